"""Tokenizers: SentencePiece (trained on the text of a run, or existing), or a tokenizer.json."""

import base64
import functools
import hashlib
import io
import itertools
import json
import os
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from transformer.data.config import TokenizerConfig
from transformer.data.sources import as_path
from transformer.errors import UserError, from_extra

PAD, BOS, EOS, UNK = 0, 1, 2, 3
"""Special tokens of the tokenizers that this library trains. An existing one may have others."""

DEFAULTS = TokenizerConfig()
"""The default config: an existing tokenizer keeps the special tokens that its file defines."""

FILES = {".model": "tokenizer.model", ".json": "tokenizer.json", ".pair": "tokenizer.pair"}
"""Suffix of a tokenizer's file -> its name in a run directory."""


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
    adds_bos: bool = True  # whether other libraries begin a text with bos
    text_ids: np.ndarray  # the ids of the pieces for text: no special tokens, no bytes
    threads: int = os.cpu_count() or 1  # that encode texts

    def set_special_tokens(self, config: TokenizerConfig, name: str, **defaults: int) -> None:
        """Sets the special tokens that the config sets, or else `defaults` (-1: none). Raises
        UserError, with the tokenizer's `name`, for a token that is not set or not a piece."""
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
    def dtype(self) -> np.dtype:
        """The type of stored ids: 2 bytes, or 4 for more than 65,536 pieces."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

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
        ids, skip = [int(i) for i in ids], {self.pad, self.bos} - {self.eos}
        if self.bos == self.eos and ids[:1] == [self.bos]:  # GPT-2 has one token for both
            ids = ids[1:]
        if self.eos in ids:
            ids = ids[: ids.index(self.eos)]
        return self._text([i for i in ids if i not in skip and i < self.vocab_size])

    def _text(self, ids: list[int]) -> str:
        raise NotImplementedError

    @functools.cached_property
    def starts_word(self) -> np.ndarray:
        """bool[vocab_size]: whether a piece begins a word."""
        pieces = map(self.piece, range(self.vocab_size))
        return np.array([piece.startswith(("\u2581", "\n")) for piece in pieces])


class SentencePiece(Tokenizer):
    """A SentencePiece model. Models that this library trains are lossless: they normalize nothing,
    and encode unknown characters as bytes. Only U+2581, its sign for a space, becomes a space."""

    name = FILES[".model"]

    def __init__(self, content: bytes, config: TokenizerConfig = DEFAULTS, name: str = "tokenizer"):
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError:
            raise UserError(f"data.tokenizer.path: {name} is not a SentencePiece model") from None
        self.content, self.vocab_size = content, self._processor.vocab_size()
        try:
            self._pieces = [self._processor.id_to_piece(i) for i in range(self.vocab_size)]
        except UnicodeDecodeError:
            raise UserError(f"data.tokenizer.path: {name} is damaged (not UTF-8)") from None
        p = self._processor
        self.set_special_tokens(config, name, pad=p.pad_id(), bos=p.bos_id(), eos=p.eos_id())

    @staticmethod
    def can_read(content: bytes) -> bool:
        """Whether `content` is a SentencePiece model. (Llama 3's tokenizer.model is not.)"""
        try:
            return bool(sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(content))
        except RuntimeError:
            return False

    def encode(self, texts):
        return self._processor.encode(as_list(texts), num_threads=self.threads)

    def _text(self, ids):  # the space before an unknown word is part of its bytes, as U+2581
        return self._processor.decode(ids).removeprefix("\u2581").replace("\u2581", " ")

    def piece(self, i):
        return self._pieces[i] if i < self.vocab_size else f"<{i}>"

    def find(self, piece):
        p = self._processor
        return i if p.id_to_piece(i := p.piece_to_id(piece)) == piece else None

    @functools.cached_property
    def text_ids(self):
        p = self._processor
        is_other = lambda i: p.is_control(i) or p.is_unknown(i) or p.is_unused(i) or p.is_byte(i)
        return np.array([i for i in range(self.vocab_size) if not is_other(i)])


class Fast(Tokenizer):
    """A tokenizer.json, read by Hugging Face's `tokenizers` (extra [hf])."""

    name = FILES[".json"]

    def __init__(self, content: bytes, config: TokenizerConfig = DEFAULTS, name: str = "tokenizer"):
        file = f"data.tokenizer.path: {name}"
        with from_extra("hf", f"{file} needs"):
            import tokenizers
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as e:  # the library raises no narrower class
            raise UserError(f"{file} is not a tokenizer.json ({str(e)[:80]})") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.content, self.vocab_size = content, self._tokenizer.get_vocab_size()
        find = lambda *names: next((i for n in names if (i := self.find(n)) is not None), -1)
        bos = find("[CLS]", "<s>", "<|begin_of_text|>", "<bos>")
        eos = find("[SEP]", "</s>", "<|end_of_text|>", "<|endoftext|>", "<eos>")
        self.set_special_tokens(config, name, pad=find("[PAD]", "<pad>"), bos=bos, eos=eos)
        mask = find("[MASK]", "<mask>")
        self.mask = mask if mask >= 0 else None
        self.adds_bos = self._tokenizer.encode("").ids[:1] == [self.bos]

    def encode(self, texts):
        encodings = self._tokenizer.encode_batch(as_list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_words(self, words):
        # Pieces may include the space before them, such as GPT-2's "\u0120cat".
        space = " " if any(x.startswith("\u0120") for x in self._tokenizer.get_vocab()) else ""
        return self.encode([f"{space}{word}" if i else word for i, word in enumerate(words)])

    def _text(self, ids):
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def piece(self, i):
        piece = self._tokenizer.id_to_token(i) or f"<{i}>"
        return piece.replace("\u0120", "\u2581").replace("\u010a", "\n")

    def find(self, piece):
        return self._tokenizer.token_to_id(piece)

    @functools.cached_property
    def text_ids(self):
        added = self._tokenizer.get_added_tokens_decoder()
        special = {i for i, token in added.items() if token.special}
        return np.array([i for i in range(self.vocab_size) if i not in special])

    @functools.cached_property
    def starts_word(self):
        pieces = [self._tokenizer.id_to_token(i) or "" for i in range(self.vocab_size)]
        if any(piece.startswith("##") for piece in pieces):  # WordPiece marks continuations
            return np.array([not piece.startswith("##") for piece in pieces])
        return np.array([piece.startswith(("\u2581", "\u0120", "\u010a")) for piece in pieces])


class TokenizerPair(Tokenizer):
    """Two SentencePiece models, for source and target language, with one vocabulary (OPUS-MT). A
    source may begin with a special token for the target language: `>>fra<< ...`. The file is JSON
    with the keys `source` and `target`, in base64, and `vocabulary`."""

    name = FILES[".pair"]

    def __init__(self, content: bytes, config: TokenizerConfig = DEFAULTS, name: str = "tokenizer"):
        try:
            fields = json.loads(content)
            self.source = base64.b64decode(fields["source"])
            self.target = base64.b64decode(fields["target"])
            self.vocabulary: dict[str, int] = fields["vocabulary"]
            self._unknown = self.vocabulary["<unk>"]
            self._pieces = {int(i): piece for piece, i in self.vocabulary.items()}
        except (ValueError, KeyError, TypeError) as e:
            problem = f"is not a pair of tokenizers ({type(e).__name__}: {e})"
            raise UserError(f"data.tokenizer.path: {name} {problem}") from None
        any_ids = TokenizerConfig(pad_id=0, bos_id=0, eos_id=0)
        parts = [SentencePiece(part, any_ids, name) for part in (self.source, self.target)]
        self._models = [part._processor for part in parts]
        self.content, self.vocab_size = content, max(self._pieces) + 1
        pad, eos = (self.vocabulary.get(piece, -1) for piece in ("<pad>", "</s>"))
        self.set_special_tokens(config, name, pad=pad, bos=pad, eos=eos)

    @property
    def files(self):
        vocabulary = json.dumps(self.vocabulary, ensure_ascii=False).encode()
        return {"source.spm": self.source, "target.spm": self.target, "vocab.json": vocabulary}

    @staticmethod
    def join(source: bytes, target: bytes, vocabulary: dict[str, int]) -> bytes:
        """The content of the file of a pair."""
        encode = lambda model: base64.b64encode(model).decode()
        models = {"source": encode(source), "target": encode(target)}
        return json.dumps(models | {"vocabulary": vocabulary}).encode()

    def encode(self, texts):
        out = []
        for text in as_list(texts):
            *language, remainder = re.split(r"^(>>[^<>]+<<)", text)  # "", ">>fra<<", the rest
            out.append(self._ids(language[1:] + self._models[0].encode(remainder, out_type=str)))
        return out

    def encode_targets(self, texts):
        return [self._ids(self._models[1].encode(text, out_type=str)) for text in as_list(texts)]

    def _ids(self, pieces: list[str]) -> list[int]:
        return [self.vocabulary.get(piece, self._unknown) for piece in pieces]

    def _text(self, ids):
        return self._models[1].decode_pieces([self._pieces[i] for i in ids if i in self._pieces])

    def piece(self, i):
        return self._pieces.get(i, f"<{i}>")

    def find(self, piece):
        return self.vocabulary.get(piece)

    @functools.cached_property
    def text_ids(self):
        special = {self.pad, self.bos, self.eos, self._unknown}
        text = sorted(i for i, piece in self._pieces.items() if not piece.startswith(">>"))
        return np.array([i for i in text if i not in special])


def load_tokenizer(path: str | os.PathLike, config: TokenizerConfig = DEFAULTS) -> Tokenizer:
    """Loads a SentencePiece .model, a tokenizer.json or a .pair."""
    path = os.fspath(path)
    kind = {".json": Fast, ".pair": TokenizerPair}.get(Path(path).suffix, SentencePiece)
    return kind(read_tokenizer(path), config, path)


def read_tokenizer(path: str | os.PathLike) -> bytes:
    """The content of a tokenizer file. Raises UserError if it is missing."""
    file = as_path(os.fspath(path), "data.tokenizer.path")
    if not file.is_file():
        raise UserError(f"data.tokenizer.path: no file {str(path)!r}")
    return file.read_bytes()


def find_tokenizer(folder: Path) -> Path | None:
    """The tokenizer file in a run directory, or None. `folder` may also be an etils path."""
    return next((file for name in FILES.values() if (file := folder / name).is_file()), None)


def train_tokenizer(
    config: TokenizerConfig, vocab_size: int, sentences: Iterable[str], reserved: int = 0
) -> Tokenizer:
    """Trains a SentencePiece model with exactly `vocab_size - reserved` pieces, or at most as many
    characters or whole words. Each line is a sentence, and the line end is a piece. With more than
    `max_sentences` lines, training reads a uniform sample, which is always the same."""
    for field in ("pad_id", "bos_id", "eos_id", "source_bos_id"):
        if getattr(config, field) >= 0:
            problem = "applies only to an existing tokenizer; set data.tokenizer.path"
            raise UserError(f"data.tokenizer.{field}: {problem}, or leave it at -1")
    model, pieces = io.BytesIO(), vocab_size - reserved
    lines = iter(_sample(sentences, config.max_sentences))
    if pieces < 1:
        problem = f"{vocab_size} leaves no piece besides the {reserved} special tokens"
        raise UserError(f"model.vocab_size: {problem} of data.objective; increase it")
    exactly, by_pieces = config.kind in ("unigram", "bpe"), config.kind != "char"
    settings = {
        "model_type": config.kind, "vocab_size": pieces, "hard_vocab_limit": exactly,
        "pad_id": PAD, "bos_id": BOS, "eos_id": EOS, "unk_id": UNK, "user_defined_symbols": ["\n"],
        "character_coverage": config.character_coverage,
        "byte_fallback": config.byte_fallback and by_pieces,
        # Lossless
        "normalization_rule_name": "identity", "remove_extra_whitespaces": False,
        "add_dummy_prefix": by_pieces,
        "max_sentence_length": 1 << 16, "num_threads": 8, "minloglevel": 2,
    }  # fmt: skip
    try:
        train = sentencepiece.SentencePieceTrainer.train
        train(sentence_iterator=lines, model_writer=model, **settings)
    except RuntimeError as e:
        largest, smallest = re.search(r"<= (\d+)", str(e)), re.search(r"\d+ vs (\d+)", str(e))
        if not largest and not smallest:
            problem = f"SentencePiece cannot be trained on this text ({str(e).strip()})"
            raise UserError(f"data.tokenizer: {problem}") from None
        way_out = f"{largest[1]} or less" if largest else f"{smallest[1]} or more"
        if reserved:
            way_out += f", and data.objective needs {reserved} more for special tokens"
        problem = f"SentencePiece cannot make {pieces} pieces of this text"
        raise UserError(f"model.vocab_size: {problem}; set it to {way_out}") from None
    trained = SentencePiece(model.getvalue())
    assert (trained.pad, trained.bos, trained.eos) == (PAD, BOS, EOS)
    return trained


def _sample(texts: Iterable[str], max_lines: int) -> list[str]:
    """All lines, or a reservoir sample of `max_lines` of them."""
    draw = random.Random(0)
    lines = (line for text in texts for line in text.split("\n") if line.strip())
    sample = list(itertools.islice(lines, max_lines))
    for count, line in enumerate(lines, max_lines + 1):
        if (index := draw.randrange(count)) < max_lines:
            sample[index] = line
    return sample
