"""Initial values of the projection matrices, by name."""

from typing import TYPE_CHECKING

from flax import linen as nn

if TYPE_CHECKING:
    from transformer.config import ModelConfig

INITIALIZERS = {
    "xavier_uniform": lambda config: nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    "lecun_normal": lambda config: nn.initializers.variance_scaling(1.0, "fan_in", "normal"),
    "normal": lambda config: nn.initializers.normal(config.init_std),
}


def matrix_init(config: "ModelConfig", gain: float = 1.0):
    """The configured initialiser times `gain`, for a matrix [inputs, outputs]."""
    base = INITIALIZERS[config.initializer](config)
    return lambda key, shape, dtype: gain * base(key, shape, dtype)
