"""Derives a verdict from results: statistics by arm, and sentences that the intervals support.

The first note in lab/notes.md says which arms are compared and when a difference is detectable."""

import collections
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from transformer.lab import effects
from transformer.lab.effects import CLOSE, Cells, Effect, Scan
from transformer.lab.formatting import both_p, number, p_value, signed, spell, spell_range
from transformer.lab.profiles import Profile, profiles
from transformer.lab.results import Arm, Results
from transformer.lab.statistics import Difference, Mean, corrected, difference
from transformer.output import count
from transformer.units import kind

NAMED, FEW = 8, 3  # arms that a sentence names, and whose sizes it states, at most


class Row(NamedTuple):
    """The statistics of an arm."""

    arm: Arm
    value: Mean  # of the metric, over finished seeds
    to_baseline: Difference | None  # arm - baseline; None for the baseline
    outcome: str  # baseline, better, worse, inconclusively ..., not detectable, untested
    reaches: list[float]  # by seed: share of the baseline's steps until its final value, or NaN


class Verdict(NamedTuple):
    """The conclusions from results. The first sentence is the verdict; the others support it."""

    results: Results
    rows: Mapping[str, Row]
    cells: Cells
    effects: tuple[Effect, ...]  # of the fields of a grid, and their interactions
    scans: tuple[Scan, ...]
    profiles: tuple[Profile, ...]
    sentences: tuple[str, ...]


def derive_verdict(results: Results) -> Verdict:
    """Computes means, differences from the baseline, effects, and the sentences on them."""
    sweep, arms, metric = results.sweep, results.arms, results.sweep.metric
    base, sign = arms[sweep.baseline], -1.0 if sweep.higher_is_better else 1.0
    values = {name: arm.values(metric) for name, arm in arms.items()}
    others = arms.keys() - {base.name}
    to_base = corrected({arm: difference(values[arm], values[base.name]) for arm in others})
    rows, progress = {}, validated(results)
    for name, arm in arms.items():
        value, versus = arm.mean(metric), to_base.get(name)
        reaches = _reaches(arm, base, progress, 1.0 if progress == "eval/loss" else sign)
        rows[name] = Row(arm, value, versus, _outcome(versus, sign), reaches)
    scanned, cells = tuple(effects.scans(results)), effects.cells_of(results, values)
    found = effects.effects_of(cells, {scan.field for scan in scanned})
    # With many arms, the sentences on the scans replace those on each scanned arm.
    many = frozenset().union(*(scan.arms for scan in scanned)) if len(rows) > NAMED else frozenset()
    by_arm = _verdict(results, rows, scanned if many else ())
    of_first = lambda effect: [field for field, *_ in effect.changes] == [cells.fields[0]]
    first = [x for x in found if of_first(x) and not many and not math.isnan(x.versus.p)]
    lead = [_of_first_field(first, results)] if first else []
    lines = (lead or [by_arm]) + effects.sentences([x for x in found if x not in first], results)
    lines += [by_arm] if lead and not sweep.ladder else []
    lines += [_of_scan(scan, results) for scan in scanned] + _of_arms(results, rows, many)
    return Verdict(results, rows, cells, found, scanned, tuple(profiles(results)), tuple(lines))


def _outcome(versus: Difference | None, sign: float) -> str:
    if versus is None:
        return "baseline"
    if math.isnan(versus.p):
        return "untested"
    side = "better" if sign * versus.mean.mean < 0 else "worse"
    unclear = f"inconclusively {side}" if versus.is_inconclusive else "not detectable"
    return side if versus.is_detectable else unclear


def validated(results: Results) -> str:
    """Returns the metric of validation curves: the primary one if it is logged, else the loss."""
    name = "eval/" + results.sweep.metric.partition("/")[2]
    base = results.arms[results.sweep.baseline]
    return name if any(run.curve(name) for run in base.runs.values()) else "eval/loss"


def _reaches(arm: Arm, base: Arm, name: str, sign: float) -> list[float]:
    """Compares validation curves, linearly interpolated, over the seeds that both arms finished."""
    shares = []
    pairs = [(arm.runs[seed], base.runs[seed]) for seed in arm.runs.keys() & base.runs.keys()]
    for runs in (x for x in pairs if all(math.isfinite(run.outcome(name)) for run in x)):
        curve, last = ([(step, sign * x) for step, x in run.curve(name)] for run in runs)
        (steps, target), share = last[-1], math.nan
        for (before, high), (after, low) in itertools.pairwise([(0, math.inf), *curve]):
            if low <= target:
                fraction = 1.0 if math.isinf(high) else (high - target) / (high - low)
                share = (before + fraction * (after - before)) / steps
                break
        shares.append(share)
    return shares


