"""Profile likelihood of a compute multiplier, to check the bootstrap (`multipliers.py`)."""

import functools
import math

import numpy as np
from scipy import optimize, stats

from transformer.lab.laws import Law
from transformer.lab.multipliers import Estimate, Scaling, log_multiplier
from transformer.lab.statistics import LEVEL

FARTHEST = 3.0
"""An end of the interval farther than this from ln k is infinite."""


def profile(scaling: Scaling, arm: str, C: float) -> Estimate:
    """Returns k(C) with its interval by profile likelihood.

    For each k, the other nine parameters of both laws are refitted: E of the arm follows from
    L*_arm(C) = L*_base(k C). Residuals of log L have a part for each run and one for each point,
    both correlated between the arms. Their covariances are estimated, and the likelihood ratio is
    compared with F(1, R - 3).
    """
    pair, runs = (scaling.fits[scaling.baseline], scaling.fits[arm]), scaling.runs
    points, (base, other) = [fit.points.rows(runs) for fit in pair], pair
    white = _whitening(np.stack([fit.residuals for fit in pair], 1))

    def errors(x, log_k: float):
        first, second = Law(*np.exp(x[:3]), *x[3:5]), Law(0.0, *np.exp(x[5:7]), *x[7:])
        E = first.at(math.exp(log_k) * C, base.cost) - second.at(C, other.cost)
        losses = first.loss(points[0].N, points[0].D), second.loss(points[1].N, points[1].D) + E
        logs = [np.log(x.loss / np.maximum(y, 1e-9)) for x, y in zip(points, losses, strict=True)]
        return white(np.stack(logs, 1))

    best = float(log_multiplier(base.law, other.law, C, base.cost, other.cost))
    if not math.isfinite(best):
        return Estimate(math.inf, 0.0, math.inf)
    one, two = base.law, other.law
    start = [*np.log([one.E, one.A, one.B]), one.alpha, one.beta]
    start += [*np.log([two.A, two.B]), two.alpha, two.beta]

    @functools.cache
    def deviance(log_k: float) -> float:
        fit = optimize.least_squares(errors, start, args=(log_k,), x_scale="jac", max_nfev=200)
        return 2 * float(fit.cost)

    found = optimize.minimize_scalar(deviance, bracket=(best - 0.02, best + 0.02), tol=1e-3)
    limit = found.fun + stats.f.ppf(LEVEL, 1, len(runs) - 3)

    def end(sign: int) -> float:
        step = 0.05
        while deviance(found.x + sign * step) < limit:
            if (step := 2 * step) > FARTHEST:
                return sign * math.inf
        return optimize.brentq(
            lambda x: deviance(x) - limit, found.x, found.x + sign * step, xtol=1e-3
        )

    return Estimate(found.x, end(-1), end(1)).exp()


def _whitening(r_RxAxP):
    """Returns a function that makes residuals [runs, arms, points] independent, of variance 1."""
    mean, points = r_RxAxP.mean(2), r_RxAxP.shape[2]
    rest, tiny = r_RxAxP - mean[..., None], 1e-18 * np.eye(r_RxAxP.shape[1])
    factor = lambda products, count: np.linalg.inv(np.linalg.cholesky(products / count + tiny))
    between = factor(mean.T @ mean, len(mean))
    within = factor(np.einsum("rap,rbp->ab", rest, rest), max(points - 1, 1) * len(mean))

    def white(r):
        mean = r.mean(2)
        rest = np.einsum("ab,rbp->rap", within, r - mean[..., None]) if points > 1 else []
        return np.concatenate([(mean @ between.T).ravel(), np.ravel(rest)])

    return white
