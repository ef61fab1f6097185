"""The stage of a preparation that writes shards of training sequences."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from transformer.data.preparation.job import UNFINISHED, Job, publish
from transformer.data.records import encode
from transformer.data.sources import Example
from transformer.data.split import held_out_below
from transformer.data.store import Store, tokenize
from transformer.data.tokenizer import find_tokenizer, load_tokenizer

MB = 10**6


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
