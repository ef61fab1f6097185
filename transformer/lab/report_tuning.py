"""The part of a report on tuning: curves, optima, and the comparison with and without tuning."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure

from transformer.lab.figures import Style, add_legend, new_figure, styles
from transformer.lab.formatting import number, signed, spell, spell_range
from transformer.lab.page import Section
from transformer.lab.statistics import Difference, difference, slope_interval
from transformer.lab.tuning import METRIC, Curve, tuning_seeds
from transformer.lab.verdict import Verdict, listed
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
        """What tuning changes."""
        lines = []
        for (name, field), group in itertools.groupby(self.slopes(), lambda row: row[:2]):
            rows = [row[2:5] for row in group]
            moves = [f"{x or 'slope'} {slope}" for x, slope, differs in rows if differs]
            where = f": {', '.join(moves)} (slopes)" if moves else " in no arm"
            where += "; no slope is identified" * ({x for _, x, _ in rows} == {"not identified"})
            lines.append(f"The best {name} changes detectably with {field}{where}.")
        if self.untuned is not None:
            changed, base = {}, self.tuned.results.sweep.baseline
            for arm, row in self.tuned.rows.items():
                if (before := self.untuned.rows[arm]).outcome != row.outcome:
                    sizes = " to ".join(_difference(x.to_baseline) for x in (before, row))
                    changed.setdefault((before.outcome, row.outcome), []).append(f"{arm} ({sizes})")
            for (before, after), arms in changed.items():
                change = f"{listed(arms, len(arms))} from {before} (untuned) to {after} (tuned)"
                lines.append(f"Tuning changes {change}, compared with {base}.")
            same = f"Tuning does not change which arms differ detectably from {base}."
            lines += [] if changed else [same]
        return lines

    @property
    def doubts(self) -> list[str]:
        """Which optima are uncertain."""
        doubts: dict[tuple[str, str], list[str]] = {}
        for curve in self.curves:
            tried, at, doubt = curve.tried, curve.tried.index(curve.best), ""
            if not curve.bracketed:
                edge = "largest" if at else "smallest"
                doubt = f"is not bracketed: {curve.best:g} is the {edge} value tried"
            elif curve.parabola is None:
                between = f"between {tried[at - 1]:g} and {tried[at + 1]:g}"
                doubt = f"is only known to be {between}; {curve.best:g} was used"
            elif not math.isfinite(low := curve.interval()[0]):
                used = "the best value tried" if math.isinf(low) else "a parabola's minimum"
                doubt = f"has no finite 95 % interval; {used} was used"
            doubts.setdefault((curve.number.name, doubt), []).append(curve.arm)
        of = lambda name, doubt, arms: f"The best {name} of {listed(arms, len(arms))} {doubt}."
        return [of(*key, arms) for key, arms in doubts.items() if key[1]]

    def section(self) -> Section:
        pictures, sweep = {}, self.sweep
        for name in self.numbers:
            caption = f"Tuning: {METRIC} against {name}, for each run (marks), with parabolas. "
            caption += "Much higher losses are cut off."
            curves = [curve for curve in self.curves if curve.number.name == name]
            pictures[f"tuning_{name}"] = (caption, _draw(curves, styles(list(self.tuned.rows))))
        seeds = f"seed{'s' * (sweep.tune_seeds > 1)} {', '.join(map(str, tuning_seeds(sweep)))}"
        note = f"Each arm is tuned by {METRIC} with up to {sweep.tuning_runs} runs, with {seeds}, "
        note += "which the comparison does not use."
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
        versus = [f"{name} - {sweep.baseline}" for name in ("untuned", "tuned")]
        rows = [["arm", "untuned", versus[0], "tuned", versus[1], "change by tuning"]]
        cells = lambda row: [spell(row.value), _difference(row.to_baseline)]
        for arm, row in self.tuned.rows.items():
            before = self.untuned.rows[arm]
            gain = difference(row.arm.values(sweep.metric), before.arm.values(sweep.metric))
            rows.append([arm, *cells(before), *cells(row), _difference(gain)])
        return rows

    def slopes(self) -> Iterator[tuple[str, str, str, str, bool, list[Curve]]]:
        """Yields a tuned number, a field of three or more sizes, a setting of the others, and the
        slope of log2(optimum) against log2(size), whether it differs from 0, and the curves. An
        optimum that is not bracketed is only a bound, and has no part in the slope."""
        points, fields = self.tuned.results.sweep.points, self.tuned.results.sweep.fields
        is_size = lambda x: type(x) in (int, float) and x > 0
        sizes = [x for x in fields if any(is_size(p.changes.get(x)) for p in points.values())]
        leads = lambda i, x: not any(self._follows(x, earlier) for earlier in sizes[:i])
        leading = [field for i, field in enumerate(sizes) if leads(i, field)]
        for name, field in itertools.product(self.numbers, leading):
            groups: dict[str, dict[float, Curve]] = {}
            for curve in (curve for curve in self.curves if curve.number.name == name):
                if is_size(size := points[curve.arm].changes.get(field)):
                    others = [x for x in points[curve.arm].changes if not self._follows(x, field)]
                    setting = "-".join(map(points[curve.arm].call, others))
                    groups.setdefault(setting, {})[math.log2(size)] = curve
            for setting, of in groups.items():
                found = {x: c.number.x(c.optimum) for x, c in of.items() if c.bracketed}
                slope, low, high = "not identified", -math.inf, math.inf
                if len(found) > 2:
                    low, high = slope_interval(list(found), list(found.values()))
                    slope = f"{(low + high) / 2:+.2f} [{low:+.2f}, {high:+.2f}]"
                if len(of) > 2:
                    yield name, field, setting, slope, not low <= 0 <= high, list(of.values())

    def shifts(self) -> list[list[list[str]]]:
        """Returns a table of `slopes`."""
        rows = [["tuned number", "against", "setting", "slope [95 %]", "optima"]]
        for *cells, _, curves in self.slopes():
            rows.append([*cells, ", ".join(_optimum(curve, brief=True) for curve in curves)])
        return [rows] if len(rows) > 1 else []

    def _follows(self, other: str, field: str) -> bool:
        """Returns whether the value of `field` determines that of `other`, as d_model does d_ff."""
        changes = self.tuned.results.sweep.arms.values()
        pairs = {(str(x.get(field)), str(x.get(other))) for x in changes}
        return len(pairs) == len({first for first, _ in pairs})


def _optimum(curve: Curve, brief: bool = False) -> str:
    if brief or not curve.bracketed:
        return f"{curve.optimum:g}{'' if curve.bracketed else ' (not bracketed)'}"
    low, high = curve.interval()
    interval = " (of three values)" if math.isnan(low) else f" [{low:g}, {high:g}]"
    interval = " (best value tried)" if not curve.parabola or math.isinf(low) else interval
    cost = "" if math.isnan(curve.flatness) or math.isinf(low) else f", {number(curve.flatness)}"
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
            height = height if curve.optimum == curve.best else float(fit(x(curve.optimum)))
        interval = [x(v) for v in curve.interval() if math.isfinite(v)]
        axes.plot(interval, [height] * len(interval), color=look["color"], linewidth=2.5, alpha=0.5)
        large = {"markersize": 8, "markeredgecolor": "black", "label": curve.arm}
        axes.plot(x(curve.optimum), height, **mark, **large)
    shown = [curve.mean(v) for curve in curves for v in curve.near]
    axes.set_ylim(top=min(axes.get_ylim()[1], max(shown) + np.ptp(shown) + 0.05))
    ends = {v for curve in curves for v in (curve.tried[0], curve.tried[-1])}
    ticks = sorted({*number.grid, *ends})
    axes.set_xticks([number.x(v) for v in ticks], [f"{v:g}" for v in ticks])
    add_legend(figure, axes)
    return figure
