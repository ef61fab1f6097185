"""Recurrent networks, which attention replaced, with and without attention to a source.
Shape suffixes: B batch, T length of the stack's tokens, S length of the source, D d_model, F gates,
G units per direction, E sources, K = B / E sequences per source (a sentence's beams, or 1)."""

import dataclasses
import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.checks import one_of
from transformer.model.cache import Shared
from transformer.model.config import ModelConfig
from transformer.model.masks import SAME_SEGMENT, Tokens
from transformer.model.mixers.base import MIXERS, SOURCE_MIXERS, Context, Mixer, MixerModule
from transformer.model.modules import Kernel, Linear


class RecurrentState(NamedTuple):
    """The decoding state: h and c, the document they belong to, and what is kept of the source."""

    h_BxG: jax.Array  # float32
    c_BxG: jax.Array | None  # float32; only LSTMs have it
    segment_B: jax.Array
    source: Shared | None = None


@dataclasses.dataclass(frozen=True)
class Recurrent(Mixer):
    """The base class of recurrent networks: h' = cell(x W + h U + b, h), and h' is the output. A
    decoder layer has one direction of d_model units. An encoder layer has two directions of d_model
    / 2 units each, whose outputs are concatenated. A document starts with h = c = 0, and padding
    leaves both unchanged. A sequence takes one sequential step per token."""

    gates: ClassVar[int]
    has_memory: ClassVar[bool] = False  # c, beside h
    fields = frozenset({"use_bias"})
    in_order = True

    # How the layers of a decoder read the encoder:
    # "cross_attention": in a separate sublayer, as layers with other mixers do
    # "attention": by additive attention before each step (Bahdanau et al. 2015)
    # "last": each step also reads the encoder's last output (after Sutskever et al. 2014)
    # "none": not at all
    source: str = "cross_attention"

    def cell(self, z_BxFxG, u_BxFxG, h_BxG, c_BxG) -> tuple[jax.Array, jax.Array | None]:
        """Returns h' and c', float32[B, G], from z = x W + h U + b and u = h U."""
        raise NotImplementedError

    def empty(self, batch: int, units: int) -> RecurrentState:
        """Returns the state before the first token."""
        zeros, segments = jnp.zeros((batch, units), jnp.float32), jnp.zeros((batch,), jnp.int32)
        return RecurrentState(zeros, zeros if self.has_memory else None, segments)

    def __post_init__(self):
        one_of("model.mixer.source", self.source, (*SOURCE_MIXERS, "attention", "last", "none"))

    def check(self, config, side):
        if side == "encoder" and config.d_model % 2:
            why = f"model.mixer = {self.name!r} has two directions in an encoder"
            return f"model.d_model: {config.d_model} must be even: {why}"
        if side == "decoder" and (not config.causal or config.prefix_lm):
            way_out = "set model.causal=True and model.prefix_lm=False"
            return f"model.mixer: {self.name!r} is causal in a decoder; {way_out}"
        if not config.is_encoder_decoder and self.source != "cross_attention":
            problem = f"{self.source!r} needs an encoder, but model.family = {config.family!r}"
            return f"model.mixer.source: {problem}; leave it at 'cross_attention'"
        return None

    def module(self, side):
        is_attentive = side == "decoder" and self.source in ("attention", "last")
        return Attentive if is_attentive else Directions

    def empty_state(self, config, batch, slots):
        return self.empty(batch, config.d_model)


@MIXERS.register("rnn")
class RNN(Recurrent):
    """A simple recurrent network: h' = tanh(x W + h U + b) (Elman 1990)."""

    scope = "rnn"
    gates = 1

    def cell(self, z_BxFxG, u_BxFxG, h_BxG, c_BxG):
        return jnp.tanh(z_BxFxG[:, 0].astype(jnp.float32)), None


@MIXERS.register("gru")
class GRU(Recurrent):
    """A gated recurrent unit (Cho et al. 2014), in the form of cuDNN and PyTorch.

    x W + h U + b is split into r, z and n, of which n has the part n_h from h. Then

        h' = (1 - sigmoid(z)) tanh(n - n_h + sigmoid(r) n_h) + sigmoid(z) h"""

    scope = "gru"
    gates = 3

    def cell(self, z_BxFxG, u_BxFxG, h_BxG, c_BxG):
        r, z, n = (z_BxFxG[:, i].astype(jnp.float32) for i in range(3))
        n = jnp.tanh(n + (jax.nn.sigmoid(r) - 1.0) * u_BxFxG[:, 2].astype(jnp.float32))
        z = jax.nn.sigmoid(z)
        return (1.0 - z) * n + z * h_BxG, None


