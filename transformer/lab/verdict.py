"""From results to what may be said of them: tables of numbers, and a sentence that claims no more than an interval does."""

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping

import numpy as np

from transformer.lab.profiles import Profile, profiles
from transformer.lab.results import Arm, Results
from transformer.lab.scans import CLOSE, Scan, scans
from transformer.lab.statistics import Difference, Mean, corrected, difference, mean
from transformer.units import unit


@dataclasses.dataclass(frozen=True)
class Row:
    """An arm in numbers."""

    arm: Arm
    value: Mean  # of the metric, over the seeds that came to their end
    to_baseline: Difference | None  # arm - baseline; None of the baseline
    among_best: bool  # the best, or not to be told from it
    reaches: "Reaches"
    tokens_per_second: float
    memory: float  # bytes at most, of the process or the device


@dataclasses.dataclass(frozen=True)
class Reaches:
    """When an arm is as good as the baseline at its end: of `seeds` that can tell, `count` come there, on average after this `share` of the
    baseline's steps."""

    share: float
    count: int
    seeds: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """All that is said of some results."""

    results: Results
    rows: Mapping[str, Row]
    factors: Mapping[
        str, Mapping[str, Difference]
    ]  # field -> "b - a" -> over all settings of the others
    scans: tuple[Scan, ...]
    profiles: tuple[Profile, ...]
    sentences: tuple[str, ...]


def judge(results: Results) -> Verdict:
    """Means, paired differences to the baseline and to the best (p corrected for the number of comparisons), and what follows."""
    sweep, arms = results.sweep, results.arms
    base, sign = arms[sweep.baseline], -1.0 if sweep.higher_is_better else 1.0
    values = {name: arm.values(sweep.metric) for name, arm in arms.items()}
    to_base = corrected(
        {name: difference(values[name], values[base.name]) for name in arms if name != base.name}
    )
    ended = {name: sign * mean(list(values[name].values())).mean for name in arms if values[name]}
    whole = max(map(len, values.values()), default=0)
    best = min(
        (name for name in ended if len(values[name]) == whole), key=ended.get, default=""
    )  # who lacks a seed may lack a hard one
    to_best = corrected(
        {name: difference(values[name], values[best]) for name in ended if name != best}
    )
    to_best |= (
        to_base if best == base.name else {base.name: to_base[best]} if base.name in to_best else {}
    )  # one word on a pair
    any_known = any(not math.isnan(one.p) for one in to_best.values())
    rows, watched = {}, validated(results)
    for name, arm in arms.items():
        rows[name] = Row(
            arm, mean(list(values[name].values())), to_base.get(name),
            any_known and (name == best or (name in to_best and _alike(to_best[name]))),
            _reaches(arm, base, watched, 1.0 if watched == "eval/loss" else sign), arm.speed,
            max((float(line["memory/peak_bytes"]) for run in arm.runs.values() for line in run.lines if "memory/peak_bytes" in line), default=math.nan),
        )  # fmt: skip
    factors = _factors(results, values)
    scanned = tuple(scans(results))
    in_scans = (
        frozenset().union(*(one.arms for one in scanned)) if len(rows) > NAMED else ()
    )  # of many, the scans' sentences say it
    sentences = (
        *_of_best(results, rows, best), *(_of_scan(one, results) for one in scanned), *_of_arms(results, rows, in_scans),
        *_of_factors({field: those for field, those in factors.items() if field not in {one.field for one in scanned}}),
    )  # fmt: skip
    return Verdict(results, rows, factors, scanned, tuple(profiles(results)), sentences)


def _alike(one: Difference) -> bool:
    """Whether two arms may be equal, as far as can be told; not where they differ by the same in every seed, of which p says nothing."""
    return not one.tells and not (one.mean.count > 1 and math.isnan(one.p))


def validated(results: Results) -> str:
    """The metric by which arms are compared while they train: the one that decides, where validation knows it, else the loss."""
    name = "eval/" + results.sweep.metric.partition("/")[2]
    base = results.arms[results.sweep.baseline]
    return name if any(run.curve(name) for run in base.runs.values()) else "eval/loss"


def _reaches(arm: Arm, base: Arm, name: str, sign: float) -> Reaches:
    """In validation, over seeds that both have brought to their end; between two evaluations in a straight line."""
    shares = []
    for seed in arm.runs.keys() & base.runs.keys():
        if not all(math.isfinite(one.runs[seed].outcome(name)) for one in (arm, base)):
            continue
        curve, last = (
            [(step, sign * x) for step, x in one.runs[seed].curve(name)] for one in (arm, base)
        )
        (steps, target), at = last[-1], math.nan
        for (before, high), (after, low) in itertools.pairwise([(0, math.inf), *curve]):
            if low <= target:
                way = 1.0 if math.isinf(high) or high == low else (high - target) / (high - low)
                at = (before + way * (after - before)) / steps
                break
        shares.append(at)
    there = [share for share in shares if not math.isnan(share)]
    return Reaches(float(np.mean(there)) if there else math.nan, len(there), len(shares))


