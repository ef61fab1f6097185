"""Stochastic gradient descent."""

import optax

from transformer.training.optimizers.base import OPTIMIZERS, Optimizer


@OPTIMIZERS.register("sgd")
class SGD(Optimizer):
    """The gradient, or with momentum its decayed sum."""

    fields = frozenset({"momentum"})
    moments = 1

    def direction(self, config):
        return optax.trace(config.momentum) if config.momentum else optax.identity()
