"""The pictures of a report. Okabe and Ito's colours, which colour-blind eyes tell apart; in grey print, line styles and markers do.

Small enough for a phone's width, and alike in PNG, PDF and inside of the page.
"""

import itertools
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from transformer.lab.profiles import Profile
from transformer.lab.results import Arm
from transformer.lab.statistics import Mean, mean
from transformer.lab.verdict import Verdict
from transformer.units import unit

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 4.6
"""Inches."""

Style = Mapping[str, dict]


def styles(names: Sequence[str]) -> Style:
    """A colour, a line and a marker for each arm; the same in all pictures."""
    cycles = zip(
        names,
        itertools.cycle(COLOURS),
        itertools.cycle(LINES),
        itertools.cycle(MARKERS),
        strict=False,
    )
    return {
        name: {"color": colour, "linestyle": line, "marker": marker}
        for name, colour, line, marker in cycles
    }


def draw(verdict: Verdict) -> dict[str, tuple[str, Figure]]:
    """Name -> (what it shows, picture); those for which there are numbers."""
    results, look = verdict.results, styles(list(verdict.results.arms))
    metric, found, chosen = results.sweep.metric, {}, _lines(verdict)
    some = (
        f" The baseline and the best {len(chosen) - 1} of {len(look)} arms; the numbers of all are in {{}}."
        if len(chosen) < len(look)
        else ""
    )
    label = lambda name: (
        name.replace("/", " ")
        + (f" ({counts})" if (counts := unit(name, results.asks_for_tokens)) else "")
    )
    for field in dict.fromkeys(one.field for one in verdict.scans):
        found[f"scan_{field}"] = (
            f"{metric} against {field}: mean over seeds that came to their end, and its 95 % interval.",
            _scan(verdict, field, label(metric)),
        )
    if any(row.value.count for row in verdict.rows.values()):
        found["by_arm"] = (
            f"{metric}: each seed, the mean and its 95 % interval.",
            _by_arm(verdict, look, label(metric)),
        )
    if any(row.to_baseline and row.to_baseline.mean.count > 1 for row in verdict.rows.values()):
        said = f"Difference to {results.sweep.baseline}, seed by seed, with its 95 % interval. Right of the line is a higher {metric}."
        found["differences"] = (said, _differences(verdict, look, label(metric)))
    axes = {
        "steps": ("training steps", lambda arm, step, tokens, seconds: step),
        "tokens": (
            "training tokens (those that are asked for)",
            lambda arm, step, tokens, seconds: tokens,
        ),
        "flops": (
            "floating-point operations of training",
            lambda arm, step, tokens, seconds: step * arm.flops_a_step,
        ),
        "time": ("seconds of training", lambda arm, step, tokens, seconds: seconds),
    }
    for name, (x_label, x_of) in axes.items():
        if figure := _curves(
            {arm: results.arms[arm] for arm in chosen},
            look,
            "eval/loss",
            x_label,
            label("validation/loss"),
            x_of,
        ):
            said = f"Validation loss against {x_label}: mean over seeds, and its 95 % interval.{some.format('curves.csv')}"
            found[f"loss_by_{name}"] = (said, figure)
    for profile in verdict.profiles:
        said = (
            f"{profile.said}: mean over seeds, and its 95 % interval.{some.format('profiles.csv')}"
        )
        found[profile.name] = (said, _profile(profile, chosen, look))
    return found


MOST = 12
"""Lines that a picture has at most: more, nobody tells apart."""


def _lines(verdict: Verdict) -> list[str]:
    """The arms that have a line: all, or the baseline and the best."""
    sweep, rows = verdict.results.sweep, verdict.rows
    by_worth = sorted(
        rows,
        key=lambda name: (
            name != sweep.baseline,
            not rows[name].value.count,
            rows[name].value.mean * (-1 if sweep.higher_is_better else 1),
        ),
    )
    return [name for name in rows if name in by_worth[:MOST]]


def _profile(profile: Profile, chosen: Sequence[str], look: Style) -> Figure:
    """One metric at several places, an arm a line."""
    figure, axes = new_figure(3.5)
    for name in [name for name in chosen if name in profile.lines]:
        line = profile.lines[name]
        _line(axes, list(line), list(line.values()), name, look[name])
    if "x" in profile.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(profile.places, [f"{x:,}" for x in profile.places])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "y" in profile.log:
        axes.set_yscale("log")
    axes.set_xlabel(profile.x_label)
    axes.set_ylabel(textwrap.fill(profile.y_label, 34))
    _legend(figure, axes)
    return figure


