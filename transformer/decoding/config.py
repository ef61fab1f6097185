"""The config of decoding: how a trained model generates text."""

import dataclasses
from typing import Protocol

import jax

from transformer.checks import LARGEST, Effect, coerce, strict
from transformer.data.config import Task
from transformer.data.objectives.base import Objective
from transformer.errors import UserError

_EFFECTS = (
    Effect(("length_penalty",), "beams: decoding.beam_size > 1", lambda c: c.beam_size > 1),
    Effect(("top_k", "top_p"), "sampling: decoding.temperature > 0", lambda c: c.temperature > 0),
)

_RANGES = {
    **dict.fromkeys(("beam_size", "max_extra", "max_new", "batch_size"), (1, LARGEST, "")),
    **dict.fromkeys(("length_penalty", "alpha"), (0.0, 100, ": above it, all beams score about 0")),
    "temperature": (0.0, 100, ": above it, all tokens are about equally likely"),
    "top_k": (0, LARGEST, ""), "top_p": (0.0, 1, ""),
}  # fmt: skip
"""Number -> (minimum, maximum, reason for the maximum). The minimum has the number's type."""


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
        check_numbers("decoding.", **dataclasses.asdict(self))
        if self.beam_size > 1 and self.temperature:
            fields = "decoding.beam_size and decoding.temperature"
            way_out = "set decoding.temperature to 0, or decoding.beam_size to 1"
            raise UserError(f"{fields}: beam search does not sample; {way_out}")


def check_numbers(section: str, **numbers) -> None:
    """Raises UserError for a number of wrong type or range. Traced numbers are not checked."""
    for name, value in numbers.items():
        if isinstance(value, jax.core.Tracer):
            continue
        least, most, why = _RANGES[name]
        value = value.item() if isinstance(value, jax.Array) and not value.shape else value
        number = coerce(value, type(least), section + name)
        if name == "top_p" and not 0 < number <= 1:
            raise UserError(f"{section}top_p: {number} must lie in (0, 1]")
        if not number >= least:  # also rejects NaN
            raise UserError(f"{section}{name}: {number} is too small; at least {least:g}")
        if number > most:
            raise UserError(f"{section}{name}: {number:,} is too large; at most {most:,}{why}")
        if name == "temperature" and 0 < number < 1e-6:
            raise UserError(f"{section}{name}: {number} is too small; at least 1e-6, or 0 (greedy)")


class DecodingTask(Task, Protocol):
    """The parts of an experiment that determine the text that a trained model generates."""

    @property
    def objective(self) -> Objective: ...

    @property
    def decoding(self) -> DecodingConfig: ...
