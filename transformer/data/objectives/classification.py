"""A class for each text, or for each word."""

import dataclasses
from typing import ClassVar

import numpy as np

from transformer.data.objectives.base import Draw, Objective, Segment, register


class _Labels(Objective):
    """Classes instead of tokens, one text a row."""

    families: ClassVar = ("encoder", "decoder")
    keeps_whole: ClassVar = True
    writes: ClassVar = False

    def rows(self, store, part, task):
        return _LabelledRows(store, part, task.data, whole=self.columns[-1] == "label")


@register("classification")
@dataclasses.dataclass(frozen=True)
class Classification(_Labels):
    """The label of a text, read as bos, x_1, ..., x_n, eos. Longer ones are dropped or cut, as `data.too_long` says."""

    columns: ClassVar = ("text", "label")

    def check(self, task):
        if not task.model.num_labels:
            return "asks for labels; set model.num_labels"
        if task.model.pooling == "none":
            return "asks for one label a text; set model.pooling to cls, mean or last"
        if task.model.pooling == "cls" and task.model.family == "decoder":
            return "reads all of a text; the first token of a decoder sees none of it: set model.pooling to last or mean"
        return _one_text_a_row(task)


@register("tagging")
@dataclasses.dataclass(frozen=True)
class Tagging(_Labels):
    """The tag of each word, asked for at its first piece. In the text both stand with spaces between: "the cat sat", "DT NN VB"."""

    columns: ClassVar = ("text", "tags")

    def check(self, task):
        if not task.model.num_labels:
            return "asks for tags; set model.num_labels"
        if task.model.pooling != "none":
            return f"asks for a tag a word; model.pooling = {task.model.pooling!r} leaves one a text: set it to none"
        return _one_text_a_row(task)


def _one_text_a_row(task) -> str | None:
    if task.data.packing:
        return "has one text a row; set data.packing=False (data.buckets saves padding)"
    return None


class _LabelledRows:
    def __init__(self, store, part: str, data, whole: bool):
        self._texts, self._labels, self._tokenizer = (
            store.texts(part, 0),
            store.labels(part),
            store.tokenizer,
        )
        self._room, self._whole = data.length - 1, whole
        lengths = self._texts.lengths
        long = lengths > self._room
        what = "dropped" if data.too_long == "drop" else "cut"
        self.report = (
            {f"examples over {data.length} tokens: {what}": int(long.sum())} if long.any() else {}
        )
        self._rows = np.flatnonzero(~long) if data.too_long == "drop" else np.arange(len(lengths))
        self.lengths = np.minimum(lengths[self._rows], self._room) + 1

    def segments(self, row: int, draw: Draw) -> list[Segment]:
        i, tokenizer = self._rows[row], self._tokenizer
        ids = np.array(self._texts[i][: self._room], np.int32)
        ids[-1] = tokenizer.eos
        inputs = np.concatenate([[tokenizer.bos], ids]).astype(np.int32)
        if self._whole:
            return [Segment(inputs, label=int(self._labels[i]))]
        start = self._texts.ends[i - 1] if i else 0
        return [
            Segment(
                inputs,
                label=np.concatenate([[-1], self._labels[start : start + len(ids) - 1], [-1]]),
            )
        ]
