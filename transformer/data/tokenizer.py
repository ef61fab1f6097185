"""SentencePiece, trained from the run's own text."""

import functools
import hashlib
import io
import os
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from transformer.config import TokenizerConfig
from transformer.errors import UserError

PAD, BOS, EOS, UNK = 0, 1, 2, 3


class Tokenizer:
    """Text to ids and back, without loss: nothing is normalised, unknown characters become bytes. (One exception, which
    is SentencePiece's: its own sign for a space, U+2581, comes back as a space.)"""

    def __init__(self, model: bytes, name: str = "tokenizer"):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError:
            raise UserError(f"data.tokenizer.path: {name} is no SentencePiece model") from None
        found = tuple(getattr(self._processor, f"{which}_id")() for which in ("pad", "bos", "eos", "unk"))
        if found != (PAD, BOS, EOS, UNK):
            raise UserError(
                f"data.tokenizer.path: {name} has pad, bos, eos, unk = {found}, expected {(PAD, BOS, EOS, UNK)}; "
                "train it with --pad_id=0 --bos_id=1 --eos_id=2 --unk_id=3"
            )
        self.model = model

        self.bos, self.eos = BOS, EOS

    @property
    def vocab_size(self) -> int:
        return self._processor.vocab_size()

    @functools.cached_property
    def text_ids(self) -> np.ndarray:
        """Ids of the pieces that stand for text: no signs, no bytes."""
        p = self._processor
        plain = lambda i: not (p.is_control(i) or p.is_unknown(i) or p.is_unused(i) or p.is_byte(i))
        return np.array([i for i in range(self.vocab_size) if plain(i)])

    @functools.cached_property
    def starts_word(self) -> np.ndarray:
        """bool[vocab_size]: pieces with which a word begins."""
        return np.array([self._processor.id_to_piece(i).startswith(("\u2581", "\n")) for i in range(self.vocab_size)])

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.model).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without bos or eos."""
        return self._processor.encode(list(texts), num_threads=os.cpu_count() or 1)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids up to the first eos; pad, bos and ids that no piece has are left out."""
        ids = [int(i) for i in ids]
        if EOS in ids:
            ids = ids[: ids.index(EOS)]
        return self._processor.decode([i for i in ids if i not in (PAD, BOS) and i < self.vocab_size])


def load_tokenizer(path: str | os.PathLike) -> Tokenizer:
    """A SentencePiece .model file."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"data.tokenizer.path: no file {str(path)!r}")
    return Tokenizer(path.read_bytes(), str(path))


def train_tokenizer(config: TokenizerConfig, vocab_size: int, sentences: Iterable[str]) -> Tokenizer:
    """Trains to exactly `vocab_size` pieces. Lines are sentences; the line end is a piece of its own. Of more than
    `max_sentences` lines, an even sample (always the same) is read."""
    model, lines = io.BytesIO(), _sample(sentences, config.max_sentences)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=vocab_size,
            model_type=config.kind, byte_fallback=config.byte_fallback, character_coverage=config.character_coverage,
            pad_id=PAD, bos_id=BOS, eos_id=EOS, unk_id=UNK, user_defined_symbols=["\n"],
            normalization_rule_name="identity", remove_extra_whitespaces=False, max_sentence_length=1 << 16,
            num_threads=8, minloglevel=2,
        )  # fmt: skip
    except RuntimeError as e:
        most, least = re.search(r"<= (\d+)", str(e)), re.search(r"\d+ vs (\d+)", str(e))
        if not most and not least:
            raise UserError(
                f"data.tokenizer: SentencePiece cannot be trained on this text ({str(e).strip()})"
            ) from None
        way_out = f"it allows at most {most[1]}" if most else f"its characters and bytes need at least {least[1]}"
        raise UserError(
            f"model.vocab_size: SentencePiece cannot make {vocab_size} pieces of this text; {way_out}"
        ) from None
    return Tokenizer(model.getvalue())


def _sample(texts: Iterable[str], most: int) -> list[str]:
    """All lines, or a reservoir sample of `most` of them."""
    kept: list[str] = []
    draw = random.Random(0)
    lines = (line for text in texts for line in text.split("\n") if line.strip())
    for count, line in enumerate(lines):
        if count < most:
            kept.append(line)
        elif (place := draw.randrange(count + 1)) < most:
            kept[place] = line
    return kept