def _verdict(results: Results, rows: Mapping[str, Row], scanned: Sequence[Scan]) -> str:
    sweep, base = results.sweep, results.sweep.baseline
    counts = kind(sweep.metric, results.predicts_tokens).unit
    metric = f"{sweep.metric} ({counts})" if counts else sweep.metric
    finished = [name for name, row in rows.items() if row.value.count]
    if len(finished) < 2 or base not in finished:
        have = f"only {base} has" if finished else "no arm has"
        have = f"the baseline, {base}, lacks" if finished and base not in finished else have
        return f"No comparison is possible: {have} a value of {metric}."
    if scanned:
        best = [f"{x.best:g}{f' with {x.setting}' * bool(x.setting)}" for x in scanned]
        if len(best) > NAMED:
            settings = collections.Counter(f"{x.best:g}" for x in scanned)
            best = [f"{x} in {count(n, 'setting')}" for x, n in settings.most_common()]
        fields = " and ".join(dict.fromkeys(effects.short(x.field) for x in scanned))
        return f"The best {fields} by {metric} is {listed(best)}."
    compared = {name: rows[name].to_baseline for name in finished if name != base}
    if all(math.isnan(versus.p) for versus in compared.values()):
        why = "the variation between seeds is unknown, because no two arms share two seeds"
        if any(versus.mean.count > 1 for versus in compared.values()):
            equal = f"each arm differs from {base} by the same in every seed"
            why = f"{equal}, so a t-test has no spread"
        return f"No conclusion is possible: {why}."
    if not any(x for versus in compared.values() for x in versus.by_seed.values()):
        return f"By {metric}, all arms are equal in every seed: {spell(rows[base].value)}."
    gone = [name for name, row in rows.items() if row.arm.diverged and not row.value.count]
    more = [f"{listed(gone)} diverged in every seed"] if gone else []
    sentence = _sentence([*_clauses(results, base, compared), *more], compared)
    return sentence.replace("it is", "It is", 1) if sentence.startswith("it is") else sentence


def _of_first_field(contrasts: Sequence[Effect], results: Results) -> str:
    """Compares the values of the first field of a grid, which is the one that is asked about."""
    ((field, base, _),) = contrasts[0].changes
    compared = {effect.changes[0][2]: effect.versus for effect in contrasts}
    return effects.averaged(field, results) + _sentence(_clauses(results, base, compared), compared)


def _sentence(clauses: Sequence[str], compared: Mapping[str, Difference]) -> str:
    """Joins clauses to a sentence, with the certainty of the differences."""
    tested = [versus for versus in compared.values() if not math.isnan(versus.p)]
    seeds = " or ".join(map(str, sorted({versus.mean.count for versus in tested})))
    detected, p = [versus.p for versus in tested if versus.is_detectable], both_p(tested[0])
    if len(tested) > 1:
        p = p_value(max(detected) if detected else min(versus.p for versus in tested))
        bound = {0: " or more", 1: ""}.get(len(detected), " or less" * ("=" in p))
        which = f" for the detectable difference{'s' * (len(detected) > 1)}"
        p = f"corrected {p}{bound}{which * (0 < len(detected) < len(tested))}"
    certainty = f"95 % interval{'s' * (len(tested) > 1)} over {seeds} seeds"
    return f"{'; '.join(clauses)} ({certainty}, {p})."


