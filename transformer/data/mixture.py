"""Mixtures: training text from several sources, whose weights may change during the run."""

import bisect
import math
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction

from transformer.checks import strict
from transformer.errors import UserError, nearest
from transformer.limits import NonNegative

OWN_FIELDS = ("name", "weight", "max_epochs")
"""Fields of an entry that belong to the mixture. All others replace fields of `data`."""

TEXT_FIELDS = (
    "corpus", "format", "train", "valid", "test", "fields", "reverse", "held_out", "max_examples",
)  # fmt: skip
"""Fields of `data` that determine the text and its splits."""

DATA_FIELDS = (*TEXT_FIELDS, "objective", "too_long")
"""Fields of `data` that each source may set."""


@strict("data.mixture")
class Source:
    """The part of a text in a mixture."""

    name: str
    # Share of the sequences, relative to those of the other sources, or ((step, weight), ...): each
    # weight applies from its step on, the first from step 0. None: set by the temperature.
    weight: float | tuple[tuple[float, ...], ...] | None = None
    max_epochs: NonNegative = 0.0  # how often a run may read the source; 0: no limit

    def __post_init__(self):
        if not re.fullmatch(r"[\w.-]+", self.name):
            allowed = "letters, digits, '.', '-' and '_'"
            raise UserError(f"data.mixture.name: {self.name!r} must consist of {allowed}")
        are_pairs = all(len(pair) == 2 for pair in self.phases)
        steps, weights = zip(*self.phases, strict=True) if are_pairs and self.phases else ((), ())
        in_order = list(steps) == sorted(set(steps)) and all(map(float.is_integer, steps))
        if steps[:1] != (0,) or not in_order or not all(0 <= w < math.inf for w in weights):
            form = "a number, or pairs (step, weight) whose steps increase from 0"
            problem = f"{self.weight} must be {form}; no weight is negative"
            raise UserError(f"data.mixture.weight: {problem} ({self.name})")

    @property
    def phases(self) -> tuple[tuple[float, ...], ...]:
        """(first step, weight) of each phase of the run."""
        return self.weight if isinstance(self.weight, tuple) else ((0.0, self.weight or 0.0),)


def read_sources(entries: Sequence[Mapping], temperature: float) -> list[Source]:
    """Reads the entries of `data.mixture`, without their fields of `data`. Raises UserError."""
    sources = []
    for entry in entries:
        allowed = (*OWN_FIELDS, *DATA_FIELDS)
        if unknown := [key for key in entry if key not in allowed]:
            way_out = nearest(unknown[0], allowed)
            raise UserError(f"data.mixture.{unknown[0]}: a source cannot set this; {way_out}")
        source = Source(**{key: entry[key] for key in OWN_FIELDS if key in entry})
        if (source.weight is None) != bool(temperature):
            way_out = "set a weight in each source, or data.mixture_temperature"
            both = "no weight" if source.weight is None else "a weight and a temperature"
            raise UserError(f"data.mixture.weight: {source.name!r} has {both}; {way_out}")
        sources.append(source)
    names = [source.name for source in sources]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"data.mixture.name: two sources are named {twice[0]!r}; rename one")
    for step in {int(step) for source in sources for step, _ in source.phases}:
        if not temperature and not any(weights_at(sources, step)):
            raise UserError(f"data.mixture.weight: all weights are 0 at step {step}; increase one")
    return sources


def weights_at(sources: Sequence[Source], step: int) -> list[Fraction]:
    """The weight of each source at a step, exactly as its decimal number."""
    current = [max(phase for phase in source.phases if phase[0] <= step) for source in sources]
    return [Fraction(repr(weight)) for _, weight in current]


def check_epochs(entries: Sequence[Mapping], epochs: Mapping[str, float]) -> None:
    """Raises UserError if a run reads a source more often than its `max_epochs`."""
    for entry in entries:
        name, limit = entry["name"], entry.get("max_epochs", 0)
        if limit and epochs[name] > limit:
            problem = f"{limit:g}, but the run reads source {name!r} {epochs[name]:.2f} times"
            raise UserError(f"data.mixture.max_epochs: {problem}; lower its weight or train.steps")


def of_temperature(tokens: Sequence[int], temperature: float) -> list[Fraction]:
    """Weights n^(1 / T) for texts of n tokens (Arivazhagan et al. 2019, "M4"). T = 1: by size."""
    return [Fraction((n / max(tokens)) ** (1 / temperature)) for n in tokens]


class Turns:
    """Which source provides sequence n of a training run, in O(1) time and memory.

    With weights w_1, ..., w_K, whose sum is W, source 1 provides n - floor(n (W - w_1) / W) of the
    first n sequences. The other sources divide the rest by the same rule. The number of sequences
    of a source thus differs from its share by less than K."""

    def __init__(self, phases: Sequence[tuple[int, Sequence[Fraction]]]):
        """`phases` are pairs (first sequence, weights). The first phase begins at 0."""
        self._starts = [start for start, _ in phases]
        scale = lambda weights: math.lcm(*(weight.denominator for weight in weights))
        self._weights = [[int(x * scale(weights)) for x in weights] for _, weights in phases]
        self._before = [[0] * len(self._weights[0])]  # sequences of each source before each phase
        for start in self._starts[1:]:
            self._before.append(self.counts(start, len(self._before) - 1))

    def counts(self, n: int, phase: int | None = None) -> list[int]:
        """The number of sequences of each source among the first n, which end in `phase`."""
        phase = bisect.bisect_right(self._starts, n) - 1 if phase is None else phase
        counts, n, rest = [], n - self._starts[phase], sum(self._weights[phase])
        for before, weight in zip(self._before[phase], self._weights[phase], strict=True):
            others = n * (rest - weight) // rest if rest else 0
            counts.append(before + n - others)
            n, rest = others, rest - weight
        return counts

    def __call__(self, n: int) -> tuple[int, int]:
        """The source of sequence n, and the number of sequences of this source before it."""
        before, after = self.counts(n), self.counts(n + 1)
        source = next(i for i, (a, b) in enumerate(zip(before, after, strict=True)) if b > a)
        return source, before[source]
