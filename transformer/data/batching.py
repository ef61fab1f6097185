"""Rows to batches: a pure function of (seed, step), of static shape.

Batch fields, [rows, length] (beside an encoder the decoder's are [rows, target_length]):
    inputs, segments, positions    int32    what the decoder (or the only stack) reads; segment 0 is padding
    targets, weights               int32, float32    what it is asked for; weight 0 where nothing is
    source, source_segments, source_positions    int32    what the encoder reads, in an encoder-decoder
    prefix, token_types            int32    1 where an input is of a prefix; its type. Where the objective has them
    labels, label_weights          int32, float32    the class of each row, [rows], or of each input
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import grain
import numpy as np

from transformer.checks import LARGEST
from transformer.data.objectives.base import Rows, Segment

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
        share: Callable[[int], np.ndarray] = np.arange,
    ):
        """`share`: of a batch of so many rows, the numbers of those that this process is to build."""
        self._rows, self._seed, self._share, self.report = rows, seed, share, rows.report
        self._widths = list(buckets) or [length]
        self._decoder_widths = [
            width * (decoder_length or length) // length for width in self._widths
        ]
        self._sizes = [batch_size * length // width for width in self._widths]
        bucket_of = np.searchsorted(self._widths, rows.lengths)
        self._members = [np.flatnonzero(bucket_of == b) for b in range(len(self._widths))]
        counts = [-(-len(m) // size) for m, size in zip(self._members, self._sizes, strict=True)]
        self._order = np.repeat(
            np.arange(len(counts)), counts
        )  # the bucket of each batch of an epoch
        self.per_epoch = len(self._order)
        self._count = self.per_epoch if seed is None else LARGEST  # training begins anew
        self._epoch: tuple[int, list[tuple[int, np.ndarray]]] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, step: int) -> Batch:
        epoch, index = divmod(step, self.per_epoch)
        bucket, rows = self._plan(epoch)[index]
        build = lambda row: self._rows.segments(
            int(row), functools.partial(self._draw, epoch, int(row))
        )
        segments = [
            build(rows[i]) if i < len(rows) else [] for i in self._share(self._sizes[bucket])
        ]
        sample = (
            [] if any(segments) else [build(rows[0])]
        )  # tells which fields there are, where all rows here are empty
        batch = assemble(sample + segments, self._widths[bucket], self._decoder_widths[bucket])
        return {name: x[len(sample) :] for name, x in batch.items()}

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
            pools = [
                iter(_chunks(shuffle(m), size))
                for m, size in zip(self._members, self._sizes, strict=True)
            ]
            current = self._epoch = epoch, [(int(b), next(pools[b])) for b in shuffle(self._order)]
        return current[1]

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Batches start, start + 1, ..., built ahead in threads."""
        stop = len(self) if stop is None else stop
        ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
        return (
            iter(grain.MapDataset.source(self)[start:stop].to_iter_dataset(ahead))
            if stop > start
            else iter(())
        )


def _chunks(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def assemble(rows: Sequence[Sequence[Segment]], length: int, decoder_length: int = 0) -> Batch:
    """Rows of segments, padded to `length` (a decoder's beside an encoder to `decoder_length`)."""
    read = [[segment.beside_inputs() for segment in row] for row in rows]
    if not any(segment.source is not None for row in rows for segment in row):
        batch = _side_by_side(read, length)
    else:
        source = _side_by_side(
            [[{"source": segment.source} for segment in row] for row in rows], length
        )
        batch = _side_by_side(read, decoder_length or length)
        batch |= {name if name == "source" else f"source_{name}": x for name, x in source.items()}
    return batch | _labels(rows, batch["inputs"].shape)


def _side_by_side(rows: Sequence[Sequence[Batch]], width: int) -> Batch:
    """Segments as arrays [rows, width], with ids from 1 and positions that restart in each."""
    fields = next(segment for row in rows for segment in row)
    kinds = {name: np.float32 if x.dtype.kind == "f" else np.int32 for name, x in fields.items()}
    kinds |= {"segments": np.int32, "positions": np.int32}
    batch = {name: np.zeros((len(rows), width), kind) for name, kind in kinds.items()}
    for r, row in enumerate(rows):
        at = 0
        for number, segment in enumerate(row, 1):
            size = len(next(iter(segment.values())))
            for name, x in (segment | {"segments": number, "positions": np.arange(size)}).items():
                batch[name][r, at : at + size] = x
            at += size
    return batch


def _labels(rows: Sequence[Sequence[Segment]], shape: tuple[int, int]) -> Batch:
    """The class of each row, or of each input; none is asked for where it is negative."""
    found = [
        (r, np.asarray(row[0].label))
        for r, row in enumerate(rows)
        if row and row[0].label is not None
    ]
    if not found:
        return {}
    labels = np.full(shape if found[0][1].ndim else shape[:1], -1, np.int32)
    for r, label in found:
        labels[(r, slice(len(label))) if label.ndim else r] = label
    return {"labels": np.maximum(labels, 0), "label_weights": (labels >= 0).astype(np.float32)}
