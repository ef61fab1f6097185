"""Span corruption (Raffel et al. 2020, T5) and its mixtures (Tay et al. 2023, UL2)."""

from typing import Annotated, NamedTuple

import numpy as np

from transformer.data.objectives.base import Objective, Spans, given, register
from transformer.data.objectives.language_model import check_prefix
from transformer.limits import POSITIVE, Rate, at_least


class Denoiser(NamedTuple):
    """Removes a fraction `rate` of the tokens: spans of `mean_length` on average; 0: the end."""

    rate: float
    mean_length: float = 0.0
    mode_token: int = -1  # index of the mode token that precedes the inputs; -1: none

    def counts(self, tokens: int) -> tuple[int, int]:
        """(removed tokens, spans) of a piece. At least one token is removed, and never all."""
        noise = min(max(round(tokens * self.rate), 1), tokens - 1)
        spans = max(round(noise / self.mean_length), 1) if self.mean_length else 1
        return noise, min(spans, noise, tokens - noise)

    def needs(self, tokens: int) -> tuple[int, int]:
        """(input length, target length) of a piece, with sentinels, eos and mode token."""
        noise, spans = self.counts(tokens)
        inputs = tokens - noise + (self.mode_token >= 0)
        return (inputs + spans + 1, noise + spans + 1) if self.mean_length else (inputs, noise)

    def split(self, ids: np.ndarray, sentinel: int, eos: int, generator) -> tuple[np.ndarray, ...]:
        """(inputs, targets). A sentinel replaces each span in the inputs, and precedes it in the
        targets. `sentinel` is the id of the first one; the ids of the others count down from it."""
        noise, spans = self.counts(len(ids))
        if not self.mean_length:
            return ids[: len(ids) - noise], ids[len(ids) - noise :]
        # As in T5's random_spans_noise_mask: remaining and removed spans alternate, in this order.
        removed, remaining = (_cut_randomly(n, spans, generator) for n in (noise, len(ids) - noise))
        pieces = np.split(ids, np.cumsum(np.stack([remaining, removed], axis=1).ravel())[:-1])
        sentinels = [np.array([sentinel - i]) for i in range(spans)]
        inputs = [x for i in range(spans) for x in (pieces[2 * i], sentinels[i])]
        targets = [x for i in range(spans) for x in (sentinels[i], pieces[2 * i + 1])]
        return np.concatenate([*inputs, [eos]]), np.concatenate([*targets, [eos]])


def _cut_randomly(total: int, count: int, generator: np.random.Generator) -> np.ndarray:
    """Splits `total` into `count` positive parts. All such splits are equally likely."""
    cuts = np.sort(generator.permutation(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


class _Denoising(Objective):
    """Cuts the joined texts into equal pieces. One of `denoisers`, drawn anew, corrupts each."""

    families = ("encoder_decoder", "decoder")
    can_pack = False
    has_variable_length = False
    has_prefix = True
    generates_text = False  # the model only fills the gaps of a text
    modes = 0  # number of mode tokens
    sentinels: int
    denoisers: tuple[Denoiser, ...]

    @property
    def reserved(self):
        return self.sentinels + self.modes

    def num_added_tokens(self, tokenizer):
        return self.reserved if self._brought(tokenizer) is None else self.modes

    def _brought(self, tokenizer) -> int | None:
        """The id of the tokenizer's first sentinel; None if it has fewer than `sentinels`."""
        first, last = (tokenizer.find(f"<extra_id_{i}>") for i in (0, self.sentinels - 1))
        return first if first is not None and last == first - self.sentinels + 1 else None

    def check(self, task):
        if problem := check_prefix(task):
            return problem
        size = self.piece(task)
        if size < 2:
            return f"does not fit into data.length = {task.data.length}; increase data.length"
        if (spans := max(d.counts(size)[1] for d in self.denoisers)) > self.sentinels:
            needs = f"{spans} spans in pieces of {size} tokens"
            return f"has {self.sentinels} sentinels, but {needs}; increase sentinels or mean_length"

    def piece(self, task) -> int:
        """The length of the longest piece that fits into a sequence with every denoiser."""
        data, decoder_only = task.data, task.model.family == "decoder"
        together = lambda inputs, targets: inputs + targets <= data.length
        apart = lambda inputs, targets: inputs <= data.length and targets <= data.decoder_length
        fits, size = together if decoder_only else apart, 2 * (data.length + data.decoder_length)
        while size >= 2 and not all(fits(*d.needs(size)) for d in self.denoisers):
            size -= 1
        return size

    def sequences(self, store, part, task):
        ids, size = store.texts(part, 0).ids, self.piece(task)
        starts = np.arange(0, len(ids) - 1, size)  # the last piece has at least two tokens
        stops = np.minimum(starts + size, len(ids))
        return Spans(self, store, task, ids, starts, stops, np.full(len(starts), task.data.length))

    def layout(self, task):
        return super().layout(task) | {"objective": "denoising", "piece": self.piece(task)}

    def segments(self, tokenizer, task, parts, draw):
        ((ids,),), generator, denoisers = parts, draw(), self.denoisers
        denoiser = denoisers[generator.integers(len(denoisers)) if len(denoisers) > 1 else 0]
        if (sentinel := self._brought(tokenizer)) is None:  # the highest reserved id, above modes
            sentinel = tokenizer.vocab_size + self.reserved - 1
        inputs, targets = denoiser.split(ids, sentinel, tokenizer.eos, generator)
        if denoiser.mode_token >= 0:
            inputs = np.concatenate([[tokenizer.vocab_size + denoiser.mode_token], inputs])
        inputs, targets = inputs.astype(np.int32), targets.astype(np.int32)
        return [given(task.model, tokenizer.bos, inputs, targets)]


@register("span_corruption")
class SpanCorruption(_Denoising):
    """Replaces spans of tokens by sentinels and predicts them (Raffel et al. 2020, sec. 3.1.4).

    The spans are `mean_length` tokens long on average and contain a fraction `rate` of all tokens.
    The targets are each sentinel with the tokens that it replaces, then eos.

    Sentinel i is the i-th id from the top: 32,099, 32,098, ... for 32,000 pieces and 100 sentinels,
    as in T5. If the tokenizer has sentinels (`<extra_id_0>`), these are used instead. Texts are
    concatenated and cut into pieces as long as `data.length` and `data.target_length` allow. A
    decoder-only model reads the corrupted text as a prefix."""

    rate: Annotated[Rate, POSITIVE] = 0.15
    mean_length: Annotated[float, at_least(1)] = 3.0
    sentinels: int = 100

    @property
    def denoisers(self):
        return (Denoiser(self.rate, self.mean_length),)


@register("ul2")
class UL2(_Denoising):
    """UL2's mixture of denoisers, each equally likely (Tay et al. 2023, table 1).

    R: short spans (mean length 3 or 8, at 15 %).
    X: long or many spans (mean length 3, 8 or 64 at 50 %, or 64 at 15 %).
    S: the last quarter of the piece.

    A mode token before the inputs indicates R, X or S: the first three ids after the pieces."""

    sentinels: int = 256

    modes = 3

    @property
    def denoisers(self):
        r, x, s = range(3)
        short = [(0.15, 3.0, r), (0.15, 8.0, r)]
        spans = [*short, (0.5, 3.0, x), (0.5, 8.0, x), (0.15, 64.0, x), (0.5, 64.0, x)]
        return (*(Denoiser(*options) for options in spans), Denoiser(0.25, mode_token=s))