@MIXERS.register("lstm")
class LSTM(Recurrent):
    """Long short-term memory (Hochreiter & Schmidhuber 1997; Gers et al. 2000).

    x W + h U + b is split into i, f, o and g. Then

        c' = sigmoid(f + 1) c + sigmoid(i) tanh(g),   h' = sigmoid(o) tanh(c')"""

    scope = "lstm"
    gates, has_memory = 4, True

    def cell(self, z_BxFxG, u_BxFxG, h_BxG, c_BxG):
        i, f, o, g = (z_BxFxG[:, n].astype(jnp.float32) for n in range(4))
        c_BxG = jax.nn.sigmoid(f + 1.0) * c_BxG + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(c_BxG), c_BxG


class Recurrence(nn.Module):
    """One direction: its matrices, and the loop over the tokens."""

    config: ModelConfig
    kind: Recurrent
    units: int
    gain: float  # scales the initial W; the output is roughly linear in x W while it is small
    reverse: bool = False

    @nn.compact
    def __call__(
        self, x_BxTxD, tokens: Tokens, state, context_BxTxD=None, read=None, source_mask_BxTxS=None
    ) -> tuple[jax.Array, jax.Array | None, RecurrentState]:
        """Returns h of each token, [B, T, G], its context, and the last state. The context, if any,
        enters the gates: `context_BxTxD`, or `read(h before the token, source_mask_BxS)`."""
        cfg, batch, kind = self.config, len(x_BxTxD), self.kind
        names, outputs = ("embed", None, None), (kind.gates, self.units)
        z = Linear(cfg, outputs, names, cfg.use_bias, self.gain, name="input")(x_BxTxD)
        w_hidden = Kernel(cfg, (self.units,), outputs, names, name="hidden")()
        if context_BxTxD is not None:
            z += Linear(cfg, outputs, names, False, name="context")(context_BxTxD)
        if read is not None:
            w_context = Kernel(cfg, (cfg.d_model,), outputs, names, name="context")()

        def step(previous: RecurrentState, token):
            z_BxFxG, segment_B, source_mask_BxS = token
            real_Bx1 = (segment_B > 0)[:, None]
            continues_Bx1 = (segment_B == previous.segment_B)[:, None]
            h, c = jax.tree.map(lambda x: jnp.where(continues_Bx1, x, 0.0), previous[:2])
            u_BxFxG = jnp.einsum("BG,GFH->BFH", h.astype(cfg.dtype), w_hidden)
            z_BxFxG += u_BxFxG
            context_BxD = None
            if read is not None:
                context_BxD = read(h.astype(cfg.dtype), source_mask_BxS)
                z_BxFxG += jnp.einsum("BD,DFH->BFH", context_BxD, w_context)
            h, c = kind.cell(z_BxFxG, u_BxFxG, h, c)
            out_BxG = jnp.where(real_Bx1, h, 0.0).astype(cfg.dtype)
            carried = jax.tree.map(lambda new, x: jnp.where(real_Bx1, new, x), (h, c), previous[:2])
            segment_B = jnp.where(real_Bx1[:, 0], segment_B, previous.segment_B)
            return RecurrentState(*carried, segment_B), (out_BxG, context_BxD)

        segments_BxT = jnp.broadcast_to(tokens.segments_BxT, x_BxTxD.shape[:2])
        initial = RecurrentState(*state[:3]) if state else kind.empty(batch, self.units)
        inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (z, segments_BxT, source_mask_BxTxS))
        state, out = jax.lax.scan(step, initial, inputs, reverse=self.reverse)
        h_BxTxG, read_BxTxD = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)
        return h_BxTxG, context_BxTxD if read is None else read_BxTxD, state


class Directions(MixerModule):
    """A recurrence; in an encoder, joined with a reverse one (Schuster & Paliwal 1997)."""

    @nn.compact
    def __call__(self, x_BxTxD, context: Context, position, state, deterministic):
        names = ("forward", "backward") if self.side == "encoder" else ("forward",)
        units, gain = self.config.d_model // len(names), self.gain * self.out_gain
        one_way = functools.partial(Recurrence, self.config, self.kind, units, gain)
        modules = [one_way(name == "backward", name=name) for name in names]
        results = [module(x_BxTxD, context.tokens, state) for module in modules]
        return jnp.concatenate([h_BxTxG for h_BxTxG, *_ in results], axis=-1), results[-1][-1]


