"""AdamW."""

import optax

from transformer.training.optimizers.base import OPTIMIZERS, Optimizer


@OPTIMIZERS.register("adamw")
class AdamW(Optimizer):
    """AdamW: bias-corrected running means of the gradient and of its square.

    Adam: Kingma & Ba 2015. Decoupled weight decay: Loshchilov & Hutter 2019.
    """

    fields = frozenset({"b1", "b2", "epsilon"})
    moments = 2
    scales_with_size = True

    def direction(self, config):
        return optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.epsilon)
