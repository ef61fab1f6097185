"""The section "Scaling" of a report on a ladder: laws, compute multipliers and predictions."""

import dataclasses
import html
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from transformer.lab.figures import new_figure, styles
from transformer.lab.laws import fit_huber, isoflop
from transformer.lab.likelihood import profile
from transformer.lab.multipliers import Estimate, Points, Scaling, fit_all, ranking
from transformer.lab.results import Results

NOTE = (
    "The multiplier k(C) of an arm solves L*_base(k C) = L*_arm(C), where L* is the lowest "
    "validation loss for C FLOPs: the arm needs 1/k times the baseline's compute for equal loss. "
    "Brackets are 95 % intervals by a bootstrap over whole runs, and by profile likelihood. A "
    "multiplier above the largest fitted budget is extrapolated."
)

Table = list[list[str]]


@dataclasses.dataclass(frozen=True)
class Section:
    """Sentences, tables, name -> (caption, figure), and name -> rows of a CSV file."""

    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Mapping[str, tuple[str, Figure]] = dataclasses.field(default_factory=dict)
    csv: Mapping[str, Table] = dataclasses.field(default_factory=dict)

    def markdown(self, rows: Callable[[Table], list[str]]) -> list[str]:
        """Returns lines. `rows` formats a table."""
        if not self.sentences:
            return []
        lines = ["## Scaling", "", *(f"- {line}" for line in self.sentences), ""]
        return [*lines, *(line for x in self.tables for line in (*rows(x), "")), NOTE, ""]

    def html(self, table: Callable[[Table], str]) -> list[str]:
        """Returns elements. `table` formats a table."""
        if not self.sentences:
            return []
        items = "".join(f"<li>{html.escape(line)}</li>" for line in self.sentences)
        head = ["<h2>Scaling</h2>", f"<ul>{items}</ul>"]
        return [*head, *map(table, self.tables), f"<p class=note>{html.escape(NOTE)}</p>"]


NONE = Section()
"""The section of a sweep that is no ladder."""


def section(results: Results) -> Section:
    """Returns the section on a ladder. It is empty for other sweeps and other directories."""
    rungs = results.sweep.ladder
    if not rungs:
        return NONE
    points, missing = read_points(results)
    held = {rung["size"] for rung in rungs.values() if rung["held_out"]}
    fitted = {
        name: x.rows([run for run in x.runs if run[0] not in held]) for name, x in points.items()
    }
    baseline = rungs[results.sweep.baseline]["arm"]
    scaling = fit_all(fitted, baseline)
    sentences = [f"{name} has no scaling law: {why}." for name, why in scaling.why_not.items()]
    tables, named = [], [name for name in scaling.fits if name != baseline]
    if baseline in scaling.fits:
        budgets = _budgets(points[baseline])
        if named:
            tables.append(_multipliers(scaling, named, budgets, held))
            inside = [C for size, C in budgets.items() if size not in held]
            sentences += [_sentence(scaling, arm, min(inside), max(inside)) for arm in named]
    if scaling.fits:
        tables += [_laws(scaling)] + [_predictions(scaling, points, held)] * bool(held)
    target = max(rungs.values(), key=lambda rung: rung["N"])["size"]
    sentences += _ranked(points, target)
    sentences += [f"{name}: left out of the laws: {why}." for name, why in missing.items()]
    rows = [["arm", "size", "seed", "N", "D", "FLOPs", "loss"]]
    for name, x in points.items():
        columns = np.stack([x.N, x.D, x.C, x.loss], -1)
        rows += [
            [name, *run, *y] for run, ys in zip(x.runs, columns.tolist(), strict=True) for y in ys
        ]
    caption = (
        "Validation loss at the end of each decay against training FLOPs. Lines: the lowest loss "
        "for a budget by each arm's law. Hollow: the size that is held out of the fit."
    )
    figure = {"scaling": (caption, _figure(points, scaling, held))} if points else {}
    return Section(sentences, tables, figure, {"scaling": rows})


def read_points(results: Results) -> tuple[dict[str, Points], dict[str, str]]:
    """Returns the points of each arm, and a reason for each run that is left out."""
    rows: dict[str, list] = {}
    missing = {}
    for name, rung in results.sweep.ladder.items():
        arm = results.arms[name]
        for seed, run in arm.runs.items():
            ends = [*run.config.optimizer.decay_ends, run.config.train.steps]
            losses = dict(run.curve("eval/loss"))
            if run.diverged is not None or not all(end in losses for end in ends):
                why = "it diverged" if run.diverged is not None else "it is not finished"
                missing[f"{name}, seed {seed}"] = why
                continue
            C = np.array(ends, np.float64) * arm.flops_per_step
            loss = np.array([losses[end] for end in ends])
            row = ((rung["size"], seed), rung["N"] + 0 * C, C / arm.flops, C, loss)
            rows.setdefault(rung["arm"], []).append(row)
    stacked = lambda x: Points(tuple(x[0]), *map(np.stack, x[1:]))
    return {name: stacked(list(zip(*x, strict=True))) for name, x in rows.items()}, missing


def _budgets(x: Points) -> dict[str, float]:
    """Returns the largest budget of each size, in FLOPs, smallest size first."""
    largest = {run[0]: float(C[-1]) for run, C in zip(x.runs, x.C, strict=True)}
    return dict(sorted(largest.items(), key=lambda item: item[1]))


