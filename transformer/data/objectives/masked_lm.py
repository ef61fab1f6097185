"""Masked language modelling, with and without next-sentence prediction (Devlin et al. 2019)."""

import dataclasses
from typing import ClassVar

import numpy as np

from transformer.data.objectives.base import Draw, Objective, Segment, pack, parts, register
from transformer.errors import UserError


@register("masked_lm")
@dataclasses.dataclass(frozen=True)
class MaskedLM(Objective):
    """A share `rate` of the tokens, drawn anew in every epoch, is asked for; of these `mask` are replaced by the mask sign, `random` by
    any piece, and the rest stay (BERT: 80, 10, 10 %). `whole_words`: all pieces of a word, or none.

    A text is read as bos, x_1, ..., x_n, eos (bos is BERT's [CLS], eos its [SEP]); longer ones in parts. With `next_sentence` texts are cut
    into parts of (length - 3) / 2 tokens and a row is bos, A, eos, B, eos: B is the part that follows A (label 0) or, half of the time, a
    part of another text (label 1); token types 0 and 1 tell them apart. Texts of one part serve as such a B alone. The mask sign is that of a tokenizer.json ([MASK], <mask>) or the first id behind the pieces.
    """

    rate: float = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_words: bool = False
    next_sentence: bool = False

    families: ClassVar = ("encoder",)
    writes: ClassVar = False

    @property
    def predicts(self):
        return ("tokens", "labels") if self.next_sentence else ("tokens",)

    @property
    def reserved(self):
        return 1

    def adds(self, tokenizer):
        return 0 if tokenizer.mask is not None else 1

    def check(self, task):
        model = task.model
        if not 0 < self.rate < 1:
            return f"has rate = {self.rate}, which must lie between 0 and 1"
        if not (self.mask >= 0 and self.random >= 0 and self.mask + self.random <= 1):
            return f"has mask = {self.mask} and random = {self.random}, shares of one whole"
        if self.next_sentence and (model.token_types, model.num_labels, model.pooling) != (
            2,
            2,
            "cls",
        ):
            return "with next_sentence tells two sentences apart; set model.token_types=2, model.num_labels=2, model.pooling='cls'"
        if self.next_sentence and task.data.length < 5:
            return f"with next_sentence needs rows of 5 tokens at least; data.length = {task.data.length}"
        if self.next_sentence and (task.data.packing or task.data.buckets):
            return "with next_sentence has one pair a row; set data.packing=False and leave out data.buckets"
        return None

    def rows(self, store, part, task):
        return (_SentencePairs if self.next_sentence else _MaskedRows)(self, store, part, task.data)

    def corrupt(
        self, ids: np.ndarray, tokenizer, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """(what is read, weight of each token as a target)."""
        can = np.flatnonzero((ids != tokenizer.bos) & (ids != tokenizer.eos))
        asked = np.zeros(len(ids), bool)
        if len(can):
            wanted = max(1, round(self.rate * len(can)))
            asked[can[self._choose(ids[can], wanted, tokenizer, generator)]] = True
        mask = tokenizer.vocab_size if tokenizer.mask is None else tokenizer.mask
        fate = generator.random(len(ids))
        read = np.where(asked & (fate < self.mask), mask, ids)
        swapped = asked & (fate >= self.mask) & (fate < self.mask + self.random)
        read[swapped] = generator.choice(tokenizer.text_ids, int(swapped.sum()))
        return read.astype(np.int32), asked.astype(np.float32)

    def _choose(
        self, ids: np.ndarray, wanted: int, tokenizer, generator: np.random.Generator
    ) -> np.ndarray:
        if not self.whole_words:
            return generator.permutation(len(ids))[:wanted]
        word = np.cumsum(tokenizer.starts_word[ids])
        numbers, sizes = np.unique(word, return_counts=True)
        chosen, room = [], wanted
        for i in generator.permutation(len(numbers)):
            if (
                sizes[i] <= room or not chosen
            ):  # as BERT's code: a word that would be too much is left out
                chosen.append(numbers[i])
                room -= sizes[i]
        return np.flatnonzero(np.isin(word, chosen))


class _MaskedRows:
    def __init__(self, objective: MaskedLM, store, part: str, data):
        texts, self._objective, self._tokenizer = store.texts(part, 0), objective, store.tokenizer
        self._ids, self.report = texts.ids, {}
        self._starts, self._stops = parts(texts, data.length - 1)
        sizes = self._stops - self._starts + 1
        if data.packing:
            self._rows = pack([sizes], [data.length])
            self.lengths = np.full(len(self._rows), data.length)
        else:
            self._rows, self.lengths = np.arange(len(sizes))[:, None], sizes

    def segments(self, row: int, draw: Draw) -> list[Segment]:
        out, generator = [], draw()
        for i in self._rows[row]:
            ids = np.concatenate(
                [[self._tokenizer.bos], self._ids[self._starts[i] : self._stops[i]]]
            ).astype(np.int32)
            read, weights = self._objective.corrupt(ids, self._tokenizer, generator)
            out.append(Segment(read, ids, weights=weights))
        return out


class _SentencePairs:
    """Parts of texts, two a row."""

    def __init__(self, objective: MaskedLM, store, part: str, data):
        texts, self._objective, self._tokenizer = store.texts(part, 0), objective, store.tokenizer
        self._ids = texts.ids
        starts, stops = parts(texts, (data.length - 3) // 2)
        stops = stops - np.isin(stops, texts.ends)  # without the text's own eos
        keep = stops > starts
        self._starts, self._stops = starts[keep], stops[keep]
        self._text = np.searchsorted(np.asarray(texts.ends), self._starts, "right")
        self._first = np.flatnonzero(self._text[:-1] == self._text[1:])
        if len(np.unique(self._text)) < 2:
            raise UserError(
                f"data.objective: next_sentence needs two texts at least; the {part} text has one"
            )
        alone = len(texts) - len(np.unique(self._text[self._first]))
        self.lengths = np.full(len(self._first), data.length)
        self.report = {"texts are too short for a pair of their own": alone} if alone else {}

    def segments(self, row: int, draw: Draw) -> list[Segment]:
        generator, first = draw(), int(self._first[row])
        label, second = int(generator.random() < 0.5), first + 1
        while label and self._text[second] == self._text[first]:
            second = int(generator.integers(len(self._starts)))
        bos, eos = self._tokenizer.bos, self._tokenizer.eos
        a, b = (self._ids[self._starts[i] : self._stops[i]] for i in (first, second))
        ids = np.concatenate([[bos], a, [eos], b, [eos]]).astype(np.int32)
        read, weights = self._objective.corrupt(ids, self._tokenizer, generator)
        types = (np.arange(len(ids)) >= len(a) + 2).astype(np.int32)
        return [Segment(read, ids, weights=weights, token_types=types, label=label)]
