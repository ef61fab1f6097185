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


def checked(config) -> dict[str, Ids]:
    """Returns the special tokens of a ModelConfig by field, in canonical form. Duplicates in
    `eos_id` are removed. A tuple of one id becomes that id, and an empty tuple None. Raises
    UserError for ids outside the vocabulary, and a start token without an encoder_decoder."""
    tokens = {field: getattr(config, field) for field in SPECIAL_TOKENS}
    ends = tuple(dict.fromkeys(as_tuple(tokens["eos_id"])))
    tokens["eos_id"] = ends if len(ends) > 1 else ends[0] if ends else None
    for field, ids in tokens.items():
        check_inside(f"model.{field}", ids, config.vocab_size)
    if config.decoder_start_id is not None and not config.is_encoder_decoder:
        needs = f"needs model.family='encoder_decoder', but it is {config.family!r}"
        problem = f"{config.decoder_start_id} {needs}"
        raise UserError(f"model.decoder_start_id: {problem}; leave it at None")
    return tokens


def check_inside(field: str, ids: Ids, vocab_size: int) -> None:
    """Raises UserError unless all ids lie in [0, vocab_size)."""
    for token in as_tuple(ids):
        if isinstance(token, bool) or not isinstance(token, int):
            raise UserError(f"{field}: {token!r} is not a token id; use an int, or None")
        if not 0 <= token < vocab_size:
            problem = f"{token} is not in a vocabulary of {vocab_size} tokens"
            raise UserError(f"{field}: {problem}; use another id")
