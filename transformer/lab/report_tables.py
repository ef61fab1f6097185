"""The tables of a report."""

import math
import operator
import re

from transformer.lab import effects
from transformer.lab.formatting import p_value, signed, spell
from transformer.lab.profiles import Profile, measured_text
from transformer.lab.results import Results
from transformer.lab.scans import CLOSE
from transformer.lab.statistics import mean
from transformer.lab.verdict import Verdict, validated
from transformer.output import human_count, human_tokens
from transformer.parallel.sharding import format_bytes
from transformer.units import bounds


def outcome(verdict: Verdict) -> list[list[str]]:
    """Returns the table of results by arm."""
    sweep, rows = verdict.results.sweep, []
    for name, row in verdict.rows.items():
        versus, arm, difference = row.to_baseline, row.arm, ["-", "-", "-"]
        if versus is not None and versus.mean.count > 1:
            low, high = (signed(x, versus.mean.half) for x in (versus.mean.low, versus.mean.high))
            p = p_value(versus.p).removeprefix("p ").removeprefix("= ")
            difference = [signed(versus.mean.mean, versus.mean.half), f"{low} to {high}", p]
        reaches = "-" if versus is None or not row.reaches.seeds else "never"
        if versus is not None and row.reaches.count:
            reaches = f"{row.reaches.share:.0%} of baseline steps"
            if row.reaches.count < row.reaches.seeds:
                reaches += f", {row.reaches.count} of {row.reaches.seeds} seeds"
        seeds = str(row.value.count)
        if versus is not None and versus.mean.count < row.value.count:
            seeds += f" ({versus.mean.count} paired)"
        diverged = f"{len(arm.diverged)} of {len(arm.runs)}" if arm.diverged else "-"
        rows.append([name, spell(row.value), *difference, row.outcome, seeds, diverged, reaches])
    value = f"{sweep.metric} (mean ± 95 % interval)"
    difference = [f"difference from {sweep.baseline}", "95 % interval", "p"]
    reaches = f"reaches the baseline's final {validated(verdict.results)} after"
    return [["arm", value, *difference, "verdict", "seeds", "diverged", reaches], *rows]


def cost(verdict: Verdict, with_speed: bool) -> list[list[str]]:
    """Returns the table of costs by arm."""
    speeds, rows = speed(verdict), []
    or_dash = lambda x, text: "-" if not x or math.isnan(x) else text(x)
    for (name, row), (_, tokens) in zip(verdict.rows.items(), speeds[1:], strict=True):
        arm = row.arm
        used = [run.manifest.get("attention_backends", {}) for run in arm.runs.values()]
        attention = " + ".join(sorted(set().union(*used))) or "-"
        sizes = [or_dash(arm.parameters, "{:,}".format), or_dash(arm.flops, human_count)]
        memory = or_dash(row.memory, format_bytes)
        rows.append([name, *sizes, *([tokens] * with_speed), memory, attention])
    head = ["arm", "parameters", "FLOPs per token", *([speeds[0][1]] * with_speed)]
    return [[*head, "peak memory", "attention"], *rows]


def speed(verdict: Verdict) -> list[list[str]]:
    """Returns the table of speeds by arm."""
    rows = [["arm", "tokens/s"]]
    for name, arm in verdict.results.arms.items():
        together = sorted({run.together for run in arm.runs.values()} - {1})
        note = f" ({' or '.join(map(str, together))} together)" if together else ""
        rows.append([name, "-" if math.isnan(arm.speed) else human_tokens(arm.speed) + note])
    return rows


def measured(verdict: Verdict) -> list[list[str]]:
    """Returns the table of other test metrics by arm, without profiles; empty if there are none."""
    arms, decides = verdict.results.arms, verdict.results.sweep.metric
    names = {name for run in verdict.results.runs for name in run.names}
    is_profile = re.compile(r"/\d+(/|$)|/sentences").search
    names = sorted(x for x in names if x.startswith("test/") and x != decides and not is_profile(x))
    parts = [measured_text(verdict.results, metric) for metric in names]
    head = [x + f" ({part})" * bool(part) for x, part in zip(names, parts, strict=True)]
    spelled = lambda arm, metric: spell(mean(list(arm.values(metric).values()), bounds(metric)))
    rows = [[name, *(spelled(arm, metric) for metric in names)] for name, arm in arms.items()]
    return [["arm", *head], *rows] if names else []


SIZED = {"parameters": "model.d_ff", "flops": "model.d_ff", "time": "train.steps"}
"""Matched fact -> the field that is adjusted to match it (lab/guard.py)."""


def of_arms(results: Results) -> list[list[str]]:
    """Returns the table of the settings of each arm, its matched size and its diverged seeds."""
    rows = [["arm", "settings", "diverged seeds"]]
    for name, arm in results.arms.items():
        settings = [f"{field} = {x}" for field, x in arm.changes.items() if field != "arm"]
        settings = settings or ["no changes"]
        if (sized := SIZED.get(results.sweep.match)) and arm.runs:
            config = next(iter(arm.runs.values())).config
            settings.append(f"sized to {sized} = {operator.attrgetter(sized)(config):,}")
        diverged = ", ".join(f"{seed} at step {step:,}" for seed, step in arm.diverged.items())
        rows.append([name, ", ".join(settings), diverged or "-"])
    return rows


