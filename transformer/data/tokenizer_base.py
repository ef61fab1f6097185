"""The interface of tokenizers."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from transformer.errors import UserError

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Special tokens of the tokenizers that this library trains. An existing one may have others."""


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The ids of the special tokens.

    pad: padding.
    bos: begins a text, or the input of a decoder.
    eos: ends a text.
    source_bos: begins a source; -1: none.
    """

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    source_bos: int = -1


def as_list(texts: Sequence[str]) -> list[str]:
    """Returns a list of texts. Raises UserError for one text, whose characters are texts too."""
    if isinstance(texts, str):
        raise UserError(f"texts: {texts[:20]!r} is one text; pass a list of texts")
    return list(texts)


class Tokenizer:
    """A tokenizer. `content` is its file, and `name` the name of that file in a run directory."""

    content: bytes
    name: str
    special_tokens: SpecialTokens
    vocab_size: int
    mask: int | None = None  # the id of the mask token, if there is one

    @property
    def pad(self) -> int:
        return self.special_tokens.pad

    @property
    def bos(self) -> int:
        return self.special_tokens.bos

    @property
    def eos(self) -> int:
        return self.special_tokens.eos

    @property
    def source_prefix_ids(self) -> list[int]:
        """The special token that begins a source, as a list of one id or none."""
        return [self.special_tokens.source_bos] if self.special_tokens.source_bos >= 0 else []

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
