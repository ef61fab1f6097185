"""Lion."""

import optax

from transformer.training.optimizers.base import OPTIMIZERS, Optimizer


@OPTIMIZERS.register("lion")
class Lion(Optimizer):
    """Lion: the sign of an interpolated momentum (Chen et al. 2023)."""

    fields = frozenset({"b1", "b2"})
    moments = 1

    def direction(self, config):
        return optax.scale_by_lion(b1=config.b1, b2=config.b2)