def scanned(verdict: Verdict) -> list[list[list[str]]]:
    """Returns the table of scans, or nothing if there are none."""
    best = f"{verdict.results.sweep.metric} at the best value"
    ranges = [f"range within {CLOSE:.0%} of the best", "range without failed seeds"]
    rows = [["field", "arms", "scanned range", "best value", best, *ranges, "sensitivity"]]
    spell_range = lambda ends: f"{ends[0]:g} to {ends[1]:g}" if ends else "-"
    for scan in verdict.scans:
        whole = spell_range((min(scan.points), max(scan.points)))
        best = [f"{scan.best:g}", spell(scan.points[scan.best])]
        around = [spell_range(scan.close), spell_range(scan.stable)]
        sensitivity = "-" if math.isnan(scan.sensitivity) else f"{scan.sensitivity:.3f}"
        rows.append([scan.field, scan.setting or "all", whole, *best, *around, sensitivity])
    return [rows] if verdict.scans else []


PLACES = 9
"""Maximum number of columns in the table of a profile. profiles.csv contains all places."""


def of_profile(profile: Profile) -> list[list[str]]:
    """Returns a table with one row per arm and one column per place (length, layer, ...)."""
    places = profile.places
    if len(places) > PLACES:
        places = [places[round(n * (len(places) - 1) / (PLACES - 1))] for n in range(PLACES)]
    cells = lambda line: [spell(line[place]) if place in line else "-" for place in places]
    rows = [[name, *cells(line)] for name, line in profile.lines.items()]
    return [[f"arm, by {profile.x_label}", *map(str, places)], *rows]


SCANNED = (
    "Sensitivity (Wortsman et al. 2023) is the mean loss over all scanned values minus the mean "
    "loss at the best value. A run fails if it diverges, or if its final loss is log V or more, "
    "the loss of uniform predictions; its loss then counts as log V. Each range is contiguous and "
    "contains the best value."
)

LOGIC = (
    "The verdict compares each arm with the baseline, paired by seed, and with no other arm. A "
    "difference is detectable if its 95 % t interval excludes zero and the p value of a paired "
    "t-test, Holm-corrected for the number of arms, is below 0.05. Effects of fields and their "
    "interactions are tested likewise, and corrected together."
)

NOTE = (
    "Means are over seeds, with 95 % t intervals, which end at the bounds of the metric. Intervals "
    "are not corrected, so one may exclude zero although the corrected p is 0.05 or more."
)

COST = (
    "Memory is the peak of a process, on the devices below; runs that were trained as one program "
    "share it. Speed (tokens/s) compares arms only if all were measured under equal conditions."
)


def as_csv(verdict: Verdict) -> dict[str, list[list]]:
    """Returns the CSV tables: summary in full precision, last metrics of runs, curves, profiles."""
    results = verdict.results
    runs = [(name, *item) for name, arm in results.arms.items() for item in arm.runs.items()]
    names = sorted({name for *_, run in runs for name in run.names})
    last = [["arm", "seed", "diverged_at", *names]]
    curves = [["arm", "seed", "step", "metric", "value"]]
    for name, seed, run in runs:
        last.append([name, seed, run.diverged or "", *(_blank(run.last(key)) for key in names)])
        for key in ("train/loss", "eval/loss"):
            curves += [[name, seed, step, key, value] for step, value in run.curve(key)]
    result = {"summary": _summary(verdict), "runs": last, "curves": curves}
    if verdict.effects:
        result["effects"] = effects.as_csv(verdict.effects)
    if verdict.profiles:
        result["profiles"] = [["profile", "arm", "place", "mean", "low", "high", "seeds"]]
    for profile in verdict.profiles:
        for name, line in profile.lines.items():
            for place, x in line.items():
                numbers = map(_blank, (x.mean, x.low, x.high, x.count))
                result["profiles"].append([profile.name, name, place, *numbers])
    return result


def _summary(verdict: Verdict) -> list[list]:
    compared = ["difference", "difference_low", "difference_high", "p_corrected"]
    head = ["arm", "mean", "low", "high", "seeds", "diverged", *compared]
    rows = [[*head, "parameters", "flops_per_token"]]
    for name, row in verdict.rows.items():
        value, arm, difference = row.value, row.arm, [""] * 4
        if versus := row.to_baseline:
            difference = [versus.mean.mean, versus.mean.low, versus.mean.high, versus.p]
        cells = [name, value.mean, value.low, value.high, value.count, len(arm.diverged)]
        rows.append([_blank(x) for x in (*cells, *difference, arm.parameters, arm.flops)])
    return rows


def _blank(x):
    return "" if isinstance(x, float) and math.isnan(x) else x
