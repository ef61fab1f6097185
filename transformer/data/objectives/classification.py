"""Classification of texts, tagging of words, and extraction of answers.

Shape suffixes: B batch, T length, C classes."""

import jax.numpy as jnp
import numpy as np

from transformer.data.objectives.base import Draw, Objective, Segment, keep, register
from transformer.errors import UserError


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


@register("extractive_qa")
class ExtractiveQA(_Labels):
    """Predicts the first and the last word of the answer in a text (Devlin et al. 2019, sec. 4.2).

    The data are those of `tagging`, with the tag "answer" for the words of the answer: "who ran ?
    the cat ran", "- - - answer answer -". P(start = i) = exp(s_i) / sum_j exp(s_j) over the words,
    at their first pieces; s_i is the first logit of word i, and the second gives P(end = i). The
    loss is -(log P(start) + log P(end)) / 2. The accuracy is the share of texts with both right. A
    text without an answer has both at bos, as in SQuAD 2.0."""

    columns = ("text", "tags")

    def check(self, task):
        if task.model.pooling != "span":
            return "predicts where a span begins and ends; set model.pooling='span'"
        return super().check(task)

    def sequences(self, store, part, task):
        if "answer" not in (tags := store.meta["classes"]):
            raise UserError(f"data: tags {', '.join(tags)}; tag the words of an answer 'answer'")
        return _LabeledSequences(store, part, task.data, answer=tags.index("answer"))

    def losses(self, outputs, batch):
        candidates_BxT = batch["label_weights"] > 0
        answer_BxT = candidates_BxT & (batch["labels"] > 0)
        place_T, first_B = jnp.arange(answer_BxT.shape[1]), jnp.argmax(answer_BxT, axis=1)
        last_B = jnp.max(jnp.where(answer_BxT, place_T, 0), axis=1)
        return {"labels": outputs.span_loss(jnp.stack([first_B, last_B], axis=1), candidates_BxT)}

    def weights(self, batch):
        return {"labels": jnp.sum(jnp.any(batch["label_weights"] > 0, axis=1), dtype=jnp.float32)}


class _LabeledSequences:
    """Texts with one label each (`whole`) or, for each word, its tag or whether it is `answer`."""

    def __init__(self, store, part: str, data, whole: bool = False, answer: int | None = None):
        self._texts, self._labels, self._answer = store.texts(part, 0), store.labels(part), answer
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
        if self._answer is None:
            return [Segment(inputs, label=np.concatenate([[-1], tags, [-1]]))]
        tags = np.where(tags < 0, -1, tags == self._answer)
        return [Segment(inputs, label=np.concatenate([[0], tags, [-1]]))]
