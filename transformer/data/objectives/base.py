"""The interface of objectives, which turn tokenized texts into sequences of inputs and targets.

data/batching.py assembles the sequences of all objectives into batches."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from transformer.data.config import Task
from transformer.data.objectives import OBJECTIVES
from transformer.data.store import Store, Texts
from transformer.data.tokenizer import Tokenizer
from transformer.model.config import ModelConfig

register = OBJECTIVES.register

Batch = Mapping[str, jax.Array]
"""The fields of data/batching.py."""

Part = tuple[np.ndarray, ...]
"""int32 ids that a sequence contains of a text; of a source and of a target, for pairs."""

Draw = Callable[[], np.random.Generator]
"""Returns a sequence's generator, seeded by (seed, epoch, index); in evaluation, by the index."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """One document's part of a sequence.

    A decoder (or the only stack) reads `inputs` and predicts `targets`. An encoder reads `source`.

    weights: weights of the targets; 1 by default.
    prefix: the first `prefix` inputs attend to each other bidirectionally.
    token_types: types of the inputs; 0 by default.
    label: the class of the sequence, or an array with the class of each input (-1: no label)."""

    inputs: np.ndarray
    targets: np.ndarray | None = None
    source: np.ndarray | None = None
    weights: np.ndarray | None = None
    prefix: int | None = None
    token_types: np.ndarray | None = None
    label: int | np.ndarray | None = None

    def token_fields(self) -> dict[str, np.ndarray]:
        """The inputs and all arrays that have one value per input, by batch field."""
        size, out = len(self.inputs), {"inputs": self.inputs}
        if self.targets is not None:
            weights = np.ones(size, np.float32) if self.weights is None else self.weights
            out |= {"targets": self.targets, "weights": weights}
        if self.prefix is not None:
            out["prefix"] = (np.arange(size) < self.prefix).astype(np.int32)
        return out if self.token_types is None else out | {"token_types": self.token_types}


class Sequences(Protocol):
    """The sequences of a split. `lengths[i]` is the length that sequence i needs."""

    lengths: np.ndarray
    report: dict[str, int]  # description -> number of texts or parts dropped or cut

    def segments(self, index: int, draw: Draw) -> Sequence[Segment]: ...


class OfParts:
    """Sequences whose segments `objective` makes from their parts."""

    def __init__(self, objective: "Objective", tokenizer: Tokenizer, task: Task):
        self._objective, self._tokenizer, self._task = objective, tokenizer, task

    def parts(self, index: int) -> list[Part]:
        raise NotImplementedError

    def segments(self, index: int, draw: Draw) -> list[Segment]:
        return self._objective.segments(self._tokenizer, self._task, self.parts(index), draw)


class Spans(OfParts):
    """Sequences of spans of the concatenated `ids` of a split: span i is ids[starts[i]:stops[i]].
    Sequence n consists of the spans `members[n]`, by default of span n alone."""

    def __init__(self, objective, store, task, ids, starts, stops, lengths, members=None):
        super().__init__(objective, store.tokenizer, task)
        self._ids, self._starts, self._stops = ids, starts, stops
        self.lengths, self.report = lengths, {}
        self._members = np.arange(len(starts))[:, None] if members is None else members

    def parts(self, index) -> list[Part]:
        ends = [(self._starts[i], self._stops[i]) for i in self._members[index]]
        return [(np.asarray(self._ids[a:b], np.int32),) for a, b in ends]


class Loss(Protocol):
    """The sums of one loss over a batch (training/loss.py implements cross-entropy)."""

    loss: jax.Array  # float32[], the sum that training minimizes
    weight: jax.Array  # float32[]

    def means(self) -> dict[str, jax.Array]:
        """The reported metrics, per unit of weight."""


@dataclasses.dataclass(frozen=True)
class Objective:
    """A training objective. A config may set its fields: `dict(name="masked_lm", rate=0.3)`."""

    families: ClassVar[tuple[str, ...]] = ()  # model families that support the objective
    # Columns of an example. "label" and "tags" contain classes; all others contain text.
    columns: ClassVar[tuple[str, ...]] = ("text",)
    # Every token of a held-out text is a target exactly once, so bits per byte are meaningful.
    scores_every_token: ClassVar[bool] = False
    can_pack: ClassVar[bool] = True  # sequences can be packed (`data.packing`)
    has_variable_length: ClassVar[bool] = True  # unpacked sequences differ in length (buckets)
    never_splits: ClassVar[bool] = False  # `data.too_long` drops or cuts texts, never splits them
    has_prefix: ClassVar[bool] = False  # a decoder gets a prefix, which it reads bidirectionally
    generates_text: ClassVar[bool] = True  # the model can generate text

    @property
    def can_prepare(self) -> bool:
        """Whether sequences can be stored as their parts (data/records.py)."""
        return type(self).segments is not Objective.segments

    @property
    def predicts(self) -> tuple[str, ...]:
        """The prediction targets: "tokens", "labels" or both. Only the heads for these run."""
        return ("labels",) if self.columns[-1] in ("label", "tags") else ("tokens",)

    @property
    def has_pairs(self) -> bool:
        """Whether an example is a source and its target, and not one text."""
        return self.columns == ("source", "target")

    @property
    def predicts_tokens(self) -> bool:
        """Whether tokens, and not only classes, are predicted."""
        return "tokens" in self.predicts

    @property
    def reserved(self) -> int:
        """The number of ids after the tokenizer's pieces that are reserved for special tokens."""
        return 0

    def num_added_tokens(self, tokenizer: Tokenizer) -> int:
        """The number of reserved ids for which this tokenizer has no special token."""
        return self.reserved

    def check(self, task: Task) -> str | None:
        """Why the task does not support this objective, in one line; None if it does."""
        return None

    def sequences(self, store: Store, part: str, task: Task) -> Sequences:
        """Assigns the texts of a split to sequences."""
        raise NotImplementedError

    def segments(
        self, tokenizer: Tokenizer, task: Task, parts: Sequence[Part], draw: Draw
    ) -> list[Segment]:
        """The segments of a sequence that consists of `parts`."""
        raise NotImplementedError

    def layout(self, task: Task) -> dict:
        """The fields of `data` (and the family) that determine the parts of each sequence."""
        data, names = task.data, ("length", "decoder_length", "packing", "too_long")
        fields = {name: getattr(data, name) for name in names}
        return fields | {"objective": data.chosen.name, "family": task.model.family}

    def losses(self, outputs: Any, batch: Batch) -> dict[str, Loss]:
        """The losses of a batch by name, each a sum. By default, the cross-entropy of `predicts`.
        `outputs` are the `ModelOutputs` of training/step.py, which compute cross-entropies.

        Training minimizes the sum of `loss / weight` over all losses. The main loss of a run is
        "tokens", else "labels", else the first. It is reported as `loss`, others as `NAME_loss`."""
        losses = {}
        if "tokens" in self.predicts:
            losses["tokens"] = outputs.token_loss(batch["targets"], batch["weights"])
        if "labels" in self.predicts:
            losses["labels"] = outputs.label_loss(batch["labels"], batch["label_weights"])
        return losses

    def weights(self, batch: Batch) -> dict[str, jax.Array]:
        """The weight in the global batch, float32[], by which each of `losses` is divided. It
        depends on the batch alone, so losses of micro-batches are divided by the whole batch's."""
        fields = {"tokens": "weights", "labels": "label_weights"}
        return {name: jnp.sum(batch[fields[name]]) for name in self.predicts}