def _scan(verdict: Verdict, field: str, y_label: str) -> Figure:
    """A metric against a number that the sweep went through, a line for each setting of the rest."""
    chosen = [one for one in verdict.scans if one.field == field]
    figure, axes = new_figure(3.5)
    for one, look in zip(chosen, styles([one.setting for one in chosen]).values(), strict=True):
        there = {x: value for x, value in one.points.items() if value.count}
        _line(
            axes,
            list(there),
            list(there.values()),
            one.setting or verdict.results.sweep.metric,
            look,
        )
    if all(x > 0 for one in chosen for x in one.points):
        axes.set_xscale("log")
    axes.set_xlabel(field)
    axes.set_ylabel(y_label)
    if any(one.setting for one in chosen):
        _legend(figure, axes)
    return figure


def _line(axes: Axes, xs: Sequence[float], means: Sequence[Mean], name: str, look: dict) -> None:
    """Means as a line, intervals as a band."""
    axes.plot(
        xs,
        [m.mean for m in means],
        label=name,
        linewidth=1.5,
        markersize=4.5,
        markevery=max(1, len(xs) // 8),
        **look,
    )
    if all(math.isfinite(m.half) for m in means):
        axes.fill_between(
            xs,
            [m.low for m in means],
            [m.high for m in means],
            color=look["color"],
            alpha=0.15,
            linewidth=0,
        )


def _legend(figure: Figure, axes: Axes) -> None:
    """Inside where it finds room, below where there are many lines; the figure grows by it."""
    names = axes.get_legend_handles_labels()[1]
    if len(names) <= 4:
        axes.legend(frameon=False, fontsize=8)
        return
    ncols = 2 if max(map(len, names)) > 14 else 3
    figure.set_figheight(figure.get_figheight() + 0.16 * math.ceil(len(names) / ncols))
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=ncols)


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Of a phone's width, so high in inches, with a light grid."""
    figure = Figure(figsize=(WIDTH, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _by_arm(verdict: Verdict, look: Style, label: str) -> Figure:
    rows = {name: row for name, row in verdict.rows.items() if row.value.count}
    figure, axes = new_figure(0.9 + 0.34 * len(rows))
    for at, (name, row) in enumerate(rows.items()):
        seeds = list(row.arm.values(verdict.results.sweep.metric).values())
        one = look[name]
        axes.plot(
            seeds,
            [at] * len(seeds),
            linestyle="",
            marker="|",
            markersize=10,
            color=one["color"],
            alpha=0.7,
        )
        half = 0.0 if math.isnan(row.value.half) else row.value.half
        axes.errorbar(
            row.value.mean,
            at,
            xerr=half,
            capsize=4,
            color=one["color"],
            marker=one["marker"],
            markersize=6,
        )
    _arms_down(axes, rows)
    axes.set_xlabel(label)
    return figure


def _differences(verdict: Verdict, look: Style, label: str) -> Figure:
    rows = {
        name: row
        for name, row in verdict.rows.items()
        if row.to_baseline and row.to_baseline.mean.count > 1
    }
    figure, axes = new_figure(0.9 + 0.34 * len(rows))
    axes.axvline(0, color="black", linewidth=1)
    for at, (name, row) in enumerate(rows.items()):
        one = row.to_baseline
        axes.errorbar(one.mean.mean, at, xerr=one.mean.half, capsize=4, color=look[name]["color"], marker=look[name]["marker"], markersize=6,
                      markerfacecolor=look[name]["color"] if one.tells else "white")  # fmt: skip
    _arms_down(axes, rows)
    axes.set_xlabel(f"difference of {label}\nfilled: told apart from the baseline")
    return figure


def _arms_down(axes: Axes, names) -> None:
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def _curves(
    arms: Mapping[str, Arm], look: Style, metric: str, x_label: str, y_label: str, x_of: Callable
) -> Figure | None:
    """Mean over seeds at each step that all of an arm's runs have; the x of that step is the mean of theirs, between two log lines in
    proportion."""
    drawn = []
    for name, arm in arms.items():
        curves = [
            (dict(ys), np.array(run.spent()))
            for run in arm.runs.values()
            if run.diverged is None and (ys := run.curve(metric))
        ]
        steps = sorted(set.intersection(*(set(ys) for ys, _ in curves))) if curves else []
        at = lambda step, spent, arm=arm: x_of(
            arm, step, *(np.interp(step, spent[:, 0], spent[:, n]) for n in (1, 2))
        )
        xs = [float(np.mean([at(step, spent) for _, spent in curves])) for step in steps]
        if len(steps) > 1 and any(xs):
            drawn.append((name, xs, [mean([ys[step] for ys, _ in curves]) for step in steps]))
    if not drawn:
        return None
    figure, axes = new_figure(3.5)
    for name, xs, means in drawn:
        _line(axes, xs, means, name, look[name])
    ends = sorted(m.mean for _, _, means in drawn for m in means)
    low, high = ends[0], ends[min(len(ends) - 1, int(0.9 * len(ends)))]
    axes.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(figure, axes)
    if max(x for _, xs, _ in drawn for x in xs) >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure
