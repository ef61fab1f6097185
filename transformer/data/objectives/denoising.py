"""Span corruption (Raffel et al. 2020, T5) and its mixtures (Tay et al. 2023, UL2)."""

import dataclasses
from typing import ClassVar, NamedTuple

import numpy as np

from transformer.data.objectives.base import Draw, Objective, Segment, continued, register, shifted
from transformer.data.objectives.language_model import needs_prefix


class Denoiser(NamedTuple):
    """Spans of `mean_length` tokens on average, a share `rate` of all, are taken out; or, with no length, all from a place on."""

    rate: float
    mean_length: float = 0.0
    sign: int = -1  # which mode sign stands before what is read; -1: none

    def counts(self, tokens: int) -> tuple[int, int]:
        """(tokens taken out, spans) of so many tokens: at least one, never all."""
        noise = min(max(round(tokens * self.rate), 1), tokens - 1)
        spans = max(round(noise / self.mean_length), 1) if self.mean_length else 1
        return noise, min(spans, noise, tokens - noise)

    def needs(self, tokens: int) -> tuple[int, int]:
        """(tokens to read, tokens to write) of so many, with sentinels, end and mode sign."""
        noise, spans = self.counts(tokens)
        read = tokens - noise + (self.sign >= 0)
        return (read + spans + 1, noise + spans + 1) if self.mean_length else (read, noise)

    def split(
        self, ids: np.ndarray, sentinel: int, eos: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """(what is read, what is asked for). Each span is a sentinel in the one and stands behind it in the other; `sentinel` is the
        first, those after it count down."""
        noise, spans = self.counts(len(ids))
        if not self.mean_length:
            return ids[: len(ids) - noise], ids[len(ids) - noise :]
        # As T5's random_spans_noise_mask: kept and taken spans alternate, a kept one first.
        taken, kept = (_cut_randomly(n, spans, generator) for n in (noise, len(ids) - noise))
        pieces = np.split(ids, np.cumsum(np.stack([kept, taken], axis=1).ravel())[:-1])
        signs = [np.array([sentinel - i]) for i in range(spans)]
        read = [x for i in range(spans) for x in (pieces[2 * i], signs[i])]
        asked = [x for i in range(spans) for x in (signs[i], pieces[2 * i + 1])]
        return np.concatenate([*read, [eos]]), np.concatenate([*asked, [eos]])


def _cut_randomly(total: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """`total` in `count` positive parts, each such cut as likely as any other."""
    cuts = np.sort(generator.permutation(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


@dataclasses.dataclass(frozen=True)
class _Denoising(Objective):
    """Texts, end to end and cut into pieces of equal length, each denoised by one of `denoisers`, drawn anew in every epoch."""

    families: ClassVar = ("encoder_decoder", "decoder")
    packs: ClassVar = False
    lengths_differ: ClassVar = False
    gives_prefix: ClassVar = True
    writes: ClassVar = False  # only what fills the gaps of a text
    modes: ClassVar[int] = 0  # mode signs

    @property
    def denoisers(self) -> tuple[Denoiser, ...]:
        raise NotImplementedError

    @property
    def reserved(self):
        return self.sentinels + self.modes

    def adds(self, tokenizer):
        return self.reserved if self._brought(tokenizer) is None else self.modes

    def first_sentinel(self, tokenizer) -> int:
        """Those after it count down: from the tokenizer's own, or from the top, above the modes."""
        brought = self._brought(tokenizer)
        return tokenizer.vocab_size + self.reserved - 1 if brought is None else brought

    def _brought(self, tokenizer) -> int | None:
        """The first sentinel, of a tokenizer that brings as many as are needed."""
        first, last = (tokenizer.find(f"<extra_id_{i}>") for i in (0, self.sentinels - 1))
        return first if first is not None and last == first - self.sentinels + 1 else None

    def check(self, task):
        if problem := needs_prefix(task):
            return problem
        if any(not 0 < d.rate < 1 for d in self.denoisers):
            return f"has rate = {self.rate}, which must lie between 0 and 1"
        size = self.piece(task)
        if size < 2:
            return f"does not fit into data.length = {task.data.length}; make it longer"
        spans = max(d.counts(size)[1] for d in self.denoisers)
        if spans > self.sentinels:
            return f"has {self.sentinels} sentinels, but {spans} spans in pieces of {size} tokens; raise sentinels or mean_length"
        return None

    def piece(self, task) -> int:
        """The longest piece that every denoiser can fit into a row."""
        data, alone = task.data, task.model.family == "decoder"
        fits = lambda read, write: (
            read + write <= data.length
            if alone
            else read <= data.length and write <= data.decoder_length
        )
        size = 2 * (data.length + data.decoder_length)
        while size >= 2 and not all(fits(*d.needs(size)) for d in self.denoisers):
            size -= 1
        return size

    def rows(self, store, part, task):
        return _Pieces(self, store, part, task)


class _Pieces:
    def __init__(self, objective: _Denoising, store, part: str, task):
        self._objective, self._tokenizer, self.report = objective, store.tokenizer, {}
        self._ids, self._size = store.texts(part, 0).ids, objective.piece(task)
        self._alone = task.model.family == "decoder"
        count = len(self._ids) // self._size + (len(self._ids) % self._size >= 2)
        self.lengths = np.full(count, task.data.length)

    def segments(self, row: int, draw: Draw) -> list[Segment]:
        ids = np.asarray(self._ids[row * self._size : (row + 1) * self._size], np.int32)
        generator, tokenizer, denoisers = draw(), self._tokenizer, self._objective.denoisers
        denoiser = (
            denoisers[generator.integers(len(denoisers))] if len(denoisers) > 1 else denoisers[0]
        )
        read, asked = denoiser.split(
            ids, self._objective.first_sentinel(tokenizer), tokenizer.eos, generator
        )
        if denoiser.sign >= 0:
            read = np.concatenate([[tokenizer.vocab_size + denoiser.sign], read])
        read, asked = read.astype(np.int32), asked.astype(np.int32)
        if self._alone:
            return [continued(tokenizer.bos, read, asked)]
        return [Segment(shifted(tokenizer.bos, asked), asked, read)]


@register("span_corruption")
@dataclasses.dataclass(frozen=True)
class SpanCorruption(_Denoising):
    """A share `rate` of the tokens is taken out, in spans of `mean_length` on average, each replaced by a sentinel; asked for are the
    sentinels with what they stand for, and eos (Raffel et al. 2020, sec. 3.1.4).

    Sentinel i is the i-th id from the top: with 32,000 pieces and 100 sentinels 32,099, 32,098, ... as in T5; of a tokenizer that brings
    sentinels (`<extra_id_0>`), they are its own. Texts stand end to end,
    cut into pieces as long as `data.length` and `data.target_length` allow. A decoder alone reads the corrupted text as a prefix.
    """

    rate: float = 0.15
    mean_length: float = 3.0
    sentinels: int = 100

    def check(self, task):
        if self.mean_length < 1:
            return f"has mean_length = {self.mean_length}; a span has at least 1 token"
        return super().check(task)

    @property
    def denoisers(self):
        return (Denoiser(self.rate, self.mean_length),)


@register("ul2")
@dataclasses.dataclass(frozen=True)
class UL2(_Denoising):
    """UL2's mixture of denoisers, each as likely (Tay et al. 2023, table 1): R, short spans (mean 3 and 8, 15 %); X, long ones or many
    (mean 3, 8 and 64 at 50 %, 64 at 15 %); S, all from three quarters on. A mode sign says which, before what is read: R, X and S are the
    first three ids behind the tokenizer's pieces.
    """

    sentinels: int = 256

    modes: ClassVar[int] = 3

    @property
    def denoisers(self):
        r, x, s = range(3)
        spans = [
            (0.15, 3.0, r),
            (0.15, 8.0, r),
            (0.5, 3.0, x),
            (0.5, 8.0, x),
            (0.15, 64.0, x),
            (0.5, 64.0, x),
        ]
        return (*(Denoiser(*given) for given in spans), Denoiser(0.25, sign=s))
