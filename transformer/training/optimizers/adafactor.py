"""Adafactor."""

import dataclasses

import optax

from transformer.checks import at_most, positive
from transformer.training.optimizers.base import OPTIMIZERS, Optimizer


@OPTIMIZERS.register("adafactor")
@dataclasses.dataclass(frozen=True)
class Adafactor(Optimizer):
    """Adafactor: factored second moments and clipped updates (Shazeer & Stern 2018)."""

    decay_rate: float = 0.8  # c in 1 - t^(-c), the decay of the second moments at step t
    clip_threshold: float = 1.0  # maximum root mean square of an array's update

    def __post_init__(self):
        positive("optimizer.name", self, "decay_rate", "clip_threshold")
        at_most("optimizer.name", self, 10**9, clip_threshold="above it, nothing is clipped")

    def direction(self, config):
        return optax.chain(
            optax.scale_by_factored_rms(decay_rate=self.decay_rate),
            optax.clip_by_block_rms(self.clip_threshold),
        )
