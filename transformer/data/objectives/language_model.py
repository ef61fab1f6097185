"""Causal and prefix language modeling: predicts each token from those before it."""

import dataclasses
import itertools

import numpy as np

from transformer.data.objectives import OBJECTIVES
from transformer.data.objectives.base import Objective, OfParts, Part, Segment, Spans, given, parts


@OBJECTIVES.register("causal_lm")
class CausalLM(Objective):
    """Predicts each token from those before it.

    The inputs of a text are bos, x_1, ..., x_n, and its targets x_1, ..., x_n, eos.

    With packing, the texts of a split are concatenated and cut into sequences of `length` tokens.
    Every token is a target exactly once, and a sequence's segments do not attend to each other.
    Without packing, a sequence contains one text or one part of a longer text. The sequences of a
    held-out split may overlap by `eval_overlap` tokens, which are inputs again but not targets."""

    families = ("decoder",)
    scores_every_token = True

    def sequences(self, store, part, task):
        return _LMSequences(self, store, part, task)

    def segments(self, tokenizer, task, parts, draw):
        """The first id of each part is the token before its targets, or bos."""
        return [Segment(ids[:-1], ids[1:]) for (ids,) in parts]


class _LMSequences(OfParts):
    def __init__(self, objective: CausalLM, store, part: str, task):
        super().__init__(objective, store.tokenizer, task)
        texts, self.report = store.texts(part, 0), {}
        self._ids, self._ends = texts.ids, np.asarray(texts.ends)
        overlap = 0 if part == "train" else task.data.eval_overlap
        total, new, packing = len(texts.ids), task.data.length - overlap, task.data.packing
        self._starts = np.arange(0, total, new) if packing else parts(texts, new)[0]
        self._stops = np.minimum(np.append(self._starts[1:], total), self._starts + new)
        self._reads = np.maximum(self._starts - overlap, 0)  # first input of each sequence
        if not packing:
            text_starts = np.concatenate([[0], self._ends[:-1]])
            text_of = np.searchsorted(self._ends, self._starts, "right")
            self._reads = np.maximum(self._reads, text_starts[text_of])
        self.lengths = self._stops - self._reads

    def parts(self, index) -> list[Part]:
        read, stop = int(self._reads[index]), int(self._stops[index])
        first = np.searchsorted(self._ends, read, "right")
        last = np.searchsorted(self._ends, stop, "left")
        out, tokenizer = [], self._tokenizer
        for a, b in itertools.pairwise([read, *map(int, self._ends[first:last]), stop]):
            starts_text = a == 0 or self._ids[a - 1] == tokenizer.eos
            before = tokenizer.bos if starts_text else self._ids[a - 1]
            out.append((np.concatenate([[before], self._ids[a:b]]).astype(np.int32),))
        return out

    def segments(self, index, draw):
        segments, context = super().segments(index, draw), self._starts[index] - self._reads[index]
        sizes = [len(segment.inputs) for segment in segments]
        weights = (np.arange(sum(sizes)) >= context).astype(np.float32)
        pairs = zip(segments, np.split(weights, np.cumsum(sizes)[:-1]), strict=True)
        return [dataclasses.replace(segment, weights=part) for segment, part in pairs]


@OBJECTIVES.register("prefix_lm")
class PrefixLM(Objective):
    """Predicts the rest of a text from its beginning (Raffel et al. 2020, sec. 3.2.1).

    The text is cut at a position drawn anew in every epoch. A decoder-only model reads the
    beginning bidirectionally (`model.prefix_lm`). In an encoder-decoder, the encoder reads it. A
    sequence contains one text or one part of a longer text."""

    families = ("decoder", "encoder_decoder")
    can_pack = False
    has_prefix = True

    def check(self, task):
        return check_prefix(task)

    def sequences(self, store, part, task):
        texts, data, is_pair = store.texts(part, 0), task.data, task.model.is_encoder_decoder
        # The inputs of an encoder end in eos, too.
        max_tokens = min(data.length - 1, data.decoder_length) if is_pair else data.length
        starts, stops = parts(texts, max_tokens)
        keep = stops - starts >= 2
        lengths = sizes = (stops - starts)[keep]
        if is_pair:
            lengths = np.maximum(sizes + 1, -(-sizes * data.length // data.decoder_length))
        spans = Spans(self, store, task, texts.ids, starts[keep], stops[keep], lengths)
        if dropped := int((~keep).sum()):
            spans.report = {"parts of one token were dropped": dropped}
        return spans

    def segments(self, tokenizer, task, parts, draw):
        ((ids,),) = parts
        cut = int(draw().integers(1, len(ids)))
        source = ids[:cut]
        if task.model.is_encoder_decoder:
            source = np.append(source, tokenizer.eos).astype(np.int32)
        return [given(task.model, tokenizer.bos, source, ids[cut:])]


def check_prefix(task) -> str | None:
    """Why a decoder-only model cannot read a prefix bidirectionally; None if it can."""
    if task.model.family == "decoder" and not task.model.prefix_lm:
        return "gives the decoder a prefix to read bidirectionally; set model.prefix_lm=True"
