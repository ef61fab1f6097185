"""The interface of optimizers. A new optimizer is a class in a file of this package.

Settings that most optimizers share (`b1`, `b2`, `epsilon`, `momentum`, and those of the schedule)
are fields of OptimizerConfig. Others are fields of the optimizer's dataclass, and a config sets
them as options: `name=dict(name="adafactor", ...)`."""

import dataclasses
from typing import Any, ClassVar

import optax

from transformer.model.parametrizations.base import Place, Rule
from transformer.training.optimizers import OPTIMIZERS

__all__ = ["OPTIMIZERS", "Config", "Optimizer"]

Config = Any  # an OptimizerConfig. Its module imports this one, so it cannot be imported here


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The base class of optimizers. Register a subclass with `@OPTIMIZERS.register("name")`."""

    name: ClassVar[str]  # by which a config chooses the optimizer; `register` sets it
    fields: ClassVar[frozenset[str]] = frozenset()  # the shared settings that it reads
    moments: ClassVar[int] = 0  # arrays in its state that have the shape of the parameters
    scales_with_size: ClassVar[bool] = False  # whether muP and CompleteP are derived for it

    def learning_rate(self, place: Place, rule: Rule) -> float:
        """Returns the multiplier of a parameter's update; by default, the rule's, for Adam."""
        return rule.learning_rate

    def direction(self, config: Config) -> optax.GradientTransformation:
        """Returns the map from gradient to direction. Weight decay, rate and negation follow it."""
        raise NotImplementedError
