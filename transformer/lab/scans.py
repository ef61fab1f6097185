"""What a number does that a sweep goes through, learning rate or warm-up say: where it is best, how far it can be pushed, how much it matters.

Wortsman et al. (2023), "Small-scale proxies for large-scale Transformer training instabilities", whose sensitivity this is: the mean over the
rates of min(loss, loss of knowing nothing) - the loss at the best rate. Who knows nothing says all tokens alike: log V nats.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy as np

from transformer.lab.results import Arm, Results, knowing_nothing
from transformer.lab.statistics import Mean, mean

LEAST = 3
"""Values that make a scan."""

CLOSE = 0.05
"""Of the best mean: how far from it a value is still as good."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """One setting of all other fields, and what it gives at each value of this one."""

    field: str
    setting: str  # what the other fields are; "" where none varies
    arms: frozenset[str]
    points: Mapping[float, Mean]  # of seeds that came to their end
    best: float
    close: tuple[
        float, float
    ]  # the values around the best from which to which means are within 5 % of it
    stable: (
        tuple[float, float] | None
    )  # the values around the best from which to which no seed failed; None: one failed at the best
    sensitivity: float  # NaN: not known, or not of a loss


def scans(results: Results) -> list[Scan]:
    """Of every field that is a number with three values or more, for each setting of the others that has as many."""
    found, points = [], results.sweep.points
    for field in results.sweep.fields:
        groups: dict[str, dict[float, Arm]] = {}  # the settings of the others -> value -> arm
        spelled: dict[str, str] = {}
        for arm in results.arms.values():
            value = arm.changes.get(field)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                others = [key for key in arm.changes if key != field]
                setting = str(sorted((key, str(arm.changes[key])) for key in others))
                spelled[setting] = "-".join(points[arm.name].call(key) for key in others)
                groups.setdefault(setting, {})[float(value)] = arm
        found += [
            _scan(results, field, spelled[setting], arms)
            for setting, arms in groups.items()
            if len(arms) >= LEAST
        ]
    return [scan for scan in found if scan is not None]


def _scan(results: Results, field: str, setting: str, arms: Mapping[float, Arm]) -> Scan | None:
    metric, sign = results.sweep.metric, -1.0 if results.sweep.higher_is_better else 1.0
    arms = dict(sorted(arms.items()))
    points = {x: mean(list(arm.values(metric).values())) for x, arm in arms.items()}
    ended = {x: one for x, one in points.items() if one.count}
    if not ended:
        return None
    best = min(ended, key=lambda x: sign * ended[x].mean)
    is_loss = metric.endswith("/loss")
    nothing = (
        knowing_nothing(next(run for arm in arms.values() for run in arm.runs.values()).config)
        if is_loss
        else math.inf
    )
    # Of every seed: what it ended with, at most what knowing nothing gives.
    losses = {
        x: [min(value, nothing) for value in arm.values(metric).values()]
        + [nothing] * len(arm.diverged)
        for x, arm in arms.items()
    }
    failed = {
        x: bool(arm.diverged) or not losses[x] or (is_loss and max(losses[x]) >= nothing)
        for x, arm in arms.items()
    }
    good = {
        x: x in ended and abs(ended[x].mean - ended[best].mean) <= CLOSE * abs(ended[best].mean)
        for x in arms
    }
    stable = None if failed[best] else _around(best, {x: not bad for x, bad in failed.items()})
    sensitivity = (
        float(np.mean([np.mean(x) for x in losses.values() if x])) - ended[best].mean
        if is_loss
        else math.nan
    )
    return Scan(
        field,
        setting,
        frozenset(arm.name for arm in arms.values()),
        points,
        best,
        _around(best, good),
        stable,
        sensitivity,
    )


def _around(best: float, holds: Mapping[float, bool]) -> tuple[float, float]:
    """From where to where it holds without a gap; values in their order."""
    below, above = ([x for x in reversed(holds) if x <= best], [x for x in holds if x >= best])
    first, last = (list(itertools.takewhile(holds.get, side))[-1] for side in (below, above))
    return first, last
