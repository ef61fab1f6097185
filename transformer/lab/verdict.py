"""Derives a verdict from results: statistics by arm, and sentences that the intervals support."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from transformer.lab.formatting import number, p_value, signed, spell, spell_range
from transformer.lab.profiles import Profile, profiles
from transformer.lab.results import Arm, Results
from transformer.lab.scans import CLOSE, Scan, scans
from transformer.lab.statistics import Difference, Mean, corrected, difference, mean
from transformer.units import unit


@dataclasses.dataclass(frozen=True)
class Row:
    """The statistics of an arm."""

    arm: Arm
    value: Mean  # of the metric, over finished seeds
    to_baseline: Difference | None  # arm - baseline; None for the baseline
    among_best: bool  # the best, or no detectable difference from it
    reaches: "Reaches"
    tokens_per_second: float
    memory: float  # peak bytes of the process or the device


@dataclasses.dataclass(frozen=True)
class Reaches:
    """When an arm reaches the final validation value of the baseline.

    Of `seeds` common seeds, `count` reach it, on average after `share` of the baseline's steps.
    """

    share: float
    count: int
    seeds: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The conclusions from results."""

    results: Results
    rows: Mapping[str, Row]
    # field -> "b - a" -> effect, averaged over all settings of the other fields
    factors: Mapping[str, Mapping[str, Difference]]
    scans: tuple[Scan, ...]
    profiles: tuple[Profile, ...]
    sentences: tuple[str, ...]


def derive_verdict(results: Results) -> Verdict:
    """Computes means, differences from baseline and best arm (paired, corrected), and sentences."""
    sweep, arms = results.sweep, results.arms
    base, sign = arms[sweep.baseline], -1.0 if sweep.higher_is_better else 1.0
    values = {name: arm.values(sweep.metric) for name, arm in arms.items()}
    versus = lambda other, names: corrected(
        {name: difference(values[name], values[other]) for name in names if name != other}
    )
    to_base = versus(base.name, arms)
    means = {name: mean(list(x.values())) for name, x in values.items()}
    finished = {name: sign * means[name].mean for name in arms if values[name]}
    most_seeds = max(map(len, values.values()), default=0)
    # An arm with missing seeds may be missing the hardest one, so it cannot be the best.
    complete = [name for name in finished if len(values[name]) == most_seeds]
    best = min(complete, key=finished.get, default="")
    to_best = versus(best, finished)
    # The pair of baseline and best gets the same corrected p value in both comparisons.
    if best == base.name:
        to_best |= to_base
    elif base.name in to_best:
        to_best[base.name] = to_base[best]
    any_p = any(not math.isnan(comparison.p) for comparison in to_best.values())
    rows, progress = {}, validated(results)
    for name, arm in arms.items():
        among_best = any_p and (name == best or (name in to_best and _alike(to_best[name])))
        reaches = _reaches(arm, base, progress, 1.0 if progress == "eval/loss" else sign)
        statistics = (means[name], to_base.get(name), among_best, reaches)
        rows[name] = Row(arm, *statistics, arm.speed, _peak_memory(arm))
    factors = _factors(results, values)
    scanned = tuple(scans(results))
    # With many arms, the sentences on the scans replace those on each scanned arm.
    scanned_arms = frozenset().union(*(scan.arms for scan in scanned)) if len(rows) > NAMED else ()
    fields = factors.keys() - {scan.field for scan in scanned}
    sentences = (
        *_of_best(results, rows, best),
        *(_of_scan(scan, results) for scan in scanned),
        *_of_arms(results, rows, scanned_arms),
        *_of_factors({field: factors[field] for field in factors if field in fields}),
    )
    return Verdict(results, rows, factors, scanned, tuple(profiles(results)), sentences)


def _peak_memory(arm: Arm) -> float:
    """Returns the largest logged peak memory of an arm in bytes, or NaN."""
    lines = (line for run in arm.runs.values() for line in run.lines)
    peaks = (line["memory/peak_bytes"] for line in lines if "memory/peak_bytes" in line)
    return max(map(float, peaks), default=math.nan)


def _alike(versus: Difference) -> bool:
    """Whether no difference is detectable. False for one that is equal in all seeds (p is NaN)."""
    return not versus.is_detectable and not (versus.mean.count > 1 and math.isnan(versus.p))


def validated(results: Results) -> str:
    """Returns the metric of validation curves: the primary one if it is logged, else the loss."""
    name = "eval/" + results.sweep.metric.partition("/")[2]
    base = results.arms[results.sweep.baseline]
    return name if any(run.curve(name) for run in base.runs.values()) else "eval/loss"


