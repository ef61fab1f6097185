"""The section "Scaling" of a report on a ladder: laws, compute multipliers and predictions."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from transformer.lab.figures import new_figure, styles
from transformer.lab.laws import fit_huber, isoflop
from transformer.lab.multipliers import Estimate, Points, Scaling, fit_all, profile, ranking
from transformer.lab.page import Section, Table
from transformer.lab.results import Results


def section(results: Results) -> Section:
    """Returns the section on a ladder, which is empty for other sweeps."""
    if not (rungs := results.sweep.ladder):
        return Section("")
    points, missing = read_points(results)
    held = {rung["size"] for rung in rungs.values() if rung["held_out"]}
    inside = lambda x: x.rows([run for run in x.runs if run[0] not in held])
    baseline = rungs[results.sweep.baseline]["arm"]
    scaling = fit_all({name: inside(x) for name, x in points.items()}, baseline)
    sentences = [f"{name} has no scaling law: {why}." for name, why in scaling.why_not.items()]
    tables = [_laws(scaling), _predictions(scaling, points, held)] if scaling.fits else []
    if baseline in scaling.fits and len(scaling.fits) > 1:
        x = points[baseline]
        sizes = {run[0]: float(C[-1]) for run, C in zip(x.runs, x.C, strict=True)}
        budgets = sorted((C, size in held) for size, C in sizes.items())  # the largest of each size
        fitted = [C for C, is_held in budgets if not is_held]
        arms = [name for name in scaling.fits if name != baseline]
        tables.insert(0, _multipliers(scaling, arms, budgets))
        sentences += [_sentence(scaling, arm, fitted[0], fitted[-1]) for arm in arms]
    target = max(rungs.values(), key=lambda rung: rung["N"])["size"]
    counts = [(size, *x) for size, x in ranking(points, target).items() if size != target]
    if shares := ", ".join(f"{size}: {right} of {of}" for size, right, of in counts):
        sentences.append(f"Pairs of runs that rank two arms as the means at {target} do: {shares}.")
    sentences += [f"{run}: left out of the laws: {why}." for run, why in missing.items()]
    rows: list = [["arm", "size", "seed", "N", "D", "FLOPs", "loss"]]
    for name, x in points.items():
        columns = np.stack([x.N, x.D, x.C, x.loss], -1).tolist()
        rows += [[name, *run, *y] for run, ys in zip(x.runs, columns, strict=True) for y in ys]
    caption = "Validation loss at the end of each decay against training FLOPs. Lines: the lowest "
    caption += "loss for a budget by each arm's law. Hollow: the size that is held out of the fit."
    figures = {"scaling": (caption, _figure(points, scaling, held))} if points else {}
    return Section("Scaling", sentences, figures, tables, csv={"scaling": rows})


def read_points(results: Results) -> tuple[dict[str, Points], dict[str, str]]:
    """Returns the points of each arm, and a reason for each run that is left out."""
    rows, missing = {}, {}
    for name, rung in results.sweep.ladder.items():
        arm = results.arms[name]
        for seed, run in arm.runs.items():
            ends = [*run.config.optimizer.decay_ends, run.config.train.steps]
            losses = dict(run.curve("eval/loss"))
            if run.diverged is not None or not losses.keys() >= set(ends):
                why = "it is not finished" if run.diverged is None else "it diverged"
                missing[f"{name}, seed {seed}"] = why
                continue
            C, loss = np.array(ends) * arm.flops_per_step, np.array([losses[x] for x in ends])
            row = ((rung["size"], seed), rung["N"] + 0 * C, C / arm.flops, C, loss)
            rows.setdefault(rung["arm"], []).append(row)
    columns = {name: list(zip(*x, strict=True)) for name, x in rows.items()}
    return {name: Points(x[0], *map(np.stack, x[1:])) for name, x in columns.items()}, missing


def _spell(x: Estimate, decimals: int = 2, least: float = -np.inf) -> str:
    show = lambda y: f"{max(y, least):.{decimals}f}" if y < 1000 else "inf"
    return f"{show(x.value)} [{show(x.low)}, {show(x.high)}]"


def _sentence(scaling: Scaling, arm: str, first: float, last: float) -> str:
    k, change = scaling.multiplier(arm, last), scaling.multiplier(arm, last, since=first)
    if k.low < 0.01 or k.high > 100:
        text = f"The multiplier of {arm} is unidentified at {last:.1e} FLOPs: its interval is "
        return text + f"{_spell(k)}."
    needs = Estimate(1 / k.value, 1 / k.high, 1 / k.low)
    differs = lambda x: x.low > 1 or x.high < 1
    unclear = "" if differs(k) else "; no detectable difference"
    line = f"At {last:.1e} FLOPs, {arm} needs {_spell(needs)} times the compute of "
    line += f"{scaling.baseline} for equal loss (95 % interval){unclear}."
    trend = f"{arm} {'gains' if change.value > 1 else 'loses'} with scale"
    line += f" From {first:.1e} to {last:.1e} FLOPs, k changes by the factor {_spell(change)}"
    line += f": {trend if differs(change) else 'no detectable change'}."
    crossings = [f"{C:.1e}" for C in scaling.crossings(arm, first, 10 * last)]
    return line + f" The fitted laws cross at {', '.join(crossings)} FLOPs." * bool(crossings)


def _multipliers(scaling: Scaling, arms: Sequence[str], budgets) -> Table:
    rows = [["arm", "FLOPs", "k", "k by profile"]]
    for arm in arms:
        for C, is_held in budgets:
            intervals = map(_spell, (scaling.multiplier(arm, C), profile(scaling, arm, C)))
            rows.append([arm, f"{C:.2e}{' (extrapolated)' * is_held}", *intervals])
    return rows


def _laws(scaling: Scaling) -> Table:
    head = ["law", "E", "alpha", "beta", "E, alpha, beta by Huber loss", "FLOPs per token"]
    rows = [[*head, "IsoFLOP: best N"]]
    for name, fit in scaling.fits.items():
        x, pair, cost = fit.points, (fit.law, fit.resampled), fit.cost
        parameters = ([getattr(law, key) for law in pair] for key in ("E", "alpha", "beta"))
        N, D, C, L = (y.ravel() for y in (x.N, x.D, x.C, x.loss))
        huber = fit_huber(N, D, L)[0]
        best = ", ".join(f"{N:.2g} at {C:.1e}" for C, N, _ in isoflop(N, C, L))
        robust = f"{huber.E:.3f}, {huber.alpha:.3f}, {huber.beta:.3f}"
        spelled = [_spell(scaling.interval(*values), 3, 0.0) for values in parameters]
        rows.append([name, *spelled, robust, f"{cost.c:.3g} N^{cost.m:.3f}", best or "-"])
    return rows


def _predictions(scaling: Scaling, points: Mapping[str, Points], held) -> Table:
    rows = [["held out", "N", "tokens", "predicted loss", "measured", "error", "in the interval"]]
    for name in scaling.fits:
        x = points[name].rows([run for run in points[name].runs if run[0] in held])
        for i, loss in enumerate(x.loss.mean(0) if x.runs else ()):
            N, D = x.N[0, i], x.D[0, i]
            law = scaling.predict(name, N, D, len(x.runs))
            inside, error = law.low <= loss <= law.high, f"{loss / law.value - 1:+.2%}"
            numbers = (f"{N:,.0f}", f"{D:.2e}", _spell(law, 4), f"{loss:.4f}", error)
            rows.append([name, *numbers, "yes" if inside else "no"])
    return rows


def _figure(points: Mapping[str, Points], scaling: Scaling, held) -> Figure:
    figure, axes = new_figure(3.5, xscale="log", xlabel="training FLOPs", ylabel="validation loss")
    for name, style in styles(list(points)).items():
        x, line = points[name], {key: style[key] for key in ("color", "linestyle")}
        for out, fill in ((False, style["color"]), (True, "none")):
            shown = x.rows([run for run in x.runs if (run[0] in held) == out])
            look = {"markerfacecolor": fill, "markersize": 4}
            axes.plot(shown.C.ravel(), shown.loss.ravel(), **style | look | {"linestyle": ""})
        C, fit = np.geomspace(x.C.min(), x.C.max(), 50), scaling.fits.get(name)
        loss, why = (fit.law.at(C, fit.cost), "") if fit else (C * np.nan, " (no law)")
        axes.plot(C, loss, label=name + why, **line)
    axes.legend(frameon=False, fontsize=8)
    return figure
