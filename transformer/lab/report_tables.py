"""The tables of a report, and whether speeds in them compare arms."""

import json
import math
import operator
import re

import numpy as np

from transformer.files import read_json
from transformer.lab import effects
from transformer.lab.formatting import p_value, signed, spell, spell_range
from transformer.lab.profiles import Profile, measured_text
from transformer.lab.results import Arm, Results
from transformer.lab.verdict import Verdict, from_to, validated
from transformer.mapping import to_mapping
from transformer.output import human_count, human_tokens
from transformer.parallel.sharding import format_bytes

# What manifests record about the conditions of a measurement.
CONDITIONS = ("host", "devices", "mesh", "processes", "versions", "commit", "trained_together")
FREE = 0.05, 0.5  # the share of a host's cores, and cores, that other processes may use
PLACES = 9  # columns in the table of a profile, at most; profiles.csv contains all places


def outcome(verdict: Verdict) -> list[list[str]]:
    """Returns the table of results by arm."""
    sweep, rows = verdict.results.sweep, []
    for name, row in verdict.rows.items():
        versus, arm, difference = row.to_baseline, row.arm, ["-", "-", "-"]
        if versus is not None and versus.mean.count > 1:
            x, p = versus.mean, p_value(versus.p).removeprefix("p ").removeprefix("= ")
            difference = [signed(x.mean, x.half), spell_range(x).replace(", ", " to "), p]
        reached = [share for share in row.reaches if not math.isnan(share)]
        reaches = "-" if versus is None or not row.reaches else "never"
        if versus is not None and reached:
            reaches = f"{np.mean(reached):.0%} of baseline steps"
            if len(reached) < len(row.reaches):
                reaches += f", {len(reached)} of {len(row.reaches)} seeds"
        seeds = str(row.value.count)
        if versus is not None and versus.mean.count < row.value.count:
            seeds += f" ({versus.mean.count} paired)"
        diverged = f"{len(arm.diverged)} of {len(arm.runs)}" if arm.diverged else "-"
        rows.append([name, spell(row.value), row.outcome, *difference, seeds, diverged, reaches])
    value = f"{sweep.metric} (mean ± 95 % interval)"
    difference = [f"difference from {sweep.baseline}", "95 % interval", "corrected p"]
    reaches = f"reaches the baseline's final {validated(verdict.results)} after"
    return [["arm", value, "verdict", *difference, "seeds", "diverged", reaches], *rows]


def cost(verdict: Verdict, with_speed: bool) -> list[list[str]]:
    """Returns the table of costs by arm."""
    planned = _planned(verdict.results)
    head = ["arm", "parameters", "FLOPs per token", *["tokens/s"] * with_speed]
    rows = [[*head, "peak memory", "attention", *(["planned step", "kernels"] if planned else [])]]
    or_dash = lambda x, text: "-" if not x or math.isnan(x) else text(x)
    for name, arm in verdict.results.arms.items():
        used = [run.manifest.get("attention_backends", {}) for run in arm.runs.values()]
        attention = " + ".join(sorted(set().union(*used))) or "-"
        sizes = [or_dash(arm.parameters, "{:,}".format), or_dash(arm.flops, human_count)]
        peaks = [x for run in arm.runs.values() for x in run.values("memory/peak_bytes")]
        memory = or_dash(max(peaks, default=math.nan), format_bytes)
        cells = [name, *sizes, *[speed(arm)] * with_speed, memory, attention]
        rows.append([*cells, *(planned.get(name, ["-", "-"]) if planned else [])])
    return rows


def _planned(results: Results) -> dict[str, list[str]]:
    """Returns the least time of a step and the relative cycles of attention kernels of the arms
    that `plan --arms --kernels --json=DIR/plan.json` has planned as they were trained."""
    file, cells = results.folders[0] / "plan.json", {}
    plans = read_json(file) if len(results.folders) == 1 and file.exists() else {}
    without = [x for x in plans.values() if x["config"]["model"]["position"] == "none"]
    base = next(iter([*without, *plans.values()]), {}).get("kernel_cycles")
    for name, plan in plans.items():
        runs = list(results.arms[name].runs.values()) if name in results.arms else []
        if runs and to_mapping(runs[0].config.model) == plan["config"]["model"]:
            least, cycles = plan["step_seconds_at_least"], plan["kernel_cycles"]
            step = f"{1e3 * least:,.1f} ms ({plan['topology']})" if least else "-"
            cells[name] = [step, f"{cycles / base:.3f}" if cycles and base else "-"]
    return cells


def speed(arm: Arm) -> str:
    """Returns the tokens per second of an arm, and how many runs shared a program."""
    together = sorted({run.together for run in arm.runs.values()} - {1})
    note = f" ({' or '.join(map(str, together))} together)" if together else ""
    return "-" if math.isnan(arm.speed) else human_tokens(arm.speed) + note


