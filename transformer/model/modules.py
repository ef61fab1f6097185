"""The modules and functions that layers consist of: parameters and their initializers, projections
x W + b from one or more input axes to one or more output axes, norms, activations, and records."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.sharding import gathered

Config = Any  # a ModelConfig, whose module imports this one

INITIALIZERS: dict[str, Callable] = {
    "xavier_uniform": lambda std: nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    "lecun_normal": lambda std: nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
    "normal": nn.initializers.normal,
}


def matrix_init(name: str, std: float, gain: float = 1.0):
    """Returns the named initializer, scaled by `gain`, for a matrix [inputs, outputs]. `std` is the
    standard deviation of "normal"; the other initializers ignore it."""
    return lambda key, shape, dtype: gain * INITIALIZERS[name](std)(key, shape, dtype)


def declare(module: nn.Module, name: str, init, names: tuple, shape: tuple[int, ...]) -> jax.Array:
    """Declares a parameter of a module, whose axes have these logical names, and returns it."""
    if module.has_variable("params", name):  # `param` would trace `init` to compare shapes: slow
        value = nn.unbox(module.get_variable("params", name))
        if value.shape == shape:
            return value
    init = nn.with_logical_partitioning(init, names)
    return module.param(name, init, shape, module.config.param_dtype)


def matrix(
    module: nn.Module, inputs: tuple[int, ...], outputs: tuple[int, ...],
    names: tuple[str | None, ...], gain: float = 1.0,
) -> jax.Array:  # fmt: skip
    """Declares the parameter `kernel`, [*inputs, *outputs], and returns it for use in a product.
    The result has the config's `dtype` and is gathered along d_model. Initial values are those of
    the matrix [prod(inputs), prod(outputs)], times `gain`. `names` are logical axis names."""
    cfg, flat = module.config, (math.prod(inputs), math.prod(outputs))
    base = matrix_init(cfg.initializer, cfg.init_std, gain)
    init = lambda key, shape, dtype: base(key, flat, dtype).reshape(shape)
    kernel = declare(module, "kernel", init, names, (*inputs, *outputs))
    return gathered(kernel.astype(cfg.dtype), names)


class Kernel(nn.Module):
    """A matrix without a product, for callers that use it several times or not as x W."""

    config: Config
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

    config: Config
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

    config: Config

    @nn.compact
    def __call__(self, x_BxTxD):
        cfg, x, zeros = self.config, x_BxTxD.astype(jnp.float32), nn.initializers.zeros
        vector = lambda name, init: declare(self, name, init, ("norm",), x.shape[-1:])
        constant = jax.lax.stop_gradient if cfg.norm == "detach_norm" else lambda x: x
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


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),  # x Phi(x)
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),  # the approximation of GPT-2
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # Hendrycks & Gimpel 2016, section 2
    "silu": jax.nn.silu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, "Primer"
    "linear": lambda x: x,
}


def gated(act: Callable, limit: float, gate: jax.Array, x: jax.Array) -> jax.Array:
    """Computes act(gate) * x (Shazeer 2020). With a limit c, computes act(min(gate, c)) *
    (clip(x, -c, c) + 1), as in GPT-OSS (OpenAI 2025)."""
    if not limit:
        return act(gate) * x
    return act(jnp.minimum(gate, limit)) * (jnp.clip(x, -limit, limit) + 1)


def soft_cap(x: jax.Array, cap: float) -> jax.Array:
    """Computes cap tanh(x / cap): near x for small x, at most cap (Bello et al. 2016; Gemma 2)."""
    return cap * jnp.tanh(x / cap)


WATCHED = ("sizes", "streams", "heads", "maps")
"""Collections that record internal values: `model.apply(..., mutable=["heads"])`. A collection is
computed only if `mutable` requests it.

sizes    root mean squares of the residual stream and of the branch added to it, at every sublayer
streams  the residual stream after each layer
heads    statistics of each attention head (attention_statistics.py)
maps     attention weights of each head"""


def watched(module: nn.Module, what: str) -> bool:
    """Returns whether this module is to record the collection `what`; not in initialization."""
    return module.is_mutable_collection(what) and not module.is_initializing()
