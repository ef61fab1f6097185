"""A stack of layers: the encoder, the decoder, and the decoder that reads an encoder.

Shape suffixes: B batch, T length of this stack's tokens, S length of the encoder's, D d_model.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model import positions
from transformer.model.attention import Attention
from transformer.model.cache import Cache, LayerCache
from transformer.model.config import Choice, ModelConfig
from transformer.model.dropout import Dropout
from transformer.model.feed_forward import FeedForward
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens, window
from transformer.model.remat import REMAT_POLICIES
from transformer.model.residual import Residual
from transformer.model.sharding import constrain


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
        residual = functools.partial(Residual, cfg)
        mask = SAME_SEGMENT & CAUSAL if self.side == "decoder" else SAME_SEGMENT
        if cfg.window:
            mask &= window(cfg.window)
        self_attention = Attention(cfg, self.side, **gains, name="self_attention")
        cross_attention = Attention(cfg, self.side, **gains, name="cross_attention") if cross else None
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
        steps = {f"{name}_residual": (f,) for name, f in sublayers.items()}
        if cfg.parallel:
            steps = {"residual": tuple(sublayers.values())}
        for i, (name, fs) in enumerate(steps.items()):
            bare = i == 0 and not cfg.first_norm
            parts = dataclasses.replace(placement, in_norm=False) if bare else placement
            x_BxTxD = residual(parts, name=name)(x_BxTxD, *fs, deterministic=self.deterministic)
        return x_BxTxD, LayerCache(**kept) if cache is not None else None


class Period(nn.Module):
    """As many layers as it takes until they repeat: what is looped where not all layers are alike."""

    layers: tuple[Callable[..., Layer], ...]

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, caches, schemes: tuple[positions.Position, ...], *shared):
        """The layers one after another; caches and schemes one a layer."""
        written = []
        for i, (layer, position) in enumerate(zip(self.layers, schemes, strict=True)):
            x_BxTxD, cache = layer(name=f"layer_{i}")(x_BxTxD, caches and caches[i], position, *shared)
            written.append(cache)
        return x_BxTxD, tuple(written)


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
        if cfg.random_positions and not deterministic:
            tokens = self._spread(tokens)
        schemes = self._schemes(tokens.positions_BxT)
        x_BxTxD = hide_padding(x_BxTxD, tokens)
        if encoded_BxSxD is not None:
            encoded_BxSxD = hide_padding(encoded_BxSxD, encoded_tokens)
        for scheme in schemes.values():
            x_BxTxD = scheme.embed(x_BxTxD, tokens.positions_BxT)
        if cfg.embedding_norm:
            x_BxTxD = cfg.norm_module(name="embedding_norm")(x_BxTxD)
        x_BxTxD = Dropout(cfg.dropout)(x_BxTxD, deterministic)
        x_BxTxD = constrain(x_BxTxD, ("batch", "length", "activation_embed"))

        key_tokens = tokens if cache is None else cache.append(tokens)
        shared = (tokens, key_tokens, encoded_BxSxD, encoded_tokens, cache and cache.index)
        x_BxTxD, layers = self._layers(x_BxTxD, cache and cache.layers, schemes, shared, deterministic)
        if cache is not None:
            cache = Cache(layers, key_tokens, cache.index + x_BxTxD.shape[1])
        if cfg.placement(self.side).final_norm:
            x_BxTxD = cfg.norm_module(name="final_norm")(x_BxTxD)
        return x_BxTxD, cache

    def _spread(self, tokens: Tokens) -> Tokens:
        """Position p of a row moved to the p-th smallest of `max_length` positions drawn without replacement (Ruoss et al. 2023)."""
        cfg, shape = self.config, tokens.segments_BxT.shape
        score = jax.random.uniform(self.make_rng("dropout"), (shape[0], cfg.random_positions))
        drawn = jnp.sort(jnp.argsort(score, axis=1)[:, : cfg.max_length], axis=1)
        spread = lambda at_BxT: jnp.take_along_axis(drawn, jnp.broadcast_to(at_BxT, shape), axis=1)
        return tokens.replace(
            positions_BxT=spread(tokens.positions_BxT), until_BxT=jax.tree.map(spread, tokens.until_BxT)
        )

    def _schemes(self, positions_BxT: jax.Array) -> dict[Choice, positions.Position]:
        """Every position scheme that a layer uses, bound once; the parameters of a second one are told apart by a number."""
        schemes, facts = {}, self.config.stack_facts(self.side)
        for spec in dict.fromkeys(layer.position for layer in self.config.layers(self.side)):
            suffix = f"_{len(schemes)}" if schemes else ""
            param = lambda name, *given, suffix=suffix: self.param(name + suffix, *given)
            schemes[spec] = positions.build(spec).bind(param, facts).at(positions_BxT)
        return schemes

    def _layers(self, x_BxTxD, caches, schemes, shared, deterministic):
        cfg, configs, period = self.config, self.config.layers(self.side), self.config.period(self.side)
        layer = Layer
        if cfg.remat != "none":
            layer = nn.remat(Layer, policy=REMAT_POLICIES[cfg.remat], prevent_cse=not cfg.scan_layers)
        position = [schemes[c.position] for c in configs]
        if cfg.scan_layers:
            looped, given = layer, (cfg.layers(self.side)[0], self.side, deterministic)
            at = position[0]
            if period > 1:
                members = tuple(functools.partial(layer, c, self.side, deterministic) for c in configs[:period])
                looped, given, at = Period, (members,), tuple(position[:period])
            shared = (at, *shared)
            scan = nn.scan(
                looped, length=len(configs) // period, variable_axes={"params": 0, "intermediates": 0}, split_rngs={"params": True, "dropout": True},
                in_axes=(0, *(nn.broadcast,) * len(shared)), metadata_params={nn.PARTITION_NAME: "layers"},
            )  # fmt: skip
            return scan(*given, name="layers")(x_BxTxD, caches, *shared)
        written = []
        for i, c in enumerate(configs):
            x_BxTxD, one = layer(c, self.side, deterministic, name=f"layers_{i}")(
                x_BxTxD, caches and caches[i], position[i], *shared
            )
            written.append(one)
        return x_BxTxD, tuple(written) if caches is not None else None


def hide_padding(x_BxTxD: jax.Array, tokens: Tokens) -> jax.Array:
    """Zeros where there is no token. A mask keeps padding's weight at zero, but zero times NaN is NaN, in gradients too."""
    return jnp.where((tokens.segments_BxT > 0)[..., None], x_BxTxD, 0)
