"""The special tokens of a vocabulary. They are properties of a vocabulary, not of the network: no
layer of a model reads them, and no token id marks a token as padding (see inputs.py). They are the
defaults of `sample` and `beam_search`, and `load_hf` and `save_hf` read and write them."""

from collections.abc import Sequence

from transformer.errors import UserError

SPECIAL_TOKENS = ("pad_id", "bos_id", "eos_id", "decoder_start_id")
"""The fields of a ModelConfig that contain token ids of its vocabulary, or None."""

Ids = int | Sequence[int] | None  # no token, one token, or several


def as_tuple(ids: Ids) -> tuple[int, ...]:
    """Returns the ids as a tuple; empty for None."""
    return () if ids is None else tuple(ids) if isinstance(ids, (tuple, list)) else (ids,)


def checked_ends(config) -> Ids:
    """Returns the `eos_id` of a ModelConfig without duplicates. A tuple of one id becomes that id,
    and an empty tuple None. Raises UserError for special tokens outside the vocabulary."""
    for field in SPECIAL_TOKENS:
        check_inside(f"model.{field}", getattr(config, field), config.vocab_size)
    ends = tuple(dict.fromkeys(as_tuple(config.eos_id)))
    return ends if len(ends) > 1 else ends[0] if ends else None


def check_inside(field: str, ids: Ids, vocab_size: int) -> None:
    """Raises UserError unless all ids lie in [0, vocab_size)."""
    for token in as_tuple(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise UserError(f"{field}: {token!r} is not a token id; use an int, or None")
        if not 0 <= token < vocab_size:
            problem = f"{token} is not in a vocabulary of {vocab_size} tokens"
            raise UserError(f"{field}: {problem}; use another id")
