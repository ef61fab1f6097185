"""Scaling laws L(N, D) = E + A N^-alpha + B D^-beta (Hoffmann et al. 2022), fitted to an arm.

L is a loss in nats, N the number of parameters and D that of training tokens. A and alpha, and B
and beta, are nearly collinear: compare arms by what their laws predict, and never by A or B."""

from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize

EXPONENTS = (0.05, 1.5)  # bounds of alpha and beta
FLOOR, LEAST = 0.01, 1e-9  # lower bounds of E, and of the other terms at the center of the points
DELTA = 1e-3  # the residual of log L above which the Huber loss is linear
CONDITION = 3000.0  # largest condition number of an identified law; Hoffmann et al.: 220


class Cost(NamedTuple):
    """Training FLOPs per token, c N^m: a power law that includes attention and unembedding."""

    c: float = 6.0
    m: float = 1.0

    @classmethod
    def fit(cls, N, flops_per_token) -> "Cost":
        """Fits log-log by least squares."""
        m, log_c = np.polyfit(np.log(N), np.log(flops_per_token), 1)
        return cls(float(np.exp(log_c)), float(m))


class Law(NamedTuple):
    """The parameters of a law: numbers, or arrays with one entry for each of several laws."""

    E: Any
    A: Any
    B: Any
    alpha: Any
    beta: Any

    def loss(self, N, D):
        """Returns L(N, D)."""
        return self.E + self.A * N**-self.alpha + self.B * D**-self.beta

    def frontier(self, cost: Cost):
        """Returns G and gamma of the lowest loss for C FLOPs: L*(C) = E + G C^-gamma. With D = C /
        (c N^m), dL/dN = 0 at N*^(alpha + m beta) = alpha A / (m beta B) (C / c)^beta."""
        a, b = self.alpha, cost.m * self.beta
        gamma = a * self.beta / (a + b)
        G = self.A * (1 + a / b) * (a * self.A / (b * self.B)) ** (-a / (a + b)) * cost.c**gamma
        return G, gamma

    def at(self, C, cost: Cost):
        """Returns L*(C)."""
        G, gamma = self.frontier(cost)
        return self.E + G * C**-gamma


def fit_projected(N, D, L, weights=None, start: Law | None = None) -> Law:
    """Returns the law with the least sum of squared weighted errors, by variable projection. For
    given exponents, E, A and B follow from linear least squares, so the search has only two
    dimensions (arXiv:2603.22339): first a grid, then Levenberg-Marquardt. Weights are 1 / L unless
    given. `L` is [points] or, near the law `start`, [sets, points]: data of several studies at the
    same points, which are fitted at once."""
    n, d, w = np.log(N), np.log(D), 1 / L if weights is None else weights
    n0, d0 = n.mean(), d.mean()
    y_SxP = np.atleast_2d((L - FLOOR) * w)
    logs = np.stack([0 * n, n0 - n, d0 - d], -1)

    def linear(alpha, beta):
        """Returns columns [sets, points, 3], their coefficients, residuals and sum of squares."""
        X = w[:, None] * np.exp(logs * np.stack([0 * alpha, alpha, beta], -1)[:, None])
        gram, right = X.swapaxes(1, 2) @ X, np.einsum("spc,sp->sc", X, y_SxP)
        x = np.linalg.solve(gram, right[..., None])[..., 0]
        bound = x[:, 0] < 0
        rest = np.linalg.solve(gram[:, 1:, 1:], right[:, 1:, None])[..., 0]
        x = np.where(bound[:, None], np.pad(rest, ((0, 0), (1, 0))), x)
        x = np.maximum(x, [0.0, LEAST, LEAST])
        r = y_SxP - np.einsum("spc,sc->sp", X, x)
        X[bound, :, 0] = 0.0
        return X, x, r, (r * r).sum(1)

    if start is None:
        grid = np.geomspace(*EXPONENTS, 24)
        powers = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2)
        powers = powers[linear(*powers.T)[-1].argmin(keepdims=True)]
    else:
        powers = np.tile([start.alpha, start.beta], (len(y_SxP), 1))
    now, damping = linear(*powers.T), np.full(len(powers), 1e-3)
    for _ in range(60):
        X, x, r, squares = now
        J = logs[:, 1:] * x[:, None, 1:] * X[..., 1:]
        J = J - X @ (np.linalg.pinv(X) @ J)
        H, g = J.swapaxes(1, 2) @ J, np.einsum("spc,sp->sc", J, r)
        scale = np.einsum("sii->si", H)[..., None] * np.eye(2) + 1e-30 * np.eye(2)
        step = np.linalg.solve(H + damping[:, None, None] * scale, g[..., None])[..., 0]
        moved = np.clip(powers + step, *EXPONENTS)
        then, change = linear(*moved.T), np.abs(moved - powers).max()
        better = then[-1] <= squares
        for old, new in zip(now, then, strict=True):
            old[better] = new[better]
        powers = np.where(better[:, None], moved, powers)
        damping = np.where(better, damping / 9, damping * 9)
        if change < (1e-12 if len(powers) == 1 else 1e-6):
            break
    (alpha, beta), (E, A, B) = powers.T, now[1].T
    fitted = (FLOOR + E, A * np.exp(alpha * n0), B * np.exp(beta * d0), alpha, beta)
    return Law(*(fitted if y_SxP.ndim == L.ndim else map(float, np.concatenate(fitted))))


