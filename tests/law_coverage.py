"""Measures how often the 95 % intervals of compute multipliers contain the true multiplier.

    python tests/law_coverage.py [--studies=500] [--profile] [--only=TEXT]

Each study is drawn from known laws: the runs of two arms with noise per run, which all budgets of
the run share, and noise per point. Part of the noise is common to both arms, as with paired seeds.
Prints the coverage of the multiplier k(C), of its change over a factor of 100 in compute, and of
the loss predicted for the next size; with --profile, also that of k by profile likelihood. `--only`
selects designs. Exits with 1 if the coverage of k is outside 93 to 97 %.
"""

import dataclasses
import sys
import time

import numpy as np

from transformer.lab.laws import Cost, Law
from transformer.lab.multipliers import Points, fit_all, log_multiplier, profile

BASE = Law(1.8172, 477.8, 2143.4, 0.3473, 0.3672)
"""The law of the data of Hoffmann et al. (2022), by arXiv:2404.10102."""

LARGE = tuple(np.geomspace(1e8, 3e9, 5))
SMALL = (49e3, 197e3, 664e3, 1.77e6, 4.87e6)
BUDGETS = (2.5, 5.0, 10.0, 20.0)
"""Tokens per parameter."""


def scaled(multiplier: float) -> Law:
    """Returns a law that reaches the loss of BASE at C with C / multiplier."""
    root = multiplier**0.5
    A, B = BASE.A * root**-BASE.alpha, BASE.B * root**-BASE.beta
    return BASE._replace(A=A, B=B)


@dataclasses.dataclass(frozen=True)
class Design:
    """Sizes, seeds, the law of the arm, and noise of log L."""

    sizes: tuple[float, ...]
    seeds: int
    arm: Law = dataclasses.field(default_factory=lambda: scaled(1.2))
    paired: float = 0.5  # share of the variance that both arms have in common
    run: float = 3e-3
    point: float = 1.5e-3
    tails: float = 0.0  # degrees of freedom of Student's t; 0: normal noise
    target: float = 0.0  # number of parameters at which k is read; 0: the largest fitted

    @property
    def C(self) -> float:
        """Budget at which the multiplier is read: 20 tokens for each parameter of the target."""
        return 6 * (self.target or self.sizes[-1]) ** 2 * BUDGETS[-1]

    def multiplier(self, C: float) -> float:
        """Returns the true k(C)."""
        return float(np.exp(log_multiplier(BASE, self.arm, C, Cost(), Cost())))

    def draw(self, seed: int) -> dict[str, Points]:
        """Returns the points of a study."""
        rng, P = np.random.default_rng(seed), len(BUDGETS)
        runs = tuple((f"{n:.3g}", seed) for n in self.sizes for seed in range(self.seeds))
        N = np.repeat(self.sizes, self.seeds)[:, None] * np.ones(P)
        D, R = N * BUDGETS, len(runs)

        def normal(shape):
            if not self.tails:
                return rng.normal(size=shape)
            return rng.standard_t(self.tails, shape) * (1 - 2 / self.tails) ** 0.5

        noise = lambda: self.run * normal((R, 1)) + self.point * normal((R, P))
        common, own = noise() * self.paired**0.5, (1 - self.paired) ** 0.5
        losses = lambda law: law.loss(N, D) * np.exp(common + own * noise())
        points = lambda law: Points(runs, N, D, 6 * N * D, losses(law))
        return {"base": points(BASE), "arm": points(self.arm)}


DESIGNS = {
    "5 sizes, 3 seeds, unpaired": Design(LARGE, 3, paired=0.0),
    "5 sizes, 3 seeds, paired": Design(LARGE, 3, paired=0.8),
    "4 sizes, 2 seeds": Design(LARGE[:4], 2),
    "4 small sizes, 3 seeds": Design(SMALL[:4], 3),
    "4 small sizes, 3 seeds, at the next": Design(SMALL[:4], 3, target=SMALL[4]),
    "3 small sizes, 3 seeds": Design(SMALL[:3], 3),
    "other exponents and floor": Design(LARGE, 3, arm=Law(1.85, 420.0, 1900.0, 0.345, 0.365)),
    "heavy tails (t, 4 degrees)": Design(LARGE, 3, tails=4.0),
}


def covers(design: Design, seed: int, replicas: int = 400, profiled: bool = False):
    """Returns whether the intervals of one study contain the truth, and the width of ln k's."""
    scaling = fit_all(design.draw(seed), "base", replicas, seed)
    if scaling.why_not:
        return None
    C, within = design.C, lambda interval, truth: interval.low <= truth <= interval.high
    k, earlier = design.multiplier(C), design.multiplier(C / 100)
    found = scaling.multiplier("arm", C)
    inside = [within(found, k), within(scaling.multiplier("arm", C, since=C / 100), k / earlier)]
    N = design.sizes[-1] * 3
    seen = design.arm.loss(N, 5 * N) * np.exp(
        np.random.default_rng([seed, 1]).normal(0, np.hypot(design.run, design.point))
    )
    inside.append(within(scaling.predict("arm", N, 5 * N), seen))
    if profiled:
        inside.append(within(profile(scaling, "arm", C), k))
    return inside, float(np.log(found.high / found.low))


def main() -> None:
    options = dict(a.removeprefix("--").partition("=")[::2] for a in sys.argv[1:])
    studies, profiled = int(options.get("studies", 500)), "profile" in options
    print("coverage of k, its change, the next size, (profile); width of ln k; no law; seconds")
    outside = False
    for name, design in DESIGNS.items():
        if options.get("only", "") not in name:
            continue
        begun = time.perf_counter()
        found = [covers(design, seed, profiled=profiled) for seed in range(studies)]
        done = [x for x in found if x is not None]
        shares = np.mean([inside for inside, _ in done], axis=0)
        outside |= not 0.93 <= shares[0] <= 0.97
        width = np.median([width for _, width in done])
        text = "  ".join(f"{share:6.1%}" for share in shares)
        seconds = time.perf_counter() - begun
        print(f"{name:36}{text}  {width:.3f}  {studies - len(done)}  {seconds:.0f} s", flush=True)
    sys.exit(int(outside))


if __name__ == "__main__":
    main()