def _reaches(arm: Arm, base: Arm, name: str, sign: float) -> Reaches:
    """Compares validation curves, linearly interpolated, over the seeds that both arms finished."""
    shares = []
    for seed in arm.runs.keys() & base.runs.keys():
        if not all(math.isfinite(each.runs[seed].outcome(name)) for each in (arm, base)):
            continue
        curve, last = (
            [(step, sign * x) for step, x in each.runs[seed].curve(name)] for each in (arm, base)
        )
        (steps, target), share = last[-1], math.nan
        for (before, high), (after, low) in itertools.pairwise([(0, math.inf), *curve]):
            if low <= target:
                flat = math.isinf(high) or high == low
                fraction = 1.0 if flat else (high - target) / (high - low)
                share = (before + fraction * (after - before)) / steps
                break
        shares.append(share)
    reached = [share for share in shares if not math.isnan(share)]
    return Reaches(float(np.mean(reached)) if reached else math.nan, len(reached), len(shares))


def _factors(
    results: Results, values: Mapping[str, Mapping[int, float]]
) -> dict[str, dict[str, Difference]]:
    """Returns the effect of each field if several vary, averaged over settings of the other fields.

    Only settings that occur with both values of the field are used.
    """
    sets, by_field = [frozenset(arm.changes) for arm in results.arms.values()], {}
    fields = max(dict.fromkeys(sets), key=sets.count)  # those of the grid; extra arms set others
    if len(fields) < 2:
        return {}
    for field in [field for field in results.sweep.fields if field in fields]:
        by_value: dict[str, dict[str, str]] = {}  # value -> setting of the other fields -> arm
        for name, arm in results.arms.items():
            if set(arm.changes) != fields:
                continue
            setting = str(sorted((k, str(v)) for k, v in arm.changes.items() if k != field))
            by_value.setdefault(results.sweep.points[name].call(field), {})[setting] = name
        first, *remaining = by_value
        effects = {}
        for value in remaining:
            common = by_value[value].keys() & by_value[first].keys()
            pairs = [(by_value[value][setting], by_value[first][setting]) for setting in common]
            if len(pairs) < 2:
                continue
            seeds = set.intersection(*(set(values[arm]) for pair in pairs for arm in pair))
            average = lambda side, pairs=pairs, seeds=seeds: {
                seed: float(np.mean([values[pair[side]][seed] for pair in pairs])) for seed in seeds
            }
            effects[f"{value} - {first}"] = difference(average(0), average(1))
        if effects:
            by_field[field] = effects
    flat = {f"{field}|{name}": x for field, xs in by_field.items() for name, x in xs.items()}
    flat = corrected(flat)
    return {
        field: {name: flat[f"{field}|{name}"] for name in effects}
        for field, effects in by_field.items()
    }


def _of_best(results: Results, rows: Mapping[str, Row], best: str) -> list[str]:
    """Returns sentences on the best arm."""
    sweep, lines = results.sweep, []
    counts = unit(sweep.metric, results.predicts_tokens)
    metric = f"{sweep.metric} ({counts})" if counts else sweep.metric
    if best and sum(row.value.count > 0 for row in rows.values()) < 2:
        value = f"a value of {metric}, {spell(rows[best].value)}"
        lines.append(f"No comparison is possible: only {best} has {value}.")
    elif best:
        equals = [name for name, row in rows.items() if row.among_best and name != best]
        equal_to = ""
        if equals:
            equal_to = f"; there is no detectable difference between it and {_listed(equals)}"
        finished, runs = rows[best].value.count, len(sweep.seeds)
        seeds = f", over the {finished} of {runs} seeds that finished" if finished < runs else ""
        is_single = rows[best].value.count == 1
        kind = "single value, from which no conclusion is drawn" if is_single else "mean"
        all_equal = len(equals) + 1 == len(rows) and all(
            row.to_baseline is None or row.to_baseline.mean.low == row.to_baseline.mean.high == 0
            for row in rows.values()
        )
        value = spell(rows[best].value)
        if all_equal:
            lines.append(f"By {metric}, all arms are equal in every seed: {value}.")
        else:
            lines.append(f"By {metric}, {best} has the best {kind}: {value}{seeds}{equal_to}.")
        if rows[best].value.count == 2:
            lines.append(
                "Two seeds give wide intervals and few detectable differences; use three or more."
            )
    return lines