class Attentive(MixerModule):
    """A recurrence that attends to the source before each step.

    With h the previous state and y_j the encoder's outputs,

        e_j = v . tanh(h W_q + y_j W_k),   a = softmax(e),   context = sum_j a_j y_j
        h' = cell([x, context], h),        output = tanh([h', context, x] W_o + b_o)

    This follows Bahdanau et al. (2015, sec. 3.1 and appendix A.2). They use a GRU that starts from
    the encoder's first backward state, and a maxout output. Here, h starts from zero, and the
    output is a tanh. With the source "last", the context is y at the source's last token instead.
    `gain` scales the initial W (see Recurrence) and W_o, `out_gain` additionally W_o."""

    @nn.compact
    def __call__(self, x_BxTxD, context: Context, position, state, deterministic):
        cfg, source, is_last = self.config, state and state.source, self.kind.source == "last"
        if (y_ExSxD := context.source_BxSxD) is not None:  # every step reads y and y W_k
            keys = Linear(cfg, (cfg.d_model,), ("embed", None), False, name="keys")
            source = Shared((y_ExSxD,) if is_last else (y_ExSxD, keys(y_ExSxD)))
        y_ExSxD = source.value[0]
        forward = Recurrence(cfg, self.kind, cfg.d_model, self.gain, name="forward")
        # Which tokens of the source each token may read
        by_source = lambda x: jnp.broadcast_to(x, x_BxTxD.shape[:2]).reshape(len(y_ExSxD), -1)
        tokens = jax.tree.map(by_source, context.tokens.replace(until_BxT=None))
        mask_ExKTxS = SAME_SEGMENT(tokens, context.source_tokens)
        if is_last:
            ends_ExS = jnp.diff(context.source_tokens.segments_BxT, axis=1, append=0) != 0
            mask_ExKTxS &= ends_ExS[:, None]
            read = jnp.einsum("EQS,ESD->EQD", mask_ExKTxS.astype(cfg.dtype), y_ExSxD)
            reading = {"context_BxTxD": read.reshape(x_BxTxD.shape)}
        else:
            mask_BxTxS = mask_ExKTxS.reshape(*x_BxTxD.shape[:2], -1)
            reading = {"read": self._attention(*source.value), "source_mask_BxTxS": mask_BxTxS}
        h_BxTxD, read_BxTxD, new_state = forward(x_BxTxD, context.tokens, state, **reading)
        features = jnp.concatenate([h_BxTxD, read_BxTxD, x_BxTxD], axis=-1)
        gain = self.gain * self.out_gain
        out = Linear(cfg, (cfg.d_model,), ("embed", None), cfg.use_bias, gain, name="out")
        return jnp.tanh(out(features)), new_state._replace(source=source)

    def _attention(self, y_ExSxD: jax.Array, keys_ExSxD: jax.Array):
        """Returns the function `read(h_BxD, source_mask_BxS) -> context_BxD`."""
        cfg, names, sources = self.config, ("embed", None), len(y_ExSxD)
        kernel = functools.partial(Kernel, cfg, (cfg.d_model,), names=names)
        w_query = kernel((cfg.d_model,), name="query")()
        w_score = kernel((1,), name="score")()[:, 0]
        by_source = lambda x: x.reshape(sources, -1, x.shape[-1])

        def read(h_BxD, source_mask_BxS):
            q_ExKx1xD = by_source(h_BxD @ w_query)[:, :, None]
            e_ExKxS = jnp.tanh(keys_ExSxD[:, None] + q_ExKx1xD) @ w_score
            source_mask_ExKxS = by_source(source_mask_BxS)
            e_ExKxS = jnp.where(source_mask_ExKxS, e_ExKxS.astype(jnp.float32), -1e30)
            a_ExKxS = jnp.where(source_mask_ExKxS, jax.nn.softmax(e_ExKxS, axis=-1), 0.0)
            context = jnp.einsum("EKS,ESD->EKD", a_ExKxS.astype(cfg.dtype), y_ExSxD)
            return context.reshape(h_BxD.shape)

        return read
