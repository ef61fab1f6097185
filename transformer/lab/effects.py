"""The effects of the fields of a grid and their interactions, and scans of numeric fields.

A contrast adds and subtracts arms, averaged over all settings of the other fields, in each seed:

    effect of a field            y[b] - y[a]
    interaction of two fields    (y[b, d] - y[a, d]) - (y[b, c] - y[a, c])

Both have a paired t interval over seeds, and the p values of all effects of a grid are corrected
together (Holm 1979). A scan, such as one of the learning rate, has a best value, stable ranges and
a sensitivity (Wortsman et al. 2023, arXiv:2309.14322): mean of min(loss, log V) - least loss."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from transformer.lab.formatting import both_p, number, p_value, signed, spell_range
from transformer.lab.results import Arm, Results, uniform_loss
from transformer.lab.statistics import Difference, Mean, corrected, difference
from transformer.units import kind

Values = dict[int, float]  # seed -> value of the metric
Key = tuple[str, ...]  # the values of some fields
LEAST = 3  # values in a scan, at least
CLOSE = 0.05  # distance of close values from the best mean, at most, relative to it


class Effect(NamedTuple):
    """The effect of a field, or the interaction of two."""

    changes: tuple[tuple[str, str, str], ...]  # fields with two values: (norm_placement, pre, post)
    versus: Difference
    at: tuple[Mean, ...] = ()  # of two fields: the effect of the first at both values of the other

    @property
    def name(self) -> str:
        return " x ".join(f"{short(field)}: {b} - {a}" for field, a, b in self.changes)


class Cells(NamedTuple):
    """The arms of a grid by the values of its fields, in the order of the fields."""

    fields: tuple[str, ...]
    values: Mapping[Key, Values]

    def levels(self, field: str) -> list[str]:
        """Returns the values of a field, the baseline's first."""
        return list(dict.fromkeys(key[self.fields.index(field)] for key in self.values))

    def contrast(self, *changes: tuple[str, str, str]) -> tuple[Difference, tuple[Mean, ...], int]:
        """Returns an effect or interaction, its parts, and over how many settings it averages."""
        corners = list(itertools.product(*((a, b) for _, a, b in changes)))
        y, settings = self.averages([field for field, *_ in changes], corners)
        (_, a, b), *others = changes
        if not others:
            return difference(y[b,], y[a,]), (), settings
        ((_, c, d),) = others
        at = tuple(difference(y[b, x], y[a, x]).mean for x in (c, d))
        plus = lambda one, two: {seed: x + y[two][seed] for seed, x in y[one].items()}
        return difference(plus((a, c), (b, d)), plus((a, d), (b, c))), at, settings

    def averages(self, fields, combinations: Collection[Key]) -> tuple[dict[Key, Values], int]:
        """Returns the mean for each combination of values of these fields, over the settings of the
        other fields that have all combinations, and the number of these settings."""
        index = [self.fields.index(field) for field in fields]
        by_setting: dict[Key, dict[Key, Values]] = {}
        for key, values in self.values.items():
            setting = tuple(x for n, x in enumerate(key) if n not in index)
            by_setting.setdefault(setting, {})[tuple(key[n] for n in index)] = values
        complete = [x for x in by_setting.values() if all(c in x for c in combinations)]
        seeds = [set(x[c]) for x in complete for c in combinations]
        common = sorted(set.intersection(*seeds)) if seeds else []
        average = lambda c: {s: float(np.mean([x[c][s] for x in complete])) for s in common}
        return {c: average(c) for c in combinations}, len(complete)


def cells_of(results: Results, values: Mapping[str, Values]) -> Cells:
    """Returns the grid of a sweep: the arms that set the most common set of fields."""
    sets = [frozenset(arm.changes) for arm in results.arms.values()]
    grid = max(dict.fromkeys(sets), key=sets.count)  # extra arms set other fields
    fields = tuple(field for field in results.sweep.fields if field in grid)
    call = lambda name: tuple(results.sweep.points[name].call(field) for field in fields)
    arms = [name for name, arm in results.arms.items() if set(arm.changes) == grid]
    return Cells(fields, {call(name): values[name] for name in arms})


