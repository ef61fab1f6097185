"""What every tokenizer does."""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Of the tokenizers that are trained here. A given one has its own."""


@dataclasses.dataclass(frozen=True)
class Signs:
    """Ids that stand for no text: padding, what a decoder (or a text) begins with, what a text ends with; what a source begins with,
    where it does."""

    pad: int = PAD
    bos: int = BOS
    eos: int = EOS
    source_bos: int = -1


class Tokenizer:
    """What every tokenizer does. `content` is its file, `name` what the file is called in a run directory."""

    content: bytes
    name: str
    signs: Signs
    vocab_size: int
    mask: int | None = None  # the sign for a hidden token, where it has one

    @property
    def pad(self) -> int:
        return self.signs.pad

    @property
    def bos(self) -> int:
        return self.signs.bos

    @property
    def eos(self) -> int:
        return self.signs.eos

    @property
    def before_source(self) -> list[int]:
        """The ids with which a source begins: none, or one."""
        return [self.signs.source_bos] if self.signs.source_bos >= 0 else []

    @property
    def files(self) -> dict[str, bytes]:
        """It, as others read it: file name -> content."""
        return {self.name: self.content}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without bos or eos."""
        raise NotImplementedError

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """The same of texts in the language that is translated into, where that has pieces of its own."""
        return self.encode(texts)

    def encode_words(self, words: Sequence[str]) -> list[list[int]]:
        """Ids of each word of a text, with the space before it."""
        return self.encode(words)

    def find(self, piece: str) -> int | None:
        """The id of a piece, None if there is none."""
        raise NotImplementedError

    def piece(self, i: int) -> str:
        """The piece of an id, as a person is to see it: a space before it is `\u2581`."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids up to the first eos; pad, bos and ids that no piece has are left out."""
        ids = [int(i) for i in ids]
        skip = {self.pad, self.bos} - {self.eos}
        if self.bos == self.eos and ids[:1] == [self.bos]:  # GPT-2 begins and ends with one sign
            ids = ids[1:]
        if self.eos in ids:
            ids = ids[: ids.index(self.eos)]
        return self._text([i for i in ids if i not in skip and i < self.vocab_size])

    def _text(self, ids: list[int]) -> str:
        raise NotImplementedError

    @functools.cached_property
    def text_ids(self) -> np.ndarray:
        """Ids of the pieces that stand for text: no signs, no bytes."""
        raise NotImplementedError

    @functools.cached_property
    def starts_word(self) -> np.ndarray:
        """bool[vocab_size]: pieces with which a word begins."""
        raise NotImplementedError
