"""The token store: a corpus split, tokenised once, memory-mapped, addressed by index.

Every text is stored as its ids followed by eos. A store lives under `$TRANSFORMER_DATA/tokens/KEY`; the key is a hash of
all that it depends on, so experiments that read the same text share it, and another tokenizer never reads it.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from etils import epath

from transformer.data import corpora, sources, split
from transformer.data.config import DataConfig
from transformer.data.sources import Example
from transformer.data.tokenizer import (
    Tokenizer,
    find_tokenizer,
    load_tokenizer,
    read_tokenizer,
    train_tokenizer,
)
from transformer.errors import UserError
from transformer.files import disk_faults
from transformer.mapping import to_mapping

VERSION = 4
"""A part of every key. Raise it with a change of the code after which the same config and the same
files give other tokens or counts: stores that were made before it are then made again."""

TEXT_FIELDS = (
    "corpus",
    "format",
    "train",
    "valid",
    "test",
    "fields",
    "reverse",
    "held_out",
    "max_examples",
)
"""Fields of a DataConfig that say which text is read, and how it is split."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts of one side of one split, as ids."""

    ids: np.ndarray  # all texts, one after another, each ended by eos
    ends: np.ndarray  # int64, where each text ends

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.ids[self.ends[i - 1] if i else 0 : self.ends[i]]

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.ends, prepend=0)


@dataclasses.dataclass(frozen=True)
class Store:
    """Tokens, texts and counts of every split."""

    folder: Path
    tokenizer: Tokenizer
    meta: dict  # sha256 of the text, and per split: examples, bytes, words of the target side

    def texts(self, part: str, side: int) -> Texts:
        return Texts(
            *(
                np.load(self.folder / f"{part}.{side}.{kind}.npy", mmap_mode="r")
                for kind in ("ids", "ends")
            )
        )

    def labels(self, part: str) -> np.ndarray:
        """int32: the class of each text, or of each token of all texts (-1: none), by its place in `classes`."""
        return np.load(self.folder / f"{part}.labels.npy", mmap_mode="r")

    @property
    def classes(self) -> list[str]:
        """Names of the labels or tags."""
        return self.meta.get("classes", [])

    def examples(self, part: str) -> list[Example]:
        """The raw text of valid or test."""
        with (self.folder / f"{part}.jsonl").open(encoding="utf-8") as lines:
            return [tuple(json.loads(line)) for line in lines]