def _spell(x: Estimate, decimals: int = 2, least: float = -math.inf) -> str:
    show = lambda y: f"{max(y, least):.{decimals}f}" if y < 1000 else "inf"
    return f"{show(x.value)} [{show(x.low)}, {show(x.high)}]"


def _sentence(scaling: Scaling, arm: str, first: float, last: float) -> str:
    k, change = scaling.multiplier(arm, last), scaling.change(arm, first, last)
    inverse = lambda x: 1 / x if x else math.inf
    needs = Estimate(inverse(k.value), inverse(k.high), inverse(k.low))
    if not (math.isfinite(k.high) and k.low > 0.01 and k.high < 100):
        text = f"The multiplier of {arm} is unidentified at {last:.1e} FLOPs: the runs allow "
        return text + f"{_spell(k)}."
    detectable = "" if k.low > 1 or k.high < 1 else "; no detectable difference"
    line = (
        f"At {last:.1e} FLOPs, {arm} needs {_spell(needs)} times the compute of "
        f"{scaling.baseline} for equal loss (95 % interval){detectable}."
    )
    trend = "no detectable change"
    if change.low > 1 or change.high < 1:
        trend = f"{arm} {'gains' if change.value > 1 else 'loses'} with scale"
    line += f" From {first:.1e} to {last:.1e} FLOPs, k changes by the factor {_spell(change)}"
    line += f": {trend}."
    if crossings := scaling.crossings(arm, first, 10 * last):
        line += f" The fitted laws cross at {', '.join(f'{C:.1e}' for C in crossings)} FLOPs."
    return line


def _multipliers(scaling: Scaling, arms: Sequence[str], budgets, held) -> Table:
    rows = [["arm", "FLOPs", "k", "k, by profile", "1/k", "k with E of the baseline (± SE)"]]
    for arm in arms:
        for size, C in budgets.items():
            k = scaling.multiplier(arm, C)
            floors = ", ".join(f"{x:.2f}" for x in scaling.with_fixed_floor(arm, C))
            beyond = " (extrapolated)" if size in held else ""
            inverse = f"{1 / k.value:.2f}" if k.value else "inf"
            by_profile = _spell(profile(scaling, arm, C))
            rows.append([arm, f"{C:.2e}{beyond}", _spell(k), by_profile, inverse, floors])
    return rows


def _laws(scaling: Scaling) -> Table:
    head = ["law", "E", "alpha", "beta", "alpha and beta by Huber loss", "FLOPs per token"]
    rows = [[*head, "IsoFLOP minima"]]
    for name, fit in scaling.fits.items():
        x, law, spread = fit.points, fit.law, fit.resampled
        huber, _ = fit_huber(*x.at, x.loss.ravel())
        of = lambda key, law=law, spread=spread: _spell(
            scaling.interval(getattr(law, key), getattr(spread, key)), 3, least=0.0
        )
        minima = isoflop(x.N.ravel(), x.C.ravel(), x.loss.ravel())
        best = ", ".join(f"{N:.2g} at {C:.1e}" for C, N, _ in minima) or "no common budgets"
        both = f"{huber.alpha:.3f}, {huber.beta:.3f}"
        cost = f"{fit.cost.c:.3g} N^{fit.cost.m:.3f}"
        rows.append([name, of("E"), of("alpha"), of("beta"), both, cost, best])
    return rows


def _predictions(scaling: Scaling, points: Mapping[str, Points], held) -> Table:
    rows = [["held out", "tokens", "predicted loss", "measured", "error", "in the interval"]]
    for name in scaling.fits:
        x = points[name].rows([run for run in points[name].runs if run[0] in held])
        for i, loss in enumerate(x.loss.mean(0) if x.runs else ()):
            N, D = x.N[0, i], x.D[0, i]
            predicted = scaling.predict(name, N, D, len(x.runs))
            inside = "yes" if predicted.low <= loss <= predicted.high else "no"
            spelled = _spell(predicted, 4)
            error = f"{loss / predicted.value - 1:+.2%}"
            rows.append(
                [f"{name}, N = {N:,.0f}", f"{D:.2e}", spelled, f"{loss:.4f}", error, inside]
            )
    return rows


def _ranked(points: Mapping[str, Points], target: str) -> list[str]:
    counts = {size: x for size, x in ranking(points, target).items() if size != target}
    shares = ", ".join(f"{size}: {right} of {of}" for size, (right, of) in counts.items())
    text = f"A single run of a size ranks two arms as the mean at {target} does, by size: {shares}."
    return [text] if shares else []


def _figure(points: Mapping[str, Points], scaling: Scaling, held) -> Figure:
    figure, axes = new_figure(3.5)
    for name, style in styles(list(points)).items():
        x = points[name]
        look = {"linestyle": "", "marker": style["marker"], "color": style["color"]}
        for out, fill in ((False, style["color"]), (True, "none")):
            shown = x.rows([run for run in x.runs if (run[0] in held) == out])
            look |= {"markerfacecolor": fill, "markersize": 4}
            axes.plot(shown.C.ravel(), shown.loss.ravel(), **look)
        C = np.geomspace(x.C.min(), x.C.max(), 50)
        if fit := scaling.fits.get(name):
            line = {"color": style["color"], "linestyle": style["linestyle"]}
            axes.plot(C, fit.law.at(C, fit.cost), label=name, **line)
        else:
            axes.plot([], [], label=f"{name} (no law)", **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("training FLOPs")
    axes.set_ylabel("validation loss")
    axes.legend(frameon=False, fontsize=8)
    return figure
