"""The figures of a report.

A line whose gid is a text with {x} and {y} shows that text when the mouse is over its points.
Colors (Okabe and Ito) are safe for color-blind readers; line styles and markers distinguish arms in
grayscale print. Figures fit a phone screen, and are identical as PNG, as PDF and in the page."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from transformer.lab.effects import Values, short
from transformer.lab.formatting import signed, spell_range
from transformer.lab.profiles import Profile
from transformer.lab.results import Arm, Results
from transformer.lab.statistics import Difference, Mean, mean
from transformer.lab.verdict import FEW, Verdict
from transformer.output import human_count
from transformer.units import kind

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INKS = ("#000000", "#7f7f7f")  # of lines that are not arms
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
WIDTH = 4.6  # of a figure, in inches
MOST = 12  # lines in a figure, at most; more would be hard to distinguish
SEEDS = "each seed (thin lines), and the mean with its 95 % interval"
Style = Mapping[str, dict]
Drawings = dict[str, tuple[str, Figure]]  # name of a figure -> its caption and the figure


def styles(names: Sequence[str], colors: Sequence[str] = COLORS) -> Style:
    """Returns the color, line style and marker of each arm. All figures use the same ones."""
    looks = zip(*map(itertools.cycle, (colors, LINES, MARKERS)), strict=False)
    keys = ("color", "linestyle", "marker")
    return {name: dict(zip(keys, next(looks), strict=True)) for name in names}


def caption_of(name: str, results: Results) -> str:
    """Returns the name and unit of a metric for an axis."""
    counts = kind(name, results.predicts_tokens).unit
    return name.replace("/", " ") + (f" ({counts})" if counts else "")


def answer(verdict: Verdict) -> Drawings:
    """Returns the figures that show the verdict: effects and differences, and values by arm."""
    sweep, rows, pictures = verdict.results.sweep, verdict.rows, {}
    effects = {x.name: x.versus for x in verdict.effects if len(x.changes) == 1}
    effects = effects if len(effects) <= FEW else {}
    arms = {name: row.to_baseline for name, row in rows.items() if row.to_baseline}
    looks = styles(list(rows)) | {name: {"color": INKS[0], "marker": "o"} for name in effects}
    if compared := {name: x for name, x in (effects | arms).items() if x.mean.count > 1}:
        caption = f"Each arm's difference from {sweep.baseline}, paired by seed: each seed "
        caption += "(dots), and the mean with its 95 % interval. Filled: a detectable difference."
        caption += " Black: the effect of a field, averaged over the others." * bool(effects)
        pictures["differences"] = (caption, _differences(compared, looks, verdict.results))
    if values := {name: x for name, row in rows.items() if (x := row.arm.values(sweep.metric))}:
        drawn = _paired({sweep.metric: values}, verdict, "")
        pictures["by_arm"] = (f"{sweep.metric} by arm: {SEEDS}.", drawn)
    return pictures


def interactions(verdict: Verdict) -> Drawings:
    """Returns a figure for each pair of fields whose effects may depend on each other."""
    pairs, pictures = [tuple(field for field, *_ in x.changes) for x in verdict.effects], {}
    for one, other in dict.fromkeys(pair for pair in pairs if len(pair) == 2):
        lines: dict[str, dict[str, Values]] = {}
        cells = list(itertools.product(*map(verdict.cells.levels, (one, other))))
        for (a, c), values in verdict.cells.averages((one, other), cells)[0].items():
            lines.setdefault(a, {})[c] = values
        line, x = short(one), short(other)
        caption = f"Interaction of {line} and {x}: {SEEDS}. If lines are parallel, the effect of "
        caption += f"{line} does not depend on {x}."
        pictures[f"interaction_{line}_{x}"] = (caption, _paired(lines, verdict, x))
    return pictures


def scanned(verdict: Verdict) -> Drawings:
    """Returns a figure for each scanned field, with a line for each setting of the others."""
    metric, pictures = verdict.results.sweep.metric, {}
    for field in dict.fromkeys(scan.field for scan in verdict.scans):
        scans = [scan for scan in verdict.scans if scan.field == field]
        figure, axes = new_figure(3.5, xlabel=field, ylabel=caption_of(metric, verdict.results))
        for scan, style in zip(scans, styles([x.setting for x in scans]).values(), strict=True):
            points = {x: value for x, value in scan.points.items() if value.count}
            _line(axes, points, scan.setting or metric, style)
        if all(x > 0 for scan in scans for x in scan.points):
            axes.set_xscale("log")
        if any(scan.setting for scan in scans):
            add_legend(figure, axes)
        caption = f"{metric} against {field}: mean over finished seeds with its 95 % interval."
        pictures[f"scan_{field}"] = (caption, figure)
    return pictures


def curves(verdict: Verdict) -> Drawings:
    """Returns the figures of the validation loss against steps, tokens, FLOPs and time. Tokens and
    FLOPs have none if they are the same multiple of the steps in all arms."""
    labels = {"steps": "training steps", "tokens": "input tokens in training"}
    labels |= {"flops": "training FLOPs", "time": "seconds (runs trained together share them)"}
    results, pictures, same = verdict.results, {}, []
    lines = [line for name in _lines(verdict) if (line := _curve(results.arms[name]))]
    for name, x_label in labels.items():
        points = [point for x in lines for point in zip(x.xs[name], x.xs["steps"], strict=True)]
        rates = [x / step for x, step in points if step]
        if name in ("tokens", "flops") and any(rates) and max(rates) <= 1.01 * min(rates):
            same.append(f"{human_count(rates[0])} {x_label}")
        elif any(rates):
            caption = f"Validation loss against {x_label}: each seed (thin lines), and the mean."
            caption += _subset(verdict, "curves.csv")
            pictures[f"loss_by_{name}"] = (caption, _curves(lines, name, x_label, results))
    if same and "loss_by_steps" in pictures:
        caption, figure = pictures["loss_by_steps"]
        caption += f" A step is {' and '.join(same)} in every arm, so those curves are the same."
        pictures["loss_by_steps"] = caption, figure
    return pictures


def profile(verdict: Verdict, profile: Profile) -> Drawings:
    style, y_label = styles(list(verdict.results.arms)), textwrap.fill(profile.y_label, 34)
    figure, axes = new_figure(3.5, xlabel=profile.x_label, ylabel=y_label)
    for name in [name for name in _lines(verdict) if name in profile.lines]:
        _line(axes, profile.lines[name], name, style[name])
    if "x" in profile.log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(profile.places, [f"{x:,}" for x in profile.places])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if "y" in profile.log:
        axes.set_yscale("log")
    add_legend(figure, axes)
    caption = f"{profile.caption}: mean over seeds with its 95 % interval."
    return {profile.name: (caption + _subset(verdict, "profiles.csv"), figure)}


def _subset(verdict: Verdict, file: str) -> str:
    """Returns a sentence on the arms that a figure leaves out."""
    shown, arms = len(_lines(verdict)), len(verdict.rows)
    best = f"the baseline and the {shown - 1} best other arms, of {arms} in all"
    return f" Shown: {best}; {file} contains all arms." if shown < arms else ""


def _lines(verdict: Verdict) -> list[str]:
    """Returns the arms that figures show: all, or the baseline and the best of the others."""
    sweep, rows = verdict.results.sweep, verdict.rows
    worse = lambda value: (not value.count, value.mean * (-1 if sweep.higher_is_better else 1))
    ranked = sorted(rows, key=lambda name: (name != sweep.baseline, *worse(rows[name].value)))
    return [name for name in rows if name in ranked[:MOST]]


def _line(axes: Axes, points: Mapping[float, Mean], name: str, style: dict) -> None:
    xs, means = list(points), points.values()
    look = {"linewidth": 1.5, "markersize": 4.5, "markevery": max(1, len(xs) // 8)} | style
    axes.plot(xs, [m.mean for m in means], label=name, gid=f"{name}, {{x:g}}: {{y:.4g}}", **look)
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


def new_figure(height: float, **properties) -> tuple[Figure, Axes]:
    """Returns a figure of width `WIDTH` and this height in inches, and its axes with a grid."""
    figure = Figure(figsize=(WIDTH, height), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.set(axisbelow=True, **properties)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _differences(compared: Mapping[str, Difference], looks: Style, results: Results) -> Figure:
    labels, sweep = [], results.sweep
    figure, axes = new_figure(1.1 + 0.46 * len(compared))
    axes.axvline(0, color="black", linewidth=1)
    for y, (name, versus) in enumerate(compared.items()):
        x, look = versus.mean, {k: looks[name][k] for k in ("color", "marker")}
        for seed, value in versus.by_seed.items():
            dot = {"color": look["color"], "alpha": 0.7, "markersize": 3.5}
            axes.plot(value, y + 0.2, "o", gid=f"{name}, seed {seed}: {{x:+.4g}}", **dot)
        labels.append(f"{name}\n{signed(x.mean, x.half)} [{spell_range(x)}]")
        look["markerfacecolor"] = look["color"] if versus.is_detectable else "white"
        drawn = axes.errorbar(x.mean, y, xerr=x.half, markersize=6.5, capsize=4, **look)
        drawn.lines[0].set_gid(labels[-1])
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    left, right = ("worse", "better") if sweep.higher_is_better else ("better", "worse")
    axes.set_xlabel(f"difference in {caption_of(sweep.metric, results)}")
    at_zero = {"xy": (0, 1), "xycoords": axes.get_xaxis_transform(), "fontsize": 8, "va": "bottom"}
    for text, side in ((f"\u2190 {left}  ", "right"), (f"  {right} \u2192", "left")):
        axes.annotate(text, ha=side, **at_zero)
    return figure


def _paired(lines: Mapping[str, Mapping[str, Values]], verdict: Verdict, x_label: str) -> Figure:
    """Plots line -> name on the x axis -> seed -> value. Thin lines join the values of a seed."""
    results = verdict.results
    metric, names = results.sweep.metric, list(next(iter(lines.values())))
    figure, axes = new_figure(3.2, xlabel=x_label, ylabel=caption_of(metric, results))
    for n, (line, style) in enumerate(styles(list(lines), INKS).items()):
        values = lines[line]
        xs = np.arange(len(names)) + 0.06 * (n - (len(lines) - 1) / 2)
        for seed in results.sweep.seeds:
            ys = [values[name].get(seed, math.nan) for name in names]
            look = {"color": style["color"], "linewidth": 0.7, "alpha": 0.5, "markersize": 3}
            axes.plot(xs, ys, marker="o", gid=f"{line}, seed {seed}: {{y:.5g}}", **look)
        means = [mean(list(values[name].values()), kind(metric).bounds) for name in names]
        ends = [[m.mean - m.low for m in means], [m.high - m.mean for m in means]]
        look = {"capsize": 4, "linewidth": 1.5, "markersize": 6, "label": line} | style
        look |= {} if len(lines) > 1 else {"linestyle": ""}
        axes.errorbar(xs, [m.mean for m in means], yerr=np.nan_to_num(ends), **look)
    turned = {"rotation": 40, "ha": "right"} if sum(map(len, names)) > 48 else {}
    axes.set_xticks(range(len(names)), names, **turned)
    axes.margins(x=0.15 if len(names) < 4 else 0.05)
    if len(lines) > 1:
        add_legend(figure, axes)
    return figure


class Curve(NamedTuple):
    """The validation curve of an arm: x by kind, and the loss of each run at all common steps."""

    name: str
    xs: Mapping[str, np.ndarray]  # of steps, tokens, FLOPs and time: means over runs
    runs: np.ndarray  # [runs, steps]


def _curve(arm: Arm) -> Curve | None:
    """Returns the curve of an arm. Tokens and time are interpolated between log lines."""
    ended = [run for run in arm.runs.values() if run.diverged is None and run.curve("eval/loss")]
    losses = [dict(run.curve("eval/loss")) for run in ended]
    steps = np.array(sorted(set.intersection(*map(set, losses))) if losses else [])
    if len(steps) < 2:
        return None
    spent = [np.transpose(run.spent()) for run in ended]
    tokens, seconds = np.mean([[np.interp(steps, x[0], y) for y in x[1:]] for x in spent], axis=0)
    xs = {"steps": steps, "tokens": tokens, "flops": steps * arm.flops_per_step, "time": seconds}
    return Curve(arm.name, xs, np.array([[ys[step] for step in steps] for ys in losses]))


def _curves(lines: Sequence[Curve], kind: str, x_label: str, results: Results) -> Figure:
    """Plots runs as thin lines and means as bold ones, without the highest tenth of long curves."""
    y_label, style = caption_of("validation/loss", results), styles(list(results.arms))
    figure, axes = new_figure(3.5, xlabel=x_label, ylabel=y_label)
    for name, xs, runs in lines:
        for ys in runs if len(runs) > 1 else ():
            axes.plot(xs[kind], ys, color=style[name]["color"], linewidth=0.6, alpha=0.5)
        look = {"linewidth": 1.8, "markersize": 4.5, "markevery": max(1, len(xs[kind]) // 8)}
        text = f"{name} at {{x:,.4g}}: {{y:.4g}}"
        axes.plot(xs[kind], runs.mean(0), label=name, gid=text, **look | style[name])
    ends = sorted(np.concatenate([line.runs.mean(0) for line in lines]))
    low = min(line.runs.min() for line in lines)
    is_long = max(line.runs.shape[1] for line in lines) > 10
    high = ends[int(0.9 * len(ends))] if is_long else ends[-1]
    inside = np.concatenate([line.xs[kind][line.runs.mean(0) <= high] for line in lines])
    axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
    axes.set_xlim(min(inside), max(inside) + 0.02 * np.ptp(inside))  # the last mark is whole
    add_legend(figure, axes)
    if max(inside) >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure
