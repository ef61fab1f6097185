"""Forgetting attention (Lin et al. 2025, arXiv:2503.02130).
Shape suffixes: B batch, T new tokens, D d_model, N heads, H head size, C extra channels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.cache import empty_slots
from transformer.model.mixers.attention import Attention, KeyValue, SelfAttention, scale_of
from transformer.model.mixers.base import MIXERS, Context
from transformer.model.modules import Linear
from transformer.model.positions import Position

CHANNELS = 8  # of queries and keys: twice three parts of a sum, and two zeros, as kernels prefer 8


class ForgettingState(NamedTuple):
    """The decoding state: the keys and values, and the sum of all logarithms so far."""

    kv: KeyValue
    c_BxN: jax.Array  # float32


@MIXERS.register("forgetting")
class Forgetting(SelfAttention):
    """Softmax attention with a forget gate, "FoX" (Lin et al. 2025, arXiv:2503.02130).

        logit of t and s = q_t . k_s / sqrt(d) + c_t - c_s,    c = cumsum(log sigmoid(x W_f + b_f))

    Each head's gate lowers the logits of all earlier tokens, by an amount that depends on the
    tokens in between. b_f starts at 0. The paper uses no position scheme. c enters the products as
    extra channels of queries and keys, so that every attention backend computes it, and keys in
    the cache are 8 numbers wider. Only causal decoders are supported, and every query head has a
    key head. The paper's "Pro" block is this mixer with `qk_norm` and an `attention_gate`, except
    that it also normalizes each head's output and shifts keys and values by one token."""

    fields = SelfAttention.fields - {"num_kv_heads", "attention_soft_cap", "attention_score"}
    hooks = frozenset({"embed", "rotate", "bias"})
    in_order = True
    causal = True
    module = lambda self, side: ForgettingAttention

    def empty_state(self, config, batch, slots):
        sizes = config.key_size("decoder") + CHANNELS, config.value_size
        kv = (empty_slots(config, batch, slots, config.num_heads, size) for size in sizes)
        return ForgettingState(KeyValue(*kv), jnp.zeros((batch, config.num_heads), jnp.float32))


class ForgettingAttention(Attention):
    """The module of Forgetting, which has the equations."""

    @nn.compact
    def __call__(self, x_BxTxD, context: Context, position: Position, state, deterministic):
        cfg = self.config
        position, q_BxTxNxH, k_BxTxNxH, v_BxTxNxH = self._projected(x_BxTxD, context, position)
        v_BxTxNxH, *first = self._with_first(v_BxTxNxH, context)
        forget = Linear(cfg, (cfg.num_heads,), ("embed", "heads"), True, name="forget")
        log_f_BxTxN = jax.nn.log_sigmoid(forget(x_BxTxD).astype(jnp.float32))
        real_BxTx1 = context.tokens.segments_BxT[..., None] > 0
        c_BxTxN = jnp.cumsum(jnp.where(real_BxTx1, log_f_BxTxN, 0.0), axis=1)
        if state is not None:
            c_BxTxN += state.c_BxN[:, None]
        parts_BxTxNx3 = bfloat16_parts(c_BxTxN / scale_of(cfg, cfg.head_size))
        join = lambda x, *more: jnp.concatenate([x, *(part.astype(x.dtype) for part in more)], -1)
        ones, pad = jnp.ones_like(parts_BxTxNx3), jnp.zeros_like(parts_BxTxNx3[..., :2])
        q_BxTxNxH = join(q_BxTxNxH, parts_BxTxNx3, ones, pad)
        k_BxTxNxH = join(k_BxTxNxH, ones, -parts_BxTxNx3, pad)
        qkv, old = (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH), None if state is None else state.kv
        out_BxTxD, kv = self._read(x_BxTxD, qkv, context, position, old, deterministic)
        return out_BxTxD, ForgettingState(kv, c_BxTxN[:, -1]), *first


def bfloat16_parts(x: jax.Array) -> jax.Array:
    """Returns three numbers on a new last axis, each exact in bfloat16, whose sum is x to 24 bits.
    Products in bfloat16 with accumulation in float32 then compute with x as float32."""
    parts, rest = [], x
    for _ in range(3):
        part = jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        rest = jax.lax.stop_gradient(rest - part)
        parts.append(jax.lax.stop_gradient(part))
    parts[0] = x + jax.lax.stop_gradient(parts[0] - x)  # the gradient of x is that of this part
    return jnp.stack(parts, axis=-1)