def parts(texts: Texts, max_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of pieces of at most `max_tokens`. No piece crosses the end of its text."""
    ends = np.asarray(texts.ends)
    counts = -(-texts.lengths // max_tokens)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(ends - texts.lengths, counts)
    starts = starts + (np.arange(counts.sum()) - first) * max_tokens
    return starts, np.minimum(starts + max_tokens, np.repeat(ends, counts))


def keep(too_long: np.ndarray, data) -> tuple[np.ndarray, dict[str, int]]:
    """The indices of the examples that `data.too_long` keeps, and a report on the others."""
    drops, count = data.too_long == "drop", int(too_long.sum())
    indices = np.flatnonzero(~too_long) if drops else np.arange(len(too_long))
    text = f"examples longer than {data.length} tokens were {'dropped' if drops else 'cut'}"
    return indices, {text: count} if count else {}


def pack(sizes: Sequence[np.ndarray], rooms: Sequence[int], num_open: int = 16) -> list[np.ndarray]:
    """Packs examples into sequences: first fit over a few open ones, in a fixed random order.
    `sizes` and `rooms` have one entry for each side of a sequence (encoder, decoder). In each side,
    the sizes of the examples in a sequence add up to at most its room. At most `num_open` sequences
    are open at once. Returns the indices of the examples in each sequence."""
    order = np.random.Generator(np.random.Philox(0)).permutation(len(sizes[0]))
    needs = np.stack(sizes, axis=1)[order].tolist()
    full: list[tuple[list[int], list[int]]] = []  # ([room left in each side], members)
    sequences: list[tuple[list[int], list[int]]] = []  # the open ones
    for i, need in zip(order.tolist(), needs, strict=True):
        sequence = next((x for x in sequences if all(map(operator.le, need, x[0]))), None)
        if sequence is None:
            if len(sequences) == num_open:  # close the fullest
                full.append(sequences.pop(min(range(num_open), key=lambda s: min(sequences[s][0]))))
            sequences.append(sequence := (list(rooms), []))
        sequence[0][:] = map(operator.sub, sequence[0], need)
        sequence[1].append(i)
    return [np.asarray(members) for _, members in full + sequences]


def shifted(start: int, targets: np.ndarray) -> np.ndarray:
    """The decoder inputs for `targets`: `start`, then each target but the last."""
    return np.concatenate([[start], targets[:-1]]).astype(np.int32)


def given(model: ModelConfig, start: int, source: np.ndarray, targets: np.ndarray) -> Segment:
    """A segment in which the model reads `source` and predicts `targets`. A decoder-only model
    reads `start`, `source` and `targets` in one sequence."""
    if model.is_encoder_decoder:
        return Segment(shifted(start, targets), targets, source)
    both = np.concatenate([source, targets]).astype(np.int32)
    weights = (np.arange(len(both)) >= len(source)).astype(np.float32)
    prefix = len(source) + 1 if model.prefix_lm else None
    return Segment(shifted(start, both), both, weights=weights, prefix=prefix)
