"""The optimizers that Optax provides."""

import optax

from transformer.checks import at_most, positive
from transformer.training.optimizers.base import OPTIMIZERS, Optimizer


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

    decay_rate: float = 0.8  # c in 1 - t^(-c), the decay of the second moments at step t
    clip_threshold: float = 1.0  # maximum root mean square of an array's update

    def __post_init__(self):
        positive("optimizer.name", self, "decay_rate", "clip_threshold")
        at_most("optimizer.name", self, 10**9, clip_threshold="above it, nothing is clipped")

    def direction(self, config):
        moments = optax.scale_by_factored_rms(decay_rate=self.decay_rate)
        return optax.chain(moments, optax.clip_by_block_rms(self.clip_threshold))
