"""The stages of a preparation: hashes of texts, duplicates, held-out text, and shards."""

import hashlib
import importlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from transformer.data.preparation.job import UNFINISHED, Job, publish
from transformer.data.records import encode
from transformer.data.sources import Example
from transformer.data.split import hash64, held_out_below, normalize
from transformer.data.store import RawText, Store, tokenize
from transformer.data.tokenizer import find_tokenizer, load_tokenizer
from transformer.errors import UserError

MB = 10**6
AT_ONCE = 1 << 25
"""Hashes in the memory of a worker that looks for duplicates."""


def load_filter(name: str) -> Callable[[Example], bool]:
    """The function that "module:function" names. "" keeps all examples. Raises UserError."""
    if not name:
        return lambda example: True
    module, _, function = name.partition(":")
    try:
        passes = getattr(importlib.import_module(module), function)
    except Exception as e:  # importing runs the module
        raise UserError(f"--filter: {name!r} is not a MODULE:FUNCTION to import ({e})") from None

    def checked(example: Example) -> bool:
        try:
            answer = passes(example)
        except Exception as e:
            problem = f"{name!r} raised {type(e).__name__}: {e}"
            raise UserError(f"--filter: {problem} for {str(example)[:60]}") from None
        if not isinstance(answer, bool | np.bool_):
            raise UserError(f"--filter: {name!r} returned {answer!r}; return True or False")
        return bool(answer)

    return checked


def source(name: str) -> str:
    """The content of the module of a filter: a preparation does not continue with another one."""
    module = importlib.import_module(name.partition(":")[0]) if name else None
    file = getattr(module, "__file__", None) or name  # a module in C has no text
    return Path(file).read_text() if file.endswith(".py") else name


def scan(job: Job, number: int, folder: Path) -> Path:
    """Per example: `exact`, the hash of its text; `sides` [n, sides], those of its normalized
    source and target; `sizes`, its bytes; `kept`, whether it passes the filters."""
    passes, most = load_filter(job.filter), job.max_chars or float("inf")
    exact, sides, sizes, kept = [], [], [], []
    for example in job.examples(number):
        exact.append(hash64("\0".join(example)))
        sides.append([hash64(normalize(text)) for text in example])
        sizes.append(sum(len(text.encode()) for text in example))
        kept.append(all(job.min_chars <= len(text) <= most for text in example) and passes(example))
    file = folder / "scan.npz"
    hashes = {"exact": np.array(exact, np.uint64), "sizes": np.array(sizes, np.int64)}
    shaped = np.array(sides, np.uint64).reshape(len(exact), len(job.columns))
    np.savez(file, sides=shaped, kept=np.array(kept, bool), **hashes)
    return file


def duplicates(job: Job, number: int, folder: Path, ranges: int) -> Path:
    """The positions of examples whose text occurs earlier, by raw file, for a range of hashes."""
    hashes, owners, positions = [], [], []
    for file in range(len(job.files)):
        scanned = job.scanned(file)
        mine = scanned["kept"] & (scanned["exact"] % np.uint64(ranges) == number)
        hashes.append(scanned["exact"][mine])
        positions.append(np.flatnonzero(mine))
        owners.append(np.full(len(positions[-1]), file, np.int32))
    hash_, owner, position = map(np.concatenate, (hashes, owners, positions))
    repeats = np.ones(len(hash_), bool)
    repeats[np.unique(hash_, return_index=True)[1]] = False
    of_file = lambda file: position[repeats & (owner == file)]
    np.savez(folder / "duplicates.npz", **{str(i): of_file(i) for i in np.unique(owner[repeats])})
    return folder / "duplicates.npz"


