"""The interface of tokenizers."""

import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from transformer.data.config import TokenizerConfig
from transformer.errors import UserError

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Special tokens of the tokenizers that this library trains. An existing one may have others."""


def as_list(texts: Sequence[str]) -> list[str]:
    """Returns a list of texts. Raises UserError for one text, whose characters are texts too."""
    if isinstance(texts, str):
        raise UserError(f"texts: {texts[:20]!r} is one text; pass a list of texts")
    return list(texts)


class Tokenizer:
    """A tokenizer. `content` is its file, and `name` the name of that file in a run directory."""

    content: bytes
    name: str
    vocab_size: int
    pad: int  # ids of special tokens: padding
    bos: int  # begins a text, or the input of a decoder
    eos: int  # ends a text
    source_prefix_ids: Sequence[int] = ()  # the one that begins a source, or none
    mask: int | None = None  # replaces tokens that are predicted

    def set_special_tokens(self, config: TokenizerConfig, name: str, **defaults: int) -> None:
        """Sets the special tokens that the config sets, or else `defaults` (-1: none).

        Raises UserError, with the tokenizer's `name`, for a token that is not set or not a piece.
        """
        ids = {}
        for token, default in defaults.items():
            configured = getattr(config, f"{token}_id")
            ids[token] = default if configured < 0 else configured
            if not ids[token] >= 0:
                field = f"data.tokenizer.{token}_id"
                raise UserError(f"{field}: must be set; {name} does not define it")
        for token, i in (ids | {"source_bos": config.source_bos_id}).items():
            if token != "pad" and i >= self.vocab_size:
                pieces = f"the {self.vocab_size} pieces of {name}"
                raise UserError(f"data.tokenizer.{token}_id: {i} is not one of {pieces}")
        self.pad, self.bos, self.eos = ids["pad"], ids["bos"], ids["eos"]
        self.source_prefix_ids = [config.source_bos_id] if config.source_bos_id >= 0 else []

    @property
    def files(self) -> dict[str, bytes]:
        """The files in which other libraries read the tokenizer: file name -> content."""
        return {self.name: self.content}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without bos or eos. Raises UserError unless `texts` is a list."""
        raise NotImplementedError

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for texts in the target language, which may have other pieces."""
        return self.encode(texts)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """The ids of each word of a text, including the space before it."""
        return self.encode(words)

    def find(self, piece: str) -> int | None:
        """The id of a piece, or None if there is no such piece."""
        raise NotImplementedError

    def piece(self, i: int) -> str:
        """The piece of an id for display. `\u2581` stands for a space before it."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids up to the first eos. Omits pad, bos and ids without a piece."""
        ids = [int(i) for i in ids]
        skip = {self.pad, self.bos} - {self.eos}
        if self.bos == self.eos and ids[:1] == [self.bos]:  # GPT-2 has one token for both
            ids = ids[1:]
        if self.eos in ids:
            ids = ids[: ids.index(self.eos)]
        return self._text([i for i in ids if i not in skip and i < self.vocab_size])

    def _text(self, ids: list[int]) -> str:
        raise NotImplementedError

    @functools.cached_property
    def text_ids(self) -> np.ndarray:
        """The ids of the pieces for text: no special tokens, no bytes."""
        raise NotImplementedError

    @functools.cached_property
    def starts_word(self) -> np.ndarray:
        """bool[vocab_size]: whether a piece begins a word."""
        raise NotImplementedError
