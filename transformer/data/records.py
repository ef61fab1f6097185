"""Prepared text: training sequences in ArrayRecord files, read by index (`data prepare`).

A folder of prepared text contains

    train-00000-of-00016.arrayrecord, ...    one record for each training sequence: its parts
    index.json     the shards (records, bytes, SHA-256) and the layout of the sequences
    meta.json, the tokenizer and the arrays of valid and test, as in a token store (data/store.py)
    card.md        source, license, tokenizer, options and versions

Host memory holds neither the text nor the order of the sequences, and does not grow with it."""

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from transformer.data import tokenizer as tokenizers
from transformer.data.config import DataConfig, Task
from transformer.data.objectives.base import OfParts, Part
from transformer.data.store import Store, check_size
from transformer.errors import UserError
from transformer.files import read_json

INDEX = "index.json"
"""Written last: a folder without it is unfinished."""

FORMAT = 1
"""The format of the records. Increase it when a change of the code changes them."""

_AGAIN = "copy it from another replica, or prepare the text again"


@dataclasses.dataclass(frozen=True)
class Prepared(Store):
    """A store whose training sequences are records. Valid and test are those of any store."""

    index: dict


class Records(OfParts):
    """The training sequences of a folder of prepared text."""

    def __init__(self, store: Prepared, task: Task):
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        super().__init__(task.data.chosen, store.tokenizer, task)
        made, now = store.index["layout"], task.data.chosen.layout(task)
        for field in now:
            if made.get(field) != now[field]:
                renamed = {"decoder_length": "target_length"}.get(field, field)
                name = "model.family" if field == "family" else f"data.{renamed}"
                problem = f"{now[field]}, but {store.folder} was prepared with {made.get(field)}"
                raise UserError(f"{name}: {problem}; use the same, or prepare the text again")
        self._shards, self._dtype = _shards(store.folder, store.index), store.tokenizer.dtype
        # The positions of records stay on disk.
        options = {"index_storage_option": "offloaded", "footer_prefetch_bytes": "0"}
        self._source = ArrayRecordDataSource(self._shards, options)
        self._ends = list(itertools.accumulate(shard.take for shard in self._shards))
        self.lengths = np.broadcast_to(task.data.length, self._ends[-1])
        self.report = store.index["report"]

    def parts(self, index):
        try:
            return decode(self._source[index], self._dtype)
        except Exception as e:  # the reader raises many types
            file = self._shards[bisect.bisect_right(self._ends, index)].filename
            problem = f"damaged or unreadable ({' '.join(str(e).split())[:100]})"
            raise UserError(f"{file}: {problem}; {_AGAIN}") from None


class _Shard(NamedTuple):
    """A shard, with the attributes that ArrayRecordDataSource reads."""

    filename: str
    take: int
    size: int  # bytes
    sha256: str
    skip: int = 0

    @property
    def examples_in_shard(self) -> int:
        return self.take


def _shards(folder: Path, index: dict) -> list[_Shard]:
    """Raises UserError if a file is missing or has another size than when it was written."""
    shards = [_Shard(**x | {"filename": str(folder / x["filename"])}) for x in index["shards"]]
    for file, size in ((Path(shard.filename), shard.size) for shard in shards):
        found = file.stat().st_size if file.exists() else None
        if found != size:
            problem = "missing" if found is None else f"{found:,} bytes instead of {size:,}"
            raise UserError(f"{file}: {problem}; {_AGAIN}")
    return shards


def verify(folder: Path) -> int:
    """Compares the SHA-256 of all files. Returns the number of shards. Raises UserError."""
    index = _index(folder)
    for name, digest in index["files"].items():
        file = folder / name
        if not file.exists() or hashlib.sha256(file.read_bytes()).hexdigest() != digest:
            raise UserError(f"{file}: missing, or altered since it was prepared; {_AGAIN}")
    shards = _shards(folder, index)
    for shard in shards:
        with Path(shard.filename).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != shard.sha256:
                raise UserError(f"{shard.filename}: altered since it was prepared; {_AGAIN}")
    return len(shards)


def open_prepared(config: DataConfig, vocab_size: int) -> Prepared:
    """Opens the folder `config.train` of prepared text, with the tokenizer in it."""
    folder = Path(config.train)
    index = _index(folder)
    meta, file = read_json(folder / "meta.json"), tokenizers.find_tokenizer(folder)
    content = tokenizers.read_tokenizer(file) if file else b""
    if hashlib.sha256(content).hexdigest() != meta["tokenizer_sha256"]:
        problem = "the tokenizer is missing, or another than that of the preparation"
        raise UserError(f"{folder}: {problem}; {_AGAIN}")
    ids = {name: i for name, i in index["tokenizer"].items() if name.endswith("_id")}
    tokenizer = tokenizers.load_tokenizer(file, type(config.tokenizer)(path=str(file), **ids))
    if config.tokenizer != type(config.tokenizer)():
        path = config.tokenizer.path
        if not path or tokenizers.read_tokenizer(path) != tokenizer.content:
            problem = f"{path or 'a new one'} is not the tokenizer with which {folder} was prepared"
            raise UserError(f"data.tokenizer: {problem}; leave it out, or prepare the text again")
    check_size(tokenizer, config.with_tokenizer(file), vocab_size)
    return Prepared(folder, tokenizer, meta, index)


def _index(folder: Path) -> dict:
    if "://" in str(folder) or str(folder).startswith("gs:/"):
        mount = "mount the bucket (gcsfuse) and name the folder in it"
        raise UserError(f"data.train: prepared text is read from a file system; {mount}")
    if not (folder / INDEX).exists():
        problem = f"{folder} has no {INDEX}, so it is not prepared text"
        way_out = "python -m transformer data prepare makes such a folder"
        raise UserError(f"data.train: {problem}; {way_out}")
    index = read_json(folder / INDEX)
    if index.get("format") != FORMAT:
        problem = f"{folder} has records of format {index.get('format')}, not {FORMAT}"
        raise UserError(f"data.train: {problem}; prepare the text again")
    return index


def encode(parts: Sequence[Part], dtype) -> bytes:
    """The record of a sequence: uint32 numbers of parts and sides, uint32 sizes, and all ids."""
    sizes = np.array([[len(ids) for ids in part] for part in parts], np.uint32)
    ids = np.concatenate([ids for part in parts for ids in part]).astype(dtype)
    return np.array(sizes.shape, np.uint32).tobytes() + sizes.tobytes() + ids.tobytes()


def decode(record: bytes, dtype) -> list[Part]:
    """The parts in a record."""
    count, sides = np.frombuffer(record, np.uint32, 2).tolist()
    sizes = np.frombuffer(record, np.uint32, count * sides, 8)
    ids = np.frombuffer(record, dtype, offset=8 + sizes.nbytes).astype(np.int32)
    pieces = np.split(ids, np.cumsum(sizes)[:-1])
    return [tuple(pieces[i : i + sides]) for i in range(0, len(pieces), sides)]
