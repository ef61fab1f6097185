"""The part of a report on tuning: curves, optima, and the comparison with and without tuning."""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from transformer.lab.figures import Style, add_legend, new_figure, styles
from transformer.lab.formatting import number, signed, spell, spell_range
from transformer.lab.page import Section
from transformer.lab.statistics import Difference, difference, slope_interval
from transformer.lab.tuning import METRIC, Curve, runs_per_arm, tuning_seeds
from transformer.lab.verdict import Verdict
from transformer.sweeps import Sweep


class Tuning(NamedTuple):
    """A tuned sweep: its curves, and both comparisons. The tuned one is that of the report."""

    sweep: Sweep
    curves: Sequence[Curve]
    tuned: Verdict
    untuned: Verdict | None  # None before its runs have started

    @property
    def numbers(self) -> list[str]:
        """The names of the tuned numbers."""
        return list(dict.fromkeys(curve.number.name for curve in self.curves))

    @property
    def sentences(self) -> list[str]:
        """What tuning changes, and which optima are uncertain."""
        lines = []
        if self.untuned is not None:
            changed, base = [], self.tuned.results.sweep.baseline
            for arm, row in self.tuned.rows.items():
                if (before := self.untuned.rows[arm].outcome) != row.outcome:
                    changed.append(f"{arm} ({before} without, {row.outcome} with tuning)")
            line = f"Tuning changes the comparison with {base} for {', '.join(changed)}."
            same = f"Tuning does not change which arms differ detectably from {base}."
            lines.append(line if changed else same)
        for curve in (curve for curve in self.curves if not curve.bracketed):
            edge = "smallest" if curve.best == curve.tried[0] else "largest"
            found = f"The best {curve.number.name} of {curve.arm} is not bracketed"
            lines.append(f"{found}: {curve.best:g} is the {edge} value tried.")
        return lines

    def section(self) -> Section:
        pictures, runs = {}, runs_per_arm(self.sweep)
        for name in self.numbers:
            caption = (
                f"Tuning: {METRIC} against {name}, for each run (marks) with the parabola around "
                "the best value. A large mark is the optimum with its 95 % interval."
            )
            curves = [curve for curve in self.curves if curve.number.name == name]
            pictures[f"tuning_{name}"] = (caption, _draw(curves, styles(list(self.tuned.rows))))
        more = "" if len(self.numbers) == 1 else " The numbers are tuned one after another."
        note = (
            f"Each arm is tuned by {METRIC} with up to {runs} runs (seeds "
            f"{', '.join(map(str, tuning_seeds(self.sweep)))}, which the comparison does not use)."
            f"{more} The optimum is the minimum of a parabola in the logarithm of the number, "
            "through the best value and its neighbors; its interval is Fieller's. The cost is that "
            "of a number twice or half as large, in nats."
        )
        tables = [self.optima(), *([self.both()] if self.untuned else ()), *self.shifts()]
        return Section("Tuning", (), pictures, tables, note)

    def optima(self) -> list[list[str]]:
        """Returns a table of the optima, with a row for each arm."""
        head = [f"{name}: optimum [95 %], cost of a factor of 2" for name in self.numbers]
        of = {(curve.arm, curve.number.name): _optimum(curve) for curve in self.curves}
        rows = [[arm, *(of.get((arm, x), "-") for x in self.numbers)] for arm in self.tuned.rows]
        return [["arm", *head], *rows]

    def both(self) -> list[list[str]]:
        """Returns a table of the results at the settings of the file and tuned."""
        sweep = self.tuned.results.sweep
        versus = f"from {sweep.baseline}"
        rows = [["arm", "untuned", versus, "tuned", versus, "gain of tuning"]]
        cells = lambda row: [spell(row.value), _difference(row.to_baseline)]
        for arm, row in self.tuned.rows.items():
            before = self.untuned.rows[arm]
            gain = difference(row.arm.values(sweep.metric), before.arm.values(sweep.metric))
            rows.append([arm, *cells(before), *cells(row), _difference(gain)])
        return rows

    def shifts(self) -> list[list[list[str]]]:
        """Returns a table of slopes of log2(optimum) against log2(size), from three sizes on."""
        head = ["tuned number", "against", "setting", "slope [95 %]", "optima"]
        rows, points = [], self.tuned.results.sweep.points
        for name, field in itertools.product(self.numbers, self.tuned.results.sweep.fields):
            groups: dict[str, dict[float, Curve]] = {}
            for curve in (curve for curve in self.curves if curve.number.name == name):
                size = points[curve.arm].changes.get(field)
                if type(size) in (int, float) and size > 0:
                    others = [x for x in points[curve.arm].changes if not self._follows(x, field)]
                    setting = "-".join(map(points[curve.arm].call, others))
                    groups.setdefault(setting, {})[size] = curve
            for setting, by_size in groups.items():
                if len(by_size) > 2:
                    x = [math.log2(size) for size in by_size]
                    y = [curve.number.x(curve.optimum) for curve in by_size.values()]
                    low, high = slope_interval(x, y)
                    optima = ", ".join(f"{curve.optimum:g}" for curve in by_size.values())
                    slope = f"{(low + high) / 2:+.2f} [{low:+.2f}, {high:+.2f}]"
                    rows.append([name, field, setting, slope, optima])
        return [[head, *rows]] if rows else []

    def _follows(self, other: str, field: str) -> bool:
        """Returns whether the value of `field` determines that of `other`, as d_model does d_ff."""
        changes = self.tuned.results.sweep.arms.values()
        pairs = {(str(x.get(field)), str(x.get(other))) for x in changes}
        return len(pairs) == len({first for first, _ in pairs})