def _factors(
    results: Results, values: Mapping[str, Mapping[int, float]]
) -> dict[str, dict[str, Difference]]:
    """Where several fields vary: what one of them does on average over the settings of the others that are there with both of its values."""
    sets, found = [frozenset(arm.changes) for arm in results.arms.values()], {}
    fields = max(dict.fromkeys(sets), key=sets.count)  # of a grid; arms beside it set others
    if len(fields) < 2:
        return {}
    for field in [field for field in results.sweep.fields if field in fields]:
        by_value: dict[str, dict[str, str]] = {}  # value -> setting of the others -> arm
        for name, arm in [
            (name, arm) for name, arm in results.arms.items() if set(arm.changes) == fields
        ]:
            others = str(sorted((k, str(v)) for k, v in arm.changes.items() if k != field))
            by_value.setdefault(results.sweep.points[name].call(field), {})[others] = name
        first, *rest = by_value
        of_field = {}
        for value in rest:
            both = [
                (by_value[value][o], by_value[first][o])
                for o in by_value[value].keys() & by_value[first].keys()
            ]
            if len(both) < 2:
                continue
            seeds = set.intersection(*(set(values[arm]) for pair in both for arm in pair))
            average = lambda side, both=both, seeds=seeds: {
                seed: float(np.mean([values[pair[side]][seed] for pair in both])) for seed in seeds
            }
            of_field[f"{value} - {first}"] = difference(average(0), average(1))
        if of_field:
            found[field] = of_field
    flat = corrected(
        {f"{field}|{name}": one for field, those in found.items() for name, one in those.items()}
    )
    return {
        field: {name: flat[f"{field}|{name}"] for name in those} for field, those in found.items()
    }


def _of_best(results: Results, rows: Mapping[str, Row], best: str) -> list[str]:
    sweep, lines = results.sweep, []
    counts = unit(sweep.metric, results.asks_for_tokens)
    what = f"{sweep.metric} ({counts})" if counts else sweep.metric
    if best and sum(row.value.count > 0 for row in rows.values()) < 2:
        lines.append(f"Nothing is compared: only {best} has {what}, {spell(rows[best].value)}.")
    elif best:
        others = [name for name, row in rows.items() if row.among_best and name != best]
        alike = f"; {_listed(others)} cannot be told from it" if others else ""
        ended, runs = rows[best].value.count, len(sweep.seeds)
        of = f", over the {ended} of {runs} seeds that came to their end" if ended < runs else ""
        mean_of = "mean" if rows[best].value.count > 1 else "number, of which nothing is claimed"
        equal = len(others) + 1 == len(rows) and all(
            row.to_baseline is None or row.to_baseline.mean.low == row.to_baseline.mean.high == 0
            for row in rows.values()
        )
        lines.append(
            f"By {what} no arm differs from another with any seed: {spell(rows[best].value)}." if equal
            else f"By {what} {best} has the best {mean_of}: {spell(rows[best].value)}{of}{alike}."
        )  # fmt: skip
        if rows[best].value.count == 2:
            lines.append(
                "Two seeds leave wide intervals, and little can be told apart; three or more tell more."
            )
    return lines


