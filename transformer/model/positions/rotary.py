"""Rotary positions: rotate queries and keys by angles proportional to their positions. And PoPE.
Shape suffixes: B batch, T length, N query heads, K key/value heads, H head size, P pairs."""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import FrozenDict

from transformer.limits import Positive
from transformer.model.positions.base import Position, StackFacts, declare, fact, option, register
from transformer.model.positions.rotary_scaling import SCALINGS, Scaling
from transformer.model.sharding import platform


@register("rotary")
class Rotary(Position):
    """Rotary position embedding: R_t q_t . R_s k_s (Su et al. 2021, "RoFormer").

    R_t rotates the i-th pair of dimensions by t / theta^(2i/d): products depend on t - s alone.

    fraction: the part of each head, from its start, that is rotated (below 1 in GPT-NeoX).
    layout: "halves" pairs dimensions (i, i + d/2), as GPT-NeoX and Llama in Transformers do.
        "interleaved" pairs (2i, 2i + 1), as RoFormer's paper and GPT-J do. The two are equal up to
        a permutation of the dimensions, but weights do not carry over.
    scaling: changes the angles for contexts longer than the training length (rotary_scaling.py).
        "none", dict(name="linear" | "ntk" | "dynamic" | "yarn" | "llama3", factor=...),
        dict(name="proportional", share=...), which is p-RoPE, or dict(name="longrope", ...).

    Parameters: none.
    Cache: keys are stored after rotation.
    Beyond the training length: degrades soon (Press et al. 2022; Kazemnejad et al. 2023)."""

    theta: Positive = option(10_000.0)
    fraction: float = option(1.0)
    layout: Literal["halves", "interleaved"] = option("halves")
    scaling: str | FrozenDict = option("none")
    d_head: int = fact(0)
    sin_BxTx1xP: jax.Array | None = None
    cos_BxTx1xP: jax.Array | None = None

    def check(self, facts: StackFacts) -> str | None:
        rotated = int(facts.d_head * self.fraction)
        if not 0 < self.fraction <= 1 or rotated % 2 or rotated == 0:
            size = f"d_head * fraction = {facts.d_head} * {self.fraction} must be even and positive"
            return f"model.position: rotation needs pairs of dimensions; {size}"
        if problem := self._scaling.check(self.theta, rotated):
            return f"model.position.scaling.{problem}"
        return None

    @property
    def _scaling(self) -> Scaling:
        return SCALINGS.build(self.scaling)

    @property
    def by_length(self) -> bool:
        """Whether rotations also depend on the length of the sequence."""
        return self._scaling.by_length

    def at(self, positions_BxT):
        rotated, length_B = int(self.d_head * self.fraction), jnp.max(positions_BxT, axis=1) + 1
        frequency = self._scaling.frequencies(self.theta, rotated, length_B)  # [P] or [B, P]
        t_BxTx1x1 = positions_BxT[..., None, None].astype(jnp.float32)
        phase_BxTx1xP = t_BxTx1x1 * frequency[..., None, None, :]
        sin, cos = (self._scaling.magnitude * f(phase_BxTx1xP) for f in (jnp.sin, jnp.cos))
        return self.replace(sin_BxTx1xP=sin, cos_BxTx1xP=cos)

    def rotate(self, q_BxTxNxH, k_BxTxKxH):
        return self._rotated(q_BxTxNxH), self._rotated(k_BxTxKxH)

    def _rotated(self, x_BxTxNxH):
        sin, cos, halves = self.sin_BxTx1xP, self.cos_BxTx1xP, self.layout == "halves"
        if platform() == "tpu":
            return _rotated_by_product(x_BxTxNxH, sin, cos, halves)
        x, unrotated = jnp.split(x_BxTxNxH.astype(jnp.float32), [2 * sin.shape[-1]], axis=-1)
        a, b = jnp.split(x, 2, axis=-1) if halves else (x[..., 0::2], x[..., 1::2])
        pairs = a * cos - b * sin, b * cos + a * sin
        x = jnp.concatenate(pairs, -1) if halves else jnp.stack(pairs, -1).reshape(x.shape)
        return jnp.concatenate([x, unrotated], axis=-1).astype(x_BxTxNxH.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _rotated_by_product(x_BxTxNxH, sin, cos, halves: bool) -> jax.Array:
    """Returns x cos + x R sin, where x R is (-b, a) for x = (a, b), exactly. On a TPU, this is
    faster than splitting and joining pairs. Its gradient is the rotation by the opposite angle."""
    H, P = x_BxTxNxH.shape[-1], sin.shape[-1]
    a, b = np.arange(2 * P).reshape(2, P) if halves else np.arange(2 * P).reshape(P, 2).T
    R_HxH = np.zeros((H, H))
    R_HxH[b, a], R_HxH[a, b] = -1.0, 1.0
    both = lambda f: jnp.concatenate([f, f], axis=-1) if halves else jnp.repeat(f, 2, axis=-1)
    wide = lambda f, rest: jnp.pad(both(f), [(0, 0)] * 3 + [(0, H - 2 * P)], constant_values=rest)
    product = functools.partial(jnp.dot, precision="highest", preferred_element_type=jnp.float32)
    x_R_BxTxNxH = product(x_BxTxNxH, jnp.asarray(R_HxH, x_BxTxNxH.dtype))
    return (x_BxTxNxH * wide(cos, 1.0) + x_R_BxTxNxH * wide(sin, 0.0)).astype(x_BxTxNxH.dtype)


_rotated_by_product.defvjp(
    lambda x, sin, cos, halves: (_rotated_by_product(x, sin, cos, halves), (sin, cos)),
    lambda halves, angles, d: (_rotated_by_product(d, -angles[0], angles[1], halves), None, None),
)


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
