"""PoPE: polar coordinate position embedding.
Shape suffixes: B batch, T length, N query heads, K key/value heads, H head size."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.limits import Positive
from transformer.model.positions.base import Position, declare, fact, option, register


@register("pope")
class PoPE(Position):
    """Products of magnitudes and phases (Gopalakrishnan et al. 2025, "PoPE", arXiv:2509.10534).

        logit of t and s = scale sum_c softplus(q_tc) softplus(k_sc) cos((t - s) theta^(-c/d) - b_c)

    over the d dimensions c = 0, 1, ... of a head: the content sets magnitudes, and positions set
    phases. There are twice as many frequencies as in rotary positions. The bias b of each head is
    learned and limited to [-2 pi, 0]. Queries and keys have 2 d numbers, magnitude (cos, sin).

    start: initial b. "zero" extrapolates better; "uniform", in [-2 pi, 0], is better in training.

    The paper's text was not available to confirm that each layer has a bias of its own.

    Parameters: a bias per layer, head and dimension.
    Cache: keys are stored with their phases, at twice the size.
    Beyond the training length: extrapolates better than rotary (the paper, section 5)."""

    theta: Positive = option(10_000.0)
    start: Literal["zero", "uniform"] = option("zero")
    d_head: int = fact(0)
    sin_BxTx1xH: jax.Array | None = None
    cos_BxTx1xH: jax.Array | None = None
    bias_NxH: jax.Array | None = None

    def key_size(self, facts):
        return 2 * facts.d_head

    def bind_layer(self, param, facts):
        uniform = lambda *args: -2 * math.pi * jax.random.uniform(*args)
        init = nn.initializers.zeros if self.start == "zero" else uniform
        shape, names = (facts.num_heads, facts.d_head), ("heads", "head")
        return self.replace(bias_NxH=declare(param, facts, "phase_bias", shape, names, init))

    def at(self, positions_BxT):
        frequency_H = self.theta ** -(jnp.arange(self.d_head, dtype=jnp.float32) / self.d_head)
        phase = positions_BxT[..., None, None].astype(jnp.float32) * frequency_H
        return self.replace(sin_BxTx1xH=jnp.sin(phase), cos_BxTx1xH=jnp.cos(phase))

    def rotate(self, q_BxTxNxH, k_BxTxKxH):
        sin, cos = self.sin_BxTx1xH, self.cos_BxTx1xH
        bias = jnp.clip(self.bias_NxH.astype(jnp.float32), -2 * math.pi, 0.0)
        cos_b, sin_b = jnp.cos(bias), jnp.sin(bias)
        q_phase = cos * cos_b + sin * sin_b, sin * cos_b - cos * sin_b
        return _polar(q_BxTxNxH, *q_phase), _polar(k_BxTxKxH, cos, sin)


def _polar(x_BxTxNxH, cos, sin) -> jax.Array:
    """Returns softplus(x) times (cos, sin), [B, T, N, 2 H], in the type of x."""
    size = jax.nn.softplus(x_BxTxNxH.astype(jnp.float32))
    return jnp.concatenate([size * cos, size * sin], axis=-1).astype(x_BxTxNxH.dtype)
