"""Statistics for few seeds: t intervals, paired t-tests and the correction for several comparisons.

Seeds are few and their losses are nearly normal. Therefore means have Student's t intervals (Gosset
1908). Arms are compared in pairs with the same seed, which cancels the effect of the seed. p values
are corrected for the number of comparisons (Holm 1979).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

LEVEL = 0.95
"""Confidence level of the intervals."""

ROUNDING = 1e-12
"""Relative tolerance below which differences count as equal."""


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean over `count` values and its interval, which is NaN for fewer than two values."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def half(self) -> float:
        """Half the width of the interval, before it was clipped at a bound of the metric."""
        return max(self.high - self.mean, self.mean - self.low)


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference between two arms over their common seeds.

    `mean` has its mean and interval. `p` is that of a two-sided paired t-test, corrected or not. It
    is NaN for fewer than two seeds, and if the difference is nonzero and the same in all seeds:
    rounded metrics cause this, and a spread of zero is not evidence.
    """

    mean: Mean
    p: float

    @property
    def is_detectable(self) -> bool:
        """Whether there is a detectable difference, by both the interval and p."""
        return self.p < 1 - LEVEL and not self.mean.low <= 0 <= self.mean.high


def mean(values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> Mean:
    """Returns the mean and its 95 % interval, mean ± t s / sqrt(n), clipped at the bounds."""
    x = np.asarray(values, np.float64)
    if not len(x):
        return Mean(math.nan, math.nan, math.nan, 0)
    center = float(x.mean())
    if len(x) == 1:
        return Mean(center, math.nan, math.nan, 1)
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
    return Mean(center, max(center - half, bounds[0]), min(center + half, bounds[1]), len(x))


def difference(arm: dict[int, float], baseline: dict[int, float]) -> Difference:
    """Returns arm - baseline, both given as seed -> value. p is NaN if it is undefined."""
    seeds = sorted(arm.keys() & baseline.keys())
    pairs = [arm[seed] - baseline[seed] for seed in seeds]
    if len(pairs) < 2:
        return Difference(mean(pairs), math.nan)
    # A t-test divides by the spread of the differences.
    largest = max(map(abs, (*arm.values(), *baseline.values())))
    if np.ptp(pairs) <= ROUNDING * largest:
        return Difference(mean(pairs), 1.0 if not any(pairs) else math.nan)
    return Difference(mean(pairs), float(stats.ttest_1samp(pairs, 0.0).pvalue))


def corrected(differences: dict[str, Difference]) -> dict[str, Difference]:
    """Applies the Holm correction to the p values. NaN does not count as a comparison.

    The smallest of m is multiplied by m, the next by m - 1, ...; results are monotonic, at most 1.
    """
    ranked = sorted((x.p, name) for name, x in differences.items() if not math.isnan(x.p))
    result, largest = dict(differences), 0.0
    for n, (p, name) in enumerate(ranked):
        largest = max(largest, min(1.0, p * (len(ranked) - n)))
        result[name] = dataclasses.replace(differences[name], p=largest)
    return result


def slope_interval(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the slope of a line through three or more points."""
    line = stats.linregress(x, y)
    half = stats.t.ppf((1 + LEVEL) / 2, len(x) - 2) * line.stderr
    return line.slope - half, line.slope + half