def open_store(config: DataConfig, vocab_size: int) -> Store:
    """The store of a config, made if it is not there yet: split, train the tokenizer, tokenise. Of `vocab_size` ids the tokenizer
    gets those that the objective leaves."""
    if not config.corpus and not config.train:
        raise UserError(
            "data.corpus or data.train: name one of them (python -m transformer data lists the corpora)"
        )
    objective = config.chosen
    text = _Text(config, objective.columns)
    inputs = {k: v for k, v in to_mapping(config).items() if k in (*TEXT_FIELDS, "tokenizer")}
    inputs["tokenizer"] = {
        k: v for k, v in inputs["tokenizer"].items() if k != "path"
    }  # where it lies is nothing to us
    given = read_tokenizer(config.tokenizer.path) if config.tokenizer.path else None
    inputs["given"] = "" if given is None else hashlib.sha256(given).hexdigest()
    inputs |= {
        "vocab_size": vocab_size,
        "reserved": objective.reserved,
        "columns": objective.columns,
        "files": text.fingerprint(),
        "version": VERSION,
    }
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:24]
    folder = corpora.data_home() / "tokens" / key
    if not (folder / "meta.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with disk_faults(folder.parent), tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch) / "store"
            made.mkdir()
            _make(made, text, config, vocab_size)
            if not folder.exists():  # another process may have been faster
                made.rename(folder)  # whole or not at all
    tokenizer = load_tokenizer(find_tokenizer(folder), config.tokenizer)
    _check_size(tokenizer, config, vocab_size)
    return Store(folder, tokenizer, json.loads((folder / "meta.json").read_text()))


class _Text:
    """The examples of each split, read again from their files whenever they are asked for."""

    def __init__(self, config: DataConfig, columns: tuple[str, ...]):
        self.columns, self.reverse, self.fields = columns, config.reverse, config.fields
        self.sides = sum(
            column not in ("label", "tags") for column in columns
        )  # what is left names classes
        if config.corpus:
            corpus, folder = corpora.fetch(config.corpus)
            self.format, self.paths = (
                corpus.format,
                {part: str(folder / file) for part, file in corpus.files.items()},
            )
        else:
            paths = {"train": config.train, "valid": config.valid, "test": config.test}
            self.format, self.paths = (
                config.format,
                {part: path for part, path in paths.items() if path},
            )
        self.held_out, self.max_examples = config.held_out, config.max_examples
        self._assigned: np.ndarray | None = None

    def fingerprint(self) -> list:
        """Names, sizes and dates of all files, without reading them."""
        if self.format in ("huggingface", "probe"):
            return sorted(self.paths.items())
        files = [
            f
            for path in self.paths.values()
            for name in sources.patterns(self.format, path)
            for f in sources.expand(name)
        ]
        return [[str(f), f.stat().length, _modified(f)] for f in files]

    def read(self, part: str) -> Iterator[Example]:
        """The examples of a split; those not given as files are held out from the training text."""
        if part in self.paths and part != "train":
            yield from self._file(part)
            return
        missing = [p for p in ("valid", "test") if p not in self.paths]
        if not missing:
            yield from self._file("train")
            return
        if self._assigned is None:
            parts, components = split.assign(map(self._apart, self._file("train")), self.held_out)
            self._assigned = np.array(
                [split.SPLITS.index(p if p in ("train", *missing) else "train") for p in parts],
                np.int8,
            )
            if components <= 2 * self.held_out:
                raise UserError(
                    f"data.held_out: {self.held_out} sources for each of valid and test leave nothing to train on: "
                    f"the text has {components} parts that share no sentence; lower it"
                )
        wanted = split.SPLITS.index(part)
        keep = self._assigned == wanted
        for example, kept in zip(self._file("train"), keep, strict=True):
            if kept:
                yield example

    def train(self) -> Iterator[Example]:
        """The training examples, thinned evenly to `max_examples`."""
        if not self.max_examples:
            return self.read("train")
        count = sum(1 for _ in self.read("train"))
        chosen = np.zeros(count, bool)
        chosen[np.random.default_rng(0).permutation(count)[: self.max_examples]] = True
        return itertools.compress(self.read("train"), chosen)

    def overlap(self) -> dict[str, int]:
        """Of each held-out file that was given: how many of its examples share what is kept apart with training."""
        given = [part for part in ("valid", "test") if part in self.paths]
        if not given:
            return {}
        keys = lambda example: [
            hash((side, split.normalise(text))) for side, text in enumerate(self._apart(example))
        ]
        held = {
            key for part in given for example in self._file(part) for key in keys(example)
        }  # the smaller side
        known = {key for example in self.train() for key in keys(example) if key in held}
        shares = lambda example: any(key in known for key in keys(example))
        return {part: sum(map(shares, self._file(part))) for part in given}

    def _apart(self, example: Example) -> Example:
        """What held-out text must not share with training: sentences of either side; of a synthetic task the question alone, since of
        answers there may be but ten."""
        if self.format == "probe":
            return example[-1:] if self.reverse else example[:1]
        return example[: self.sides]

    def _file(self, part: str) -> Iterator[Example]:
        for example in sources.read(self.format, self.paths[part], self.fields, self.columns):
            yield example[::-1] if self.reverse else example


def _modified(file: epath.Path) -> float:
    """When a file was changed, as exactly as its file system tells."""
    return os.stat(file).st_mtime_ns if os.path.exists(file) else file.stat().mtime


def _make(folder: Path, text: _Text, config: DataConfig, vocab_size: int) -> None:
    if config.tokenizer.path:
        tokenizer = load_tokenizer(config.tokenizer.path, config.tokenizer)
        _check_size(tokenizer, config, vocab_size)
    else:
        for sign in ("pad_id", "bos_id", "eos_id", "source_bos_id"):
            if getattr(config.tokenizer, sign) >= 0:
                raise UserError(
                    f"data.tokenizer.{sign}: of a given tokenizer; set data.tokenizer.path, or leave it at -1"
                )
        texts = itertools.chain.from_iterable(example[: text.sides] for example in text.train())
        tokenizer = train_tokenizer(config.tokenizer, vocab_size, texts, config.chosen.reserved)
    (folder / tokenizer.name).write_bytes(tokenizer.content)
    meta = {"tokenizer_sha256": tokenizer.sha256, "overlap": text.overlap()}
    if len(text.columns) > text.sides:
        names = lambda example: example[-1].split() if text.columns[-1] == "tags" else [example[-1]]
        meta["classes"] = sorted({name for example in text.train() for name in names(example)})
    for part in split.SPLITS:
        examples = text.train() if part == "train" else text.read(part)
        meta[part] = _tokenise(folder, part, examples, tokenizer, text, meta.get("classes", []))
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))


