"""LSTMs: the recurrent networks that attention replaced, with and without attention to a source.

Shape suffixes: B batch, T length of the stack's tokens, S length of the source, D d_model, G units of a direction,
E sequences that share a source, K sequences to one source (the beams of a sentence; else 1), B = E K.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.checks import one_of
from transformer.model.cache import Shared
from transformer.model.config import ModelConfig
from transformer.model.linear import Kernel, Linear
from transformer.model.masks import SAME_SEGMENT, Tokens
from transformer.model.mixers.base import MIXERS, Context, Mixer
from transformer.model.positions import Position

SOURCES = ("cross_attention", "attention", "last", "none")


class Memory(NamedTuple):
    """The state: h and c, which document they belong to, and what the layer keeps of the source."""

    h_BxG: jax.Array  # float32
    c_BxG: jax.Array  # float32
    segment_B: jax.Array
    source: Shared | None = None


def empty_memory(batch: int, units: int) -> Memory:
    """h and c are zero."""
    zeros = jnp.zeros((batch, units), jnp.float32)
    return Memory(zeros, zeros, jnp.zeros((batch,), jnp.int32))


@MIXERS.register("lstm")
@dataclasses.dataclass(frozen=True)
class LSTM(Mixer):
    """Long short-term memory (Hochreiter & Schmidhuber 1997; Gers et al. 2000).

    With i, f, o and g the four parts of x W + h U + b,

        c' = sigmoid(f + 1) c + sigmoid(i) tanh(g),   h' = sigmoid(o) tanh(c')

    and h' is the output. In a decoder one direction has d_model units. In an encoder two directions have d_model / 2
    units each, side by side. A document begins with h = c = 0, and padding leaves both as they are. A sequence takes as many
    steps, one after another, as it has tokens.
    """

    scope = "lstm"
    fields = frozenset({"use_bias"})
    in_order = True

    source: str = "cross_attention"  # how the layers of a decoder read the encoder:
    # cross_attention  in a sublayer of their own, like other layers
    # attention        before each step, by additive attention (Bahdanau et al. 2015)
    # last             the encoder's output at its last token, at each step (after Sutskever et al. 2014)
    # none             not at all

    def __post_init__(self):
        one_of("model.mixer.source", self.source, SOURCES)

    def check(self, config, side):
        if side == "encoder" and config.d_model % 2:
            return f"model.d_model: {config.d_model} must be even: model.mixer = 'lstm' has two directions in an encoder"
        if side == "decoder" and (not config.causal or config.prefix_lm):
            return (
                "model.mixer: 'lstm' reads each token after those before it; a decoder needs model.causal=True and "
                "model.prefix_lm=False"
            )
        if not config.two_sides and self.source != "cross_attention":
            return (
                f"model.mixer.source: {self.source!r} needs an encoder to read, but model.family = {config.family!r}; "
                "leave it at 'cross_attention'"
            )
        return None

    def build(self, config, side, gain, out_gain):
        if side == "encoder":
            return functools.partial(Bidirectional, config, gain * out_gain)
        if self.source in ("attention", "last"):
            return functools.partial(Attentive, config, gain, out_gain, self.source == "last")
        return functools.partial(Unidirectional, config, gain * out_gain)

    def empty_state(self, config, batch, slots):
        return empty_memory(batch, config.d_model)


class Recurrence(nn.Module):
    """The matrices of one direction, and the loop over its tokens."""

    config: ModelConfig
    units: int
    gain: float  # of the initial W: the output is about linear in g, as long as it is small
    reverse: bool = False

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        tokens: Tokens,
        state: Memory | None,
        context_BxTxD: jax.Array | None = None,
        read: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
        may_BxTxS: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None, Memory]:
        """h of each token, [B, T, G], what was read for it, and the last state. A context takes part in the gates by a matrix of
        its own; it is given, or it is `read(h before the token, may_BxS)`."""
        cfg, rows, units = self.config, len(x_BxTxD), self.units
        names = ("embed", None, None)
        z = Linear(cfg, (4, units), names, cfg.use_bias, self.gain, name="input")(x_BxTxD)
        w_hidden = Kernel(cfg, (units,), (4, units), names, name="hidden")()
        if context_BxTxD is not None:
            z += Linear(cfg, (4, units), names, False, name="context")(context_BxTxD)
        if read is not None:
            w_context = Kernel(cfg, (cfg.d_model,), (4, units), names, name="context")()

        def step(old: Memory, token):
            z_Bx4xG, segment_B, may_BxS = token
            real_Bx1 = (segment_B > 0)[:, None]
            continues_Bx1 = (segment_B == old.segment_B)[:, None]
            h, c = (jnp.where(continues_Bx1, x, 0.0) for x in old[:2])
            z_Bx4xG += jnp.einsum("BG,GFH->BFH", h.astype(cfg.dtype), w_hidden)
            context_BxD = None
            if read is not None:
                context_BxD = read(h.astype(cfg.dtype), may_BxS)
                z_Bx4xG += jnp.einsum("BD,DFH->BFH", context_BxD, w_context)
            h, c = cell(z_Bx4xG, c)
            out_BxG = jnp.where(real_Bx1, h, 0.0).astype(cfg.dtype)
            kept = (jnp.where(real_Bx1, new, x) for new, x in zip((h, c), old[:2], strict=True))
            segment_B = jnp.where(real_Bx1[:, 0], segment_B, old.segment_B)
            return Memory(*kept, segment_B), (out_BxG, context_BxD)

        segments_BxT = jnp.broadcast_to(tokens.segments_BxT, x_BxTxD.shape[:2])
        by_token = lambda x: jnp.moveaxis(x, 1, 0)
        start = Memory(*state[:3]) if state else empty_memory(rows, units)
        state, out = jax.lax.scan(
            step, start, jax.tree.map(by_token, (z, segments_BxT, may_BxTxS)), reverse=self.reverse
        )
        h_BxTxG, read_BxTxD = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)
        return h_BxTxG, context_BxTxD if read is None else read_BxTxD, state


def cell(z_Bx4xG: jax.Array, c_BxG: jax.Array) -> tuple[jax.Array, jax.Array]:
    """h' and c', float32[B, G]."""
    i, f, o, g = (z_Bx4xG[:, n].astype(jnp.float32) for n in range(4))
    c_BxG = jax.nn.sigmoid(f + 1.0) * c_BxG + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c_BxG), c_BxG


class Unidirectional(nn.Module):
    """An LSTM that reads the tokens before each token, and no source."""

    config: ModelConfig
    gain: float

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        context: Context,
        position: Position,
        state: Memory | None,
        deterministic: bool,
    ) -> tuple[jax.Array, Memory]:
        lstm = Recurrence(self.config, self.config.d_model, self.gain, name="forward")
        h_BxTxD, _, state = lstm(x_BxTxD, context.tokens, state)
        return h_BxTxD, state


class Bidirectional(nn.Module):
    """Two LSTMs, one from the first token and one from the last, side by side (Schuster & Paliwal 1997)."""

    config: ModelConfig
    gain: float

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        context: Context,
        position: Position,
        state: Any,
        deterministic: bool,
    ) -> tuple[jax.Array, None]:
        sides = []
        for way in ("forward", "backward"):
            lstm = Recurrence(
                self.config, self.config.d_model // 2, self.gain, way == "backward", name=way
            )
            sides.append(lstm(x_BxTxD, context.tokens, None)[0])
        return jnp.concatenate(sides, axis=-1), None


class Attentive(nn.Module):
    """An LSTM that reads the source before each step. With h the last state and y_j the encoder's outputs,

        e_j = v . tanh(h W_q + y_j W_k),   a = softmax(e),   context = sum_j a_j y_j
        h' = LSTM([x, context], h),        output = tanh([h', context, x] W_o + b_o)

    after Bahdanau et al. (2015, sec. 3.1 and appendix A.2), who have a GRU that starts from the encoder's first backward state,
    and a maxout; here an LSTM that starts from zero, and a tanh. With `last`, the context is y of the source's last token.
    """

    config: ModelConfig
    gain: float
    out_gain: float  # of the initial W_o, on top
    last: bool

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        context: Context,
        position: Position,
        state: Memory | None,
        deterministic: bool,
    ) -> tuple[jax.Array, Memory]:
        cfg, (rows, length) = self.config, x_BxTxD.shape[:2]
        kept = state.source if context.source_BxSxD is None else self._keep(context.source_BxSxD)
        y_ExSxD = kept.value[0]
        lstm = Recurrence(cfg, cfg.d_model, self.gain, name="forward")
        may_BxTxS = self._may(context, rows, length, len(y_ExSxD))
        if self.last:
            may_ExKTxS = may_BxTxS.reshape(len(y_ExSxD), -1, may_BxTxS.shape[-1])
            read = jnp.einsum("EQS,ESD->EQD", may_ExKTxS.astype(cfg.dtype), y_ExSxD)
            read_BxTxD = read.reshape(x_BxTxD.shape)
            h_BxTxD, read_BxTxD, after = lstm(x_BxTxD, context.tokens, state, read_BxTxD)
        else:
            read = self._attention(*kept.value)
            h_BxTxD, read_BxTxD, after = lstm(
                x_BxTxD, context.tokens, state, read=read, may_BxTxS=may_BxTxS
            )
        both = jnp.concatenate([h_BxTxD, read_BxTxD, x_BxTxD], axis=-1)
        gain = self.gain * self.out_gain
        out = Linear(cfg, (cfg.d_model,), ("embed", None), cfg.use_bias, gain, name="out")
        return jnp.tanh(out(both)), after._replace(source=kept)

    def _keep(self, y_ExSxD: jax.Array) -> Shared:
        """What every step reads: the encoder's output and, for attention, y W_k."""
        cfg = self.config
        if self.last:
            return Shared((y_ExSxD,))
        keys = Linear(cfg, (cfg.d_model,), ("embed", None), False, name="keys")
        return Shared((y_ExSxD, keys(y_ExSxD)))

    def _may(self, context: Context, rows: int, length: int, sources: int) -> jax.Array:
        """bool[B, T, S]: which tokens of the source each token may read."""
        by_source = lambda x: jnp.broadcast_to(x, (rows, length)).reshape(sources, -1)
        tokens = jax.tree.map(by_source, context.tokens.replace(until_BxT=None))
        may_ExKTxS = SAME_SEGMENT(tokens, context.source_tokens)
        if self.last:
            ends_ExS = jnp.diff(context.source_tokens.segments_BxT, axis=1, append=0) != 0
            may_ExKTxS &= ends_ExS[:, None]
        return may_ExKTxS.reshape(rows, length, -1)

    def _attention(self, y_ExSxD: jax.Array, keys_ExSxD: jax.Array):
        """(h_BxD, may_BxS) -> context_BxD."""
        cfg, names, sources = self.config, ("embed", None), len(y_ExSxD)
        kernel = functools.partial(Kernel, cfg, (cfg.d_model,), names=names)
        w_query = kernel((cfg.d_model,), name="query")()
        w_score = kernel((1,), name="score")()[:, 0]
        by_source = lambda x: x.reshape(sources, -1, x.shape[-1])

        def read(h_BxD, may_BxS):
            q_ExKx1xD = by_source(h_BxD @ w_query)[:, :, None]
            e_ExKxS = jnp.tanh(keys_ExSxD[:, None] + q_ExKx1xD) @ w_score
            may_ExKxS = by_source(may_BxS)
            e_ExKxS = jnp.where(may_ExKxS, e_ExKxS.astype(jnp.float32), -1e30)
            a_ExKxS = jnp.where(may_ExKxS, jax.nn.softmax(e_ExKxS, axis=-1), 0.0)
            context = jnp.einsum("EKS,ESD->EKD", a_ExKxS.astype(cfg.dtype), y_ExSxD)
            return context.reshape(h_BxD.shape)

        return read
