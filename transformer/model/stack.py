"""A stack of identical layers: the encoder, the decoder, and the decoder that reads an encoder.

Shape suffixes: B batch, T length of this stack's tokens, S length of the encoder's, D d_model.
"""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model import positions
from transformer.model.attention import Attention
from transformer.model.cache import Cache, LayerCache
from transformer.model.config import ModelConfig
from transformer.model.dropout import Dropout
from transformer.model.feed_forward import FeedForward
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens, window
from transformer.model.remat import REMAT_POLICIES
from transformer.model.residual import Residual


class Layer(nn.Module):
    """Self-attention, cross-attention (where there is an encoder to read), feed-forward; each wrapped by the residual formula."""

    config: ModelConfig
    side: str
    deterministic: bool

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        cache: LayerCache | None,
        position: positions.Position,
        tokens: Tokens,
        key_tokens: Tokens,
        encoded_BxSxD: jax.Array | None,
        encoded_tokens: Tokens | None,
        index: jax.Array | None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """One layer. `key_tokens` are `tokens`, or with a cache all its slots."""
        cfg, placement = self.config, self.config.placement(self.side)
        gains = {"gain": placement.branch_gain, "out_gain": 1.0}
        cross = encoded_tokens is not None
        if cfg.residual_init_scale:
            gains["out_gain"] = ((2 + cross) * cfg.num_layers(self.side)) ** -0.5
        residual = functools.partial(Residual, cfg, placement)
        mask = SAME_SEGMENT & CAUSAL if self.side == "decoder" else SAME_SEGMENT
        if cfg.window:
            mask &= window(cfg.window)
        self_attention = Attention(cfg, **gains, name="self_attention")
        cross_attention = Attention(cfg, **gains, name="cross_attention") if cross else None
        feed_forward = FeedForward(cfg, **gains, name="feed_forward")
        kept = {}  # the keys and values that each attention read

        def read_own(h):
            out, kept["self_attention"] = self_attention(
                h, h, mask, tokens, key_tokens, position, self.deterministic, cache and cache.self_attention, index
            )
            return out

        def read_encoder(h):
            out, kept["cross_attention"] = cross_attention(
                h,
                encoded_BxSxD,
                SAME_SEGMENT,
                tokens,
                encoded_tokens,
                None,
                self.deterministic,
                cache and cache.cross_attention,
            )
            return out

        sublayers = {"self_attention": read_own}
        if cross:
            sublayers["cross_attention"] = read_encoder
        sublayers["feed_forward"] = lambda h: feed_forward(h, self.deterministic)
        if cfg.parallel:
            x_BxTxD = residual(name="residual")(x_BxTxD, *sublayers.values(), deterministic=self.deterministic)
        else:
            for name, f in sublayers.items():
                x_BxTxD = residual(name=f"{name}_residual")(x_BxTxD, f, deterministic=self.deterministic)
        return x_BxTxD, LayerCache(**kept) if cache is not None else None


class Stack(nn.Module):
    """Positions, dropout, layers (scanned or unrolled), and a final norm where the placement asks for one."""

    config: ModelConfig
    side: str  # encoder | decoder

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        tokens: Tokens,
        encoded_BxSxD: jax.Array | None = None,
        encoded_tokens: Tokens | None = None,
        cache: Cache | None = None,
        deterministic: bool = True,
    ) -> tuple[jax.Array, Cache | None]:
        """The stream after the last layer, and the cache with these tokens in it (None without one)."""
        cfg = self.config
        facts = cfg.stack_facts(self.side)
        position = positions.build(cfg.position).bind(self, facts).at(tokens.positions_BxT)
        x_BxTxD = hide_padding(x_BxTxD, tokens)
        if encoded_BxSxD is not None:
            encoded_BxSxD = hide_padding(encoded_BxSxD, encoded_tokens)
        x_BxTxD = position.embed(x_BxTxD, tokens.positions_BxT)
        if cfg.embedding_norm:
            x_BxTxD = cfg.norm_module(name="embedding_norm")(x_BxTxD)
        x_BxTxD = Dropout(cfg.dropout)(x_BxTxD, deterministic)
        x_BxTxD = nn.with_logical_constraint(x_BxTxD, ("batch", "length", "activation_embed"))

        key_tokens = tokens if cache is None else cache.append(tokens)
        shared = (position, tokens, key_tokens, encoded_BxSxD, encoded_tokens, cache and cache.index)
        x_BxTxD, layers = self._layers(x_BxTxD, cache and cache.layers, shared, deterministic)
        if cache is not None:
            cache = Cache(layers, key_tokens, cache.index + x_BxTxD.shape[1])
        if cfg.placement(self.side).final_norm:
            x_BxTxD = cfg.norm_module(name="final_norm")(x_BxTxD)
        return x_BxTxD, cache

    def _layers(self, x_BxTxD, caches, shared, deterministic):
        cfg, depth = self.config, self.config.num_layers(self.side)
        layer = Layer
        if cfg.remat != "none":
            layer = nn.remat(Layer, policy=REMAT_POLICIES[cfg.remat], prevent_cse=not cfg.scan_layers)
        if cfg.scan_layers:
            scan = nn.scan(
                layer, length=depth, variable_axes={"params": 0, "intermediates": 0}, split_rngs={"params": True, "dropout": True},
                in_axes=(0, *(nn.broadcast,) * len(shared)), metadata_params={nn.PARTITION_NAME: "layers"},
            )  # fmt: skip
            return scan(cfg, self.side, deterministic, name="layers")(x_BxTxD, caches, *shared)
        written = []
        for i in range(depth):
            x_BxTxD, one = layer(cfg, self.side, deterministic, name=f"layers_{i}")(
                x_BxTxD, caches and caches[i], *shared
            )
            written.append(one)
        return x_BxTxD, tuple(written) if caches is not None else None


def hide_padding(x_BxTxD: jax.Array, tokens: Tokens) -> jax.Array:
    """Zeros where there is no token. A mask keeps padding's weight at zero, but zero times NaN is NaN, in gradients too."""
    return jnp.where((tokens.segments_BxT > 0)[..., None], x_BxTxD, 0)
