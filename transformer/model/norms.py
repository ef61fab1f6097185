"""LayerNorm and RMSNorm."""

import jax.numpy as jnp
from flax import linen as nn

NORMS = ("layernorm", "rmsnorm")


class Norm(nn.Module):
    """Normalizes the last axis, usually d_model, in float32.

    layernorm (Ba et al. 2016):       (x - mean) / sqrt(var + eps) * gain + offset
    rmsnorm (Zhang & Sennrich 2019):  x / sqrt(mean(x^2) + eps) * gain

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
        x = x / jnp.sqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        if self.gain and self.zero_centered:
            x = x * (1.0 + self._vector("gain", nn.initializers.zeros, x))
        elif self.gain:
            x = x * self._vector("gain", nn.initializers.ones, x)
        if self.offset and self.kind == "layernorm":
            x = x + self._vector("offset", nn.initializers.zeros, x)
        return x.astype(x_BxTxD.dtype)

    def _vector(self, name, init, x):
        init = nn.with_logical_partitioning(init, ("norm",))
        return self.param(name, init, (x.shape[-1],), self.param_dtype)
