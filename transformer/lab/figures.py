"""The figures of a report.

The colors are those of Okabe and Ito, which are safe for color-blind readers. Line styles and
markers also distinguish arms in grayscale print. Figures fit a phone screen, and are identical as
PNG, as PDF and in the page.
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

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 4.6
"""Width of a figure in inches."""

Style = Mapping[str, dict]


def styles(names: Sequence[str]) -> Style:
    """Returns the color, line style and marker of each arm. All figures use the same ones."""
    cycles = zip(names, *map(itertools.cycle, (COLORS, LINES, MARKERS)), strict=False)
    return {
        name: {"color": color, "linestyle": line, "marker": marker}
        for name, color, line, marker in cycles
    }


def draw(verdict: Verdict) -> dict[str, tuple[str, Figure]]:
    """Returns name -> (caption, figure), for all figures that have data."""
    results, style = verdict.results, styles(list(verdict.results.arms))
    metric, pictures, shown = results.sweep.metric, {}, _lines(verdict)
    subset = ""
    if len(shown) < len(style):
        best = f"the baseline and the {len(shown) - 1} best other arms, of {len(style)} in all"
        subset = f" Shown: {best}; {{}} contains all arms."

    def label(name: str) -> str:
        counts = unit(name, results.predicts_tokens)
        return name.replace("/", " ") + (f" ({counts})" if counts else "")

    for field in dict.fromkeys(scan.field for scan in verdict.scans):
        pictures[f"scan_{field}"] = (
            f"{metric} against {field}: mean over finished seeds with its 95 % interval.",
            _scan(verdict, field, label(metric)),
        )
    if any(row.value.count for row in verdict.rows.values()):
        pictures["by_arm"] = (
            f"{metric} of each seed (vertical marks), and the mean with its 95 % interval.",
            _by_arm(verdict, style, label(metric)),
        )
    if any(row.to_baseline and row.to_baseline.mean.count > 1 for row in verdict.rows.values()):
        caption = (
            f"Difference from {results.sweep.baseline}, paired by seed: mean with its 95 % "
            f"interval. Arms to the right of the line have a higher {metric}."
        )
        pictures["differences"] = (caption, _differences(verdict, style, label(metric)))
    axes = {
        "steps": ("training steps", lambda arm, step, tokens, seconds: step),
        "tokens": ("target tokens in training", lambda arm, step, tokens, seconds: tokens),
        "flops": ("training FLOPs", lambda arm, step, tokens, seconds: step * arm.flops_per_step),
        "time": ("training time in seconds", lambda arm, step, tokens, seconds: seconds),
    }
    arms, y_label = {arm: results.arms[arm] for arm in shown}, label("validation/loss")
    plotted = "mean over seeds with its 95 % interval."
    for name, (x_label, x_of) in axes.items():
        if figure := _curves(arms, style, "eval/loss", x_label, y_label, x_of):
            caption = f"Validation loss against {x_label}: {plotted}{subset.format('curves.csv')}"
            pictures[f"loss_by_{name}"] = (caption, figure)
    for profile in verdict.profiles:
        caption = f"{profile.caption}: {plotted}{subset.format('profiles.csv')}"
        pictures[profile.name] = (caption, _profile(profile, shown, style))
    return pictures


MOST = 12
"""Maximum number of lines in a figure. More would be hard to distinguish."""


def _lines(verdict: Verdict) -> list[str]:
    """Returns the arms that figures show: all, or the baseline and the best of the others."""
    sweep, rows = verdict.results.sweep, verdict.rows
    sign = -1 if sweep.higher_is_better else 1
    worse = lambda value: (not value.count, sign * value.mean)
    ranked = sorted(rows, key=lambda name: (name != sweep.baseline, *worse(rows[name].value)))
    return [name for name in rows if name in ranked[:MOST]]


def _profile(profile: Profile, shown: Sequence[str], style: Style) -> Figure:
    """Plots a metric against position, with one line per arm."""
    figure, axes = new_figure(3.5)
    for name in [name for name in shown if name in profile.lines]:
        line = profile.lines[name]
        _line(axes, list(line), list(line.values()), name, style[name])
    if "x" in profile.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(profile.places, [f"{x:,}" for x in profile.places])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "y" in profile.log:
        axes.set_yscale("log")
    axes.set_xlabel(profile.x_label)
    axes.set_ylabel(textwrap.fill(profile.y_label, 34))
    add_legend(figure, axes)
    return figure


def _scan(verdict: Verdict, field: str, y_label: str) -> Figure:
    """Plots a metric against a scanned field, with one line per setting of the other fields."""
    lines = [scan for scan in verdict.scans if scan.field == field]
    figure, axes = new_figure(3.5)
    for scan, style in zip(lines, styles([scan.setting for scan in lines]).values(), strict=True):
        points = {x: value for x, value in scan.points.items() if value.count}
        name = scan.setting or verdict.results.sweep.metric
        _line(axes, list(points), list(points.values()), name, style)
    if all(x > 0 for scan in lines for x in scan.points):
        axes.set_xscale("log")
    axes.set_xlabel(field)
    axes.set_ylabel(y_label)
    if any(scan.setting for scan in lines):
        add_legend(figure, axes)
    return figure


def _line(axes: Axes, xs: Sequence[float], means: Sequence[Mean], name: str, style: dict) -> None:
    """Plots means as a line and intervals as a band."""
    look = {"linewidth": 1.5, "markersize": 4.5, "markevery": max(1, len(xs) // 8)} | style
    axes.plot(xs, [m.mean for m in means], label=name, **look)
    if all(math.isfinite(m.half) for m in means):
        low, high = [m.low for m in means], [m.high for m in means]
        axes.fill_between(xs, low, high, color=style["color"], alpha=0.15, linewidth=0)


def add_legend(figure: Figure, axes: Axes) -> None:
    """Adds a legend: inside the axes for up to 4 lines, else below them in a taller figure."""
    names = axes.get_legend_handles_labels()[1]
    if len(names) <= 4:
        axes.legend(frameon=False, fontsize=8)
        return
    ncols = 2 if max(map(len, names)) > 14 else 3
    figure.set_figheight(figure.get_figheight() + 0.16 * math.ceil(len(names) / ncols))
    figure.legend(loc="outside lower center", frameon=False, fontsize=8, ncols=ncols)


def new_figure(height: float) -> tuple[Figure, Axes]:
    """Returns an empty figure of width `WIDTH` and this height in inches, with a light grid."""
    figure = Figure(figsize=(WIDTH, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _by_arm(verdict: Verdict, style: Style, label: str) -> Figure:
    rows = {name: row for name, row in verdict.rows.items() if row.value.count}
    figure, axes = new_figure(0.9 + 0.34 * len(rows))
    for y, (name, row) in enumerate(rows.items()):
        seeds = list(row.arm.values(verdict.results.sweep.metric).values())
        ticks = {"linestyle": "", "marker": "|", "markersize": 10, "alpha": 0.7}
        axes.plot(seeds, [y] * len(seeds), color=style[name]["color"], **ticks)
        half = 0.0 if math.isnan(row.value.half) else row.value.half
        axes.errorbar(row.value.mean, y, xerr=half, **_interval(style[name]))
    _arms_down(axes, rows)
    axes.set_xlabel(label)
    return figure


def _differences(verdict: Verdict, style: Style, label: str) -> Figure:
    compared = {name: row.to_baseline for name, row in verdict.rows.items() if row.to_baseline}
    compared = {name: versus for name, versus in compared.items() if versus.mean.count > 1}
    figure, axes = new_figure(0.9 + 0.34 * len(compared))
    axes.axvline(0, color="black", linewidth=1)
    for y, (name, versus) in enumerate(compared.items()):
        look = _interval(style[name])
        look["markerfacecolor"] = look["color"] if versus.is_detectable else "white"
        axes.errorbar(versus.mean.mean, y, xerr=versus.mean.half, **look)
    _arms_down(axes, compared)
    axes.set_xlabel(f"difference in {label}\nfilled: detectable difference from the baseline")
    return figure


def _interval(style: dict) -> dict:
    """Returns the look of a mean and its interval."""
    return {"color": style["color"], "marker": style["marker"], "markersize": 6, "capsize": 4}


def _arms_down(axes: Axes, names) -> None:
    axes.set_yticks(range(len(names)), list(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)


def _curves(
    arms: Mapping[str, Arm], style: Style, metric: str, x_label: str, y_label: str, x_of: Callable
) -> Figure | None:
    """Plots the mean over seeds at each step that all runs of an arm have logged.

    The x of a step is the mean over the runs, linearly interpolated between log lines.
    """
    drawn = []
    for name, arm in arms.items():
        curves = [
            (dict(ys), np.array(run.spent()))
            for run in arm.runs.values()
            if run.diverged is None and (ys := run.curve(metric))
        ]
        steps = sorted(set.intersection(*(set(ys) for ys, _ in curves))) if curves else []
        x_at = lambda step, spent, arm=arm: x_of(
            arm, step, *(np.interp(step, spent[:, 0], spent[:, n]) for n in (1, 2))
        )
        xs = [float(np.mean([x_at(step, spent) for _, spent in curves])) for step in steps]
        if len(steps) > 1 and any(xs):
            drawn.append((name, xs, [mean([ys[step] for ys, _ in curves]) for step in steps]))
    if not drawn:
        return None
    figure, axes = new_figure(3.5)
    for name, xs, means in drawn:
        _line(axes, xs, means, name, style[name])
    ends = sorted(m.mean for _, _, means in drawn for m in means)
    low, high = ends[0], ends[min(len(ends) - 1, int(0.9 * len(ends)))]
    axes.set_ylim(low - 0.05 * (high - low), high + 0.15 * (high - low))
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    add_legend(figure, axes)
    if max(x for _, xs, _ in drawn for x in xs) >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure
