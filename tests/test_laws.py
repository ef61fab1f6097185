"""Scaling laws: recovery, gradients, identifiability, compute multipliers and their intervals."""

import dataclasses

import numpy as np
import pytest
from law_coverage import BASE, BUDGETS, DESIGNS, LARGE, SMALL, Design, covers, scaled
from scipy import optimize

from transformer.lab.laws import (
    DELTA,
    Cost,
    Law,
    fit_huber,
    fit_projected,
    huber_objective,
    isoflop,
    problem,
    unidentified,
)
from transformer.lab.multipliers import Points, fit_all, log_multiplier, profile, ranking

NOISELESS = Design(SMALL, 2, run=0.0, point=0.0)


def as_array(law: Law) -> np.ndarray:
    return np.array([law.E, law.A, law.B, law.alpha, law.beta])


def points(law: Law, sizes=LARGE, budgets=BUDGETS):
    """Returns N, D and the noiseless losses of a grid of sizes and tokens per parameter."""
    N, ratio = (x.ravel() for x in np.meshgrid(sizes, budgets, indexing="ij"))
    return N, N * ratio, law.loss(N, N * ratio)


@pytest.mark.parametrize("sizes", [LARGE, SMALL])
@pytest.mark.parametrize("law", [BASE, Law(1.1, 60.0, 900.0, 0.25, 0.45)])
def test_noiseless_laws_are_recovered(law, sizes):
    N, D, L = points(law, sizes)
    projected, (huber, reached) = fit_projected(N, D, L), fit_huber(N, D, L)
    np.testing.assert_allclose(as_array(projected), as_array(law), rtol=1e-6)
    np.testing.assert_allclose(as_array(huber), as_array(law), rtol=1e-6)
    assert reached > 0.1


def test_projection_is_the_minimum_of_a_general_optimizer():
    rng = np.random.default_rng(3)
    N, D, L = points(BASE)
    L = L * np.exp(rng.normal(0, 3e-3, len(L)))
    law = fit_projected(N, D, L)
    errors = lambda x: Law(*x).loss(N, D) / L - 1
    found = optimize.least_squares(errors, as_array(BASE), x_scale="jac", xtol=1e-15, ftol=1e-15)
    assert np.sum(errors(as_array(law)) ** 2) <= 2 * found.cost * (1 + 1e-9)
    np.testing.assert_allclose(as_array(law), found.x, rtol=1e-4)


def test_studies_that_are_fitted_at_once_equal_studies_fitted_alone():
    rng = np.random.default_rng(4)
    N, D, L = points(BASE)
    L_SxP = L * np.exp(rng.normal(0, 3e-3, (5, len(L))))
    together = fit_projected(N, D, L_SxP, 1 / L, start=BASE)
    for i, row in enumerate(L_SxP):
        alone = fit_projected(N, D, row, 1 / L)
        np.testing.assert_allclose(as_array(together)[:, i], as_array(alone), rtol=1e-4)
    assert np.ptp(together.E) > 0.01


def test_gradient_of_the_huber_objective_matches_finite_differences():
    rng = np.random.default_rng(0)
    N, D, L = points(BASE)
    log_L = np.log(L * np.exp(rng.normal(0, 2 * DELTA, len(L))))
    data = (np.log(N), np.log(D), log_L)
    x = np.array([np.log(BASE.E), np.log(BASE.A), np.log(BASE.B), BASE.alpha, BASE.beta])
    residuals = np.log(BASE.loss(N, D)) - log_L
    assert (np.abs(residuals) > DELTA).any() and (np.abs(residuals) < DELTA).any()
    _, gradient = huber_objective(x, *data)
    value = lambda x: huber_objective(x, *data)[0]
    numeric = [(value(x + h) - value(x - h)) / 2e-6 for h in 1e-6 * np.eye(5)]
    np.testing.assert_allclose(gradient, numeric, rtol=1e-5)


def test_the_huber_objective_is_a_sum():
    N, D, L = points(BASE)
    x = np.array([np.log(BASE.E), np.log(BASE.A), np.log(BASE.B), BASE.alpha, BASE.beta])
    value = lambda times: huber_objective(
        x, *(np.tile(y, times) for y in (np.log(N), np.log(D), np.log(L) + 0.01))
    )[0]
    each = DELTA * (0.01 - DELTA / 2)
    np.testing.assert_allclose([value(1), value(3)], [len(N) * each, 3 * len(N) * each])


def test_the_huber_fit_resists_outliers():
    N, D, L = points(BASE)
    L = L * np.where(np.arange(len(L)) == 3, 1.05, 1.0)
    error = lambda law: np.abs(law.loss(N, D) / BASE.loss(N, D) - 1).max()
    assert error(fit_huber(N, D, L)[0]) < 0.3 * error(fit_projected(N, D, L))


def test_the_frontier_is_the_lowest_loss_for_a_budget():
    cost = Cost(30.0, 0.9)
    N = np.geomspace(1e3, 1e12, 200_001)
    for C in (1e13, 1e18):
        losses = BASE.loss(N, C / (cost.c * N**cost.m))
        assert BASE.at(C, cost) == pytest.approx(losses.min(), rel=1e-8)


def test_a_multiplier_solves_its_equation():
    arm, costs = Law(1.9, 300.0, 1500.0, 0.33, 0.35), (Cost(), Cost(9.0, 0.98))
    k = np.exp(log_multiplier(BASE, arm, 1e19, *costs))
    assert BASE.at(k * 1e19, costs[0]) == pytest.approx(arm.at(1e19, costs[1]), rel=1e-12)
    assert np.exp(log_multiplier(BASE, scaled(1.2), 1e19, *costs[:1] * 2)) == pytest.approx(1.2)
    lower = arm._replace(E=0.5)
    assert log_multiplier(BASE, lower, 1e24, *costs) == np.inf


