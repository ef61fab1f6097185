"""A stack of layers: an encoder, a decoder, or a decoder that attends to an encoder.
Shape suffixes: B batch, T length of this stack's tokens, S length of the encoder's, D d_model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model import pipeline, positions
from transformer.model.cache import Cache, LayerState
from transformer.model.config import ModelConfig
from transformer.model.convolution import Canon
from transformer.model.dropout import Dropout, rate_of
from transformer.model.masks import Tokens
from transformer.model.mixers.base import Context
from transformer.model.modules import WATCHED, watched
from transformer.model.placements.base import Streams
from transformer.model.residual import Residual, parts_of
from transformer.model.sharding import axis_of, constrain

REMAT_POLICIES = {
    "none": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}
"""Which activations the backward pass does not recompute, trading time for memory, by `remat`."""

Carry = tuple[Streams, Any]
"""The residual streams, and what the mixer of one layer passes on to the next; None if nothing."""


class Layer(nn.Module):
    """A token mixer, cross-attention and a feed-forward (if any), each in a residual connection.
    Only a decoder layer with an encoder has cross-attention, unless its mixer reads the source."""

    config: ModelConfig
    side: str
    out_gain: float  # scales the initial values of the last matrix of each sublayer
    deterministic: bool

    @nn.compact
    def __call__(self, carry: Carry, own: tuple, position, context: Context):
        """Returns the next carry and, in decoding, LayerState. `own`: state and layer number."""
        cfg, placement, (state, index) = self.config, self.config.placement(self.side), own
        (streams, passed), tokens = carry, context.tokens
        canon = Canon(cfg, tokens, state and state.canon)
        context = context.replace(layer=index, passed=passed, canon=canon)
        gains = {"gain": placement.branch_gain, "out_gain": self.out_gain}
        new_states, sublayers, new_passed = {}, {}, [passed]

        def mix(part, module, h):
            h = canon(self, "A", ("norm",), h) if part == "mixer" else h
            old = state and getattr(state, part)
            out, new_states[part], *rest = module(h, context, position, old, self.deterministic)
            new_passed[:] = rest or new_passed
            return out

        for part, mixer in cfg.mixers(self.side).items():
            module = mixer.build(cfg.read_by(mixer), self.side, **gains)(name=mixer.scope)
            sublayers[mixer.scope] = functools.partial(mix, part, module)
        if cfg.feed_forward_kind.exists:
            feed_forward = cfg.feed_forward_kind.build(cfg, **gains)(name="feed_forward")
            conv = functools.partial(canon, self, "C", ("norm",))
            sublayers["feed_forward"] = lambda h: feed_forward(conv(h), context, self.deterministic)
        steps = {f"{name}_residual": (f,) for name, f in sublayers.items()}
        if cfg.parallel:
            steps = {"residual": tuple(sublayers.values())}
        for i, (name, fs) in enumerate(steps.items()):
            without_norm = i == 0 and not cfg.first_norm
            parts = dataclasses.replace(placement, in_norm=False) if without_norm else placement
            residual = Residual(cfg, self.side, parts, i, len(steps), name=name)
            streams = residual(streams, *fs, context=context, deterministic=self.deterministic)
        if watched(self, "streams"):
            self.sow("streams", "after", streams)
        states = LayerState(**new_states, canon=canon.state or None)
        return (streams, *new_passed), None if state is None else states


class Period(nn.Module):
    """One repetition of the layer pattern, the unit that is scanned if layers differ."""

    layers: tuple[Callable[..., Layer], ...]

    @nn.compact
    def __call__(self, carry: Carry, own: tuple, schemes, context: Context):
        """Applies the layers in order. `own`: their states, if any, and the repetition's number."""
        (states, index), new_states = own, []
        for i, (layer, position) in enumerate(zip(self.layers, schemes, strict=True)):
            own = states and states[i], index * len(self.layers) + i
            carry, state = layer(name=f"layer_{i}")(carry, own, position, context)
            new_states.append(state)
        return carry, tuple(new_states)