def huber_objective(x, n, d, log_L):
    """Returns the objective of Approach 3 and its gradient by (ln E, ln A, ln B, alpha, beta). Sum
    over points of Huber_delta(logsumexp(ln A - alpha ln N, ln B - beta ln D, ln E) - ln L). With
    the mean instead of the sum, the original fit stopped early (arXiv:2404.10102)."""
    e, a, b, alpha, beta = x
    terms = np.stack([np.full_like(n, e), a - alpha * n, b - beta * d])
    fitted = np.logaddexp.reduce(terms)
    r = fitted - log_L
    share = np.exp(terms - fitted) * np.clip(r, -DELTA, DELTA)
    value = np.where(np.abs(r) <= DELTA, r * r / 2, DELTA * (np.abs(r) - DELTA / 2)).sum()
    return value, np.array([*share.sum(1), -(share[1] @ n), -(share[2] @ d)])


def fit_huber(N, D, L, starts: int = 40) -> tuple[Law, float]:
    """Returns the law of Approach 3, which resists outliers, and the share of starts that reach it.
    Starts are drawn from the grid of Hoffmann et al. On their data, 43 % reach the minimum."""
    points, draw = (np.log(N), np.log(D), np.log(L)), np.random.default_rng(0).choice
    tens, halves = np.arange(0, 26, 5.0), np.arange(0, 2.1, 0.5)
    drawn = [draw(axis, starts) for axis in (halves - 1, tens, tens, halves, halves)]
    bounds = [(np.log(FLOOR), None), (None, None), (None, None), EXPONENTS, EXPONENTS]
    options = {"ftol": 1e-15, "gtol": 1e-10, "maxiter": 20_000, "maxfun": 40_000}
    scaled = lambda x: tuple(1e6 * part for part in huber_objective(x, *points))
    solve = {"jac": True, "method": "L-BFGS-B", "bounds": bounds, "options": options}
    found = [minimize(scaled, x, **solve) for x in np.transpose(drawn)]
    best = min(found, key=lambda result: result.fun)
    reached = np.mean([result.fun <= 1.001 * best.fun + 1e-6 for result in found])
    return Law(*map(float, (*np.exp(best.x[:3]), *best.x[3:]))), float(reached)


def unidentified(N, D, runs) -> str:
    """Returns why a design cannot identify a law, whatever the losses are; "" if it can."""
    if (sizes := len(np.unique(N))) < 3:
        return f"{sizes} model size{'s' * (sizes > 1)}; E, A and alpha need 3 or more"
    if np.ptp(np.log(D / N)) < 0.1:
        return "one budget of tokens per parameter, so N and D vary together; use 2 or more"
    few = f"{len(runs)} runs; intervals need 6 or more, because sizes take up 3 parameters"
    return few if len(runs) < 6 else ""


def problem(law: Law, N, D) -> str:
    """Returns why a fitted law cannot be used: an active bound, or bad conditioning; "" if it can.
    The condition number is that of d log L / d (parameters), with columns of unit length."""
    terms = {"A": law.A * N**-law.alpha, "B": law.B * D**-law.beta}
    ends = [x for x in ("alpha", "beta") if np.isclose(getattr(law, x), EXPONENTS).any()]
    ends += [x for x, nats in terms.items() if nats.min() < 10 * LEAST] + ["E"] * (law.E <= FLOOR)
    if ends:
        values = ", ".join(f"{x} = {getattr(law, x):.3g}" for x in ends)
        return f"the fit ended at a bound ({values})"
    a, b = terms.values()
    J = np.stack([law.E + 0 * N, a, b, a * np.log(N), b * np.log(D)], 1) / law.loss(N, D)[:, None]
    number = np.linalg.cond(J / np.linalg.norm(J, axis=0))
    bad = f"the points determine no law (condition number {number:,.0f})"
    return bad if number > CONDITION else ""


def isoflop(N, C, L) -> list[tuple[float, float, float]]:
    """Returns (C, N*, L*) for each budget (within 5 %) with 3 or more sizes: Approach 2. N* is the
    minimum of a parabola in ln N. It is biased if alpha and beta differ."""
    minima, order = [], np.argsort(C)
    for group in np.split(order, np.flatnonzero(np.diff(np.log(C[order])) > 0.05) + 1):
        if len(np.unique(n := np.log(N[group]))) >= 3:
            c2, c1, c0 = np.polyfit(n - n.mean(), L[group], 2)
            if c2 > 0 and abs(c1 / (2 * c2)) <= np.ptp(n):
                best = float(np.exp(n.mean() - c1 / (2 * c2))), float(c0 - c1**2 / (4 * c2))
                minima.append((float(np.exp(np.log(C[group]).mean())), *best))
    return minima
