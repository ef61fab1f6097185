"""Statistics for few seeds: t intervals, paired t-tests and the correction for several comparisons.

Seeds are few and their losses are nearly normal, so means have Student's t intervals (Gosset 1908).
Arms are compared in pairs of one seed, which cancels its effect. Holm (1979) corrects p values."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95  # confidence level of the intervals
ROUNDING = 1e-12  # relative tolerance below which differences count as equal


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


class Difference(NamedTuple):
    """The difference between two arms over their common seeds."""

    mean: Mean
    # Of a two-sided paired t-test, corrected or not. NaN for fewer than two seeds, and if a nonzero
    # difference is the same in all seeds: rounding causes this, and no spread is no evidence.
    p: float
    by_seed: dict[int, float]
    alone: float = math.nan  # p before the correction

    @property
    def is_detectable(self) -> bool:
        """Whether there is a detectable difference, by both the interval and p."""
        return self.p < 1 - LEVEL and not self.mean.low <= 0 <= self.mean.high

    @property
    def is_inconclusive(self) -> bool:
        """Whether the interval excludes zero, but the corrected p is too large."""
        return self.p >= 1 - LEVEL and not self.mean.low <= 0 <= self.mean.high


def mean(values: Sequence[float], bounds: tuple[float, float] = (-math.inf, math.inf)) -> Mean:
    """Returns the mean and its 95 % interval, mean ± t s / sqrt(n), clipped at the bounds."""
    x = np.asarray(values, np.float64)
    center = float(x.mean()) if len(x) else math.nan
    if len(x) < 2:
        return Mean(center, math.nan, math.nan, len(x))
    half = float(stats.t.ppf((1 + LEVEL) / 2, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
    return Mean(center, max(center - half, bounds[0]), min(center + half, bounds[1]), len(x))


def difference(arm: dict[int, float], baseline: dict[int, float]) -> Difference:
    """Returns arm - baseline, both given as seed -> value. p is NaN if it is undefined."""
    by_seed = {seed: arm[seed] - baseline[seed] for seed in sorted(arm.keys() & baseline.keys())}
    pairs, p = list(by_seed.values()), math.nan
    if len(pairs) > 1:
        largest = max(map(abs, (*arm.values(), *baseline.values())))  # t divides by the spread
        if np.ptp(pairs) > ROUNDING * largest:
            p = float(stats.ttest_1samp(pairs, 0.0).pvalue)
        elif not any(pairs):
            p = 1.0
    return Difference(mean(pairs), p, by_seed)


def corrected(differences: dict[str, Difference]) -> dict[str, Difference]:
    """Applies the Holm correction. NaN does not count as a comparison."""
    ranked = sorted((x.p, name) for name, x in differences.items() if not math.isnan(x.p))
    result, largest = dict(differences), 0.0
    for n, (p, name) in enumerate(ranked):
        largest = max(largest, min(1.0, p * (len(ranked) - n)))
        result[name] = differences[name]._replace(p=largest, alone=p)
    return result


def slope_interval(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the slope of a line through three or more points."""
    line = stats.linregress(x, y)
    half = stats.t.ppf((1 + LEVEL) / 2, len(x) - 2) * line.stderr
    return line.slope - half, line.slope + half


class Parabola(NamedTuple):
    """A parabola c0 + c1 x + c2 x^2 through noisy losses. x is in powers of 2, from `center`."""

    center: float
    c: np.ndarray
    covariance: np.ndarray  # of c; NaN without degrees of freedom
    freedom: int

    @classmethod
    def of(cls, x: Sequence[float], loss: Sequence[float], seed: Sequence[int]) -> "Parabola":
        """Fits by least squares. Each seed has an offset of its own, since it is the same text."""
        x, center = np.asarray(x), float(np.mean(x))
        seeds = np.unique(seed)
        offsets = [np.equal(seed, s).astype(float) - np.equal(seed, seeds[0]) for s in seeds[1:]]
        design = np.stack([np.ones(len(x)), x - center, (x - center) ** 2, *offsets], axis=1)
        c, *_ = np.linalg.lstsq(design, np.asarray(loss), rcond=None)
        freedom = len(x) - design.shape[1]
        variance = float(np.sum((loss - design @ c) ** 2)) / freedom if freedom > 0 else math.nan
        return cls(center, c[:3], variance * np.linalg.pinv(design.T @ design)[:3, :3], freedom)

    def __call__(self, x):
        """Returns the loss at x, averaged over seeds."""
        return self.c[0] + self.c[1] * (x - self.center) + self.c[2] * (x - self.center) ** 2

    @property
    def minimum(self) -> float:
        """The x of the least loss; NaN if the parabola has no minimum."""
        return self.center - self.c[1] / (2 * self.c[2]) if self.c[2] > 0 else math.nan

    def interval(self) -> tuple[float, float]:
        """Returns Fieller's (1954) interval of the minimum: all x whose slope may be 0. It is
        infinite unless the curvature is significantly positive; NaN if the noise is unknown."""
        if self.freedom < 1:
            return math.nan, math.nan
        t, (_, c1, c2), v = stats.t.ppf((1 + LEVEL) / 2, self.freedom), self.c, self.covariance
        a = 4 * (c2**2 - t**2 * v[2, 2])  # (c1 + 2 c2 x)^2 <= t^2 Var(c1 + 2 c2 x), quadratic in x
        b = 4 * (c1 * c2 - t**2 * v[1, 2])
        root = b**2 - 4 * a * (c1**2 - t**2 * v[1, 1])
        if a <= 0 or c2 <= 0:
            return -math.inf, math.inf
        half = math.sqrt(max(root, 0.0)) / (2 * a)
        return self.center - b / (2 * a) - half, self.center - b / (2 * a) + half
