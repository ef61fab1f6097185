"""Classification of texts, and tagging of words."""

import numpy as np

from transformer.data.objectives.base import Draw, Objective, Segment, keep, register


class _Labels(Objective):
    """Predicts classes instead of tokens, with one text per sequence."""

    families = ("encoder", "decoder")
    never_splits = True
    generates_text = False

    def check(self, task):
        if task.data.packing:
            return "puts one text in each sequence; set data.packing=False"

    def sequences(self, store, part, task):
        return _LabeledSequences(store, part, task.data, whole=self.columns[-1] == "label")


@register("classification")
class Classification(_Labels):
    """Predicts the label of a text from bos, x_1, ..., x_n, eos.

    Texts that are too long are dropped or cut (`data.too_long`)."""

    columns = ("text", "label")

    def check(self, task):
        if not task.model.num_labels:
            return "predicts labels; set model.num_labels"
        if task.model.pooling == "none":
            return "predicts one label per text; set model.pooling to cls, mean or last"
        if task.model.pooling == "cls" and task.model.family == "decoder":
            problem = "the first token of a decoder attends only to itself"
            return f"classifies the whole text, but {problem}; set model.pooling to last or mean"
        return super().check(task)


@register("tagging")
class Tagging(_Labels):
    """Predicts the tag of each word, at its first piece.

    Words and tags are separated by spaces in the data: "the cat sat", "DT NN VB"."""

    columns = ("text", "tags")

    def check(self, task):
        if not task.model.num_labels:
            return "predicts tags; set model.num_labels"
        if task.model.pooling != "none":
            return f"tags words, but model.pooling = {task.model.pooling!r}; set it to none"
        return super().check(task)


class _LabeledSequences:
    def __init__(self, store, part: str, data, whole: bool):
        self._texts, self._labels = store.texts(part, 0), store.labels(part)
        self._tokenizer, self._room, self._whole = store.tokenizer, data.length - 1, whole
        lengths = self._texts.lengths
        self._members, self.report = keep(lengths > self._room, data)
        self.lengths = np.minimum(lengths[self._members], self._room) + 1

    def segments(self, index: int, draw: Draw) -> list[Segment]:
        i, tokenizer = self._members[index], self._tokenizer
        ids = np.array(self._texts[i][: self._room], np.int32)
        ids[-1] = tokenizer.eos
        inputs = np.concatenate([[tokenizer.bos], ids]).astype(np.int32)
        if self._whole:
            return [Segment(inputs, label=int(self._labels[i]))]
        start = self._texts.ends[i - 1] if i else 0
        tags = self._labels[start : start + len(ids) - 1]
        return [Segment(inputs, label=np.concatenate([[-1], tags, [-1]]))]
