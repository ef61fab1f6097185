"""Special tokens in config.json, and in generation_config.json beside it.

In config.json, a field that is absent has the family's default, and null means that there is no
such token. Here None does.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path

from transformer.convert.fields import is_token, shown
from transformer.errors import UserError
from transformer.files import read_json
from transformer.model.config import ModelConfig

NAMES = {
    "pad_id": "pad_token_id", "bos_id": "bos_token_id", "eos_id": "eos_token_id", "decoder_start_id": "decoder_start_token_id",
}  # fmt: skip
"""Our field -> theirs."""


_NONE = {"decoder_start_token_id": -1}
"""What stands for None where it is not null, which Transformers refuses to read in a Marian model."""


def read(theirs: Mapping, defaults: Mapping[str, int], fields: Mapping) -> dict:
    """The special tokens of the ModelConfig that will have these `fields`."""
    return {
        ours: read_id(theirs, name, fields["vocab_size"], defaults.get(name))
        for ours, name in NAMES.items()
        if ours != "decoder_start_id" or fields["family"] == "encoder_decoder"
    }


def of_generation(directory: Path) -> dict:
    """The special tokens in generation_config.json, by which Transformers generates where the file
    is there. What it leaves out is none to Transformers; here, config.json says it."""
    file = directory / "generation_config.json"
    found = read_json(file) if file.is_file() else {}
    tokens = {name: found[name] for name in NAMES.values() if name in found}
    for name, value in tokens.items():
        if not is_token(value, several=name == NAMES["eos_id"]):
            raise UserError(f"{file}: {name} = {shown(value)} must be the id of a token or null")
    return tokens


def read_id(theirs: Mapping, name: str, vocab_size: int, default: int | None = None):
    """A token, None, or, where there are several ends, a tuple. Some spell none as -1.

    An id outside the vocabulary names no token of it: it is None, with a warning if the file says it. Transformers writes the
    default of the family into every file, so models with a small vocabulary have such ids.
    """
    value = theirs.get(name, default)
    several = isinstance(value, list) and name == NAMES["eos_id"]
    ids = [token for token in (value if several else [value]) if token is not None]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise UserError(
                f"config.json: {name} = {value!r} is no token id; give an integer, or null"
            )
        if token >= vocab_size and name in theirs:
            warnings.warn(
                f"{name} = {token} is no token of a vocabulary of {vocab_size}; read as null",
                stacklevel=2,
            )
    ids = [token for token in ids if 0 <= token < vocab_size]
    return tuple(ids) if len(ids) > 1 else ids[0] if ids else None


def write(config: ModelConfig, defaults: Mapping[str, int]) -> dict:
    """The special tokens of config.json: null where the family's default must not take the place of None."""
    found = {name: getattr(config, ours) for ours, name in NAMES.items()}
    return {
        name: _NONE.get(name)
        if value is None
        else list(value)
        if isinstance(value, tuple)
        else value
        for name, value in found.items()
        if value is not None or name in defaults
    }
