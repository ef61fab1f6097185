"""Sequence-to-sequence learning, such as translation: predicts a target from a source."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from transformer.data.objectives import OBJECTIVES
from transformer.data.objectives.base import Objective, Segment, continued, keep, pack, shifted


@OBJECTIVES.register("seq2seq")
class Seq2Seq(Objective):
    """Predicts a target y from a source x.

    The encoder reads x, eos, preceded by `data.tokenizer.source_bos_id` if that is set. The decoder
    reads bos, y and predicts y, eos. A decoder-only model reads bos, x, eos, y and also predicts
    y, eos. It may read x bidirectionally (`model.prefix_lm`).

    A pair that does not fit into its sequence is dropped or, with `too_long="cut"`, cut; each cut
    text keeps its eos. In a decoder-only model, each text of a cut pair gets half of the sequence.
    """

    families = ("encoder_decoder", "decoder")
    columns = ("source", "target")
    never_splits = True
    has_prefix = True

    def sequences(self, store, part, task):
        pairs = _DecoderPairs if task.model.family == "decoder" else _EncoderDecoderPairs
        return pairs(store, part, task)


class _Pairs:
    """Assigns pairs to sequences.

    The lists `sizes` (of pairs) and `rooms` (of a sequence) are [source, target] or [both].
    """

    def __init__(self, store, part: str, data):
        self._texts = [store.texts(part, side) for side in (0, 1)]
        self._tokenizer, self._before = store.tokenizer, store.tokenizer.source_prefix_ids
        source, target = (texts.lengths for texts in self._texts)
        sizes, rooms = self.sizes(source + len(self._before), target), self.rooms(data)
        self.long = np.any([size > room for size, room in zip(sizes, rooms, strict=True)], axis=0)
        pairs, self.report = keep(self.long, data)
        sizes = [np.minimum(size[pairs], room) for size, room in zip(sizes, rooms, strict=True)]
        # A bucket scales the lengths of encoder and decoder sequences by the same factor.
        scaled = [-(-size * data.length // room) for size, room in zip(sizes, rooms, strict=True)]
        self.members, self.lengths = pairs[:, None], np.max(scaled, axis=0)
        if data.packing:
            self.members = [pairs[members] for members in pack(sizes, rooms)]
            self.lengths = np.full(len(self.members), data.length)

    def pair(self, number: int, rooms: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The source and the target of a pair, cut to `rooms`."""
        source, targets = (texts[number] for texts in self._texts)
        return self._cut([*self._before, *source], rooms[0]), self._cut(targets, rooms[1])

    def _cut(self, ids: Sequence[int], room: int) -> np.ndarray:
        ids = np.array(ids[:room], np.int32)
        ids[-1] = self._tokenizer.eos
        return ids


class _EncoderDecoderPairs(_Pairs):
    """The source in a sequence of the encoder, the target in one of the decoder."""

    def __init__(self, store, part: str, task):
        super().__init__(store, part, task.data)
        self._rooms = self.rooms(task.data)

    def sizes(self, source, targets):
        return [source, targets]

    def rooms(self, data):
        return [data.length, data.decoder_length]

    def segments(self, index, draw) -> list[Segment]:
        pairs = [self.pair(number, self._rooms) for number in self.members[index]]
        bos = self._tokenizer.bos
        return [Segment(shifted(bos, targets), targets, source) for source, targets in pairs]


class _DecoderPairs(_Pairs):
    """The source and the target in one sequence of a decoder-only model."""

    def __init__(self, store, part: str, task):
        super().__init__(store, part, task.data)
        length, self._prefix = task.data.length, task.model.prefix_lm
        self._halves, self._whole = (length // 2, length - length // 2), (length, length)

    def sizes(self, source, targets):
        return [source + targets]

    def rooms(self, data):
        return [data.length]

    def segments(self, index, draw) -> list[Segment]:
        out = []
        for number in self.members[index]:
            rooms = self._halves if self.long[number] else self._whole
            source, targets = self.pair(number, rooms)
            segment = continued(self._tokenizer.bos, source, targets)
            out.append(segment if self._prefix else dataclasses.replace(segment, prefix=None))
        return out
