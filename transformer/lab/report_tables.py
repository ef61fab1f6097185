"""The tables of a report."""

import math
import re

from transformer.lab.profiles import Profile, reads
from transformer.lab.results import Results
from transformer.lab.scans import CLOSE
from transformer.lab.statistics import mean
from transformer.lab.verdict import Verdict, p_value, signed, spell, validated
from transformer.parallel.sharding import human_bytes
from transformer.runs.metrics import human_count


def outcome(verdict: Verdict) -> list[list[str]]:
    """The table of arms, for a person: what came out."""
    sweep, rows = verdict.results.sweep, []
    for name, row in verdict.rows.items():
        one, arm = row.to_baseline, row.arm
        difference = ["-", "-", "-"]
        if one is not None and one.mean.count > 1:
            low, high = (signed(x, one.mean.half) for x in (one.mean.low, one.mean.high))
            difference = [
                signed(one.mean.mean, one.mean.half),
                f"{low} to {high}",
                p_value(one.p).removeprefix("p ").removeprefix("= "),
            ]
        reaches = "-" if one is None or not row.reaches.seeds else "never"
        if one is not None and row.reaches.count:
            reaches = f"{row.reaches.share:.0%} of its steps" + (
                f", {row.reaches.count} of {row.reaches.seeds} seeds"
                if row.reaches.count < row.reaches.seeds
                else ""
            )
        seeds = str(row.value.count) + (
            f" ({one.mean.count} paired)"
            if one is not None and one.mean.count < row.value.count
            else ""
        )
        diverged = f"{len(arm.diverged)} of {len(arm.runs)}" if arm.diverged else "-"
        rows.append(
            [
                name + (" *" if row.among_best else ""),
                spell(row.value),
                *difference,
                seeds,
                diverged,
                reaches,
            ]
        )
    head = [
        "arm",
        f"{sweep.metric} ± 95 %",
        f"minus {sweep.baseline}",
        "95 % interval",
        "p",
        "seeds",
        "diverged",
        f"{validated(verdict.results)} as good as the baseline's last after",
    ]
    return [head, *rows]


def cost(verdict: Verdict) -> list[list[str]]:
    """The table of arms, for a person: what they took."""
    rows = [["arm", "parameters", "FLOP a token", "tokens/s", "memory", "attention"]]
    for name, row in verdict.rows.items():
        arm = row.arm
        together = {run.together for run in arm.runs.values()}
        mark = f" ({' or '.join(map(str, sorted(together)))} together)" if together - {1} else ""
        attention = sorted(
            {
                backend
                for run in arm.runs.values()
                for backend in run.manifest.get("attention_backends", {})
            }
        )
        known = lambda x, text, more="": "-" if not x or math.isnan(x) else text(x) + more
        rows.append([
            name, known(arm.parameters, "{:,}".format), known(arm.flops, human_count), known(row.tokens_per_second, human_count, mark),
            known(row.memory, human_bytes, mark), " + ".join(attention) or "-",
        ])  # fmt: skip
    return rows


def measured(verdict: Verdict) -> list[list[str]]:
    """The table of arms, for a person: what else the test says, but for what is a profile; empty where there is nothing."""
    arms, decides = verdict.results.arms, verdict.results.sweep.metric
    names = {name for arm in arms.values() for run in arm.runs.values() for name in run.names}
    names = sorted(
        name
        for name in names
        if name.startswith("test/")
        and name != decides
        and not re.search(r"/\d+(/|$)|/sentences", name)
    )
    rows = [
        [name, *(spell(mean(list(arm.values(metric).values()))) for metric in names)]
        for name, arm in arms.items()
    ]
    heads = [
        f"{metric} ({part})" if (part := reads(verdict.results, metric)) else metric
        for metric in names
    ]
    return [["arm", *heads], *rows] if names else []


SIZED = {"parameters": "model.d_ff", "flops": "model.d_ff", "time": "train.steps"}
"""What arms are sized equal by (lab/guard.py)."""


def arms_table(results: Results) -> list[list[str]]:
    """What each arm sets, and what it was sized to."""
    rows = [["arm", "what it sets", "diverged (seed)"]]
    for name, arm in results.arms.items():
        said = [f"{field} = {value}" for field, value in arm.changes.items() if field != "arm"] or [
            "as it is"
        ]
        if (sized := SIZED.get(results.sweep.match)) and arm.runs:
            parent, field = sized.split(".")
            said.append(
                f"sized to {sized} = {getattr(getattr(next(iter(arm.runs.values())).config, parent), field):,}"
            )
        rows.append(
            [
                name,
                ", ".join(said),
                ", ".join(f"{seed} at step {step:,}" for seed, step in arm.diverged.items()) or "-",
            ]
        )
    return rows


