"""Differential attention (Ye et al. 2024, arXiv:2410.05258). Shape suffixes: B batch, T query
length, S key length, D d_model, N query heads, K key heads, H head size, V 2 d_value."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.cache import empty_slots
from transformer.model.mixers.attention import Attention, KeyValue, SelfAttention
from transformer.model.mixers.base import MIXERS
from transformer.model.modules import declare


@MIXERS.register("differential")
class Differential(SelfAttention):
    """The difference of two attention maps, which cancels noise (Ye et al. 2024, arXiv:2410.05258).

        out = (1 - l_0) norm((softmax(Q_1 K_1^T / sqrt(d)) - l softmax(Q_2 K_2^T / sqrt(d))) V)
        l = exp(q_1 . k_1) - exp(q_2 . k_2) + l_0,    l_0 = 0.8 - 0.6 exp(-0.3 layer)

    Two query heads, two key heads and a value of size 2 d_value form a pair. There are
    `num_heads` / 2 pairs, so that the sizes are those of multi-head attention. The learned vectors
    q_1, k_1, q_2 and k_2 belong to the layer, and layers count from 0. The norm is an RMSNorm over
    2 d_value numbers, with one gain for all pairs. With grouped queries, `num_kv_heads` is even,
    and the query heads of two key heads form pairs in order."""

    fields = (SelfAttention.fields | {"norm_epsilon"}) - {
        "attention_gate", "attention_sink", "v_norm", "value_residual",
    }  # fmt: skip
    hooks = frozenset({"embed", "rotate", "bias", "score"})
    module = lambda self, side: DifferentialAttention

    def check(self, config, side):
        if config.kv_heads % 2:
            field = "num_kv_heads" if config.num_kv_heads else "num_heads"
            return f"model.{field}: {config.kv_heads} is odd, and 'differential' pairs heads"
        return super().check(config, side)

    def empty_state(self, config, batch, slots):
        keys = config.kv_heads, config.key_size("decoder")
        values = config.kv_heads // 2, 2 * config.value_size
        return KeyValue(*(empty_slots(config, batch, slots, *shape) for shape in (keys, values)))


class DifferentialAttention(Attention):
    """The module of Differential, which has the equations."""

    def _value(self, x_BxSxD: jax.Array) -> jax.Array:
        pairs, size = self.config.kv_heads // 2, 2 * self.config.value_size
        return self._heads("value", self.gain, (pairs, size))(x_BxSxD)

    def _inner(self, q_and_kv, *options):
        cfg, (q_BxTxNxH, kv), *_, layer = self.config, q_and_kv, *options
        kv = kv._replace(v_BxKxSxH=jnp.repeat(kv.v_BxKxSxH, 2, axis=1))
        out_BxTxNxV = super()._inner((q_BxTxNxH, kv), *options)
        pairs = *out_BxTxNxV.shape[:2], cfg.kv_heads // 2, 2, -1, out_BxTxNxV.shape[-1]
        first, second = jnp.moveaxis(out_BxTxNxV.reshape(pairs), 3, 0)
        start, vector = 0.8 - 0.6 * jnp.exp(-0.3 * layer), (cfg.head_size,)
        weights = nn.initializers.normal(0.1)
        declared = lambda name: declare(self, name, weights, ("head",), vector).astype(jnp.float32)
        q_1, k_1, q_2, k_2 = map(declared, ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"))
        factor = jnp.exp(q_1 @ k_1) - jnp.exp(q_2 @ k_2) + start
        out = first - factor.astype(first.dtype) * second
        parts = {"norm": "rmsnorm", "norm_gain": True, "norm_zero_centered": False}
        out = cfg.part(**parts).norm_module(name="head_norm")(out)
        out = out * (1.0 - start).astype(out.dtype)
        return out.reshape(*out.shape[:2], cfg.num_heads // 2, -1)
