"""The target from the source: translation and everything like it."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from transformer.data.objectives.base import (
    Draw,
    Objective,
    Segment,
    continued,
    pack,
    register,
    shifted,
)


@register("seq2seq")
@dataclasses.dataclass(frozen=True)
class Seq2Seq(Objective):
    """The encoder reads x, eos (behind a sign of its own, where `data.tokenizer.source_bos_id` is one); the decoder reads bos, y and is
    asked for y, eos. A decoder alone reads bos, x, eos, y and is asked for the same; it may read x both ways (`model.prefix_lm`).

    A pair with a side longer than its row is dropped or, with `too_long="cut"`, cut (its eos is kept). A decoder alone has half of the row
    for each where it has to be cut.
    """

    families: ClassVar = ("encoder_decoder", "decoder")
    columns: ClassVar = ("source", "target")
    keeps_whole: ClassVar = True
    gives_prefix: ClassVar = True

    def rows(self, store, part, task):
        return (
            _OneRow(store, part, task)
            if task.model.family == "decoder"
            else _TwoRows(store, part, task)
        )


class _Pairs:
    """Which pairs stand in which row. `sizes` of pairs and `rooms` of a row are lists: of the two sides, or of the one row that both
    share."""

    def __init__(self, store, part: str, data):
        self._texts, self._tokenizer, self._before = (
            [store.texts(part, side) for side in (0, 1)],
            store.tokenizer,
            store.tokenizer.before_source,
        )
        sizes, rooms = (
            self.sizes(self._texts[0].lengths + len(self._before), self._texts[1].lengths),
            self.rooms(data),
        )
        self.long = np.any([size > room for size, room in zip(sizes, rooms, strict=True)], axis=0)
        what = "dropped" if data.too_long == "drop" else "cut"
        self.report = (
            {f"examples over {data.length} tokens: {what}": int(self.long.sum())}
            if self.long.any()
            else {}
        )
        pairs = np.flatnonzero(~self.long) if data.too_long == "drop" else np.arange(len(self.long))
        sizes = [np.minimum(size[pairs], room) for size, room in zip(sizes, rooms, strict=True)]
        self.rows = (
            [pairs[members] for members in pack(sizes, rooms)] if data.packing else pairs[:, None]
        )
        # A bucket's decoder rows shrink as its encoder rows do.
        scaled = [-(-size * data.length // room) for size, room in zip(sizes, rooms, strict=True)]
        self.lengths = (
            np.full(len(self.rows), data.length) if data.packing else np.max(scaled, axis=0)
        )

    def pair(self, number: int, rooms: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Source and target, cut to these rooms."""
        source, targets = (texts[number] for texts in self._texts)
        return self._cut([*self._before, *source], rooms[0]), self._cut(targets, rooms[1])

    def _cut(self, ids: Sequence[int], room: int) -> np.ndarray:
        ids = np.array(ids[:room], np.int32)
        ids[-1] = self._tokenizer.eos
        return ids


class _TwoRows(_Pairs):
    """The source in an encoder's row, the target in a decoder's."""

    def __init__(self, store, part: str, task):
        super().__init__(store, part, task.data)
        self._rooms = self.rooms(task.data)

    def sizes(self, source, targets):
        return [source, targets]

    def rooms(self, data):
        return [data.length, data.decoder_length]

    def segments(self, row: int, draw: Draw) -> list[Segment]:
        pairs = [self.pair(number, self._rooms) for number in self.rows[row]]
        return [
            Segment(shifted(self._tokenizer.bos, targets), targets, source)
            for source, targets in pairs
        ]


class _OneRow(_Pairs):
    """The source and the target in one row of a decoder."""

    def __init__(self, store, part: str, task):
        super().__init__(store, part, task.data)
        length, self._prefix = task.data.length, task.model.prefix_lm
        self._halves = length // 2, length - length // 2
        self._length = length

    def sizes(self, source, targets):
        return [source + targets]

    def rooms(self, data):
        return [data.length]

    def segments(self, row: int, draw: Draw) -> list[Segment]:
        out = []
        for number in self.rows[row]:
            source, targets = self.pair(
                number, self._halves if self.long[number] else (self._length, self._length)
            )
            one = continued(self._tokenizer.bos, source, targets)
            out.append(one if self._prefix else dataclasses.replace(one, prefix=None))
        return out
