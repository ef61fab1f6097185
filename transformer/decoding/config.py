"""The config of decoding: how a trained model generates text."""

import dataclasses
from typing import Protocol

from transformer.checks import Effect, at_least, at_most, strict
from transformer.data.config import Task
from transformer.data.objectives.base import Objective
from transformer.errors import UserError

_EFFECTS = (
    Effect(("length_penalty",), "beams: decoding.beam_size > 1", lambda c: c.beam_size > 1),
    Effect(("top_k", "top_p"), "sampling: decoding.temperature > 0", lambda c: c.temperature > 0),
)


@strict("decoding", _EFFECTS)
@dataclasses.dataclass(frozen=True)
class DecodingConfig:
    """How a trained model generates text."""

    beam_size: int = 1  # number of beams; 1: greedy decoding, or sampling if temperature > 0
    length_penalty: float = 0.6  # alpha in the penalty ((5 + |y|) / 6)^alpha of beam search
    temperature: float = 0.0  # divides the logits before sampling; 0: greedy decoding
    top_k: int = 0  # sample from the k most likely tokens; 0: from all
    # Sample from the smallest set of tokens with this probability (Holtzman et al. 2020).
    top_p: float = 1.0
    # Maximum number of generated tokens. In an encoder-decoder, the length of the source is added.
    max_extra: int = 50
    batch_size: int = 64  # sequences that are decoded at once

    def __post_init__(self):
        at_least("decoding", self, 1, "beam_size", "max_extra", "batch_size")
        at_least("decoding", self, 0, "temperature", "top_k", "length_penalty")
        at_most(
            "decoding",
            self,
            100,
            temperature="above it, all tokens are about equally likely",
            length_penalty="above it, all beams score about 0",
        )
        check_temperature("decoding.temperature", self.temperature)
        if self.beam_size > 1 and self.temperature:
            raise UserError(
                "decoding.beam_size and decoding.temperature: beam search does not sample; set "
                "decoding.temperature to 0, or decoding.beam_size to 1"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"decoding.top_p: {self.top_p} must lie in (0, 1]")


def check_temperature(field: str, temperature: float) -> None:
    """Raises UserError for a temperature by which logits cannot be divided."""
    if 0 < temperature < 1e-6:
        raise UserError(
            f"{field}: {temperature} is too small; at least 1e-6, or 0 for greedy decoding"
        )


class DecodingTask(Task, Protocol):
    """The parts of an experiment that determine the text that a trained model generates."""

    @property
    def objective(self) -> Objective: ...

    @property
    def decoding(self) -> DecodingConfig: ...
