"""Assembles sequences into batches of static shape, as a pure function of (seed, step).

The fields of a batch have shape [B, length]; those of the decoder in an encoder-decoder have shape
[B, target_length]. Weights are float32, and all other fields are int32.

    inputs, segments, positions: input of the decoder or of the only stack; segment 0 is padding.
    targets, weights: target tokens; weight 0 where there is no target.
    source, source_segments, source_positions: input of the encoder in an encoder-decoder.
    prefix: 1 where an input belongs to a prefix. Present if the objective provides it.
    token_types: the type of each input. Present if the objective provides it.
    labels, label_weights: the class of each sequence, [B], or of each input."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import grain
import numpy as np

from transformer.data.mixture import Turns
from transformer.data.objectives.base import Segment, Sequences
from transformer.errors import UserError
from transformer.limits import LARGEST

Batch = dict[str, np.ndarray]


class Stream:
    """Batches indexed by step. Any host can build any batch, in any order."""

    threads = 2  # that build batches ahead of time
    report: dict[str, int]  # description -> number of texts or parts dropped or cut

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, step: int) -> Batch:
        raise NotImplementedError

    def source_of(self, step: int) -> str:
        """The source of a mixture that all sequences of a held-out batch are from, or ""."""
        return ""

    def epochs(self, steps: int) -> dict[str, float]:
        """How often `steps` training steps read the sequences of each source."""
        raise NotImplementedError

    def stream(self, start: int = 0, stop: int | None = None) -> Iterator[Batch]:
        """Yields batches start, start + 1, ..., stop - 1. Threads build them ahead of time."""
        stop = len(self) if stop is None else stop
        options = grain.ReadOptions(self.threads, prefetch_buffer_size=max(8, self.threads))
        if stop <= start:
            return iter(())
        return iter(grain.MapDataset.source(self)[start:stop].to_iter_dataset(options))


class Batches(Stream):
    """The batches of one text.

    Every epoch contains each sequence once. In training, the order of the sequences (within each
    bucket) and of the batches is drawn from (seed, epoch). In evaluation (`seed=None`), neither is
    shuffled. The last batch of a bucket is filled with empty sequences, whose weights are zero."""

    def __init__(
        self, sequences: Sequences, *, length: int, decoder_length: int = 0, batch_size: int,
        buckets: Sequence[int] = (), seed: int | None,
        share: Callable[[int], np.ndarray] = np.arange,
    ):  # fmt: skip
        """`share` maps a batch size to the indices of the sequences that this process builds."""
        self._sequences, self._seed, self._share = sequences, seed, share
        self.report = sequences.report
        self._widths = list(buckets) or [length]
        self._decoder_widths = [x * (decoder_length or length) // length for x in self._widths]
        self._sizes = [batch_size * length // width for width in self._widths]
        self.num_sequences = len(sequences.lengths)
        self._plan = functools.lru_cache(maxsize=1)(self._plan_epoch)

    @functools.cached_property
    def _members(self) -> list[np.ndarray]:
        """The sequences in each bucket. A mixture, which has none, does without these arrays."""
        bucket_of = np.searchsorted(self._widths, self._sequences.lengths)
        return [np.flatnonzero(bucket_of == b) for b in range(len(self._widths))]

    @functools.cached_property
    def _order(self) -> np.ndarray:
        """The bucket of each batch of an epoch."""
        counts = [-(-len(x) // size) for x, size in zip(self._members, self._sizes, strict=True)]
        return np.repeat(np.arange(len(counts)), counts)

    @property
    def per_epoch(self) -> int:
        return len(self._order)

    def __len__(self) -> int:
        return self.per_epoch if self._seed is None else LARGEST  # training repeats epochs

    def __getitem__(self, step: int) -> Batch:
        epoch, number = divmod(step, self.per_epoch)
        bucket, indices = self._plan(epoch)[number]
        row = lambda i: self.segments(epoch, int(indices[i])) if i < len(indices) else []
        return self.fill(row, bucket)

    def epochs(self, steps):
        return {"": steps / self.per_epoch}

    def segments(self, epoch: int, index: int) -> Sequence[Segment]:
        """The segments of a sequence, with the random numbers of this epoch."""
        seed = [] if self._seed is None else [self._seed, epoch]
        return self._sequences.segments(index, lambda: np.random.default_rng([*seed, index]))

    def fill(self, row: Callable[[int], Sequence[Segment]], bucket: int = 0) -> Batch:
        """Assembles this process's part of a batch of the sequences `row(0)`, `row(1)`, ..."""
        segments = [row(i) for i in self._share(self._sizes[bucket])]
        # If all sequences of this process are empty, a sample determines the fields of the batch.
        sample = [] if any(segments) else [row(0)]
        batch = assemble(sample + segments, self._widths[bucket], self._decoder_widths[bucket])
        return {name: x[len(sample) :] for name, x in batch.items()}

    def _plan_epoch(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(bucket, sequence indices) of every batch of an epoch."""
        shuffle = np.asarray
        if self._seed is not None:
            shuffle = np.random.Generator(np.random.Philox(key=[self._seed, epoch])).permutation
        pairs = zip(self._members, self._sizes, strict=True)
        starts = lambda members, size: range(size, len(members), size)
        pools = [iter(np.split(shuffle(x), starts(x, size))) for x, size in pairs]
        return [(int(b), next(pools[b])) for b in shuffle(self._order)]


class MixedBatches(Stream):
    """The training batches of a mixture. Each source is shuffled anew in each of its epochs. Grain
    computes the order by index, so that no permutation is held in memory."""

    def __init__(
        self, sources: Mapping[str, Batches], turns: Turns, batch_size: int, seed: int, threads: int
    ):
        self._names, self._sources, self._turns = list(sources), list(sources.values()), turns
        self._size, self.report, self.threads = batch_size, _reports(sources), threads
        order = lambda source: grain.MapDataset.range(source.num_sequences).seed(seed).shuffle()
        self._orders = [order(source).repeat() for source in self._sources]

    def __len__(self):
        return LARGEST

    def __getitem__(self, step):
        return self._sources[0].fill(lambda i: self._row(step * self._size + i))

    def epochs(self, steps):
        parts = zip(self._names, self._sources, self._turns.counts(steps * self._size), strict=True)
        return {name: count / source.num_sequences for name, source, count in parts}

    def _row(self, n: int) -> Sequence[Segment]:
        source, number = self._turns(int(n))
        batches = self._sources[source]
        return batches.segments(number // batches.num_sequences, self._orders[source][number])


class JoinedBatches(Stream):
    """The held-out batches of a mixture, each from one source. Any first part has some of each."""

    def __init__(self, sources: Mapping[str, Batches]):
        self._sources, self.report = sources, _reports(sources)
        items = [(name, i) for name, batches in sources.items() for i in range(len(batches))]
        self._items = sorted(items, key=lambda item: (item[1] + 0.5) / len(sources[item[0]]))

    def __len__(self):
        return len(self._items)

    def __getitem__(self, step):
        name, number = self._items[step]
        return self._sources[name][number]

    def source_of(self, step):
        return self._items[step][0]


def check_fields(sources: Mapping[str, Batches]) -> None:
    """Raises UserError if the batches of two sources of a mixture have different fields."""
    batch = lambda source: source.fill(lambda i: source.segments(0, 0))
    fields = {name: sorted(batch(source)) for name, source in sources.items()}
    (first, expected), *others = fields.items()
    for name, found in others:
        if found != expected:
            differ = ", ".join(sorted({*found} ^ {*expected}))
            problem = f"sources {first!r} and {name!r} have batches of different fields ({differ})"
            raise UserError(f"data.mixture.objective: {problem}; use objectives with equal fields")


def _reports(sources: Mapping[str, Batches]) -> dict[str, int]:
    items = [(name, *x) for name, batches in sources.items() for x in batches.report.items()]
    return {f"{text} ({name})": number for name, text, number in items}


def by_width(
    lengths: Sequence[int], longest: int, batch_size: int
) -> Iterator[tuple[int, list[list[int]]]]:
    """Yields (width, batches of indices) of sequences of similar length, the longest first. The
    width is a power of two from 16, but at most `longest`. It depends on each length alone."""
    width = lambda i: min(max(16, 1 << (lengths[i] - 1).bit_length()), longest)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for of_batches, group in itertools.groupby(order, key=width):
        members = list(group)
        yield of_batches, [members[n : n + batch_size] for n in range(0, len(members), batch_size)]


def assemble(sequences: Sequence[Sequence[Segment]], length: int, decoder_length: int = 0) -> Batch:
    """Assembles sequences of segments into a batch, padded to `length`. If segments have a source,
    it is padded to `length`, the rest to `decoder_length` or `length`."""
    inputs = [[segment.token_fields() for segment in segments] for segments in sequences]
    if not any(segment.source is not None for segments in sequences for segment in segments):
        batch = _side_by_side(inputs, length)
    else:
        sources = [[{"source": segment.source} for segment in x] for x in sequences]
        source = _side_by_side(sources, length)
        batch = _side_by_side(inputs, decoder_length or length)
        batch |= {name if name == "source" else f"source_{name}": x for name, x in source.items()}
    return batch | _labels(sequences, batch["inputs"].shape)


def _side_by_side(sequences: Sequence[Sequence[Batch]], width: int) -> Batch:
    """Concatenates the segments of each sequence: arrays [len(sequences), width]. Segment ids count
    from 1 in each sequence. Positions restart in each segment."""
    fields = next(segment for segments in sequences for segment in segments)
    dtypes = {name: np.float32 if x.dtype.kind == "f" else np.int32 for name, x in fields.items()}
    dtypes |= {"segments": np.int32, "positions": np.int32}
    batch = {name: np.zeros((len(sequences), width), dtype) for name, dtype in dtypes.items()}
    for r, segments in enumerate(sequences):
        start = 0
        for number, segment in enumerate(segments, 1):
            size = len(next(iter(segment.values())))
            for name, x in (segment | {"segments": number, "positions": np.arange(size)}).items():
                batch[name][r, start : start + size] = x
            start += size
    return batch


def _labels(sequences: Sequence[Sequence[Segment]], shape: tuple[int, int]) -> Batch:
    """The class of each sequence, or of each input. Negative labels get weight 0."""
    firsts = [(r, segments[0].label) for r, segments in enumerate(sequences) if segments]
    labeled = [(r, np.asarray(label)) for r, label in firsts if label is not None]
    if not labeled:
        return {}
    labels = np.full(shape if labeled[0][1].ndim else shape[:1], -1, np.int32)
    for r, label in labeled:
        labels[(r, slice(len(label))) if label.ndim else r] = label
    return {"labels": np.maximum(labels, 0), "label_weights": (labels >= 0).astype(np.float32)}
