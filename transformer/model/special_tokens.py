"""The special tokens of a vocabulary.

They are facts about a vocabulary, and no part of the network: no module of `model/` reads them, and no token id makes a
token padding (see inputs.py). They are the defaults of `sample` and `beam_search`, and what `load_hf` and `save_hf` read
and write.
"""

from collections.abc import Sequence

from transformer.errors import UserError

SPECIAL_TOKENS = ("pad_id", "bos_id", "eos_id", "decoder_start_id")
"""Fields of a ModelConfig that name a token of its vocabulary, or are None."""

Ids = int | Sequence[int] | None
"""No token, one token, or several."""


def as_tuple(ids: Ids) -> tuple[int, ...]:
    """Every token that is named."""
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, (tuple, list)) else (ids,)


def checked(config) -> dict[str, Ids]:
    """The special tokens of a ModelConfig by field; a list of one end is that end, and an empty list is None.

    Raises UserError for an id outside the vocabulary, and for a decoder start token in a model without an encoder.
    """
    found = {field: getattr(config, field) for field in SPECIAL_TOKENS}
    ends = tuple(dict.fromkeys(as_tuple(found["eos_id"])))
    found["eos_id"] = ends if len(ends) > 1 else ends[0] if ends else None
    for field, ids in found.items():
        check_inside(f"model.{field}", ids, config.vocab_size)
    if config.decoder_start_id is not None and not config.two_sides:
        raise UserError(
            f"model.decoder_start_id: {config.decoder_start_id}, but model.family = {config.family!r}; "
            "only an encoder_decoder has one, so leave it at None"
        )
    return found


def check_inside(field: str, ids: Ids, vocab_size: int) -> None:
    """Raises UserError unless all ids lie in [0, vocab_size)."""
    for token in as_tuple(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise UserError(f"{field}: {token!r} is no token id; give an int, or None")
        if not 0 <= token < vocab_size:
            raise UserError(f"{field}: {token} is no token of a vocabulary of {vocab_size}")
