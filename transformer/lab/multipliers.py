"""Compute multipliers of arms against a baseline, from scaling laws, with intervals.

The multiplier k(C) of an arm solves L*_base(k C) = L*_arm(C), where L* is the lowest loss that a
budget of C FLOPs allows: with k = 0.8, a FLOP spent on the arm is worth 0.8 on the baseline, and
the arm needs 1 / k = 1.25 times the compute of the baseline for equal loss.

Intervals come from a bootstrap over whole runs. The residuals of a run (all its budgets, in all
arms, which share sizes and seeds) are drawn together, from the runs of all sizes. With points drawn
instead of runs, nominal 95 % intervals covered 74 %. E, A and alpha take up three degrees of
freedom, so residuals of R runs are scaled by sqrt(R / (R - 3)), and quantiles by the ratio of
Student's t with R - 3 degrees to the normal. `profile` checks it, and `make coverage` both."""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

from transformer.lab.laws import Cost, Law, fit_projected, problem, unidentified
from transformer.lab.statistics import LEVEL

Run = tuple[str, int]  # name of a size, and seed


class Points(NamedTuple):
    """Losses of an arm. Arrays are [runs, budgets]."""

    runs: tuple[Run, ...]
    N: np.ndarray  # parameters
    D: np.ndarray  # training tokens
    C: np.ndarray  # training FLOPs
    loss: np.ndarray

    def rows(self, runs) -> "Points":
        """Returns the points of some runs, in their order."""
        i = [self.runs.index(run) for run in runs]
        return Points(tuple(runs), self.N[i], self.D[i], self.C[i], self.loss[i])


class Estimate(NamedTuple):
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def exp(self) -> "Estimate":
        """Returns the exponential of the number and of its interval."""
        return Estimate(*(math.exp(min(x, 700.0)) for x in (self.value, self.low, self.high)))


class Fit(NamedTuple):
    """The law of an arm, the laws of resampled studies, and residuals of log L: [runs, budgets]."""

    points: Points
    law: Law
    cost: Cost
    resampled: Law
    residuals: np.ndarray


def log_multiplier(base: Law, arm: Law, C: float, base_cost: Cost, arm_cost: Cost):
    """Returns ln k(C). It is infinite if the arm's loss is below the baseline's E."""
    with np.errstate(all="ignore"):  # laws without one of the terms
        G, gamma = base.frontier(base_cost)
        above = np.asarray(arm.at(C, arm_cost) - base.E)
        logs = -np.log(np.maximum(above, 1e-300) / G) / gamma - np.log(C)
    return np.where((above > 0) & ~np.isnan(logs), logs, np.inf)


class Scaling(NamedTuple):
    """Laws of several arms."""

    fits: Mapping[str, Fit]
    baseline: str
    why_not: Mapping[str, str]  # a reason for each arm without a law
    runs: tuple[Run, ...]  # sizes and seeds that all fitted arms have

    def interval(self, value, resampled) -> Estimate:
        """Returns a value with its interval, from its values under the resampled laws."""
        tail, value = (1 - LEVEL) / 2, float(value)
        ends = np.quantile(resampled, (tail, 1 - tail), method="inverted_cdf")
        wider = stats.t.ppf(tail, len(self.runs) - 3) / stats.norm.ppf(tail)
        return Estimate(value, *(float(value + wider * (end - value)) for end in ends))

    def multiplier(self, arm: str, C: float, since: float | None = None) -> Estimate:
        """Returns k(C), or k(C) / k(since), which is above 1 if the arm gains with scale."""
        base, other, logs = self.fits[self.baseline], self.fits[arm], []
        for laws in ((base.law, other.law), (base.resampled, other.resampled)):
            of = lambda C, laws=laws: log_multiplier(laws[0], laws[1], C, base.cost, other.cost)
            earlier = 0.0 if since is None else of(since)
            logs.append(np.where(np.isinf(earlier), 0.0, of(C) - np.nan_to_num(earlier)))
        return self.interval(*logs).exp()

    def predict(self, arm: str, N: float, D: float, seeds: int = 1) -> Estimate:
        """Returns the mean loss of `seeds` new runs at N and D, with noise drawn from residuals."""
        fit, rng = self.fits[arm], np.random.default_rng(1)
        noise = rng.choice(fit.residuals[:, -1], (len(fit.resampled.E), seeds)).mean(1)
        return self.interval(fit.law.loss(N, D), fit.resampled.loss(N, D) * np.exp(noise))

    def crossings(self, arm: str, low: float, high: float) -> list[float]:
        """Returns the budgets between two at which k crosses 1."""
        C, base, other = np.geomspace(low, high, 400), self.fits[self.baseline], self.fits[arm]
        above = base.law.at(C, base.cost) > other.law.at(C, other.cost)
        return C[1:][above[1:] != above[:-1]].tolist()