def _check_size(tokenizer: Tokenizer, config: DataConfig, vocab_size: int) -> None:
    needed = tokenizer.vocab_size + config.chosen.adds(tokenizer)
    if needed > vocab_size:
        raise UserError(
            f"model.vocab_size: {vocab_size}, but the {tokenizer.vocab_size} pieces of {config.tokenizer.path} "
            f"and the objective's signs are {needed}; raise it"
        )


def _tokenise(
    folder: Path,
    part: str,
    examples: Iterator[Example],
    tokenizer: Tokenizer,
    text: _Text,
    classes: list[str],
) -> dict:
    """Writes one split; returns its counts. Streams, so that a corpus may be larger than memory."""
    digest, counts, sides = (
        hashlib.sha256(),
        {"examples": 0, "bytes": 0, "words": 0},
        range(text.sides),
    )
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    number = {name: i for i, name in enumerate(classes)}
    ends: list[list[int]] = [[] for _ in sides]
    labels: list[np.ndarray] = []
    raw = [(folder / f"{part}.{side}.raw").open("wb") for side in sides]
    texts = None if part == "train" else (folder / f"{part}.jsonl").open("w", encoding="utf-8")
    while block := list(itertools.islice(examples, 10_000)):
        for example in block:
            last = example[text.sides - 1]
            digest.update("\t".join(example).encode() + b"\n")
            counts["examples"] += 1
            counts["bytes"] += len(last.encode())
            counts["words"] += len(last.split()) + last.count("\n")
            if texts:
                texts.write(json.dumps(example, ensure_ascii=False) + "\n")
        if text.columns[-1] == "tags":
            encoded = [_tagged(example, tokenizer, number) for example in block]
            labels += [tags for _, tags in encoded]
            sides_ids = [[ids for ids, _ in encoded]]
        else:
            encode = {
                side: tokenizer.encode_targets
                if text.columns[side] == "target"
                else tokenizer.encode
                for side in sides
            }
            sides_ids = [encode[side]([example[side] for example in block]) for side in sides]
        if text.columns[-1] == "label":
            labels.append(
                np.array([_class(number, example[-1], example[0]) for example in block], np.int32)
            )
        for side in sides:
            for ids in sides_ids[side]:
                ids.append(tokenizer.eos)
                raw[side].write(np.asarray(ids, dtype).tobytes())
                ends[side].append(len(ids))
    for side in sides:
        raw[side].close()
        np.save(folder / f"{part}.{side}.ends.npy", np.cumsum(ends[side], dtype=np.int64))
        _as_npy(folder / f"{part}.{side}.raw", folder / f"{part}.{side}.ids.npy", dtype)
    if texts:
        texts.close()
    if classes:
        np.save(folder / f"{part}.labels.npy", np.concatenate([*labels, np.zeros(0, np.int32)]))
    return counts | {"tokens": int(sum(ends[-1])), "sha256": digest.hexdigest()}


def _class(number: dict[str, int], name: str, text: str) -> int:
    if name not in number:
        raise UserError(
            f"data: the label {name!r} of {text[:40]!r} is not among those of training: {', '.join(number)}"
        )
    return number[name]


def _tagged(
    example: Example, tokenizer: Tokenizer, number: dict[str, int]
) -> tuple[list[int], np.ndarray]:
    """Ids of a text, word by word, and the tag of each: a word's at its first piece, -1 at the others and at eos."""
    words, tags = (column.split() for column in example)
    if len(words) != len(tags):
        raise UserError(f"data: {len(words)} words, but {len(tags)} tags: {example[0][:60]!r}")
    ids, found = [], []
    for pieces, tag in zip(tokenizer.encode_words(words), tags, strict=True):
        ids += (
            pieces  # none, of a word that the tokenizer does not see: then its tag is not asked for
        )
        found += [_class(number, tag, example[0]), *[-1] * (len(pieces) - 1)][: len(pieces)]
    return ids, np.array([*found, -1], np.int32)


def _as_npy(raw: Path, file: Path, dtype) -> None:
    """Raw numbers as an .npy file, copied in pieces (and not through a map of the file: a full disk must be an error)."""
    count = raw.stat().st_size // np.dtype(dtype).itemsize
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": (count,),
    }
    with raw.open("rb") as source, file.open("wb") as out:
        np.lib.format.write_array_header_1_0(out, header)
        shutil.copyfileobj(source, out)
    raw.unlink()
