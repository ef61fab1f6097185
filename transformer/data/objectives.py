"""What the model is asked to learn: how tokenised texts become rows of inputs and targets.

An objective lays out rows (which parts of which texts stand in which row) and yields each row's segments. The rest, from
rows to batches, is the same for all. A new objective is a new class here, and one line in OBJECTIVES.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from transformer.config import DataConfig
from transformer.data.store import Store, Texts
from transformer.data.tokenizer import BOS, EOS


@dataclasses.dataclass(frozen=True)
class Segment:
    """One document's part of a row: the decoder reads `inputs` and is asked for `targets`; an encoder reads `source`.

    `weights` of the targets are 1 unless given.
    """

    inputs: np.ndarray
    targets: np.ndarray
    source: np.ndarray | None = None
    weights: np.ndarray | None = None


class Rows(Protocol):
    """The rows of a split. `lengths[i]` is the room that row i needs."""

    lengths: np.ndarray
    report: dict[str, int]  # what was dropped or cut

    def segments(self, row: int) -> Sequence[Segment]: ...


class Objective(Protocol):
    sides: int  # texts an example has

    def rows(self, store: Store, part: str, config: DataConfig) -> Rows: ...


class CausalLM:
    """Each token from those before it. A text is read as bos, x_1, ..., x_n and asked for x_1, ..., x_n, eos.

    Packed, the texts of a split stand one after another and are cut into rows of `length`: every token is a target exactly
    once, and a row's segments never see each other. Unpacked, a row holds one text or, of a longer text, one part.
    The rows of a held-out split may overlap by `eval_overlap` tokens, which are read again and not asked for again.
    """

    sides = 1

    def rows(self, store: Store, part: str, config: DataConfig) -> "LMRows":
        overlap = 0 if part == "train" else config.eval_overlap
        return LMRows(store.texts(part, 0), config.length, config.packing, overlap)


class LMRows:
    def __init__(self, texts: Texts, length: int, packing: bool, overlap: int = 0):
        self._ids, self._ends = texts.ids, np.asarray(texts.ends)
        self.report = {}
        total, new = len(texts.ids), length - overlap
        if packing:
            self._starts = np.arange(0, total, new)
        else:
            begins = np.concatenate([[0], self._ends[:-1]])
            parts = -(-texts.lengths // new)
            first = np.repeat(np.cumsum(parts) - parts, parts)
            self._starts = np.repeat(begins, parts) + (np.arange(parts.sum()) - first) * new
        self._stops = np.minimum(np.append(self._starts[1:], total), self._starts + new)
        self._reads = np.maximum(self._starts - overlap, 0)  # where a row begins to read
        if not packing:
            self._reads = np.maximum(self._reads, np.repeat(begins, parts))
        self.lengths = self._stops - self._reads

    def segments(self, row: int) -> list[Segment]:
        read, start, stop = (int(x[row]) for x in (self._reads, self._starts, self._stops))
        inner = self._ends[np.searchsorted(self._ends, read, "right") : np.searchsorted(self._ends, stop, "left")]
        bounds = [read, *map(int, inner), stop]
        out = []
        for a, b in itertools.pairwise(bounds):
            targets = np.asarray(self._ids[a:b], np.int32)
            before = BOS if a == 0 or self._ids[a - 1] == EOS else int(self._ids[a - 1])
            inputs = np.concatenate([[before], targets[:-1]]).astype(np.int32)
            out.append(Segment(inputs, targets, weights=(np.arange(a, b) >= start).astype(np.float32)))
        return out


class Seq2Seq:
    """The target from the source: the encoder reads x, eos; the decoder reads bos, y and is asked for y, eos.

    A pair with a side longer than `length` is dropped or, with `too_long="cut"`, cut (its eos is kept).
    """

    sides = 2

    def rows(self, store: Store, part: str, config: DataConfig) -> "PairRows":
        return PairRows(store.texts(part, 0), store.texts(part, 1), config)


class PairRows:
    def __init__(self, source: Texts, target: Texts, config: DataConfig):
        self._source, self._target, self._length = source, target, config.length
        needed = np.maximum(source.lengths, target.lengths)
        long = needed > config.length
        self.report = (
            {"too long: " + ("dropped" if config.too_long == "drop" else "cut"): int(long.sum())} if long.any() else {}
        )
        pairs = np.flatnonzero(~long) if config.too_long == "drop" else np.arange(len(needed))
        if config.packing:
            sizes = [np.minimum(texts.lengths[pairs], config.length) for texts in (source, target)]
            self._rows = [pairs[members] for members in pack(*sizes, room=config.length)]
            self.lengths = np.full(len(self._rows), config.length)
        else:
            self._rows = pairs[:, None]
            self.lengths = np.minimum(needed[pairs], config.length)

    def segments(self, row: int) -> list[Segment]:
        out = []
        for pair in self._rows[row]:
            source, targets = (self._cut(texts[pair]) for texts in (self._source, self._target))
            out.append(Segment(np.concatenate([[BOS], targets[:-1]]).astype(np.int32), targets, source))
        return out

    def _cut(self, ids: np.ndarray) -> np.ndarray:
        ids = np.array(ids[: self._length], np.int32)
        ids[-1] = EOS
        return ids


def pack(a: np.ndarray, b: np.ndarray, room: int, open_rows: int = 16) -> list[np.ndarray]:
    """Examples in rows whose sums of `a` and of `b` both fit into `room`: first fit over a few open rows, in a fixed shuffled order."""
    order = np.random.Generator(np.random.Philox(0)).permutation(len(a))
    full, rows = [], []  # an open row: [room left in a, room left in b, members]
    for i, x, y in zip(order.tolist(), a[order].tolist(), b[order].tolist(), strict=True):
        for row in rows:
            if x <= row[0] and y <= row[1]:
                break
        else:
            if len(rows) == open_rows:  # close the fullest
                fullest = min(range(open_rows), key=lambda r: min(rows[r][0], rows[r][1]))
                full.append(rows.pop(fullest))
            row = [room, room, []]
            rows.append(row)
        row[0] -= x
        row[1] -= y
        row[2].append(i)
    return [np.asarray(row[2]) for row in full + rows]


OBJECTIVES: dict[str, Objective] = {"causal_lm": CausalLM(), "seq2seq": Seq2Seq()}
