"""The interface of optimizers, and those that Optax provides. A new one is a class in a file here.

Settings that most optimizers share (`b1`, `b2`, `epsilon`, `momentum`, and those of the schedule)
are fields of OptimizerConfig. Others are fields of the optimizer's dataclass, and a config sets
them as options: `name=dict(name="adafactor", ...)`."""

import dataclasses
from typing import Annotated, Any, ClassVar

import optax

from transformer.limits import Positive, at_most
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


@OPTIMIZERS.register("adamw")
class AdamW(Optimizer):
    """AdamW: bias-corrected running means of the gradient and of its square.

    Adam: Kingma & Ba 2015. Decoupled weight decay: Loshchilov & Hutter 2019."""

    fields = frozenset({"b1", "b2", "epsilon"})
    moments = 2
    scales_with_size = True

    def direction(self, config):
        return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.epsilon)


@OPTIMIZERS.register("lion")
class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum (Chen et al. 2023)."""

    fields = frozenset({"b1", "b2"})
    moments = 1

    def direction(self, config):
        return optax.scale_by_lion(b1=config.b1, b2=config.b2)


@OPTIMIZERS.register("sgd")
class SGD(Optimizer):
    """The gradient, or with momentum its decayed sum."""

    fields = frozenset({"momentum"})
    moments = 1

    def direction(self, config):
        return optax.trace(config.momentum) if config.momentum else optax.identity()


@OPTIMIZERS.register("adafactor")
class Adafactor(Optimizer):
    """Adafactor: factored second moments and clipped updates (Shazeer & Stern 2018)."""

    decay_rate: Positive = 0.8  # c in 1 - t^(-c), the decay of the second moments at step t
    # maximum root mean square of an array's update
    clip_threshold: Annotated[Positive, at_most(10**9, "above it, nothing is clipped")] = 1.0

    def direction(self, config):
        moments = optax.scale_by_factored_rms(decay_rate=self.decay_rate)
        return optax.chain(moments, optax.clip_by_block_rms(self.clip_threshold))
