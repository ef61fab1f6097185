"""Projections: x W + b, from one or more input axes to one or more output axes."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.config import ModelConfig
from transformer.model.initializers import declare, matrix_init
from transformer.model.sharding import gathered


def matrix(
    module: nn.Module, inputs: tuple[int, ...], outputs: tuple[int, ...],
    names: tuple[str | None, ...], gain: float = 1.0,
) -> jax.Array:  # fmt: skip
    """Declares the parameter `kernel`, [*inputs, *outputs], and returns it for use in a product.
    The result has the config's `dtype` and is gathered along d_model. Initial values are those of
    the matrix [prod(inputs), prod(outputs)], times `gain`. `names` are logical axis names."""
    cfg = module.config

    def init(key, shape, dtype):
        base = matrix_init(cfg.initializer, cfg.init_std, gain)
        return base(key, (math.prod(inputs), math.prod(outputs)), dtype).reshape(shape)

    kernel = declare(module, "kernel", init, names, (*inputs, *outputs))
    return gathered(kernel.astype(cfg.dtype), names)


class Kernel(nn.Module):
    """A matrix without a product, for callers that use it several times or not as x W."""

    config: ModelConfig
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    names: tuple[str | None, ...]
    gain: float = 1.0

    @nn.compact
    def __call__(self) -> jax.Array:
        return matrix(self, self.inputs, self.outputs, self.names, self.gain)


class Linear(nn.Module):
    """Computes x W + b, contracting the last axes of x with the first axes of W. `names` are the
    logical names of W's axes. The last `len(outputs)` of them are the output axes."""

    config: ModelConfig
    outputs: tuple[int, ...]
    names: tuple[str, ...]
    bias: bool
    gain: float = 1.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg, contracted = self.config, len(self.names) - len(self.outputs)
        kernel = matrix(self, x.shape[x.ndim - contracted :], self.outputs, self.names, self.gain)
        y = jnp.tensordot(x.astype(cfg.dtype), kernel, axes=contracted)
        if self.bias:
            zeros, names = nn.initializers.zeros, self.names[contracted:]
            y += declare(self, "bias", zeros, names, self.outputs).astype(cfg.dtype)
        return y