def disturbances(results: Results) -> list[str]:
    """Returns why the speeds of runs cannot be compared, in sentences; empty if they can."""
    timed = [run for run in results.runs if not math.isnan(run.speed)]
    lines, starts = [], []
    for run in timed:
        entries = [x for x in run.manifest.get("earlier_starts", ()) if isinstance(x, dict)]
        starts += [x | {"trained_together": run.together} for x in (*entries, run.manifest)]
    for name in CONDITIONS:
        values = {json.dumps(start.get(name), sort_keys=True) for start in starts}
        if len(values) > 1:
            shown = "; ".join(sorted(values)) if max(map(len, values)) < 40 else len(values)
            lines.append(f"Runs differ in {name.replace('_', ' ')}: {shown}.")
        elif name == "host" and values == {"null"}:
            lines.append("The runs do not record their host.")
    others = [run.last("time/other_cores") for run in timed]
    if any(map(math.isnan, others)):
        lines.append("It is not recorded whether other processes ran.")
    limits = [min(FREE[0] * run.manifest.get("cores", 1), FREE[1]) for run in timed]
    if any(x > limit for x, limit in zip(others, limits, strict=True)):
        cores = "/".join(sorted({str(run.manifest.get("cores", "?")) for run in timed}))
        used = f"up to {max(x for x in others if x > 0):.1f} of the host's {cores} cores"
        lines.append(f"Other processes used {used} during training.")
    return lines


def measured(verdict: Verdict) -> list[list[str]]:
    """Returns the table of other test metrics by arm, without profiles; empty if there are none."""
    arms, decides = verdict.results.arms, verdict.results.sweep.metric
    names = {name for run in verdict.results.runs for name in run.names}
    is_profile = re.compile(r"/\d+(/|$)|/sentences").search
    names = sorted(x for x in names if x.startswith("test/") and x != decides and not is_profile(x))
    parts = [measured_text(verdict.results, metric) for metric in names]
    head = [x + f" ({part})" * bool(part) for x, part in zip(names, parts, strict=True)]
    rows = [[name, *(spell(arm.mean(x)) for x in names)] for name, arm in arms.items()]
    return [["arm", *head], *rows] if names else []


def of_arms(results: Results) -> list[list[str]]:
    """Returns the table of the settings of each arm, its matched size and its diverged seeds."""
    rows = [["arm", "settings", "diverged seeds"]]
    for name, arm in results.arms.items():
        settings = [f"{field} = {x}" for field, x in arm.changes.items() if field != "arm"]
        settings = settings or ["no changes"]
        if results.sweep.match and arm.runs:  # the field that lab/guard.py adjusts
            sized = "train.steps" if results.sweep.match == "time" else "model.d_ff"
            config = next(iter(arm.runs.values())).config
            settings.append(f"sized to {sized} = {operator.attrgetter(sized)(config):,}")
        diverged = ", ".join(f"{seed} at step {step:,}" for seed, step in arm.diverged.items())
        rows.append([name, ", ".join(settings), diverged or "-"])
    return rows


def scanned(verdict: Verdict) -> list[list[list[str]]]:
    """Returns the table of scans, or nothing if there are none."""
    best = f"{verdict.results.sweep.metric} at the best value"
    ranges = [f"range within {effects.CLOSE:.0%} of the best", "range without failed seeds"]
    rows = [["field", "arms", "scanned range", "best value", best, *ranges, "sensitivity"]]
    for scan in verdict.scans:
        whole = from_to((min(scan.points), max(scan.points)))
        best = [f"{scan.best:g}", spell(scan.points[scan.best])]
        around = [from_to(ends) if ends else "-" for ends in (scan.close, scan.stable)]
        sensitivity = "-" if math.isnan(scan.sensitivity) else f"{scan.sensitivity:.3f}"
        rows.append([scan.field, scan.setting or "all", whole, *best, *around, sensitivity])
    return [rows] if verdict.scans else []


def of_profile(profile: Profile) -> list[list[str]]:
    """Returns a table with one row per arm and one column per place (length, layer, ...)."""
    count = len(profile.places)
    places = [profile.places[round(n)] for n in np.linspace(0, count - 1, min(count, PLACES))]
    cells = lambda line: [spell(line[place]) if place in line else "-" for place in places]
    rows = [[name, *cells(line)] for name, line in profile.lines.items()]
    return [[f"arm, by {profile.x_label}", *map(str, places)], *rows]


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
        result["effects"] = [["effect", "difference", "low", "high", "p_corrected", "seeds"]]
    for effect in verdict.effects:
        x, p = effect.versus.mean, effect.versus.p
        result["effects"].append([effect.name, x.mean, x.low, x.high, p, x.count])
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
