"""The config of decoding: how a trained model generates text."""

from typing import Annotated

import jax

from transformer.checks import Effect, coerce, strict, type_hints
from transformer.errors import UserError
from transformer.limits import Count, NonNegative, Positive, Size, at_most

_EFFECTS = (
    Effect(("length_penalty",), "beams: decoding.beam_size > 1", lambda c: c.beam_size > 1),
    Effect(("top_k", "top_p"), "sampling: decoding.temperature > 0", lambda c: c.temperature > 0),
)


def _not_tiny(path: str, value: float) -> None:
    if 0 < value < 1e-6:
        raise UserError(f"{path}: {value} is too small; at least 1e-6, or 0 (greedy)")


_Penalty = Annotated[NonNegative, at_most(100, "above it, all beams score about 0")]
_WHY = "above it, all tokens are about equally likely"
_Temperature = Annotated[NonNegative, at_most(100, _WHY), _not_tiny]


@strict("decoding", _EFFECTS)
class DecodingConfig:
    """How a trained model generates text."""

    beam_size: Size = 1  # number of beams; 1: greedy decoding, or sampling if temperature > 0
    length_penalty: _Penalty = 0.6  # alpha in the penalty ((5 + |y|) / 6)^alpha of beam search
    temperature: _Temperature = 0.0  # divides the logits before sampling; 0: greedy decoding
    top_k: Count = 0  # sample from the k most likely tokens; 0: from all
    # Sample from the smallest set of tokens with this probability (Holtzman et al. 2020).
    top_p: Annotated[Positive, at_most(1)] = 1.0
    # Maximum number of generated tokens. In an encoder-decoder, the length of the source is added.
    max_extra: Size = 50
    batch_size: Size = 64  # sequences that are decoded at once

    def __post_init__(self):
        if self.beam_size > 1 and self.temperature:
            fields = "decoding.beam_size and decoding.temperature"
            way_out = "set decoding.temperature to 0, or decoding.beam_size to 1"
            raise UserError(f"{fields}: beam search does not sample; {way_out}")


def check_numbers(**numbers) -> None:
    """Raises UserError for a number of wrong type or range. Traced numbers are not checked."""
    kinds = type_hints(DecodingConfig) | {"alpha": _Penalty, "max_new": Size}
    for name, value in numbers.items():
        if not isinstance(value, jax.core.Tracer):
            is_scalar = isinstance(value, jax.Array) and not value.shape
            coerce(value.item() if is_scalar else value, kinds[name], name)
