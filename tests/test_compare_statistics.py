"""The statistics of a comparison: means, paired differences, and corrected p values."""

import math

import numpy as np
import pytest
from scipy import stats

from transformer.lab import verdict
from transformer.lab.statistics import corrected, difference, mean


def test_means_and_differences_match_students_t():
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, 6), rng.normal(3.5, 1, 6)
    low, high = stats.t.interval(0.95, 5, loc=a.mean(), scale=stats.sem(a))
    estimate = mean(a)
    np.testing.assert_allclose([estimate.mean, estimate.low, estimate.high], [a.mean(), low, high])
    expected = stats.ttest_rel(a, b)
    versus = difference(dict(enumerate(a)), dict(enumerate(b)) | {9: 100.0})
    assert versus.p == pytest.approx(expected.pvalue) and versus.mean.count == 6
    np.testing.assert_allclose(
        [versus.mean.low, versus.mean.high], expected.confidence_interval(0.95)
    )


def test_interval_has_nominal_coverage():
    rng = np.random.default_rng(1)
    covered = [
        (estimate := mean(rng.normal(size=3))).low <= 0 <= estimate.high for _ in range(4000)
    ]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


@pytest.mark.parametrize("arms", [4, 12])
def test_false_positive_rate_against_the_best_arm_is_bounded(arms):
    """The false positive rate against the best arm is somewhat above 5%.

    The best arm is chosen by the same numbers, as the note of the report explains.
    """
    rng, detected = np.random.default_rng(2), 0
    for _ in range(600):
        values = rng.normal(size=(arms, 3))
        best = values.mean(axis=1).argmin()
        detected += any(
            versus.is_detectable
            for versus in corrected(
                {
                    n: difference(dict(enumerate(values[n])), dict(enumerate(values[best])))
                    for n in range(arms)
                    if n != best
                }
            ).values()
        )
    assert 0.04 < detected / 600 < 0.125


def test_holm_controls_the_family_wise_error_rate():
    """With many comparisons of equal arms, about one study in twenty detects a difference."""
    differences = {
        name: difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.5})._replace(p=p)
        for name, p in zip("abcd", (0.01, 0.04, 0.03, math.nan), strict=True)
    }
    assert {name: versus.p for name, versus in corrected(differences).items() if name != "d"} == {
        "a": 0.03,
        "b": 0.06,
        "c": 0.06,
    }
    rng, detected = np.random.default_rng(2), []
    draw = lambda: dict(enumerate(rng.normal(size=5)))
    for _ in range(400):
        base = draw()
        detected.append(
            any(
                versus.is_detectable
                for versus in corrected(
                    {str(i): difference(draw(), base) for i in range(6)}
                ).values()
            )
        )
    assert 0 < np.mean(detected) < 0.08


def test_too_few_or_constant_values_detect_no_difference():
    assert math.isnan(mean([3.0]).low) and mean([]).count == 0
    assert (
        math.isnan(difference({0: 1.0}, {0: 2.0}).p)
        and not difference({0: 1.0}, {0: 2.0}).is_detectable
    )
    same = {0: 1.0, 1: 2.0}
    assert difference(same, same).p == 1.0 and not difference(same, same).is_detectable
    # The difference is the same in every seed, exactly or up to rounding: no spread, no evidence.
    for shift in (1.0, 0.1):
        versus = difference({seed: x + shift for seed, x in same.items()}, same)
        assert (
            math.isnan(versus.p)
            and not versus.is_detectable
            and versus.mean.mean == pytest.approx(shift)
        )


@pytest.mark.parametrize(
    ("value", "half", "text"),
    [
        (5.2694, 0.0273, "5.269 ± 0.027"),
        (0.99999968, 8.5e-8, "1.000000 ± 0.000000"),
        (1234.5678, 8.5e-8, "1,234.57 ± 0.00"),
        (9.2e-6, 1.2e-5, "0.000009 ± 0.000012"),
        (0.5, 0.0, "0.500 ± 0.000"),
        (0.0, 0.02, "0.000 ± 0.020"),
    ],
)
def test_digits_of_a_mean_depend_on_its_interval(value, half, text):
    assert verdict.spell(verdict.Mean(value, value - half, value + half, 3)) == text
