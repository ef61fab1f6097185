"""Rows to batches: a pure function of (seed, step), of static shape.

Batch fields, all [rows, length]:
    inputs, segments, positions    int32    what the decoder (or the only stack) reads; segment 0 is padding
    targets, weights               int32, float32    what it is asked for; weight 0 where nothing is
    source, source_segments, source_positions    int32    what the encoder reads, in an encoder-decoder
"""

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
        batch_size: int,
        buckets: Sequence[int] = (),
        seed: int | None,
        steps: int | None = None,
    ):
        self._rows, self._seed, self.report = rows, seed, rows.report
        self._widths = list(buckets) or [length]
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
        segments = [self._rows.segments(int(row)) for row in rows]
        segments += [[]] * (self._sizes[bucket] - len(rows))
        return assemble(segments, self._widths[bucket])

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


def assemble(rows: Sequence[Sequence[Segment]], length: int) -> Batch:
    """Rows of segments, padded to `length`, with segment ids from 1 and positions that restart in each segment."""
    sides = {"": "inputs"}
    if any(segment.source is not None for row in rows for segment in row):
        sides["source_"] = "source"
    shape = (len(rows), length)
    batch = {prefix + name: np.zeros(shape, np.int32) for prefix in sides for name in ("segments", "positions")}
    batch |= {field: np.zeros(shape, np.int32) for field in (*sides.values(), "targets")}
    batch["weights"] = np.zeros(shape, np.float32)
    for r, row in enumerate(rows):
        for prefix, field in sides.items():
            at = 0
            for number, segment in enumerate(row, 1):
                ids = getattr(segment, field)
                here = slice(at, at + len(ids))
                batch[field][r, here] = ids
                batch[prefix + "segments"][r, here] = number
                batch[prefix + "positions"][r, here] = np.arange(len(ids))
                if field == "inputs":
                    batch["targets"][r, here] = segment.targets
                    batch["weights"][r, here] = 1.0 if segment.weights is None else segment.weights
                at += len(ids)
    return batch
