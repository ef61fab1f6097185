"""The token store: a corpus that is split and tokenized once, memory-mapped and indexed.

Each text is stored as its ids followed by eos. A store is in `$TRANSFORMER_DATA/tokens/KEY`. The
key is a hash of everything on which the store depends, so that experiments can share a store."""

import collections
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from transformer.data import corpora, sources, split, tokenizer as tokenizers
from transformer.data.config import DataConfig
from transformer.data.mixture import TEXT_FIELDS
from transformer.data.sources import Example
from transformer.data.tokenizer import Tokenizer
from transformer.errors import UserError
from transformer.files import data_home, new_folder
from transformer.mapping import to_mapping

VERSION = 4
"""A part of every key. Increase it when a change of the code changes the tokens or counts of some
config and files; then all stores are rebuilt."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """The ids of the texts on one side (source or target) of a split."""

    ids: np.ndarray  # the concatenated texts, each ending in eos
    ends: np.ndarray  # int64, the end of each text

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.ends[i - 1] if i else 0 : self.ends[i]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


@dataclasses.dataclass(frozen=True)
class Store:
    """The tokens, texts and counts of all splits."""

    folder: Path
    tokenizer: Tokenizer
    meta: dict  # per split: sha256 of the text; number of examples; bytes and words of the targets

    def texts(self, part: str, side: int) -> Texts:
        load = lambda kind: np.load(self.folder / f"{part}.{side}.{kind}.npy", mmap_mode="r")
        return Texts(load("ids"), load("ends"))

    def labels(self, part: str) -> np.ndarray:
        """int32: the index in meta["classes"] of the class of each text, or token (-1: none)."""
        return np.load(self.folder / f"{part}.labels.npy", mmap_mode="r")

    def examples(self, part: str) -> list[Example]:
        """The raw text of valid or test."""
        with (self.folder / f"{part}.jsonl").open(encoding="utf-8") as lines:
            return [tuple(json.loads(line)) for line in lines]


def joined(metas: Mapping[str, dict]) -> dict:
    """The `meta` of several stores with one tokenizer, together: sums of counts, hash of hashes."""
    first, *_ = metas.values()
    total = {"tokenizer_sha256": first["tokenizer_sha256"], "overlap": collections.Counter()}
    for part in split.SPLITS:
        digests = "".join(meta[part]["sha256"] for meta in metas.values())
        total[part] = {"sha256": hashlib.sha256(digests.encode()).hexdigest()}
        for field in first[part].keys() - {"sha256"}:
            total[part][field] = sum(meta[part][field] for meta in metas.values())
    for meta in metas.values():
        total["overlap"].update(meta["overlap"])
    return total | {"sources": metas}


def open_stores(sources: Mapping[str, DataConfig], vocab_size: int) -> dict[str, Store]:
    """Opens the store of each source. A new tokenizer is trained on the text of all of them."""
    configs = list(sources.values())
    if len(configs) > 1 and not configs[0].tokenizer.path:
        texts = [RawText(config) for config in configs]
        most = max(configs, key=lambda config: config.chosen.reserved)
        inputs = [_inputs(*pair, vocab_size) for pair in zip(configs, texts, strict=True)]
        folder = data_home() / "tokenizers" / _key([*inputs, most.chosen.reserved])
        if not tokenizers.find_tokenizer(folder):
            lines = itertools.chain.from_iterable(text.lines() for text in texts)
            with new_folder(folder, keep=True) as new:
                provide_tokenizer(new, most, vocab_size, lines)
        file = tokenizers.find_tokenizer(folder)
        sources = {name: config.with_tokenizer(file) for name, config in sources.items()}
    return {name: open_store(config, vocab_size) for name, config in sources.items()}


def open_store(config: DataConfig, vocab_size: int) -> Store:
    """Opens the store of a config. If there is none yet, splits and tokenizes the text. A trained
    tokenizer gets those of `vocab_size` ids that the objective does not reserve."""
    text = RawText(config)
    folder = data_home() / "tokens" / _key(_inputs(config, text, vocab_size))
    if not (folder / "meta.json").exists():
        with new_folder(folder, keep=True) as new:
            _build(new, text, config, vocab_size)
    tokenizer = tokenizers.load_tokenizer(tokenizers.find_tokenizer(folder), config.tokenizer)
    check_size(tokenizer, config, vocab_size)
    return Store(folder, tokenizer, json.loads((folder / "meta.json").read_text()))


def _inputs(config: DataConfig, text: "RawText", vocab_size: int) -> dict:
    """All that a store depends on."""
    inputs = {k: v for k, v in to_mapping(config).items() if k in (*TEXT_FIELDS, "tokenizer")}
    # The key contains a hash of the tokenizer instead of its path.
    inputs["tokenizer"] = {k: v for k, v in inputs["tokenizer"].items() if k != "path"}
    existing = tokenizers.read_tokenizer(config.tokenizer.path) if config.tokenizer.path else None
    inputs["tokenizer_sha256"] = "" if existing is None else hashlib.sha256(existing).hexdigest()
    inputs |= {"columns": config.chosen.columns, "reserved": config.chosen.reserved}
    return inputs | {"files": text.fingerprint(), "version": VERSION, "vocab_size": vocab_size}


def _key(inputs) -> str:
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]


def num_sides(columns: Sequence[str]) -> int:
    """The number of columns that are text. They precede those of classes."""
    return sum(column not in ("label", "tags") for column in columns)


class RawText:
    """The examples of each split. Every pass reads the files again."""

    def __init__(self, config: DataConfig):
        if not config.corpus and not config.train:
            way_out = "set one of them (python -m transformer data lists the corpora)"
            raise UserError(f"data.corpus or data.train: {way_out}")
        self.columns, self.reverse = config.chosen.columns, config.reverse
        self.sides, self.fields = num_sides(self.columns), config.fields
        if config.corpus:
            corpus, folder = corpora.fetch(config.corpus)
            self.format = corpus.format
            self.paths = {part: str(folder / file) for part, file in corpus.files.items()}
        else:
            self.format, paths = config.format, {p: getattr(config, p) for p in split.SPLITS}
            self.paths = {part: path for part, path in paths.items() if path}
        self.held_out, self.max_examples = config.held_out, config.max_examples
        self._assigned: np.ndarray | None = None

    def fingerprint(self) -> list:
        """The names, sizes and modification times of all files. Reads no content."""
        if self.format in ("huggingface", "probe"):
            return sorted(self.paths.items())
        files = []
        for part, path in self.paths.items():
            for name in sources.patterns(self.format, path):
                files += sources.expand(name, f"data.{part}")
        # Local file systems offer a higher resolution of times than etils does.
        modified = lambda f: os.stat(f).st_mtime_ns if os.path.exists(f) else f.stat().mtime
        return [[str(f), f.stat().length, modified(f)] for f in files]

    def read(self, part: str) -> Iterator[Example]:
        """Yields the examples of a split. A split without a file is held out from training."""
        missing = [p for p in ("valid", "test") if p not in self.paths]
        if part in self.paths and (part != "train" or not missing):
            yield from self._file(part)
            return
        if self._assigned is None:
            texts = map(self._texts_to_separate, self._file("train"))
            # A fraction: what it reserves for a split with a file of its own is in no split.
            by_hash = self.held_out < 1
            parts = (split.by_hash if by_hash else split.assign)(texts, self.held_out)
            numbers = dict.fromkeys(("", "valid", "test"), -1 if by_hash else 0)
            numbers |= {part: split.SPLITS.index(part) for part in ("train", *missing)}
            self._assigned = np.array([numbers[part] for part in parts], np.int8)
        pairs = zip(self._file("train"), self._assigned == split.SPLITS.index(part), strict=True)
        yield from (example for example, is_in_part in pairs if is_in_part)

    def train(self) -> Iterator[Example]:
        """The training examples, or a uniform sample of `max_examples` of them."""
        if not self.max_examples:
            return self.read("train")
        count = sum(1 for _ in self.read("train"))
        chosen = np.zeros(count, bool)
        chosen[np.random.default_rng(0).permutation(count)[: self.max_examples]] = True
        return itertools.compress(self.read("train"), chosen)

    def lines(self) -> Iterator[str]:
        """The training texts of all sides, for the tokenizer."""
        return itertools.chain.from_iterable(example[: self.sides] for example in self.train())

    def overlap(self) -> dict[str, int]:
        """The number of examples in each held-out file that share a text with training."""
        parts = [part for part in ("valid", "test") if part in self.paths]
        if not parts:
            return {}
        texts = lambda example: enumerate(self._texts_to_separate(example))
        keys = lambda example: [hash((side, split.normalize(x))) for side, x in texts(example)]
        # Memory holds the keys of held-out texts, which are fewer than those of training.
        held_out = {key for part in parts for example in self._file(part) for key in keys(example)}
        shared = {key for example in self.train() for key in keys(example) if key in held_out}
        is_shared = lambda example: any(key in shared for key in keys(example))
        return {part: sum(map(is_shared, self._file(part))) for part in parts}

    def _texts_to_separate(self, example: Example) -> Example:
        """The texts that held-out examples must not share with training: source and target."""
        if self.format == "probe":  # the question alone: there may be only ten different answers
            return example[-1:] if self.reverse else example[:1]
        return example[: self.sides]

    def _file(self, part: str) -> Iterator[Example]:
        for example in sources.read(self.format, self.paths[part], self.fields, self.columns):
            yield example[::-1] if self.reverse else example


def _build(folder: Path, text: RawText, config: DataConfig, vocab_size: int) -> None:
    tokenizer = provide_tokenizer(folder, config, vocab_size, text.lines())
    meta = {"tokenizer_sha256": tokenizer.sha256, "overlap": text.overlap()}
    if len(text.columns) > text.sides:
        names = lambda example: example[-1].split() if text.columns[-1] == "tags" else [example[-1]]
        meta["classes"] = sorted({name for example in text.train() for name in names(example)})
    for part in split.SPLITS:
        examples = text.train() if part == "train" else text.read(part)
        classes = meta.get("classes", [])
        meta[part] = tokenize(folder, part, examples, tokenizer, text.columns, classes)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def provide_tokenizer(
    folder: Path, config: DataConfig, vocab_size: int, lines: Iterator[str]
) -> Tokenizer:
    """The tokenizer of a config, existing or trained on `lines`. Writes its file to `folder`."""
    settings = config.tokenizer
    if settings.path:
        tokenizer = tokenizers.load_tokenizer(settings.path, settings)
        check_size(tokenizer, config, vocab_size)
    else:
        tokenizer = tokenizers.train_tokenizer(settings, vocab_size, lines, config.chosen.reserved)
    (folder / tokenizer.name).write_bytes(tokenizer.content)
    return tokenizer


def check_size(tokenizer: Tokenizer, config: DataConfig, vocab_size: int) -> None:
    if (needed := tokenizer.vocab_size + config.chosen.num_added_tokens(tokenizer)) > vocab_size:
        pieces = f"the {tokenizer.vocab_size} pieces of {config.tokenizer.path}"
        total = f"{pieces} and the objective's special tokens are {needed}"
        raise UserError(f"model.vocab_size: {vocab_size}, but {total}; increase it")


def tokenize(
    folder: Path, part: str, examples: Iterator[Example], tokenizer: Tokenizer, columns, classes=()
) -> dict:
    """Writes a split in blocks, since a corpus may exceed memory. Returns its counts."""
    digest, counts = hashlib.sha256(), {"examples": 0, "bytes": 0, "words": 0}
    sides, dtype = range(num_sides(columns)), tokenizer.dtype
    number = {name: i for i, name in enumerate(classes)}
    ends: list[list[int]] = [[] for _ in sides]
    labels: list[np.ndarray] = []
    files = [(folder / f"{part}.{side}.ids.npy").open("wb") for side in sides]
    for file in files:
        _write_header(file, dtype, 0)
    texts = None if part == "train" else (folder / f"{part}.jsonl").open("w", encoding="utf-8")
    while block := list(itertools.islice(examples, 10_000)):
        for example in block:
            last = example[len(sides) - 1]
            digest.update("\t".join(example).encode() + b"\n")
            counts["examples"] += 1
            counts["bytes"] += len(last.encode())
            counts["words"] += len(last.split()) + last.count("\n")
            if texts:
                texts.write(json.dumps(example, ensure_ascii=False) + "\n")
        if columns[-1] == "tags":
            encoded = [_tagged(example, tokenizer, number) for example in block]
            labels += [tags for _, tags in encoded]
            sides_ids = [[ids for ids, _ in encoded]]
        else:
            encoders = {"target": tokenizer.encode_targets}
            encode = [encoders.get(columns[side], tokenizer.encode) for side in sides]
            sides_ids = [encode[side]([example[side] for example in block]) for side in sides]
        if columns[-1] == "label":
            labels.append(np.array([_class(number, x[-1], x[0]) for x in block], np.int32))
        for side in sides:
            for ids in sides_ids[side]:
                ids.append(tokenizer.eos)
                files[side].write(np.asarray(ids, dtype).tobytes())
                ends[side].append(len(ids))
    for side in sides:
        _write_header(files[side], dtype, sum(ends[side]))
        files[side].close()
        np.save(folder / f"{part}.{side}.ends.npy", np.cumsum(ends[side], dtype=np.int64))
    if texts:
        texts.close()
    if classes:
        np.save(folder / f"{part}.labels.npy", np.concatenate([*labels, np.zeros(0, np.int32)]))
    return counts | {"tokens": int(sum(ends[-1])), "sha256": digest.hexdigest()}


def _class(number: dict[str, int], name: str, text: str) -> int:
    if name not in number:
        known = f"those of training: {', '.join(number)}"
        raise UserError(f"data: the label {name!r} of {text[:40]!r} is not among {known}")
    return number[name]


def _tagged(example: Example, tokenizer: Tokenizer, number) -> tuple[list[int], np.ndarray]:
    """The ids of a text and their tags: a word's at its first piece, -1 at other pieces and eos."""
    words, tags = (column.split() for column in example)
    if len(words) != len(tags):
        raise UserError(f"data: {len(words)} words, but {len(tags)} tags: {example[0][:60]!r}")
    ids, labels = [], []
    for pieces, tag in zip(tokenizer.encode_words(words), tags, strict=True):
        ids += pieces  # none if the tokenizer removes a word completely; its tag is omitted, too
        labels += [_class(number, tag, example[0]), *[-1] * (len(pieces) - 1)][: len(pieces)]
    return ids, np.array([*labels, -1], np.int32)


def _write_header(file: BinaryIO, dtype: np.dtype, length: int) -> None:
    """Writes the header of a .npy file. All lengths take the same space: NumPy pads the header. A
    memory map, which needs no header of its own, would not report a full disk."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    file.seek(0)
    np.lib.format.write_array_header_1_0(file, header | {"shape": (length,)})