def _of_arms(results: Results, rows: Mapping[str, Row], without: Collection[str]) -> list[str]:
    """Returns sentences on divergence, and on the difference of each arm from the baseline.

    Arms in `without` get no sentence on it. Arms without a detectable one share a sentence.
    """
    sweep, lines, base = results.sweep, [], results.sweep.baseline
    correction = _correction(row.to_baseline for row in rows.values() if row.to_baseline)
    undetected: dict[str, Difference] = {}
    untested: dict[str, list[str]] = {}  # reason -> arms
    for name, row in rows.items():
        diverged = row.arm.diverged
        if diverged:
            steps = ", ".join(f"{step:,}" for step in diverged.values())
            note = "; means are over the other seeds" if row.value.count else ""
            share = f"{len(diverged)} of {len(row.arm.runs)} seeds"
            lines.append(f"{name} diverged in {share}, at step {steps}{note}.")
        if row.to_baseline is None or not row.value.count or name in without:
            continue
        versus = row.to_baseline
        if versus.mean.count < 2:
            common = f"{versus.mean.count or 'no'} seed{'s' * (versus.mean.count == 0)} in common"
            reason = f"{common} with {base}, too few for an interval"
            untested.setdefault(reason, []).append(name)
        elif math.isnan(versus.p):
            reason = (
                f"a difference from {base} of {signed(versus.mean.mean)} in each of "
                f"{versus.mean.count} seeds, which leaves no spread for a t-test"
            )
            untested.setdefault(reason, []).append(name)
        elif versus.is_detectable:
            better = (versus.mean.mean < 0) != sweep.higher_is_better
            lines.append(
                f"{name} is {'better' if better else 'worse'} than {base} by "
                f"{number(abs(versus.mean.mean), versus.mean.half)} "
                f"[{spell_range(versus.mean, abs_value=True)}] (95 % interval over "
                f"{versus.mean.count} seeds), {p_value(versus.p)}{correction}."
            )
        else:
            undetected[name] = versus
    for reason, names in untested.items():
        has = "have" if len(names) > 1 else "has"
        lines.append(f"{_listed(names)} {has} {reason}, so no conclusion is drawn.")
    return lines + _of_undetected(undetected, base, correction)


def _of_undetected(undetected: Mapping[str, Difference], base: str, correction: str) -> list[str]:
    """Returns a sentence on the arms without a detectable difference from the baseline."""
    excludes_zero = lambda interval: not interval.low <= 0 <= interval.high
    uncorrected = [name for name, versus in undetected.items() if excludes_zero(versus.mean)]
    remark = "; without the correction, the difference would be significant" if uncorrected else ""
    if len(undetected) == 1:
        ((name, versus),) = undetected.items()
        return [
            f"{name} has no detectable difference from {base}: "
            f"{signed(versus.mean.mean, versus.mean.half)} [{spell_range(versus.mean)}] "
            f"(95 % interval over {versus.mean.count} seeds), "
            f"{p_value(versus.p)}{correction}{remark}."
        ]
    if undetected:
        arms = _listed(uncorrected) if len(uncorrected) <= NAMED else f"{len(uncorrected)} of them"
        remark += f" for {arms}" if uncorrected else ""
        return [
            f"{_listed(list(undetected))} have no detectable difference from {base}: "
            f"{p_value(min(versus.p for versus in undetected.values()))} or more"
            f"{correction}{remark}."
        ]
    return []


def _correction(differences: Iterable[Difference]) -> str:
    """Returns the words that follow a corrected p value."""
    count = sum(not math.isnan(difference.p) for difference in differences)
    return f", Holm-corrected for {count} comparisons" if count > 1 else ""


def _of_factors(factors: Mapping[str, Mapping[str, Difference]]) -> list[str]:
    """Returns a sentence for each effect of a field, averaged over the other fields."""
    lines = []
    correction = _correction(e for effects in factors.values() for e in effects.values())
    for field, effects in factors.items():
        for pair, effect in effects.items():
            if effect.mean.count >= 2:
                remark = "" if effect.is_detectable else "; no detectable difference from zero"
                if math.isnan(effect.p):
                    remark = "; the same in every seed, so no conclusion is drawn"
                lines.append(
                    f"Effect of {field.rpartition('.')[2]} ({pair}), averaged over the other "
                    f"fields: {signed(effect.mean.mean, effect.mean.half)} "
                    f"[{spell_range(effect.mean)}] (95 % interval), {p_value(effect.p)}"
                    f"{'' if math.isnan(effect.p) else correction}{remark}."
                )
    return lines


def _of_scan(scan: Scan, results: Results) -> str:
    """Returns a sentence on a scan."""
    values = f"{len(scan.points)} values of {scan.field.rpartition('.')[2]}"
    line = f"With {scan.setting}, of {values}" if scan.setting else f"Of {values}"
    line += f", {scan.best:g} has the best mean ({spell(scan.points[scan.best])})"
    if scan.best in (min(scan.points), max(scan.points)):
        line += ", at the edge of the scanned range"
    line += f"; range within {CLOSE:.0%} of it: {_from_to(scan.close)}"
    if results.sweep.metric.endswith("/loss"):
        if scan.stable:
            line += f"; range without failed seeds: {_from_to(scan.stable)}"
        else:
            line += "; a seed failed even at the best value"
        line += f"; sensitivity {scan.sensitivity:.3f} nats"
    return line + "."


def _from_to(ends: tuple[float, float]) -> str:
    return f"{ends[0]:g} to {ends[1]:g}" if ends[0] < ends[1] else f"{ends[0]:g} alone"


NAMED = 8
"""Maximum number of arms that a sentence names. The table has all of them."""


def _listed(names: list[str]) -> str:
    if len(names) > NAMED:
        return f"{len(names)} other arms"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
