"""LayerNorm, DetachNorm, RMSNorm and DynamicTanh."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from transformer.model.initializers import declare

NORMS = ("layernorm", "detach_norm", "rmsnorm", "dynamic_tanh")
WITH_OFFSET = ("layernorm", "detach_norm", "dynamic_tanh")  # the norms with a learned offset


class Norm(nn.Module):
    """Normalizes the last axis, usually d_model, in float32.

    layernorm (Ba et al. 2016):       (x - mean) / sqrt(var + eps) * gain + offset
    rmsnorm (Zhang & Sennrich 2019):  x / sqrt(mean(x^2) + eps) * gain
    dynamic_tanh (Zhu et al. 2025):   tanh(alpha x) * gain + offset

    `detach_norm` (DetachNorm, Xu et al. 2019) computes the same as `layernorm`, but its gradient
    treats the mean and the variance as constants. `dynamic_tanh` computes no statistics: it limits
    large values instead, in place of a norm. The learned scalar alpha starts at 0.5.

    With `norm_zero_centered`, the gain is 1 + w, and weight decay pulls w to 0 (Gemma)."""

    config: Any  # a ModelConfig, whose module imports this one

    @nn.compact
    def __call__(self, x_BxTxD):
        cfg, x, zeros = self.config, x_BxTxD.astype(jnp.float32), nn.initializers.zeros
        vector = lambda name, init: declare(self, name, init, ("norm",), x.shape[-1:])
        constant = lax.stop_gradient if cfg.norm == "detach_norm" else lambda x: x
        if cfg.norm in ("layernorm", "detach_norm"):
            x = x - constant(jnp.mean(x, axis=-1, keepdims=True))
        if cfg.norm == "dynamic_tanh":
            x = jnp.tanh(declare(self, "alpha", nn.initializers.constant(0.5), (), ()) * x)
        else:
            square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
            x = x / constant(jnp.sqrt(square + cfg.norm_epsilon))
        if cfg.norm_gain and cfg.norm_zero_centered:
            x = x * (1.0 + vector("gain", zeros))
        elif cfg.norm_gain:
            x = x * vector("gain", nn.initializers.ones)
        if cfg.norm_offset and cfg.norm in WITH_OFFSET:
            x = x + vector("offset", zeros)
        return x.astype(x_BxTxD.dtype)