@pytest.mark.parametrize(
    ("sizes", "budgets", "seeds", "reason"),
    [
        (LARGE[:2], BUDGETS, 3, "2 model sizes"),
        (LARGE, (20.0,), 3, "one budget of tokens per parameter"),
        (LARGE, BUDGETS, 1, "5 runs"),
        (LARGE, BUDGETS, 2, ""),
    ],
)
def test_designs_that_identify_no_law_are_named(sizes, budgets, seeds, reason):
    N, D, _ = points(BASE, sizes, budgets)
    runs = [(size, seed) for size in sizes for seed in range(seeds)]
    why = unidentified(N, D, runs)
    assert why.startswith(reason) and bool(why) == bool(reason)


def test_bad_conditioning_and_active_bounds_are_named():
    N, D, L = points(BASE)
    assert not problem(BASE, N, D)
    close = np.linspace(1e8, 1.1e8, 5)
    near = points(BASE, close)
    assert "condition number" in problem(BASE, *near[:2])
    steep = Law(1.8, 1e16, 2143.4, 2.0, 0.3672)
    assert "alpha = 1.5" in problem(fit_projected(N, D, steep.loss(N, D)), N, D)
    assert "E = 0.01" in problem(fit_projected(N, D, L - 1.9), N, D)


def test_isoflop_parabolas_find_the_optimal_sizes():
    law, C = Law(1.8, 400.0, 400.0, 0.35, 0.35), 1e19
    best = (C / 6) ** 0.5  # alpha = beta and A = B: N* = D*
    N = np.tile(best * np.geomspace(0.3, 3.0, 7), 2)
    budgets = np.repeat([C, 1.02 * C], 7)
    ((budget, size, loss),) = isoflop(N, budgets, law.loss(N, C / (6 * N)))
    assert budget == pytest.approx(1.01 * C, rel=1e-3)
    assert size == pytest.approx(best, rel=1e-3)
    assert loss == pytest.approx(law.at(C, Cost()), rel=1e-3)


def test_noiseless_studies_give_the_true_multiplier():
    scaling, design = fit_all(NOISELESS.draw(0), "base", 20), NOISELESS
    for C in (design.C, 100 * design.C):
        k = scaling.multiplier("arm", C)
        np.testing.assert_allclose([k.value, k.low, k.high], 1.2, rtol=1e-4)
    predicted = scaling.predict("arm", 1e8, 2e9)
    np.testing.assert_allclose([predicted.low, predicted.high], design.arm.loss(1e8, 2e9))


def test_crossings_are_found():
    better_later = BASE._replace(E=1.75, A=600.0)
    design = dataclasses.replace(NOISELESS, arm=better_later)
    scaling = fit_all(design.draw(0), "base", 20)
    (C,) = scaling.crossings("arm", 1e19, 1e23)
    assert design.multiplier(C) == pytest.approx(1.0, abs=0.02)
    assert scaling.multiplier("arm", C * 100, since=C / 100).value > 1
    assert not scaling.crossings("arm", C * 2, C * 100)


def test_arms_without_a_law_have_a_reason_and_do_not_stop_the_others():
    arms = DESIGNS["5 sizes, 3 seeds, paired"].draw(0)
    arms["short"] = arms["arm"].rows(arms["arm"].runs[:6])
    scaling = fit_all(arms, "base", 20)
    assert set(scaling.fits) == {"base", "arm"} and "2 model sizes" in scaling.why_not["short"]
    disjoint = arms["arm"]._replace(runs=tuple((n, 9 + s) for n, s in arms["arm"].runs))
    scaling = fit_all({"base": arms["base"], "arm": disjoint}, "base", 20)
    assert not scaling.fits and "0 runs (size and seed) in common" in scaling.why_not["arm"]


def test_pairing_narrows_the_intervals():
    width = lambda design: covers(design, 0, 200)[1]
    unpaired, paired = DESIGNS["5 sizes, 3 seeds, unpaired"], DESIGNS["5 sizes, 3 seeds, paired"]
    assert width(paired) < 0.7 * width(unpaired)


def test_rankings_at_one_size_are_compared_with_the_target():
    runs = (("small", 0), ("small", 1), ("large", 0), ("large", 1))
    one = lambda *losses: Points(runs, *np.ones((3, 4, 1)), np.array(losses, np.float64)[:, None])
    arms = {"a": one(3.0, 3.2, 2.0, 2.1), "b": one(3.1, 3.1, 2.2, 2.05)}
    # a is better on average at "large"; a single seed agrees once at each size.
    assert ranking(arms, "large") == {"small": (1, 2), "large": (1, 2)}


@pytest.mark.parametrize("name", ["5 sizes, 3 seeds, unpaired", "4 small sizes, 3 seeds"])
def test_intervals_cover_the_true_multiplier(name):
    """A slice of `make coverage`: 60 studies, of which 51 to 60 are covered with p > 0.99."""
    found = [covers(DESIGNS[name], seed, 200) for seed in range(60)]
    covered = np.sum([inside for inside, _ in found], axis=0)
    assert (covered >= 51).all(), covered


def test_profile_and_bootstrap_agree():
    design = DESIGNS["5 sizes, 3 seeds, paired"]
    scaling = fit_all(design.draw(2), "base", 400)
    by_profile, by_bootstrap = (
        profile(scaling, "arm", design.C),
        scaling.multiplier("arm", design.C),
    )
    assert by_profile.low < by_bootstrap.value < by_profile.high
    width = lambda x: np.log(x.high / x.low)
    assert width(by_profile) == pytest.approx(width(by_bootstrap), rel=0.4)
