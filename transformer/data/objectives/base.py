"""What every objective has in common: how tokenised texts become rows of inputs and targets.

An objective lays out rows (which parts of which texts stand in which row) and yields each row's segments. The rest, from
rows to batches, is the same for all.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformer.config import Experiment
    from transformer.data.store import Store, Texts
    from transformer.data.tokenizer import Tokenizer

OBJECTIVES: dict[str, type["Objective"]] = {}

Draw = Callable[[], np.random.Generator]
"""Gives a row its random numbers: a function of (seed, epoch, row) in training, of the row alone in evaluation."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """One document's part of a row: a decoder (or the only stack) reads `inputs` and is asked for `targets`; an encoder reads
    `source`.

    `weights` of the targets are 1 unless given. The first `prefix` inputs see each other both ways. `token_types` of the inputs are
    0 unless given. `label`: the class of the row, or one for each of `inputs` (-1: not asked for).
    """

    inputs: np.ndarray
    targets: np.ndarray | None = None
    source: np.ndarray | None = None
    weights: np.ndarray | None = None
    prefix: int | None = None
    token_types: np.ndarray | None = None
    label: int | np.ndarray | None = None

    def beside_inputs(self) -> dict[str, np.ndarray]:
        """The inputs, and all that has one value for each of them, as a batch calls it."""
        size, out = len(self.inputs), {"inputs": self.inputs}
        if self.targets is not None:
            out |= {
                "targets": self.targets,
                "weights": np.ones(size, np.float32) if self.weights is None else self.weights,
            }
        if self.prefix is not None:
            out["prefix"] = (np.arange(size) < self.prefix).astype(np.int32)
        return out if self.token_types is None else out | {"token_types": self.token_types}


class Rows(Protocol):
    """The rows of a split. `lengths[i]` is the room that row i needs."""

    lengths: np.ndarray
    report: dict[str, int]  # what was dropped or cut

    def segments(self, row: int, draw: Draw) -> Sequence[Segment]: ...


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the model is asked to learn. Fields are the options that a config may set: `dict(name="masked_lm", rate=0.3)`."""

    families: ClassVar[tuple[str, ...]] = ()  # of models that can learn it
    columns: ClassVar[tuple[str, ...]] = (
        "text",
    )  # of the text it reads; "label" and "tags" name classes, all others are texts
    every_token: ClassVar[bool] = (
        False  # a held-out text is asked for whole, once: bits per byte have a meaning
    )
    packs: ClassVar[bool] = True  # rows are packed or not, as `data.packing` says
    lengths_differ: ClassVar[bool] = True  # rows that are not packed; `data.buckets` sorts them
    keeps_whole: ClassVar[bool] = (
        False  # a text that is too long is treated as `data.too_long` says
    )
    gives_prefix: ClassVar[bool] = False  # which a decoder reads both ways
    writes: ClassVar[bool] = True  # the model can be asked for text

    @property
    def asks_for_tokens(self) -> bool:
        """And not for classes alone."""
        return self.columns[-1] not in ("label", "tags")

    @property
    def reserved(self) -> int:
        """How many ids, behind the tokenizer's pieces, it keeps for signs of its own."""
        return 0

    def adds(self, tokenizer: "Tokenizer") -> int:
        """How many of them this tokenizer does not bring."""
        return self.reserved

    def check(self, config: "Experiment") -> str | None:
        """Why it cannot be learned so, in one line; None if it can."""
        return None

    def rows(self, store: "Store", part: str, config: "Experiment") -> Rows:
        raise NotImplementedError


def register(name: str):
    """Class decorator: gives an objective the name by which a config asks for it."""

    def add(cls):
        OBJECTIVES[name] = cls
        return cls

    return add


def parts(texts: "Texts", most: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of pieces of at most `most` tokens; none reaches over the end of its text."""
    ends = np.asarray(texts.ends)
    counts = -(-texts.lengths // most)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(ends - texts.lengths, counts) + (np.arange(counts.sum()) - first) * most
    return starts, np.minimum(starts + most, np.repeat(ends, counts))


def pack(
    sizes: Sequence[np.ndarray], rooms: Sequence[int], open_rows: int = 16
) -> list[np.ndarray]:
    """Examples in rows in which the sums of each of their `sizes` fit into its room: first fit over a few open rows, in a fixed
    shuffled order."""
    order = np.random.Generator(np.random.Philox(0)).permutation(len(sizes[0]))
    needs = np.stack(sizes, axis=1)[order].tolist()
    full, rows = [], []  # an open row: ([room left on each side], members)
    for i, need in zip(order.tolist(), needs, strict=True):
        row = next((row for row in rows if all(map(operator.le, need, row[0]))), None)
        if row is None:
            if len(rows) == open_rows:  # close the fullest
                full.append(rows.pop(min(range(open_rows), key=lambda r: min(rows[r][0]))))
            row = list(rooms), []
            rows.append(row)
        row[0][:] = map(operator.sub, row[0], need)
        row[1].append(i)
    return [np.asarray(members) for _, members in full + rows]


def shifted(start: int, targets: np.ndarray) -> np.ndarray:
    """What a decoder reads to be asked for `targets`: `start`, then each target but the last."""
    return np.concatenate([[start], targets[:-1]]).astype(np.int32)


def continued(start: int, given: np.ndarray, asked: np.ndarray) -> Segment:
    """A decoder alone reads `given` as a prefix and is asked for what follows it."""
    whole = np.concatenate([given, asked]).astype(np.int32)
    weights = (np.arange(len(whole)) >= len(given)).astype(np.float32)
    return Segment(shifted(start, whole), whole, weights=weights, prefix=len(given) + 1)