def _optimum(curve: Curve) -> str:
    if not curve.bracketed:
        return f"{curve.optimum:g} (not bracketed)"
    low, high = curve.interval()
    interval = f" [{low:g}, {high:g}]" if math.isfinite(low) else ""
    interval = " (not identified)" if math.isinf(low) else interval
    cost = "" if math.isnan(curve.flatness) else f", {number(curve.flatness)}"
    return f"{curve.optimum:g}{interval}{cost}"


def _difference(versus: Difference | None) -> str:
    if versus is None or not versus.mean.count:
        return "-"
    center = signed(versus.mean.mean, versus.mean.half)
    return f"{center} [{spell_range(versus.mean)}]" if versus.mean.count > 1 else center


def _draw(curves: Sequence[Curve], style: Style) -> Figure:
    number = curves[0].number
    figure, axes = new_figure(3.5, xlabel=number.field, ylabel=METRIC)
    for curve in curves:
        look, fit, x = style[curve.arm], curve.parabola, number.x
        runs = [(x(v), y) for v in curve.tried for y in curve.losses[v].values() if y < math.inf]
        mark = {"color": look["color"], "marker": look["marker"], "linestyle": ""}
        axes.plot(*zip(*runs, strict=True), markersize=4, alpha=0.6, **mark)
        height = curve.mean(curve.best)
        if fit is not None:
            xs = np.linspace(x(curve.near[0]), x(curve.near[-1]), 100)
            line = {"color": look["color"], "linestyle": look["linestyle"], "linewidth": 1.2}
            axes.plot(xs, fit(xs), **line)
            height = float(fit(x(curve.optimum)))
        interval = [x(v) for v in curve.interval() if math.isfinite(v)]
        axes.plot(interval, [height] * len(interval), color=look["color"], linewidth=2.5, alpha=0.5)
        large = {"markersize": 8, "markeredgecolor": "black", "label": curve.arm}
        axes.plot(x(curve.optimum), height, **mark, **large)
    ends = {v for curve in curves for v in (curve.tried[0], curve.tried[-1])}
    ticks = sorted({*number.grid, *ends})
    axes.set_xticks([number.x(v) for v in ticks], [f"{v:g}" for v in ticks])
    add_legend(figure, axes)
    return figure
