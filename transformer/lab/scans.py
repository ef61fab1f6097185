"""Scans of a numeric field, such as the learning rate: best value, stable range and sensitivity.

The sensitivity is that of Wortsman et al. (2023), "Small-scale proxies for large-scale Transformer
training instabilities": the mean over all values of min(loss, log V), minus the loss at the best
value. log V nats is the loss of uniform predictions.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy as np

from transformer.lab.results import Arm, Results, uniform_loss
from transformer.lab.statistics import Mean, mean
from transformer.units import bounds

LEAST = 3
"""Minimum number of values in a scan."""

CLOSE = 0.05
"""Maximum distance of close values from the best mean, relative to it."""


@dataclasses.dataclass(frozen=True)
class Scan:
    """The metric at each value of a field, for one setting of the other fields."""

    field: str
    setting: str  # of the other fields; "" if no other field varies
    arms: frozenset[str]
    points: Mapping[float, Mean]  # value -> mean over finished seeds
    best: float  # the value with the best mean
    # The first and last value of the contiguous range around the best whose means are within CLOSE.
    close: tuple[float, float]
    # The same for the range without failed seeds. None if a seed failed at the best value.
    stable: tuple[float, float] | None
    sensitivity: float  # NaN if unknown, or if the metric is not a loss


def scans(results: Results) -> list[Scan]:
    """Returns a scan for each numeric field and setting of the others with >= LEAST values."""
    result, points = [], results.sweep.points
    for field in results.sweep.fields:
        groups: dict[str, dict[float, Arm]] = {}  # setting -> value -> arm
        spelled: dict[str, str] = {}
        for arm in results.arms.values():
            value = arm.changes.get(field)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                other_fields = [key for key in arm.changes if key != field]
                setting = str(sorted((key, str(arm.changes[key])) for key in other_fields))
                spelled[setting] = "-".join(points[arm.name].call(key) for key in other_fields)
                groups.setdefault(setting, {})[float(value)] = arm
        for setting, arms in groups.items():
            if len(arms) >= LEAST:
                result.append(_scan(results, field, spelled[setting], arms))
    return [scan for scan in result if scan is not None]


def _scan(results: Results, field: str, setting: str, arms: Mapping[float, Arm]) -> Scan | None:
    metric, sign = results.sweep.metric, -1.0 if results.sweep.higher_is_better else 1.0
    arms = dict(sorted(arms.items()))
    points = {x: mean(list(arm.values(metric).values()), bounds(metric)) for x, arm in arms.items()}
    finished = {x: point for x, point in points.items() if point.count}
    if not finished:
        return None
    best = min(finished, key=lambda x: sign * finished[x].mean)
    least = finished[best].mean
    is_loss, worst, sensitivity = metric.endswith("/loss"), math.inf, math.nan
    if is_loss:
        worst = uniform_loss(next(run for arm in arms.values() for run in arm.runs.values()).config)
    # The final loss of every seed, at most that of uniform predictions.
    losses, completes, is_close = {}, {}, {}
    for x, arm in arms.items():
        losses[x] = [min(value, worst) for value in arm.values(metric).values()]
        losses[x] += [worst] * len(arm.diverged)
        reaches_worst = is_loss and bool(losses[x]) and max(losses[x]) >= worst
        completes[x] = not arm.diverged and bool(losses[x]) and not reaches_worst
        is_close[x] = x in finished and abs(finished[x].mean - least) <= CLOSE * abs(least)
    stable = _around(best, completes) if completes[best] else None
    if is_loss:
        sensitivity = float(np.mean([np.mean(x) for x in losses.values() if x])) - least
    names, close = frozenset(arm.name for arm in arms.values()), _around(best, is_close)
    return Scan(field, setting, names, points, best, close, stable, sensitivity)


def _around(best: float, holds: Mapping[float, bool]) -> tuple[float, float]:
    """Returns the contiguous range around `best` in which `holds` is true. Values are sorted."""
    below, above = [x for x in reversed(holds) if x <= best], [x for x in holds if x >= best]
    return tuple([*itertools.takewhile(holds.get, side)][-1] for side in (below, above))
