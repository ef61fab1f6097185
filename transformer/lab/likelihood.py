"""Profile likelihood of a compute multiplier, to check the bootstrap (`multipliers.py`)."""

import functools
import math

import numpy as np
from scipy import optimize, stats

from transformer.lab.laws import Law
from transformer.lab.multipliers import Estimate, Scaling, log_multiplier
from transformer.lab.statistics import LEVEL


def profile(scaling: Scaling, arm: str, C: float) -> Estimate:
    """Returns k(C) with its interval by profile likelihood. An end with |ln k| > 3 is infinite.

    For each k, the other nine parameters of both laws are refitted: E of the arm follows from
    L*_arm(C) = L*_base(k C). Residuals of log L have a part for each run and one for each point,
    both correlated between the arms. Their covariances are estimated, and the likelihood ratio is
    compared with F(1, R - 3).
    """
    pair, runs = (scaling.fits[scaling.baseline], scaling.fits[arm]), scaling.runs
    points, costs = [fit.points.rows(runs) for fit in pair], [fit.cost for fit in pair]
    white = _whitening(np.stack([fit.residuals for fit in pair], 1))

    def errors(x, log_k: float):
        first, second = Law(*np.exp(x[:3]), *x[3:5]), Law(0.0, *np.exp(x[5:7]), *x[7:])
        E = first.at(math.exp(log_k) * C, costs[0]) - second.at(C, costs[1])
        losses = [law.loss(x.N, x.D) for law, x in zip((first, second), points, strict=True)]
        losses[1] = np.maximum(losses[1] + E, 1e-9)
        return white(np.log([x.loss for x in points]) - np.log(losses))

    one, two = pair[0].law, pair[1].law
    if not math.isfinite(best := float(log_multiplier(one, two, C, *costs))):
        return Estimate(math.inf, 0.0, math.inf)
    start = [*np.log([one.E, one.A, one.B]), one.alpha, one.beta]
    start += [*np.log([two.A, two.B]), two.alpha, two.beta]

    @functools.cache
    def deviance(log_k: float) -> float:
        fit = optimize.least_squares(errors, start, args=(log_k,), x_scale="jac", max_nfev=200)
        return 2 * float(fit.cost)

    found = optimize.minimize_scalar(deviance, bracket=(best - 0.02, best + 0.02), tol=1e-3)
    excess = lambda x: deviance(x) - found.fun - stats.f.ppf(LEVEL, 1, len(runs) - 3)

    def end(sign: int) -> float:
        steps = (found.x + sign * 0.05 * 2**i for i in range(7))
        far = next((x for x in steps if excess(x) > 0), None)
        return sign * math.inf if far is None else optimize.brentq(excess, found.x, far, xtol=1e-3)

    return Estimate(float(found.x), end(-1), end(1)).exp()


def _whitening(r_RxAxP):
    """Returns a function that makes residuals [arms, runs, points] independent, of variance 1."""
    mean, (runs, arms, points) = r_RxAxP.mean(2), r_RxAxP.shape
    rest, tiny = r_RxAxP - mean[..., None], 1e-18 * np.eye(arms)
    factor = lambda products, count: np.linalg.inv(np.linalg.cholesky(products / count + tiny))
    between = factor(mean.T @ mean, runs)
    within = factor(np.einsum("rap,rbp->ab", rest, rest), max(points - 1, 1) * runs)

    def white(r_AxRxP):
        mean = r_AxRxP.mean(2)
        rest = np.einsum("ab,brp->arp", within, r_AxRxP - mean[..., None])
        return np.concatenate([(between @ mean).ravel(), rest.ravel()])

    return white