def fit_all(arms: Mapping[str, Points], baseline: str, replicas=1000, seed=0) -> Scaling:
    """Fits the law of each arm, and of `replicas` resampled studies."""
    laws, why_not = {}, {}
    for name, x in arms.items():
        N, D, _, L = (y.ravel() for y in x[1:])
        if why := unidentified(N, D, x.runs) or problem(law := fit_projected(N, D, L), N, D):
            why_not[name] = why
        else:
            laws[name] = law
    runs = tuple(sorted(set.intersection(*(set(arms[x].runs) for x in laws)))) if laws else ()
    if laws and len(runs) < 6:
        reason = f"the arms have {len(runs)} runs (size and seed) in common; use 6 or more"
        return Scaling({}, baseline, why_not | dict.fromkeys(laws, reason), ())
    targets, fits = sorted({run for name in laws for run in arms[name].runs}), {}
    drawn = np.random.default_rng(seed).integers(max(len(runs), 1), size=(replicas, len(targets)))
    for name, law in laws.items():
        x, common = arms[name], arms[name].rows(runs)
        residuals = np.log(common.loss / law.loss(common.N, common.D))
        residuals = (residuals - residuals.mean(0)) * math.sqrt(len(runs) / (len(runs) - 3))
        noise = residuals[drawn[:, [targets.index(run) for run in x.runs]]]
        simulated = (law.loss(x.N, x.D) * np.exp(noise)).reshape(replicas, -1)
        N, D, C, L = (y.ravel() for y in x[1:])
        resampled = fit_projected(N, D, simulated, 1 / L, law)
        fits[name] = Fit(x, law, Cost.fit(N, C / D), resampled, residuals)
    return Scaling(fits, baseline, why_not, runs)


def ranking(arms: Mapping[str, Points], target: str) -> dict[str, tuple[int, int]]:
    """Returns, by size, how many (right, all) pairs of runs rank two arms as the means at the size
    `target` do. The runs of a pair have one seed; losses are those of their last budgets."""
    counts: dict[str, tuple[int, int]] = {}
    for pair in itertools.combinations(arms.values(), 2):
        one, two = (dict(zip(x.runs, x.loss[:, -1], strict=True)) for x in pair)
        differences = {run: one[run] - two[run] for run in one.keys() & two.keys()}
        goal = [x for run, x in differences.items() if run[0] == target]
        for run, difference in differences.items() if goal else ():
            right, of = counts.get(run[0], (0, 0))
            counts[run[0]] = (right + int(difference * np.mean(goal) > 0), of + 1)
    return dict(sorted(counts.items()))


def profile(scaling: Scaling, arm: str, C: float) -> Estimate:
    """Returns k(C) with its interval by profile likelihood. An end with |ln k| > 3 is infinite. For
    each k, the other nine parameters of both laws are refitted: E of the arm follows from L*_arm(C)
    = L*_base(k C). Residuals of log L have a part for each run and one for each point, both
    correlated between arms, with estimated covariances. F(1, R - 3) bounds likelihood ratios."""
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
    start = [*np.log(one[:3]), *one[3:], *np.log(two[1:3]), *two[3:]]

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