class Stack(nn.Module):
    """Positions, dropout, layers (scanned or unrolled), and the placement's final norm, if any."""

    config: ModelConfig
    side: str  # encoder | decoder

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, tokens: Tokens, encoded_BxSxD: jax.Array | None = None,
        encoded_tokens: Tokens | None = None, cache: Cache | None = None,
        deterministic: bool = True, dropout_rate: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:  # fmt: skip
        """Returns the residual stream after the last layer and the updated cache, if any."""
        cfg = self.config
        if cfg.random_positions and not deterministic:
            tokens = self._spread(tokens)
        schemes = self._schemes()
        x_BxTxD = hide_padding(x_BxTxD, tokens)
        if encoded_BxSxD is not None:
            encoded_BxSxD = constrain(encoded_BxSxD, ("batch", "length", "activation_embed"))
            encoded_BxSxD = hide_padding(encoded_BxSxD, encoded_tokens)
        kinds = [scheme for scheme, _ in distinct_schemes(cfg, self.side)[0]]
        for i, scheme in enumerate(schemes):
            if kinds[i] not in kinds[:i]:  # positions are added once for each kind of scheme
                x_BxTxD = scheme.embed(x_BxTxD, tokens.positions_BxT)
        if cfg.embedding_norm:
            x_BxTxD = cfg.norm_module(name="embedding_norm")(x_BxTxD)
        x_BxTxD = Dropout(rate_of(cfg, dropout_rate))(x_BxTxD, deterministic)
        x_BxTxD = constrain(x_BxTxD, ("batch", "stream", "activation_embed"))

        key_tokens = tokens if cache is None else cache.append(tokens)
        source = encoded_BxSxD, encoded_tokens
        context = Context(tokens, key_tokens, *source, cache and cache.index, dropout_rate)
        last, sublayers = cfg.last_placement(self.side), cfg.residuals(self.side)
        passed = None
        if cfg.value_residual:  # zeros stand for the first layer's values, until it computes them
            passed = jnp.zeros((*x_BxTxD.shape[:2], cfg.kv_heads, cfg.value_size), x_BxTxD.dtype)
        carry = last.begin(x_BxTxD, sublayers), passed
        (streams, _), layers = self._layers(carry, cache, schemes, context, deterministic)
        if cache is not None:
            index = cache.index + x_BxTxD.shape[1] * cache.beams
            cache = cache.replace(layers=layers, tokens=key_tokens.replace(order=""), index=index)
        return last.end(parts_of(self), streams, sublayers), cache

    def _spread(self, tokens: Tokens) -> Tokens:
        """Randomizes positions (Ruoss et al. 2023). For each sequence, `max_length` positions are
        drawn without replacement. Position p becomes the p-th smallest of them."""
        cfg, shape = self.config, tokens.segments_BxT.shape
        score = jax.random.uniform(self.make_rng("dropout"), (shape[0], cfg.random_positions))
        drawn = jnp.sort(jnp.argsort(score, axis=1)[:, : cfg.max_length], axis=1)
        spread = lambda p_BxT: jnp.take_along_axis(drawn, jnp.broadcast_to(p_BxT, shape), axis=1)
        positions_BxT, until_BxT = jax.tree.map(spread, (tokens.positions_BxT, tokens.until_BxT))
        order = "increasing" if tokens.order == "contiguous" else tokens.order
        return tokens.replace(positions_BxT=positions_BxT, until_BxT=until_BxT, order=order)

    def _schemes(self) -> tuple[positions.Position, ...]:
        """Returns the distinct schemes, bound to their parameters; from the second on, numbered."""
        schemes = []
        for scheme, facts in distinct_schemes(self.config, self.side)[0]:
            suffix = f"_{len(schemes)}" if schemes else ""
            param = lambda name, *args, suffix=suffix: self.param(name + suffix, *args)
            schemes.append(scheme.bind(param, facts))
        return tuple(schemes)

    def _of_layers(self, schemes, tokens: Tokens) -> tuple[positions.Position, ...]:
        """Returns the position scheme of each layer, evaluated at these tokens' positions."""
        at_tokens = [scheme.at(tokens.positions_BxT) for scheme in schemes]
        return tuple(at_tokens[i] for i in distinct_schemes(self.config, self.side)[1])

    def _layers(self, carry: Carry, cache: Cache | None, schemes, context: Context, deterministic):
        """Applies all layers, unrolled, scanned or pipelined. Returns carry and new states."""
        cfg, configs = self.config, self.config.layers(self.side)
        if not cfg.scan_layers:
            states, out_gain = [], self._out_gain()
            for i, position in enumerate(self._of_layers(schemes, context.tokens)):
                layer = self._layer(configs[i], out_gain, deterministic)(name=f"layers_{i}")
                carry, state = layer(carry, (cache and cache.layers[i], i), position, context)
                states.append(state)
            return carry, tuple(states) if cache is not None else None
        _, stages = axis_of("layers")
        micro, rounds = cfg.pipeline_microbatches or stages, cfg.pipeline_rounds
        observed = self.is_initializing() or any(watched(self, what) for what in WATCHED)
        use_pipeline = stages > 1 and cache is None and not observed
        if use_pipeline and not pipeline.why_not(len(jax.tree.leaves(carry)[0]), micro, rounds):
            return self._pipelined(carry, schemes, context, deterministic, micro), None
        cut = (lambda x: x.reshape(rounds, -1, *x.shape[1:])) if rounds > 1 else (lambda x: x)
        join = (lambda x: x.reshape(-1, *x.shape[2:])) if rounds > 1 else (lambda x: x)
        period = cfg.period(self.side)
        repeats = len(configs) // period
        layers, args = self._loop(repeats // rounds, deterministic)
        layers = _scanned(layers, rounds, "rounds") if rounds > 1 else layers
        position = self._of_period(self._of_layers(schemes, context.tokens))
        own = jax.tree.map(cut, (cache and _stacked(cache.layers, period), jnp.arange(repeats)))
        carry, states = layers(*args, name="layers")(carry, own, position, context)
        states = jax.tree.map(join, states)
        return carry, states if cache is None else _unstacked(states, len(configs), period)

    def _layer(self, config: ModelConfig, out_gain: float, deterministic: bool):
        """Returns a layer, rematerialized as `remat` sets, without its `name`."""
        options = {"policy": REMAT_POLICIES[config.remat], "prevent_cse": not config.scan_layers}
        cls = Layer if config.remat == "none" else nn.remat(Layer, **options)
        return functools.partial(cls, config, self.side, out_gain, deterministic)

    def _out_gain(self) -> float:
        """Returns 1 / sqrt(number of the base's sublayers) or 1 (Radford et al. 2019, sec. 2.3)."""
        if not self.config.residual_init_scale:
            return 1.0
        sublayers = sum(x.num_sublayers(self.side) for x in self.config.layers(self.side))
        return (sublayers / self.config.m_L(self.side)) ** -0.5

    def _loop(self, length: int, deterministic: bool) -> tuple[type[nn.Module], tuple]:
        """Returns a module class that scans `length` periods of layers, and its arguments."""
        cfg, out_gain = self.config, self._out_gain()
        period = cfg.layers(self.side)[: cfg.period(self.side)]
        layers = [self._layer(c, out_gain, deterministic) for c in period]
        if len(layers) > 1:
            return _scanned(Period, length, "layers"), (tuple(layers),)
        return _scanned(layers[0].func, length, "layers"), layers[0].args

    def _of_period(self, schemes: tuple):
        """Returns the position schemes of one period; of a single layer, its scheme."""
        period = self.config.period(self.side)
        return schemes[:period] if period > 1 else schemes[0]

    def _pipelined(self, carry, schemes, context: Context, deterministic, micro) -> Carry:
        """Applies the layers sharded over "stage" (pipeline.py)."""
        cfg, (_, stages), rounds = self.config, axis_of("layers"), self.config.pipeline_rounds
        repeat = lambda x: jnp.broadcast_to(x, (len(jax.tree.leaves(carry)[0]), *x.shape[1:]))
        repeats = len(cfg.layers(self.side)) // cfg.period(self.side)
        module, args = self._loop(repeats // rounds // stages, deterministic)

        def layers(own, carry, context: Context, schemes, key):
            position = self._of_period(self._of_layers(schemes, context.tokens))
            params, index = own
            inputs = {"params": params}, carry, (None, index), position, context
            options = {"rngs": None if key is None else {"dropout": key}, "mutable": ["losses"]}
            (carry, _), sown = module(*args, parent=None).apply(*inputs, **options)
            return carry, sown.get("losses", {})

        key = None if deterministic or not self.has_rng("dropout") else self.make_rng("dropout")
        index = jnp.arange(repeats).reshape((rounds, -1) if rounds > 1 else -1)
        own = self.variables["params"]["layers"], index
        context = jax.tree.map(repeat, context)
        carry, sown = pipeline.pipelined(layers, own, carry, context, schemes, key, micro, rounds)
        if sown:
            self.sow("losses", "layers", sown)
        return carry


def distinct_schemes(
    config: ModelConfig, side: str
) -> tuple[tuple[tuple[positions.Position, positions.StackFacts], ...], tuple[int, ...]]:
    """Returns the distinct position schemes of a stack, unbound, and the index of each layer's.
    Layers share a scheme and its parameters if the facts that `bind` reads are the same."""
    distinct, of_layer, layers = {}, {}, config.layers(side)
    for layer in dict.fromkeys(layers):
        scheme, facts = positions.build(layer.layer_position), layer.stack_facts(side)
        key = scheme, _facts_read(scheme, facts)
        distinct.setdefault(key, (scheme, facts))
        of_layer[layer] = list(distinct).index(key)
    return tuple(distinct.values()), tuple(of_layer[layer] for layer in layers)


@functools.lru_cache(maxsize=256)
def _facts_read(scheme: positions.Position, facts: positions.StackFacts) -> frozenset:
    """Returns (name, value) of each fact that `bind` reads."""
    read = {}

    class Recorded:
        def __getattr__(self, name):
            read[name] = getattr(facts, name)
            return read[name]

    param = lambda name, init, *args: nn.unbox(init(jax.random.key(0), *args))
    jax.eval_shape(lambda: scheme.bind(param, Recorded()))
    return frozenset(read.items())


def _stacked(states: tuple, period: int) -> Any:
    """Stacks the states of layers as a scan takes them: one stack per layer of a period."""
    stack = lambda *xs: jnp.stack(xs)
    stacks = tuple(jax.tree.map(stack, *states[i::period]) for i in range(period))
    return stacks if period > 1 else stacks[0]


def _unstacked(stacks: Any, count: int, period: int) -> tuple:
    """Returns the states of `count` layers: the inverse of `_stacked`."""
    stacks = stacks if period > 1 else (stacks,)
    of = lambda i: jax.tree.map(lambda x: x[i // period], stacks[i % period])
    return tuple(map(of, range(count)))


def _scanned(cls: type[nn.Module], length: int, axis: str) -> type[nn.Module]:
    """Returns `cls` scanned `length` times. The module takes (carry, own, position, context). Its
    parameters and `own` are stacked on axis 0, whose logical name is `axis`."""
    return nn.scan(
        cls, length=length, split_rngs={"params": True, "dropout": True},
        variable_axes=dict.fromkeys(("params", "losses", "intermediates", *WATCHED), 0),
        in_axes=(0, nn.broadcast, nn.broadcast), metadata_params={nn.PARTITION_NAME: axis},
    )  # fmt: skip


def hide_padding(x_BxTxD: jax.Array, tokens: Tokens) -> jax.Array:
    """Sets the vectors of padding to zero: zero weight times NaN is NaN, also in gradients."""
    return jnp.where((tokens.segments_BxT > 0)[..., None], x_BxTxD, 0)
