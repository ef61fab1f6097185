"""A stack of layers: the encoder, the decoder, and the decoder that reads an encoder.

Shape suffixes: B batch, T length of this stack's tokens, S length of the encoder's, D d_model.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model import pipeline, positions
from transformer.model.attention import Attention
from transformer.model.cache import Cache, LayerCache
from transformer.model.config import Choice, ModelConfig
from transformer.model.dropout import Dropout
from transformer.model.feed_forward import FEED_FORWARDS
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens, window
from transformer.model.remat import REMAT_POLICIES
from transformer.model.residual import Residual
from transformer.model.sharding import axis_of, constrain
from transformer.model.watch import WATCHED, any_watched, watched


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
        mask = SAME_SEGMENT & CAUSAL if self.side == "decoder" and cfg.causal else SAME_SEGMENT
        if cfg.window:
            mask &= window(cfg.window)
        self_attention = Attention(cfg, self.side, **gains, name="self_attention")
        cross_attention = (
            Attention(cfg, self.side, **gains, name="cross_attention") if cross else None
        )
        feed_forward = FEED_FORWARDS[cfg.feed_forward_kind.name](cfg, **gains, name="feed_forward")
        kept = {}  # the keys and values that each attention read

        def read_own(h):
            out, kept["self_attention"] = self_attention(
                h,
                h,
                mask,
                tokens,
                key_tokens,
                position,
                self.deterministic,
                cache and cache.self_attention,
                index,
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
        sublayers["feed_forward"] = lambda h: feed_forward(h, tokens, self.deterministic)
        steps = {f"{name}_residual": (f,) for name, f in sublayers.items()}
        if cfg.parallel:
            steps = {"residual": tuple(sublayers.values())}
        for i, (name, fs) in enumerate(steps.items()):
            bare = i == 0 and not cfg.first_norm
            parts = dataclasses.replace(placement, in_norm=False) if bare else placement
            x_BxTxD = residual(parts, name=name)(
                x_BxTxD, *fs, segments_BxT=tokens.segments_BxT, deterministic=self.deterministic
            )
        if watched(self, "streams"):
            self.sow("streams", "after", x_BxTxD)
        return x_BxTxD, LayerCache(**kept) if cache is not None else None


class Period(nn.Module):
    """As many layers as it takes until they repeat: what is looped where not all layers are alike."""

    layers: tuple[Callable[..., Layer], ...]

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, caches, schemes: tuple[positions.Position, ...], *shared
    ):
        """The layers one after another; caches and schemes one a layer."""
        written = []
        for i, (layer, position) in enumerate(zip(self.layers, schemes, strict=True)):
            x_BxTxD, cache = layer(name=f"layer_{i}")(
                x_BxTxD, caches and caches[i], position, *shared
            )
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
        schemes = self._schemes()
        x_BxTxD = hide_padding(x_BxTxD, tokens)
        if encoded_BxSxD is not None:
            encoded_BxSxD = constrain(encoded_BxSxD, ("batch", "length", "activation_embed"))
            encoded_BxSxD = hide_padding(encoded_BxSxD, encoded_tokens)
        for scheme in schemes.values():
            x_BxTxD = scheme.embed(x_BxTxD, tokens.positions_BxT)
        if cfg.embedding_norm:
            x_BxTxD = cfg.norm_module(name="embedding_norm")(x_BxTxD)
        x_BxTxD = Dropout(cfg.dropout)(x_BxTxD, deterministic)
        x_BxTxD = constrain(x_BxTxD, ("batch", "stream", "activation_embed"))

        key_tokens = tokens if cache is None else cache.append(tokens)
        shared = (tokens, key_tokens, encoded_BxSxD, encoded_tokens, cache and cache.index)
        x_BxTxD, layers = self._layers(x_BxTxD, cache, schemes, shared, deterministic)
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
            positions_BxT=spread(tokens.positions_BxT), until_BxT=jax.tree.map(spread, tokens.until_BxT),
            order="growing" if tokens.order == "rows" else tokens.order,
        )  # fmt: skip

    def _schemes(self) -> dict[Choice, positions.Position]:
        """Every position scheme that a layer uses, bound once; the parameters of a second one are told apart by a number."""
        schemes, facts = {}, self.config.stack_facts(self.side)
        for spec in dict.fromkeys(layer.position for layer in self.config.layers(self.side)):
            suffix = f"_{len(schemes)}" if schemes else ""
            param = lambda name, *given, suffix=suffix: self.param(name + suffix, *given)
            schemes[spec] = positions.build(spec).bind(param, facts)
        return schemes

    def _of_layers(self, schemes, tokens: Tokens) -> tuple[positions.Position, ...]:
        """Each layer's scheme, at these tokens' positions."""
        here = {spec: scheme.at(tokens.positions_BxT) for spec, scheme in schemes.items()}
        return tuple(here[layer.position] for layer in self.config.layers(self.side))

    def _layers(self, x_BxTxD, cache: Cache | None, schemes, shared, deterministic):
        """All layers: one after another, looped, or spread over devices. (The stream, the cache's layers)."""
        cfg, configs = self.config, self.config.layers(self.side)
        if not cfg.scan_layers:
            written = []
            for i, position in enumerate(self._of_layers(schemes, shared[0])):
                layer = self._layer(configs[i], deterministic)(name=f"layers_{i}")
                x_BxTxD, one = layer(x_BxTxD, cache and cache.layers[i], position, *shared)
                written.append(one)
            return x_BxTxD, tuple(written) if cache is not None else None
        _, stages = axis_of("layers")
        micro, rounds = cfg.pipeline_microbatches or stages, cfg.pipeline_rounds
        spread = (
            stages > 1 and cache is None and not self.is_initializing() and not any_watched(self)
        )
        if spread and not pipeline.why_not(len(x_BxTxD), micro, rounds):
            return self._pipelined(x_BxTxD, schemes, shared, deterministic, micro), None
        cut = (lambda x: x.reshape(rounds, -1, *x.shape[1:])) if rounds > 1 else (lambda x: x)
        join = (lambda x: x.reshape(-1, *x.shape[2:])) if rounds > 1 else (lambda x: x)
        loop, given = self._loop(len(configs) // cfg.period(self.side) // rounds, deterministic)
        loop = _looped(loop, rounds, "rounds") if rounds > 1 else loop
        position = self._of_period(self._of_layers(schemes, shared[0]))
        caches = jax.tree.map(cut, cache and cache.layers)
        x_BxTxD, written = loop(*given, name="layers")(x_BxTxD, caches, position, *shared)
        return x_BxTxD, jax.tree.map(join, written)

    def _layer(self, config: ModelConfig, deterministic: bool) -> Callable[..., Layer]:
        """A layer, but for its name; what it keeps for the backward pass is as `remat` says."""
        cls = Layer
        if config.remat != "none":
            cls = nn.remat(
                Layer, policy=REMAT_POLICIES[config.remat], prevent_cse=not config.scan_layers
            )
        return functools.partial(cls, config, self.side, deterministic)

    def _loop(self, length: int, deterministic: bool) -> tuple[type[nn.Module], tuple]:
        """So many periods of layers as one module: its class, and what that is made with."""
        cfg = self.config
        layers = [
            self._layer(c, deterministic) for c in cfg.layers(self.side)[: cfg.period(self.side)]
        ]
        if len(layers) > 1:
            return _looped(Period, length, "layers"), (tuple(layers),)
        return _looped(layers[0].func, length, "layers"), layers[0].args

    def _of_period(self, schemes: tuple):
        """What a period is given of the layers' schemes."""
        period = self.config.period(self.side)
        return schemes[:period] if period > 1 else schemes[0]

    def _pipelined(self, x_BxTxD, schemes, shared, deterministic, micro: int) -> jax.Array:
        """The layers spread over "stage" (pipeline.py)."""
        cfg, (_, stages), (tokens, _, encoded_BxSxD, encoded_tokens, _) = (
            self.config,
            axis_of("layers"),
            shared,
        )
        rows = lambda tree: jax.tree.map(
            lambda x: jnp.broadcast_to(x, (len(x_BxTxD), *x.shape[1:])), tree
        )
        count = len(cfg.layers(self.side)) // cfg.period(self.side) // cfg.pipeline_rounds // stages
        loop, given = self._loop(count, deterministic)

        def layers(params, x_bxTxD, shared, schemes, key):
            tokens, encoded, encoded_tokens = shared
            position = self._of_period(self._of_layers(schemes, tokens))
            (x_bxTxD, _), sown = loop(*given, parent=None).apply(
                {"params": params}, x_bxTxD, None, position, tokens, tokens, encoded, encoded_tokens, None,
                rngs=None if key is None else {"dropout": key}, mutable=["losses"],
            )  # fmt: skip
            return x_bxTxD, sown.get("losses", {})

        key = None if deterministic or not self.has_rng("dropout") else self.make_rng("dropout")
        shared = (rows(tokens), encoded_BxSxD, rows(encoded_tokens))
        params = self.variables["params"]["layers"]
        x_BxTxD, sown = pipeline.pipelined(
            layers, params, x_BxTxD, shared, schemes, key, micro, cfg.pipeline_rounds
        )
        if sown:
            self.sow("losses", "layers", sown)
        return x_BxTxD


def _looped(cls: type[nn.Module], length: int, axis: str) -> type[nn.Module]:
    """`cls`, called with (x, caches, position, *shared), over and over; its parameters and caches stacked along an axis of this name."""
    return nn.scan(
        cls, length=length, variable_axes=dict.fromkeys(("params", "losses", *WATCHED), 0), split_rngs={"params": True, "dropout": True},
        in_axes=(0, *(nn.broadcast,) * 6), metadata_params={nn.PARTITION_NAME: axis},
    )  # fmt: skip


def hide_padding(x_BxTxD: jax.Array, tokens: Tokens) -> jax.Array:
    """Zeros where there is no token. A mask keeps padding's weight at zero, but zero times NaN is NaN, in gradients too."""
    return jnp.where((tokens.segments_BxT > 0)[..., None], x_BxTxD, 0)
