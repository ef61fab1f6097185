"""Projections: x W + b, from one or more input axes to one or more output axes."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.config import ModelConfig
from transformer.model.initializers import matrix_init
from transformer.model.sharding import gathered


class Linear(nn.Module):
    """Contracts the last axes of x with the first axes of W; W's axes carry `names`, the last `len(outputs)` of which are new.

    Initialised as the matrix [all inputs, all outputs] that it is, whatever axes it is laid out in.
    """

    config: ModelConfig
    outputs: tuple[int, ...]
    names: tuple[str, ...]
    bias: bool
    gain: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, contracted = self.config, len(self.names) - len(self.outputs)
        inputs = x.shape[x.ndim - contracted :]

        def init(key, shape, dtype):
            return matrix_init(cfg.initializer, cfg.init_std, self.gain)(
                key, (math.prod(inputs), math.prod(self.outputs)), dtype
            ).reshape(shape)

        kernel = self.param(
            "kernel",
            nn.with_logical_partitioning(init, self.names),
            (*inputs, *self.outputs),
            cfg.param_dtype,
        )
        kernel = gathered(kernel.astype(cfg.dtype), self.names)
        y = jnp.tensordot(x.astype(cfg.dtype), kernel, axes=contracted)
        if self.bias:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, self.names[contracted:])
            y += self.param("bias", zeros, self.outputs, cfg.param_dtype).astype(cfg.dtype)
        return y