def effects_of(cells: Cells, without: Collection[str]) -> tuple[Effect, ...]:
    """Returns the effects and interactions of the fields of a grid, except those in `without`."""
    levels = {field: cells.levels(field) for field in cells.fields if field not in without}
    steps = [[(field, a, b) for b in others] for field, (a, *others) in levels.items()]
    singles = [(step,) for changes in steps for step in changes]
    pairs = [pair for two in itertools.combinations(steps, 2) for pair in itertools.product(*two)]
    contrasts = [(changes, *cells.contrast(*changes)) for changes in (*singles, *pairs)]
    # The effect of a field in one setting of the others is a difference from the baseline.
    effects = [Effect(x, versus, at) for x, versus, at, n in contrasts if n >= 3 - len(x)]
    tested = corrected({str(n): effect.versus for n, effect in enumerate(effects)})
    return tuple(x._replace(versus=tested[str(n)]) for n, x in enumerate(effects))


def short(field: str) -> str:
    """Returns the last part of a field's name."""
    return field.rpartition(".")[2]


def sentences(effects: Sequence[Effect], results: Results) -> list[str]:
    """Returns a sentence for each effect of a field, and for each pair of fields."""
    tested = [effect for effect in effects if effect.versus.mean.count > 1]
    lines = [_of_field(effect, results) for effect in tested if len(effect.changes) == 1]
    fields = lambda effect: [field for field, *_ in effect.changes]
    pairs = itertools.groupby((x for x in tested if len(x.changes) == 2), key=fields)
    return lines + [_of_pair(pair, list(contrasts), results) for pair, contrasts in pairs]


def averaged(field: str, results: Results) -> str:
    """Returns the start of a sentence on the effect of a field."""
    others = [short(other) for other in results.sweep.fields if other not in (field, "arm")]
    return f"Averaged over {'the sizes' if results.sweep.ladder else ' and '.join(others)}, "


def _of_field(effect: Effect, results: Results) -> str:
    ((field, a, b),), x = effect.changes, effect.versus.mean
    change = f"{averaged(field, results)}{b} instead of {a}"
    counts, metric = kind(results.sweep.metric, results.predicts_tokens).unit, results.sweep.metric
    if not (effect.versus.is_detectable or effect.versus.is_inconclusive):
        size = f"{signed(x.mean, x.half)} [{spell_range(x)}]"
        return f"{change} makes no detectable difference: {size} {_certainty(effect)}."
    verb = "raises" if x.mean > 0 else "lowers"
    size = f"{number(abs(x.mean), x.half)} [{spell_range(x, abs_value=True)}] {counts}".rstrip()
    size += ", but inconclusively" * effect.versus.is_inconclusive
    return f"{change} {verb} {metric} by {size} {_certainty(effect)}."


def _of_pair(pair: Sequence[str], contrasts: Sequence[Effect], results: Results) -> str:
    """Returns the answer to whether the effect of one field depends on another."""
    question = f"Does the effect of {short(pair[0])} depend on {short(pair[1])}?"
    detected = [effect for effect in contrasts if effect.versus.is_detectable]
    p = lambda effect: math.inf if math.isnan(effect.versus.p) else effect.versus.p
    effect = min(detected or contrasts, key=p)
    (_, a, b), (_, c, d) = effect.changes
    unclear = "Inconclusive" if effect.versus.is_inconclusive else "Not detectably"
    x, answer = effect.versus.mean, "Yes" if detected else unclear
    if len(contrasts) > 1:
        answer += f", in {len(detected) or 'any'} of {len(contrasts)} contrasts. The clearest"
    at = [f"{signed(part.mean, part.half)} [{spell_range(part)}]" for part in effect.at]
    sizes = f"{results.sweep.metric} by {at[0]} with {c} and by {at[1]} with {d}"
    further = f"{signed(x.mean, x.half)} [{spell_range(x)}] {_certainty(effect)}"
    answer += f": {b} instead of {a} changes {sizes}"
    return f"{question} {answer}. The difference of these differences is {further}."


