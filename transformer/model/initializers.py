"""Parameters, and the initializers of projection matrices, by name."""

from collections.abc import Callable

import jax
from flax import linen as nn

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
