"""A parabola through noisy losses, and the interval of its minimum."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from transformer.lab.statistics import LEVEL


@dataclasses.dataclass(frozen=True)
class Parabola:
    """A fit of loss = c0 + c1 x + c2 x^2, where x is in powers of 2, relative to `center`."""

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
        variance = math.nan
        if freedom > 0:
            variance = float(np.sum((loss - design @ c) ** 2)) / freedom
        covariance = variance * np.linalg.pinv(design.T @ design)
        return cls(center, c[:3], covariance[:3, :3], freedom)

    def __call__(self, x):
        """Returns the loss at x, averaged over seeds."""
        return self.c[0] + self.c[1] * (x - self.center) + self.c[2] * (x - self.center) ** 2

    @property
    def minimum(self) -> float:
        """The x of the least loss; NaN if the parabola has no minimum."""
        return self.center - self.c[1] / (2 * self.c[2]) if self.c[2] > 0 else math.nan

    def interval(self) -> tuple[float, float]:
        """Returns Fieller's interval of the minimum: all x whose slope may be 0.

        It is infinite unless the curvature is significantly positive, and NaN if there are too few
        runs to estimate the noise.
        """
        if self.freedom < 1:
            return math.nan, math.nan
        t2, (_, c1, c2), v = (
            stats.t.ppf((1 + LEVEL) / 2, self.freedom) ** 2,
            self.c,
            self.covariance,
        )
        # (c1 + 2 c2 x)^2 <= t^2 Var(c1 + 2 c2 x), a quadratic in x
        a = 4 * (c2**2 - t2 * v[2, 2])
        b = 4 * (c1 * c2 - t2 * v[1, 2])
        root = b**2 - 4 * a * (c1**2 - t2 * v[1, 1])
        if a <= 0 or c2 <= 0:
            return -math.inf, math.inf
        half = math.sqrt(max(root, 0.0)) / (2 * a)
        return self.center - b / (2 * a) - half, self.center - b / (2 * a) + half