def _of_arms(results: Results, rows: Mapping[str, Row], without: Collection[str]) -> list[str]:
    """Which arms diverged, and what each, but for some, is against the baseline; those of which nothing can be told share a sentence."""
    sweep, lines, base = results.sweep, [], results.sweep.baseline
    known = [
        row.to_baseline.p
        for row in rows.values()
        if row.to_baseline is not None and not math.isnan(row.to_baseline.p)
    ]
    of_many = f" corrected for {len(known)} comparisons" if len(known) > 1 else ""
    untold: dict[str, Difference] = {}
    unclaimed: dict[str, list[str]] = {}  # why -> arms
    for name, row in rows.items():
        dead = row.arm.diverged
        if dead:
            at = ", ".join(f"{step:,}" for step in dead.values())
            rest = "; means are over the others" if row.value.count else ""
            lines.append(
                f"{name} diverged with {len(dead)} of {len(row.arm.runs)} seeds, at step {at}{rest}."
            )
        if row.to_baseline is None or not row.value.count or name in without:
            continue
        one = row.to_baseline
        if one.mean.count < 2:
            unclaimed.setdefault(
                f"{one.mean.count or 'no'} seed{'s' * (one.mean.count == 0)} in common with {base}: no interval can be had",
                [],
            ).append(name)
        elif math.isnan(one.p):
            why = f"a difference to {base} of {signed(one.mean.mean)} in each of {one.mean.count} seeds: without a spread no interval can be had"
            unclaimed.setdefault(why, []).append(name)
        elif one.tells:
            better = (one.mean.mean < 0) != sweep.higher_is_better
            lines.append(
                f"{name} is {'better' if better else 'worse'} than {base} by {number(abs(one.mean.mean), one.mean.half)} "
                f"[{_range(one.mean, abs_value=True)}], {p_value(one.p)}{of_many}, {one.mean.count} seeds."
            )
        else:
            untold[name] = one
    lines += [
        f"{_listed(names)} {'have' if len(names) > 1 else 'has'} {why}, and nothing is claimed."
        for why, names in unclaimed.items()
    ]
    alone = [name for name, one in untold.items() if not one.mean.low <= 0 <= one.mean.high]
    if len(untold) == 1:
        ((name, one),) = untold.items()
        would = "; alone this interval would tell, among so many it does not" if alone else ""
        lines.append(
            f"{name} cannot be told from {base}: {signed(one.mean.mean, one.mean.half)} [{_range(one.mean)}], {p_value(one.p)}{of_many}, {one.mean.count} seeds{would}."
        )
    elif untold:
        of = _listed(alone) if len(alone) <= NAMED else f"{len(alone)} of them"
        would = (
            f"; alone the interval of {of} would tell, among so many it does not" if alone else ""
        )
        lines.append(
            f"{_listed(list(untold))} cannot be told from {base}: {p_value(min(one.p for one in untold.values()))} at least{of_many}{would}."
        )
    return lines


def _of_factors(factors: Mapping[str, Mapping[str, Difference]]) -> list[str]:
    lines = []
    for field, those in factors.items():
        for pair, one in those.items():
            if one.mean.count >= 2:
                told = (
                    ""
                    if one.tells
                    else ", the same in every seed, of which nothing is claimed"
                    if math.isnan(one.p)
                    else ", which cannot be told from nothing"
                )
                lines.append(
                    f"On average over the rest, {field.rpartition('.')[2]} {pair}: {signed(one.mean.mean, one.mean.half)} [{_range(one.mean)}], {p_value(one.p)}{told}."
                )
    return lines


def _of_scan(one: Scan, results: Results) -> str:
    name, of = one.field.rpartition(".")[2], f"{one.setting}: " if one.setting else ""
    best = one.points[one.best]
    line = (
        f"{of}of {len(one.points)} values of {name}, {one.best:g} has the best mean ({spell(best)})"
    )
    line += (
        ", at the end of what was scanned" if one.best in (min(one.points), max(one.points)) else ""
    )
    line += f"; {_from_to(one.close)} within {CLOSE:.0%} of it"
    if results.sweep.metric.endswith("/loss"):
        line += (
            f"; {_from_to(one.stable)} no seed failed"
            if one.stable
            else "; even there a seed failed"
        )
        line += f"; sensitivity {one.sensitivity:.3f} nats"
    return line + "."


def _from_to(ends: tuple[float, float]) -> str:
    return f"from {ends[0]:g} to {ends[1]:g}" if ends[0] < ends[1] else f"at {ends[0]:g} alone"


NAMED = 8
"""Arms that a sentence names at most; the table has all."""


def _listed(names: list[str]) -> str:
    if len(names) > NAMED:
        return f"{len(names)} others"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


# ---- numbers as text


def digits(half: float, x: float = 1.0) -> int:
    """Decimals that an interval of this half-width allows: two of its own. Without one: three, or two of x where it is small."""
    of = half if math.isfinite(half) and half > 0 else 0.01 if abs(x) >= 0.01 or not x else abs(x)
    return max(0, 1 - math.floor(math.log10(of)))


def number(x: float, half: float = math.nan) -> str:
    """As many decimals as the interval allows."""
    return "-" if math.isnan(x) else f"{x:,.{digits(half, x)}f}"


def signed(x: float, half: float = math.nan) -> str:
    return "-" if math.isnan(x) else f"{x:+,.{digits(half, x)}f}"


def spell(one: Mean) -> str:
    """mean ± half of the 95 % interval, of the mean about six digits at most."""
    if one.count < 2:
        return f"{number(one.mean)} (one seed)" if one.count else "-"
    shown = max(one.half, abs(one.mean) / 10**4) if one.half else 0.0
    return f"{number(one.mean, shown)} ± {number(one.half, shown)}"


def p_value(p: float) -> str:
    return (
        "p unknown"
        if math.isnan(p)
        else "p < 0.001"
        if p < 0.001
        else f"p = {p:.3f}"
        if p < 0.1
        else f"p = {p:.2f}"
    )


def _range(one: Mean, abs_value: bool = False) -> str:
    low, high = sorted((abs(one.low), abs(one.high))) if abs_value else (one.low, one.high)
    say = number if abs_value else signed
    return f"{say(low, one.half)}, {say(high, one.half)}"
