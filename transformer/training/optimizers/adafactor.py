"""Adafactor."""

import optax

from transformer.training.optimizers.base import OPTIMIZERS, Optimizer


@OPTIMIZERS.register("adafactor")
class Adafactor(Optimizer):
    """Adafactor: factored second moments and clipped updates (Shazeer & Stern 2018)."""

    def direction(self, config):
        return optax.chain(
            optax.scale_by_factored_rms(decay_rate=0.8), optax.clip_by_block_rms(1.0)
        )
