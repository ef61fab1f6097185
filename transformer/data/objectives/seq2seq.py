"""The target from the source: translation and everything like it."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from transformer.data.objectives.base import Draw, Objective, Segment, pack, register, shifted


@register("seq2seq")
@dataclasses.dataclass(frozen=True)
class Seq2Seq(Objective):
    """The encoder reads x, eos (behind a sign of its own, where `data.tokenizer.source_bos_id` is one); the decoder reads bos, y and is
    asked for y, eos.

    A pair with a side longer than its row is dropped or, with `too_long="cut"`, cut (its eos is kept).
    """

    families: ClassVar = ("encoder_decoder",)
    columns: ClassVar = ("source", "target")

    def rows(self, store, part, config):
        return _PairRows(store, part, config.data)


class _PairRows:
    def __init__(self, store, part: str, data):
        self._texts, self._tokenizer = [store.texts(part, side) for side in (0, 1)], store.tokenizer
        self._rooms, self._before = (data.length, data.decoder_length), self._tokenizer.before_source
        sizes = [self._texts[0].lengths + len(self._before), self._texts[1].lengths]
        long = np.any([size > room for size, room in zip(sizes, self._rooms, strict=True)], axis=0)
        what = "dropped" if data.too_long == "drop" else "cut"
        self.report = {f"examples over {data.length} tokens: {what}": int(long.sum())} if long.any() else {}
        pairs = np.flatnonzero(~long) if data.too_long == "drop" else np.arange(len(long))
        sizes = [np.minimum(size[pairs], room) for size, room in zip(sizes, self._rooms, strict=True)]
        if data.packing:
            self._rows = [pairs[members] for members in pack(sizes, self._rooms)]
            self.lengths = np.full(len(self._rows), data.length)
        else:
            self._rows = pairs[:, None]
            scaled = -(
                -sizes[1] * data.length // data.decoder_length
            )  # a bucket's decoder rows shrink as its encoder rows do
            self.lengths = np.maximum(sizes[0], scaled)

    def segments(self, row: int, draw: Draw) -> list[Segment]:
        out = []
        for pair in self._rows[row]:
            source, targets = (texts[pair] for texts in self._texts)
            source, targets = self._cut([*self._before, *source], self._rooms[0]), self._cut(targets, self._rooms[1])
            out.append(Segment(shifted(self._tokenizer.bos, targets), targets, source))
        return out

    def _cut(self, ids: Sequence[int], room: int) -> np.ndarray:
        ids = np.array(ids[:room], np.int32)
        ids[-1] = self._tokenizer.eos
        return ids