def _clauses(results: Results, base: str, compared: Mapping[str, Difference]) -> list[str]:
    metric, sign = results.sweep.metric, -1.0 if results.sweep.higher_is_better else 1.0
    counts = kind(metric, results.predicts_tokens).unit
    names = lambda outcome: [name for name, x in compared.items() if _outcome(x, sign) == outcome]
    clauses = []
    for outcome in ("better", "worse", "inconclusively better", "inconclusively worse"):
        size = lambda name: -abs(compared[name].mean.mean)
        if not (ranked := sorted(names(outcome), key=size)):
            continue
        doubt, side = outcome.split()[:-1], outcome.split()[-1]
        means = [compared[name].mean for name in ranked]
        sizes = [f"{number(abs(x.mean), x.half)} [{spell_range(x, abs_value=True)}]" for x in means]
        arms, its = listed(ranked), "its" if len(ranked) == 1 else "their"
        if len(ranked) > NAMED:
            arms, its, sizes = f"{len(ranked)} arms", f"for {ranked[0]}, the", sizes[:1]
        differ = f"{'is' if len(ranked) == 1 else 'are'} {side}" + f" than {base}" * (not clauses)
        arms = f"it is inconclusive whether {arms}" if doubt else arms
        direction = "lower" if means[0].mean < 0 else "higher"
        by_seed = [x * means[0].mean > 0 for x in compared[ranked[0]].by_seed.values()]
        seeds = f" in {sum(by_seed)} of {len(by_seed)} seeds" * (len(doubt) == len(ranked) == 1)
        value = f"{its} {metric} is {listed(sizes)} {counts} {direction}{seeds}"
        clauses.append(f"{arms} {differ}: {value}")
    if undetected := names("not detectable"):
        do = "does" if len(undetected) == 1 else "do"
        clause = f"{listed(undetected)} {do} not differ detectably from {base}"
        means = [compared[name].mean for name in undetected]
        low, high = min(x.low for x in means), max(x.high for x in means)
        sizes = f"between {signed(low, high - low)} and {signed(high, high - low)}"
        if len(means) <= FEW:
            sizes = listed([f"{signed(x.mean, x.half)} [{spell_range(x)}]" for x in means])
        verb = f"difference{' is' if len(means) == 1 else 's are'}"
        clauses.append(f"{clause}: the {verb} {sizes} {counts}".rstrip())
    if unknown := names("untested"):
        clauses.append(f"about {listed(unknown)}, no conclusion is possible")
    return clauses


def _of_arms(results: Results, rows: Mapping[str, Row], without: Collection[str]) -> list[str]:
    """Returns sentences on divergence and, of arms not in `without`, on unclear comparisons."""
    lines, base = [], results.sweep.baseline
    reasons: dict[str, list[str]] = {}  # reason -> arms
    for name, row in rows.items():
        if diverged := row.arm.diverged:
            steps = ", ".join(f"{step:,}" for step in diverged.values())
            note = "; means are over the other seeds" if row.value.count else ""
            share = f"{len(diverged)} of {len(row.arm.runs)} seeds"
            lines.append(f"{name} diverged in {share}, at step {steps}{note}.")
        versus = row.to_baseline
        if versus is None or not row.value.count or name in without or not math.isnan(versus.p):
            continue
        if versus.mean.count < 2:
            common = f"{versus.mean.count or 'no'} seed{'s' * (versus.mean.count == 0)} in common"
            reason = f"{common} with {base}, too few for an interval"
        else:
            size = signed(versus.mean.mean)
            reason = f"{size} from {base} in each seed, which leaves no spread for a t-test"
        reasons.setdefault(reason, []).append(name)
    lines += [f"{listed(names)}: {reason}." for reason, names in reasons.items()]
    if max(row.value.count for row in rows.values()) == 2:
        lines.append("Two seeds give wide intervals; use three or more to detect differences.")
    return lines


def _of_scan(scan: Scan, results: Results) -> str:
    values = f"{len(scan.points)} values of {effects.short(scan.field)}"
    line = f"With {scan.setting}, of {values}" if scan.setting else f"Of {values}"
    line += f", {scan.best:g} has the best mean ({spell(scan.points[scan.best])})"
    if scan.best in (min(scan.points), max(scan.points)):
        line += ", at the edge of the scanned range"
    line += f"; range within {CLOSE:.0%} of it: {from_to(scan.close)}"
    if results.sweep.metric.endswith("/loss"):
        stable = scan.stable and f"range without failed seeds: {from_to(scan.stable)}"
        stable = stable or "a seed failed even at the best value"
        line += f"; {stable}; sensitivity {scan.sensitivity:.3f} nats"
    return line + "."


def from_to(ends: tuple[float, float]) -> str:
    return f"{ends[0]:g} to {ends[1]:g}" if ends[0] < ends[1] else f"{ends[0]:g} alone"


def listed(names: list[str], most: int = NAMED) -> str:
    if len(names) > most:
        return f"{len(names)} other arms"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
