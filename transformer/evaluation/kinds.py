"""What a run may be measured by beside its loss: the names and options that `train.evaluators` chooses from.

How each is measured stands in `evaluators.py`.
"""

import dataclasses
from typing import ClassVar

from transformer.checks import at_least, build_choice
from transformer.errors import UserError


@dataclasses.dataclass(frozen=True)
class LossByPosition:
    """Loss by the place in the row, in so many parts of equal length: what context is worth."""

    name: ClassVar[str] = "loss_by_position"
    during: ClassVar[bool] = True  # at every evaluation in training, not in `evaluate` alone

    parts: int = 8

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "parts")


@dataclasses.dataclass(frozen=True)
class Extrapolation:
    """Loss of a language model in rows of the training length, twice, four times, ... `times` as long (Press et al. 2022): in rows that
    do not overlap, and, `sliding`, of the last tokens of each row alone, which have all the row before them as context."""

    name: ClassVar[str] = "extrapolation"
    during: ClassVar[bool] = False

    times: int = 16  # a power of two
    tokens: int = 65536  # of each length, from the beginning of the text; 0: all
    sliding: bool = True

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "times")
        at_least("train.evaluators", self, 0, "tokens")
        if self.times & (self.times - 1):
            raise UserError(f"train.evaluators: extrapolation: times: {self.times}; a power of two")

    @property
    def multiples(self) -> tuple[int, ...]:
        """1, 2, 4, ..., times."""
        return tuple(2**n for n in range(self.times.bit_length()))


@dataclasses.dataclass(frozen=True)
class DepthProfile:
    """By layer and sublayer, on one batch: how large the residual stream and the branch beside it are, the gradient, and what one update
    changes (Xiong et al. 2020; Liu et al. 2020)."""

    name: ClassVar[str] = "depth_profile"
    during: ClassVar[bool] = True


KINDS = {kind.name: kind for kind in (LossByPosition, Extrapolation, DepthProfile)}


def build(spec):
    """The kind that a config chooses: `"depth_profile"`, or `dict(name="extrapolation", times=8)`. Raises UserError."""
    return build_choice("train.evaluators", KINDS, spec)
