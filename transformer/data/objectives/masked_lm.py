"""Masked language modeling, with and without next-sentence prediction (Devlin et al. 2019)."""

from typing import Annotated

import numpy as np

from transformer.data.objectives.base import Draw, Objective, Segment, Spans, pack, parts, register
from transformer.errors import UserError
from transformer.limits import POSITIVE, Rate


@register("masked_lm")
class MaskedLM(Objective):
    """Predicts a fraction `rate` of the tokens, drawn anew in every epoch.

    Of these, a fraction `mask` is replaced by the mask token and a fraction `random` by random
    pieces; the others are unchanged (BERT: 80, 10 and 10 %). With `whole_words`, all pieces of a
    word are predicted or none. The mask token is that of a tokenizer.json, or follows the pieces.

    A sequence is bos, x_1, ..., x_n, eos (BERT's [CLS] and [SEP]). Longer texts are split.

    With `next_sentence`, texts are split into parts of (length - 3) / 2 tokens, and a sequence is
    bos, A, eos, B, eos. B is the part that follows A (label 0) or, half of the time, a part of
    another text (label 1). Token types 0 and 1 mark A and B. Texts of one part are only B."""

    rate: Annotated[Rate, POSITIVE] = 0.15
    mask: float = 0.8
    random: float = 0.1
    whole_words: bool = False
    next_sentence: bool = False

    families = ("encoder",)
    generates_text = False

    @property
    def predicts(self):
        return ("tokens", "labels") if self.next_sentence else ("tokens",)

    @property
    def reserved(self):
        return 1

    def num_added_tokens(self, tokenizer):
        return 0 if tokenizer.mask is not None else 1

    def check(self, task):
        model = task.model
        if not (self.mask >= 0 and self.random >= 0 and self.mask + self.random <= 1):
            limits = "which must not be negative or add up to more than 1"
            return f"has mask = {self.mask} and random = {self.random}, {limits}"
        heads = (model.token_types, model.num_labels, model.pooling)
        if self.next_sentence and heads != (2, 2, "cls"):
            settings = "model.token_types=2, model.num_labels=2, model.pooling='cls'"
            return f"with next_sentence distinguishes two sentences; set {settings}"
        if self.next_sentence and task.data.length < 5:
            return "with next_sentence needs sequences of at least 5 tokens; increase data.length"
        if self.next_sentence and (task.data.packing or task.data.buckets):
            way_out = "set data.packing=False and leave out data.buckets"
            return f"with next_sentence puts one pair in each sequence; {way_out}"

    def sequences(self, store, part, task):
        if self.next_sentence:
            return _SentencePairs(self, store, part, task)
        texts, data = store.texts(part, 0), task.data
        starts, stops = parts(texts, data.length - 1)
        sizes, members = stops - starts + 1, None
        if data.packing:
            members = pack([sizes], [data.length])
            sizes = np.full(len(members), data.length)
        return Spans(self, store, task, texts.ids, starts, stops, sizes, members)

    @property
    def can_prepare(self):
        return not self.next_sentence

    def segments(self, tokenizer, task, parts, draw):
        out, generator = [], draw()
        for (text,) in parts:
            ids = np.concatenate([[tokenizer.bos], text]).astype(np.int32)
            inputs, weights = self.corrupt(ids, tokenizer, generator)
            out.append(Segment(inputs, ids, weights=weights))
        return out

    def corrupt(self, ids: np.ndarray, tokenizer, generator) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, weight of each token as a target)."""
        candidates = np.flatnonzero((ids != tokenizer.bos) & (ids != tokenizer.eos))
        is_target = np.zeros(len(ids), bool)
        if len(candidates):
            count = max(1, round(self.rate * len(candidates)))
            is_target[candidates[self._choose(ids[candidates], count, tokenizer, generator)]] = True
        mask = tokenizer.vocab_size if tokenizer.mask is None else tokenizer.mask
        uniform = generator.random(len(ids))
        inputs = np.where(is_target & (uniform < self.mask), mask, ids)
        replaced = is_target & (uniform >= self.mask) & (uniform < self.mask + self.random)
        inputs[replaced] = generator.choice(tokenizer.text_ids, int(replaced.sum()))
        return inputs.astype(np.int32), is_target.astype(np.float32)

    def _choose(self, ids: np.ndarray, count: int, tokenizer, generator) -> np.ndarray:
        if not self.whole_words:
            return generator.permutation(len(ids))[:count]
        word = np.cumsum(tokenizer.starts_word[ids])
        numbers, sizes = np.unique(word, return_counts=True)
        chosen, room = [], count
        for i in generator.permutation(len(numbers)):
            # Like BERT's code, skip a word with more pieces than are left to choose.
            if sizes[i] <= room or not chosen:
                chosen.append(numbers[i])
                room -= sizes[i]
        return np.flatnonzero(np.isin(word, chosen))


class _SentencePairs:
    """Parts of texts, two in each sequence."""

    def __init__(self, objective: MaskedLM, store, part: str, task):
        texts, self._objective, self._tokenizer = store.texts(part, 0), objective, store.tokenizer
        self._ids = texts.ids
        starts, stops = parts(texts, (task.data.length - 3) // 2)
        stops = stops - np.isin(stops, texts.ends)  # without the eos of the text
        keep = stops > starts
        self._starts, self._stops = starts[keep], stops[keep]
        self._text = np.searchsorted(np.asarray(texts.ends), self._starts, "right")
        self._first = np.flatnonzero(self._text[:-1] == self._text[1:])
        if len(np.unique(self._text)) < 2:
            problem = f"needs at least two texts; the {part} split has one"
            raise UserError(f"data.objective: next_sentence {problem}")
        alone = len(texts) - len(np.unique(self._text[self._first]))
        self.lengths = np.full(len(self._first), task.data.length)
        self.report = {"texts are too short to form a pair": alone} if alone else {}

    def segments(self, index: int, draw: Draw) -> list[Segment]:
        generator, first = draw(), int(self._first[index])
        label, second = int(generator.random() < 0.5), first + 1
        while label and self._text[second] == self._text[first]:
            second = int(generator.integers(len(self._starts)))
        bos, eos = self._tokenizer.bos, self._tokenizer.eos
        a, b = (self._ids[self._starts[i] : self._stops[i]] for i in (first, second))
        ids = np.concatenate([[bos], a, [eos], b, [eos]]).astype(np.int32)
        inputs, weights = self._objective.corrupt(ids, self._tokenizer, generator)
        types = (np.arange(len(ids)) >= len(a) + 2).astype(np.int32)
        return [Segment(inputs, ids, weights=weights, token_types=types, label=label)]
