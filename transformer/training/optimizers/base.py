"""What an optimizer is. A new one is a class in a file of this package."""

from typing import Any, ClassVar

import optax

from transformer.training.optimizers import OPTIMIZERS

__all__ = ["OPTIMIZERS", "Config", "Optimizer"]

Config = Any
"""An OptimizerConfig, whose module imports this one."""


class Optimizer:
    """The base of every optimizer. Register a subclass with `@OPTIMIZERS.register("name")`."""

    name: ClassVar[str]
    """By which a config chooses it, as it is registered."""

    fields: ClassVar[frozenset[str]] = frozenset()
    """Those of `b1`, `b2`, `epsilon` and `momentum` that it reads; the config refuses the others."""

    def direction(self, config: Config) -> optax.GradientTransformation:
        """Gradient -> direction. Weight decay, the learning rate and the sign come after it (training/optimizer.py)."""
        raise NotImplementedError
