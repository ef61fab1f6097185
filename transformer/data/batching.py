"""Rows to batches: a pure function of (seed, step), of static shape.

Batch fields, all [rows, length]:
    inputs, segments, positions    int32    what the decoder (or the only stack) reads; segment 0 is padding
    targets, weights               int32, float32    what it is asked for; weight 0 where nothing is
    source, source_segments, source_positions    int32    what the encoder reads, in an encoder-decoder
    prefix, token_types            int32    1 where an input is of a prefix; its type. Where the objective has them
    labels, label_weights          int32, float32    the class of each row, [rows], or of each input
"""

import functools
from collections.abc import Iterator, Sequence

import grain
import numpy as np

from transformer.data.objectives import Rows, Segment

Batch = dict[str, np.ndarray]


class Batches:
    """Batch number `step`, for any step, in any order, on any host.

    Every epoch has every row once. Training: rows (within buckets) and batches in an order drawn from (seed, epoch).
    Evaluation (`seed=None`): in their own order. The last batch of a bucket is filled up with rows of weight zero.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        length: int,
        decoder_length: int = 0,
        batch_size: int,
        buckets: Sequence[int] = (),
        seed: int | None,
        steps: int | None = None,
    ):
        self._rows, self._seed, self.report = rows, seed, rows.report
        self._widths = list(buckets) or [length]
        self._decoder_widths = [width * (decoder_length or length) // length for width in self._widths]
        self._sizes = [batch_size * length // width for width in self._widths]
        bucket_of = np.searchsorted(self._widths, rows.lengths)
        self._members = [np.flatnonzero(bucket_of == b) for b in range(len(self._widths))]
        counts = [-(-len(m) // size) for m, size in zip(self._members, self._sizes, strict=True)]
        self._order = np.repeat(np.arange(len(counts)), counts)  # the bucket of each batch of an epoch
        self.per_epoch = len(self._order)
        self._steps = steps if steps is not None else self.per_epoch
        self._epoch: tuple[int, list[tuple[int, np.ndarray]]] | None = None

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, step: int) -> Batch:
        epoch, index = divmod(step, self.per_epoch)
        bucket, rows = self._plan(epoch)[index]
        segments = [self._rows.segments(int(row), functools.partial(self._draw, epoch, int(row))) for row in rows]
        segments += [[]] * (self._sizes[bucket] - len(rows))
        return assemble(segments, self._widths[bucket], self._decoder_widths[bucket])

    def _draw(self, epoch: int, row: int) -> np.random.Generator:
        """A row's own random numbers: of the epoch, in training."""
        return np.random.default_rng([row] if self._seed is None else [self._seed, epoch, row])

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(bucket, rows) of every batch of an epoch; the last plan is kept."""
        current = self._epoch
        if current is None or current[0] != epoch:
            shuffle = (
                np.random.Generator(np.random.Philox(key=[self._seed, epoch])).permutation
                if self._seed is not None
                else np.asarray
            )
            pools = [iter(_chunks(shuffle(m), size)) for m, size in zip(self._members, self._sizes, strict=True)]
            current = self._epoch = epoch, [(int(b), next(pools[b])) for b in shuffle(self._order)]
        return current[1]

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Batches start, start + 1, ..., built ahead in threads."""
        stop = len(self) if stop is None else stop
        ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        return iter(grain.MapDataset.source(self)[start:stop].to_iter_dataset(ahead)) if stop > start else iter(())


def _chunks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def assemble(rows: Sequence[Sequence[Segment]], length: int, decoder_length: int = 0) -> Batch:
    """Rows of segments, padded to `length` (a decoder's beside an encoder to `decoder_length`), with segment ids from 1 and positions
    that restart in each segment."""
    has = lambda field: any(getattr(segment, field) is not None for row in rows for segment in row)
    sides = {"": ("inputs", (decoder_length or length) if has("source") else length)}
    if has("source"):
        sides["source_"] = ("source", length)
    ints, floats = [field for field, _ in sides.values()], []
    blank = lambda field, kind: np.zeros((len(rows), sides["source_" if field == "source" else ""][1]), kind)
    if has("targets"):
        ints, floats = [*ints, "targets"], ["weights"]
    ints += [field for field in ("token_types",) if has(field)]
    ints += ["prefix"] * any(segment.prefix for row in rows for segment in row)
    batch = {field: blank(field, np.int32) for field in ints} | {field: blank(field, np.float32) for field in floats}
    for prefix, (_, width) in sides.items():
        batch |= {prefix + name: np.zeros((len(rows), width), np.int32) for name in ("segments", "positions")}
    for prefix, (field, _) in sides.items():
        for r, row in enumerate(rows):
            at = 0
            for number, segment in enumerate(row, 1):
                ids = getattr(segment, field)
                here = slice(at, at + len(ids))
                batch[field][r, here] = ids
                batch[prefix + "segments"][r, here] = number
                batch[prefix + "positions"][r, here] = np.arange(len(ids))
                if field == "inputs":
                    _fill(batch, r, here, segment)
                at += len(ids)
    return batch | _labels(rows, batch["inputs"].shape)


def _fill(batch: Batch, r: int, here: slice, segment: Segment) -> None:
    """What stands beside a segment's inputs."""
    if segment.targets is not None:
        batch["targets"][r, here] = segment.targets
        batch["weights"][r, here] = 1.0 if segment.weights is None else segment.weights
    if segment.token_types is not None:
        batch["token_types"][r, here] = segment.token_types
    if segment.prefix:
        batch["prefix"][r, here.start : here.start + segment.prefix] = 1


def _labels(rows: Sequence[Sequence[Segment]], shape: tuple[int, int]) -> Batch:
    """The class of each row, or of each input; none is asked for where it is negative."""
    found = [(r, np.asarray(row[0].label)) for r, row in enumerate(rows) if row and row[0].label is not None]
    if not found:
        return {}
    labels = np.full(shape if found[0][1].ndim else shape[:1], -1, np.int32)
    for r, label in found:
        labels[(r, slice(len(label))) if label.ndim else r] = label
    return {"labels": np.maximum(labels, 0), "label_weights": (labels >= 0).astype(np.float32)}
