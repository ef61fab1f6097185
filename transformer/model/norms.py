"""LayerNorm, RMSNorm and DynamicTanh."""

import jax.numpy as jnp
from flax import linen as nn

NORMS = ("layernorm", "rmsnorm", "dynamic_tanh")

WITH_OFFSET = ("layernorm", "dynamic_tanh")
"""The norms with a learned offset."""


class Norm(nn.Module):
    """Normalizes the last axis, usually d_model, in float32.

    layernorm (Ba et al. 2016):       (x - mean) / sqrt(var + eps) * gain + offset
    rmsnorm (Zhang & Sennrich 2019):  x / sqrt(mean(x^2) + eps) * gain
    dynamic_tanh (Zhu et al. 2025):   tanh(alpha x) * gain + offset

    The learned scalar alpha starts at 0.5. `dynamic_tanh` computes no statistics: it limits large
    values instead, in place of a norm.

    With `zero_centered`, the gain is 1 + w, where w is the parameter. Weight decay then pulls the
    gain to 1 (Gemma).
    """

    kind: str
    epsilon: float
    gain: bool
    zero_centered: bool
    offset: bool
    param_dtype: str

    @nn.compact
    def __call__(self, x_BxTxD):
        x = x_BxTxD.astype(jnp.float32)
        if self.kind == "layernorm":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        if self.kind == "dynamic_tanh":
            start = nn.with_logical_partitioning(nn.initializers.constant(0.5), ())
            x = jnp.tanh(self.param("alpha", start, (), self.param_dtype) * x)
        else:
            x = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        if self.gain and self.zero_centered:
            x = x * (1.0 + self._vector("gain", nn.initializers.zeros, x))
        elif self.gain:
            x = x * self._vector("gain", nn.initializers.ones, x)
        if self.offset and self.kind in WITH_OFFSET:
            x = x + self._vector("offset", nn.initializers.zeros, x)
        return x.astype(x_BxTxD.dtype)

    def _vector(self, name, init, x):
        init = nn.with_logical_partitioning(init, ("norm",))
        return self.param(name, init, (x.shape[-1],), self.param_dtype)