def limits(job: Job) -> dict[str, int]:
    """The largest hash of a source in test, valid and the tokenizer's sample, in this order."""
    data, below = job.data, held_out_below(job.data.held_out)
    held_out = [0 if below or getattr(data, p) else data.held_out for p in ("test", "valid")]
    sampled = 0 if data.tokenizer.path else data.tokenizer.max_sentences
    smallest, count = np.zeros(0, np.uint64), 0
    for file in range(len(job.files)):
        scanned = job.scanned(file)
        count += len(scanned["kept"])
        new = scanned["sides"][scanned["kept"], 0]
        new = new[new >= below]
        smallest = np.unique(np.concatenate([smallest, new]))[: sum(held_out) + sampled + 1]
    if not count:
        raise UserError(f"data.train: {data.train} contains no text")
    if not len(smallest):
        raise UserError("data: no example passes the filters; change them")
    if len(smallest) <= sum(held_out):
        problem = f"{data.held_out:,} sources in each of valid and test leave no text for training"
        raise UserError(f"data.held_out: {problem}; lower it, or set data.valid and data.test")
    ends = zip(("test", "valid", "sample"), itertools.accumulate([*held_out, sampled]), strict=True)
    found = {p: int(smallest[min(end, len(smallest)) - 1]) if end else -1 for p, end in ends}
    return found | ({"test": below // 2 - 1, "valid": below - 1} if below else {})


def select(job: Job, number: int, folder: Path, limits: dict[str, int]) -> Path:
    """A line [part, example] for each example that is held out or in the tokenizer's sample."""
    of_source, file = job.scanned(number)["sides"][:, 0], folder / "select.jsonl"
    chosen = job.training(number) & (of_source <= max(limits.values()))
    with file.open("w", encoding="utf-8") as lines:
        examples = zip(job.examples(number), of_source.tolist(), strict=True)
        for example, source in itertools.compress(examples, chosen) if chosen.any() else ():
            part = next(part for part, limit in limits.items() if source <= limit)
            lines.write(json.dumps([part, example], ensure_ascii=False) + "\n")
    return file


def selected(job: Job) -> tuple[dict[str, list[Example]], list[Example]]:
    """The examples of valid and test, and the tokenizer's sample. Also writes held-out hashes."""
    found: dict[str, list[Example]] = {"valid": [], "test": [], "sample": []}
    for file in range(len(job.files)):
        with job.result("select", file).open("r", encoding="utf-8") as lines:
            for part, example in map(json.loads, lines):
                found[part].append(tuple(example))
    for part in ("valid", "test"):
        if getattr(job.data, part):
            found[part] = list(RawText(job.data).read(part))
    sample, held_out = found.pop("sample"), [*found["valid"], *found["test"]]
    hash_of = lambda text: hash64(normalize(text))
    hashes = [set(map(hash_of, side)) for side in zip(*held_out, strict=True)]
    below = held_out_below(job.data.held_out)
    is_in = lambda hash_, held_out: hash_ < below or hash_ in held_out
    is_held_out = lambda example: any(map(is_in, map(hash_of, example), hashes))
    with tempfile.TemporaryDirectory() as folder:
        sides = {str(i): np.array(sorted(side), np.uint64) for i, side in enumerate(hashes)}
        np.savez(Path(folder) / "held_out.npz", **sides)
        publish(Path(folder) / "held_out.npz", job.result("held_out", 0))
    return found, [example for example in sample if not is_held_out(example)]


def pieces(job: Job) -> list[list[tuple[int, int, int]]]:
    """The raw text of each shard: ranges (file, first example, end) of together `shard_mb`."""
    pieces: list[list[tuple[int, int, int]]] = [[]]
    room = full = job.shard_mb * MB
    for file in range(len(job.files)):
        ends, start = np.cumsum(job.scanned(file)["sizes"]), 0
        while start < len(ends):
            before = ends[start - 1] if start else 0
            end = max(int(np.searchsorted(ends, before + room, "right")), start + (room == full))
            if end > start:
                pieces[-1].append((file, start, end))
                room, start = room - int(ends[end - 1] - before), end
            if start < len(ends):
                pieces.append([])
                room = full
    return pieces


def write(job: Job, number: int, folder: Path, pieces) -> Path:
    """Writes a shard. The result describes it."""
    from array_record.python.array_record_module import ArrayRecordWriter

    file = find_tokenizer(job.folder / UNFINISHED)
    tokenizer = load_tokenizer(file, job.data.with_tokenizer(file).tokenizer)
    tokenizer.threads = 1 if len(pieces) > 1 else tokenizer.threads  # beside other workers
    counts = tokenize(folder, "train", _training(job, pieces[number]), tokenizer, job.columns)
    shard = folder / f"train-{number:05d}-of-{len(pieces):05d}.arrayrecord"
    entry = {"filename": shard.name, "take": 0, "counts": counts, "report": {}}
    if counts["examples"]:
        sequences = job.data.chosen.sequences(Store(folder, tokenizer, {}), "train", job)
        entry |= {"take": len(sequences.lengths), "report": sequences.report}
    if entry["take"]:
        writer = ArrayRecordWriter(str(shard), "group_size:1,uncompressed")
        for i in range(entry["take"]):
            writer.write(encode(sequences.parts(i), tokenizer.dtype))
        writer.close()
        with shard.open("rb") as stream:
            entry["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
        entry |= {"size": shard.stat().st_size, "filled": _filled(job, sequences)}
        publish(shard, job.folder / shard.name)
    (folder / "result.json").write_text(json.dumps(entry))
    return folder / "result.json"


def _training(job: Job, ranges: Iterable[tuple[int, int, int]]) -> Iterator[Example]:
    """The training examples in ranges of raw files."""
    with job.result("held_out", 0).open("rb") as stream:
        held_out = dict(np.load(stream))
    for file, start, end in ranges:
        kept, sides = job.training(file), job.scanned(file)["sides"]
        for side, hashes in held_out.items():
            kept &= ~np.isin(sides[:, int(side)], hashes)
        kept &= (sides >= held_out_below(job.data.held_out)).all(1)
        examples = itertools.islice(job.examples(file), start, end)
        yield from itertools.compress(examples, kept[start:end])


def _filled(job: Job, sequences) -> float:
    """The share of tokens that are not padding, in at most 100 sequences."""
    count = len(sequences.lengths)
    used, rows = 0, range(0, count, -(-count // 100))
    for i in rows:
        for segment in sequences.segments(i, lambda: np.random.default_rng(0)):
            used += len(segment.inputs) + (0 if segment.source is None else len(segment.source))
    width = job.data.length + job.data.decoder_length * job.model.is_encoder_decoder
    return used / (len(rows) * width)
