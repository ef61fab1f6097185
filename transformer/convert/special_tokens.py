"""Special tokens in config.json, and in generation_config.json beside it. In config.json, a missing
field has the family's default, and null means no such token, as None does in a ModelConfig."""

import warnings
from collections.abc import Mapping
from pathlib import Path

from transformer.convert.fields import is_token, shown
from transformer.errors import UserError
from transformer.files import read_json
from transformer.model.config import ModelConfig

NAMES = {
    "pad_id": "pad_token_id", "bos_id": "bos_token_id", "eos_id": "eos_token_id",
    "decoder_start_id": "decoder_start_token_id",
}  # fmt: skip
"""Field of ModelConfig -> field of config.json."""


def read(theirs: Mapping, defaults: Mapping[str, int], fields: Mapping) -> dict:
    """Returns the special tokens of a config.json, for a ModelConfig with these `fields`."""
    return {
        ours: read_id(theirs, name, fields["vocab_size"], defaults.get(name))
        for ours, name in NAMES.items()
        if ours != "decoder_start_id" or fields["family"] == "encoder_decoder"
    }


def read_both(directory: Path, theirs: Mapping) -> dict:
    """Returns the special tokens of generation_config.json or, if missing there, of config.json. If
    the first file exists, Transformers generates with its tokens, and treats missing tokens as
    absent. `theirs` is the content of config.json. Raises UserError for an invalid ID in either."""
    file, tokens = directory / "generation_config.json", {}
    generation = read_json(file) if file.is_file() else {}
    for source, fields in ((directory / "config.json", theirs), (file, generation)):
        for name in NAMES.values() & fields.keys():
            value = tokens[name] = fields[name]
            if not is_token(value, several=name == NAMES["eos_id"]):
                raise UserError(f"{source}: {name} = {shown(value)} must be a token ID or null")
    return tokens


def read_id(theirs: Mapping, name: str, vocab_size: int, default: int | None = None):
    """Returns a token ID, None, or, for several end tokens, a tuple. Some files use -1 for None.
    `theirs` is a config.json that `Fields` has accepted. An ID outside the vocabulary becomes None,
    with a warning if the file contains it. Transformers writes the family's default into every
    file, so models with a small vocabulary have such IDs."""
    value = theirs.get(name, default)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if token >= vocab_size and name in theirs:
            outside = f"outside the vocabulary of {vocab_size} tokens"
            warnings.warn(f"{name} = {token} is {outside}; read as null", stacklevel=2)
    ids = [token for token in ids if 0 <= token < vocab_size]
    return tuple(ids) if len(ids) > 1 else ids[0] if ids else None


def write(config: ModelConfig, defaults: Mapping[str, int]) -> dict:
    """Returns the special tokens of config.json; null where a missing field has a default."""
    tokens = {}
    for ours, name in NAMES.items():
        if (value := getattr(config, ours)) is not None:
            tokens[name] = list(value) if isinstance(value, tuple) else value
        elif name in defaults:
            # Transformers cannot load a Marian model whose decoder_start_token_id is null.
            tokens[name] = -1 if name == "decoder_start_token_id" else None
    return tokens
