"""Sequence-to-sequence learning, such as translation: predicts a target from a source."""

import numpy as np

from transformer.data.objectives.base import Objective, OfParts, Part, given, keep, pack, register


@register("seq2seq")
class Seq2Seq(Objective):
    """Predicts a target y from a source x.

    The encoder reads x, eos, preceded by `data.tokenizer.source_bos_id` if that is set. The decoder
    reads bos, y and predicts y, eos. A decoder-only model reads bos, x, eos, y and also predicts
    y, eos. It may read x bidirectionally (`model.prefix_lm`).

    A pair that does not fit into its sequence is dropped or, with `too_long="cut"`, cut; each cut
    text keeps its eos. In a decoder-only model, each text of a cut pair gets half the sequence."""

    families = ("encoder_decoder", "decoder")
    columns = ("source", "target")
    never_splits = True
    has_prefix = True

    def sequences(self, store, part, task):
        return _Pairs(self, store, part, task)

    def segments(self, tokenizer, task, parts, draw):
        return [given(task.model, tokenizer.bos, *pair) for pair in parts]


class _Pairs(OfParts):
    """Pairs in sequences: an encoder's and a decoder's, or one of a decoder-only model. The lists
    `sizes` (of pairs) and `rooms` (of a sequence) are [source, target] or [both]."""

    def __init__(self, objective: Seq2Seq, store, part: str, task):
        super().__init__(objective, store.tokenizer, task)
        data, self._alone = task.data, task.model.family == "decoder"
        self._texts = [store.texts(part, side) for side in (0, 1)]
        self._before = store.tokenizer.source_prefix_ids
        source, target = (texts.lengths for texts in self._texts)
        sizes, rooms = [source + len(self._before), target], [data.length, data.decoder_length]
        if self._alone:
            sizes, rooms = [sum(sizes)], [data.length]
        self._rooms = rooms
        self._long = np.any([size > room for size, room in zip(sizes, rooms, strict=True)], axis=0)
        pairs, self.report = keep(self._long, data)
        sizes = [np.minimum(size[pairs], room) for size, room in zip(sizes, rooms, strict=True)]
        # A bucket scales the lengths of encoder and decoder sequences by the same factor.
        scaled = [-(-size * data.length // room) for size, room in zip(sizes, rooms, strict=True)]
        self.members, self.lengths = pairs[:, None], np.max(scaled, axis=0)
        if data.packing:
            self.members = [pairs[members] for members in pack(sizes, rooms)]
            self.lengths = np.full(len(self.members), data.length)

    def parts(self, index) -> list[Part]:
        return [self._part(pair) for pair in self.members[index]]

    def _part(self, pair: int) -> Part:
        rooms = self._rooms
        if self._alone:
            length, half = rooms[0], rooms[0] // 2
            rooms = (half, length - half) if self._long[pair] else (length, length)
        source, targets = (texts[pair] for texts in self._texts)
        return self._cut([*self._before, *source], rooms[0]), self._cut(targets, rooms[1])

    def _cut(self, ids: np.ndarray | list[int], room: int) -> np.ndarray:
        """The ids up to `room`, the last of which becomes eos."""
        ids = np.array(ids[:room], np.int32)
        ids[-1] = self._tokenizer.eos
        return ids
