"""What every objective has in common: how tokenised texts become rows of inputs and targets.

An objective lays out rows (which parts of which texts stand in which row) and yields each row's segments. The rest, from
rows to batches, is the same for all.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer.data.config import Task
from transformer.data.objectives import OBJECTIVES
from transformer.data.store import Store, Texts
from transformer.data.tokenizer_base import Tokenizer

register = OBJECTIVES.register

Batch = Mapping[str, jax.Array]
"""The fields of data/batching.py."""

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


class Loss(Protocol):
    """The sums of one loss over a batch (training/loss.py has those of cross-entropy)."""

    loss: jax.Array  # float32[], what is minimized
    weight: jax.Array  # float32[]

    def means(self) -> dict[str, jax.Array]:
        """What is reported, per unit of weight."""
        ...


class Outputs(Protocol):
    """What the model makes of a batch (training/outputs.py)."""

    hidden_BxTxE: jax.Array | None  # what the token head reads; None where no token is predicted
    head: Callable[[jax.Array], jax.Array] | None  # [..., E] -> logits [..., V]
    label_logits: jax.Array | None  # [B, C] or [B, T, C]; None where no label is predicted

    def token_loss(self, targets_BxT: jax.Array, weights_BxT: jax.Array) -> Loss:
        """Cross-entropy of tokens, with `train.label_smoothing` and `train.z_loss` in training."""
        ...

    def label_loss(self, labels: jax.Array, weights: jax.Array) -> Loss:
        """Cross-entropy of classes, with `train.label_smoothing` in training."""
        ...


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
    def predicts(self) -> tuple[str, ...]:
        """What the model predicts: "tokens", "labels" or both. These are the heads that are run."""
        return ("labels",) if self.columns[-1] in ("label", "tags") else ("tokens",)

    @property
    def asks_for_tokens(self) -> bool:
        """And not for classes alone."""
        return "tokens" in self.predicts

    @property
    def reserved(self) -> int:
        """How many ids, behind the tokenizer's pieces, it keeps for signs of its own."""
        return 0

    def adds(self, tokenizer: Tokenizer) -> int:
        """How many of them this tokenizer does not bring."""
        return self.reserved

    def check(self, task: Task) -> str | None:
        """Why it cannot be learned so, in one line; None if it can."""
        return None

    def rows(self, store: Store, part: str, task: Task) -> Rows:
        """How the texts of a split stand in rows."""
        raise NotImplementedError

    def losses(self, outputs: Outputs, batch: Batch) -> dict[str, Loss]:
        """The losses of a batch by name, each a sum. Training minimizes the sum of
        `loss / weight` over all of them. A run is judged by "tokens" (or by "labels" where there
        is none): its mean is reported as `loss`, that of another name as `NAME_loss`.

        Cross-entropy of what is predicted, unless an objective says otherwise.
        """
        found = {}
        if "tokens" in self.predicts:
            found["tokens"] = outputs.token_loss(batch["targets"], batch["weights"])
        if "labels" in self.predicts:
            found["labels"] = outputs.label_loss(batch["labels"], batch["label_weights"])
        return found

    def weights(self, batch: Batch) -> dict[str, jax.Array]:
        """What each of `losses` is divided by: its weight in the global batch, float32[]. It
        depends on the batch alone, so that micro-batches can be divided by the weight of all."""
        fields = {"tokens": "weights", "labels": "label_weights"}
        return {name: jnp.sum(batch[fields[name]]) for name in self.predicts}


def parts(texts: Texts, most: int) -> tuple[np.ndarray, np.ndarray]:
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
