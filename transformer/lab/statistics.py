"""What a few seeds allow one to say: Student's t, in pairs, corrected for the number of comparisons.

Seeds are few and their losses near normal; so means have t intervals (Gosset 1908), arms are compared seed by seed (what a seed does to
both of them cancels), and p values are corrected by Holm (1979).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.95

ROUNDING = 1e-12
"""Differences that are closer, as a share of the values, are the same."""


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over `count` values and its interval; without one (NaN) where there is a single value."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def half(self) -> float:
        return (self.high - self.low) / 2


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of an arm to another, over the seeds that both have: mean, interval, and p of a two-sided paired t-test, corrected or not. Where the
    difference is the same in all seeds, and not nothing, there is no p: rounded metrics do that, and a spread of nothing is no evidence."""

    mean: Mean
    p: float

    @property
    def tells(self) -> bool:
        """Whether the two can be told apart: neither the interval nor p, as it is corrected, leaves room for none."""
        return self.p < 1 - LEVEL and not self.mean.low <= 0 <= self.mean.high


def mean(values: Sequence[float]) -> Mean:
    """The mean and its 95 % interval: mean -+ t s / sqrt(n)."""
    x = np.asarray(values, np.float64)
    if not len(x):
        return Mean(math.nan, math.nan, math.nan, 0)
    middle = float(x.mean())
    if len(x) == 1:
        return Mean(middle, math.nan, math.nan, 1)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
    return Mean(middle, middle - half, middle + half, len(x))


def difference(arm: dict[int, float], baseline: dict[int, float]) -> Difference:
    """Seed -> value, of both; NaN where a p value cannot be had."""
    seeds = sorted(arm.keys() & baseline.keys())
    pairs = [arm[seed] - baseline[seed] for seed in seeds]
    if len(pairs) < 2:
        return Difference(mean(pairs), math.nan)
    if np.ptp(pairs) <= ROUNDING * max(
        abs(x) for one in (arm, baseline) for x in one.values()
    ):  # a t-test divides by their spread
        return Difference(mean(pairs), 1.0 if not any(pairs) else math.nan)
    return Difference(mean(pairs), float(stats.ttest_1samp(pairs, 0.0).pvalue))


def corrected(found: dict[str, Difference]) -> dict[str, Difference]:
    """Holm's: the smallest of m p values times m, the next times m - 1, and so on, never falling, at most 1. One that is not known counts
    for no comparison."""
    known = sorted((one.p, name) for name, one in found.items() if not math.isnan(one.p))
    out, least = dict(found), 0.0
    for n, (p, name) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - n)))
        out[name] = dataclasses.replace(found[name], p=least)
    return out