def scanned(verdict: Verdict) -> list[list[str]]:
    """The table of numbers that the sweep went through."""
    rows = [
        [
            "field",
            "arms",
            "values",
            "best",
            verdict.results.sweep.metric,
            f"within {CLOSE:.0%}",
            "no seed failed",
            "sensitivity",
        ]
    ]
    for one in verdict.scans:
        known = lambda x, text: "-" if math.isnan(x) else text.format(x)
        ends = lambda pair: f"{pair[0]:g} to {pair[1]:g}" if pair else "-"
        rows.append([
            one.field, one.setting or "all", ends((min(one.points), max(one.points))), f"{one.best:g}", spell(one.points[one.best]),
            ends(one.close), ends(one.stable), known(one.sensitivity, "{:.3f}"),
        ])  # fmt: skip
    return rows


PLACES = 9
"""Columns that a profile's table has at most; all are in profiles.csv."""


def profile_table(profile: Profile) -> list[list[str]]:
    """An arm a row, a place a column."""
    places = profile.places
    if len(places) > PLACES:
        places = [places[round(n * (len(places) - 1) / (PLACES - 1))] for n in range(PLACES)]
    rows = [
        [name, *(spell(line[at]) if at in line else "-" for at in places)]
        for name, line in profile.lines.items()
    ]
    return [[profile.x_label, *map(str, places)], *rows]


SCANNED = (
    "Sensitivity (Wortsman et al. 2023): the mean loss over all values, that of a failed run being the loss of knowing nothing, log V, less the loss at "
    "the best. A run fails that diverges or ends with more than log V; ranges are those around the best value, without a gap."
)


NOTE = (
    "* the best, and arms that cannot be told from it. Means over seeds with 95 % t intervals; differences seed by seed, paired t-test, "
    "p corrected by Holm for the number of comparisons; the best is found in the same numbers, so of equal arms some one is told from it in 6 to 10 studies of 100 instead of 5; an interval is of its comparison alone, so it may leave out zero where p does not tell. "
    "Speed is of one run and memory of its process, on the machine below; (n together): n runs were one program and shared it."
)


def tables(verdict: Verdict) -> dict[str, list[list]]:
    """CSV: the summary in full precision, every run's last metrics, and the curves."""
    results = verdict.results
    runs = [
        (name, seed, run) for name, arm in results.arms.items() for seed, run in arm.runs.items()
    ]
    names = sorted({name for *_, run in runs for name in run.names})
    last = [["arm", "seed", "diverged_at", *names]]
    last += [
        [name, seed, run.diverged or "", *(_blank(run.last(key)) for key in names)]
        for name, seed, run in runs
    ]
    curves = [["arm", "seed", "step", "metric", "value"]]
    curves += [
        [name, seed, step, key, value]
        for name, seed, run in runs
        for key in ("train/loss", "eval/loss")
        for step, value in run.curve(key)
    ]
    places = [["profile", "arm", "place", "mean", "low", "high", "seeds"]]
    for profile in verdict.profiles:
        for name, line in profile.lines.items():
            places += [
                [profile.name, name, at, *map(_blank, (one.mean, one.low, one.high, one.count))]
                for at, one in line.items()
            ]
    return {"summary": _summary(verdict), "runs": last, "curves": curves} | (
        {"profiles": places} if verdict.profiles else {}
    )


def _summary(verdict: Verdict) -> list[list]:
    """A row for each arm, in full precision."""
    head = [
        "arm",
        "mean",
        "low",
        "high",
        "seeds",
        "diverged",
        "difference",
        "difference_low",
        "difference_high",
        "p_corrected",
        "parameters",
        "flops_per_token",
    ]
    rows = [head]
    for name, row in verdict.rows.items():
        one = row.to_baseline
        more = [one.mean.mean, one.mean.low, one.mean.high, one.p] if one else [""] * 4
        rows.append(
            [
                _blank(x)
                for x in (
                    name,
                    row.value.mean,
                    row.value.low,
                    row.value.high,
                    row.value.count,
                    len(row.arm.diverged),
                    *more,
                    row.arm.parameters,
                    row.arm.flops,
                )
            ]
        )
    return rows


def _blank(x):
    """Nothing where a number is not known."""
    return "" if isinstance(x, float) and math.isnan(x) else x