def _certainty(effect: Effect) -> str:
    if math.isnan(effect.versus.p):
        return "in every seed, which leaves no spread for a t-test"
    return f"(95 % interval over {effect.versus.mean.count} seeds, {both_p(effect.versus)})"


def tables(effects: Sequence[Effect]) -> list[list[list[str]]]:
    """Returns the table of effects, or nothing if there are none."""
    rows = [["effect", "difference", "95 % interval", "p", "corrected p", "seeds"]]
    for effect in effects:
        x, values = effect.versus.mean, (effect.versus.alone, effect.versus.p)
        ps = [p_value(p).removeprefix("p ").removeprefix("= ") for p in values]
        rows.append([effect.name, signed(x.mean, x.half), spell_range(x), *ps, str(x.count)])
    return [rows] if effects else []


class Scan(NamedTuple):
    """The metric at each value of a field, for one setting of the other fields."""

    field: str
    setting: str  # of the other fields; "" if no other field varies
    arms: frozenset[str]
    points: Mapping[float, Mean]  # value -> mean over finished seeds
    best: float  # the value with the best mean
    close: tuple[float, float]  # ends of the contiguous range around `best` within CLOSE of it
    stable: tuple[float, float] | None  # of that without failed seeds; None if `best` has some
    sensitivity: float  # NaN if unknown, or if the metric is not a loss


def scans(results: Results) -> list[Scan]:
    """Returns a scan for each numeric field and setting of the others with >= LEAST values."""
    result, points, metric = [], results.sweep.points, results.sweep.metric
    for field in results.sweep.fields:
        groups: dict[str, dict[float, Arm]] = {}  # setting of the other fields -> value -> arm
        for arm in (x for x in results.arms.values() if type(x.changes.get(field)) in (int, float)):
            others = {key: str(x) for key, x in arm.changes.items() if key != field}
            groups.setdefault(str(sorted(others.items())), {})[float(arm.changes[field])] = arm
        for arms in groups.values():
            any_arm = points[next(iter(arms.values())).name]
            setting = "-".join(any_arm.call(key) for key in any_arm.changes if key != field)
            if len(arms) >= LEAST and any(arm.values(metric) for arm in arms.values()):
                result.append(_scan(results, field, setting, dict(sorted(arms.items()))))
    return result


def _scan(results: Results, field: str, setting: str, arms: Mapping[float, Arm]) -> Scan:
    metric, sign = results.sweep.metric, -1.0 if results.sweep.higher_is_better else 1.0
    points = {x: arm.mean(metric) for x, arm in arms.items()}
    best = min((x for x in points if points[x].count), key=lambda x: sign * points[x].mean)
    least, is_loss = points[best].mean, metric.endswith("/loss")
    first = next(run for arm in arms.values() for run in arm.runs.values())
    worst = uniform_loss(first.config) if is_loss else math.inf
    losses, completes, is_close = {}, {}, {}  # final losses, at most log V
    for x, arm in arms.items():
        losses[x] = [min(value, worst) for value in arm.values(metric).values()]
        losses[x] += [worst] * len(arm.diverged)
        completes[x] = bool(losses[x]) and max(losses[x]) < worst
        is_close[x] = abs(points[x].mean - least) <= CLOSE * abs(least)  # False for NaN
    stable = _around(best, completes) if completes[best] else None
    mean_loss = float(np.mean([np.mean(x) for x in losses.values() if x]))
    sensitivity = mean_loss - least if is_loss else math.nan
    names, close = frozenset(arm.name for arm in arms.values()), _around(best, is_close)
    return Scan(field, setting, names, points, best, close, stable, sensitivity)


def _around(best: float, holds: Mapping[float, bool]) -> tuple[float, float]:
    """Returns the contiguous range around `best` in which `holds` is true. Values are sorted."""
    below, above = [x for x in reversed(holds) if x <= best], [x for x in holds if x >= best]
    return tuple([*itertools.takewhile(holds.get, side)][-1] for side in (below, above))
