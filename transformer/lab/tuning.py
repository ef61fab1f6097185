"""Tunes numbers for each arm of a sweep, so that every arm is compared at its best.

A sweep with `tune` has three studies, which run one after another:

    DIR/tuning   every arm with the values that are tried, on seeds of their own
    DIR/tuned    the comparison, with each arm at its optimum
    DIR          the comparison at the settings of the experiment file

The search is replayed from the finished runs, so it resumes, and all machines that share DIR agree.
The optimum is the minimum of a parabola in log2 of the number, with Fieller's interval."""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.lab.guard import changed, warmup
from transformer.lab.results import load_run
from transformer.lab.statistics import Parabola
from transformer.lab.study import Study, load_study
from transformer.output import count
from transformer.sweeps import Grid, Point, Sweep, Tuned

METRIC = "eval/loss"  # the metric that is tuned: the validation loss after the last step
NEAR, FAR = 2.0, 0.3  # range of a fit: steps of the grid, and nats, around the best value
PATIENCE = 2.0  # seconds between two looks at the runs of other machines


class Curve(NamedTuple):
    """The values of one number that an arm has tried, and its optimum."""

    arm: str
    number: Tuned
    setting: Mapping[str, float]  # the arm's optima of the numbers tuned before
    losses: Mapping[float, Mapping[int, float]]  # value -> seed -> loss; infinite if diverged

    @property
    def tried(self) -> list[float]:
        return sorted(self.losses)

    def mean(self, value: float) -> float:
        """Returns the mean loss at a value, infinite if a run diverged."""
        return float(np.mean(list(self.losses[value].values())))

    @property
    def best(self) -> float:
        """The value with the least mean loss. Raises UserError if every value diverged."""
        best, tried = min(self.tried, key=self.mean), self.tried
        if not math.isfinite(self.mean(best)):
            values = f"{self.number.name} from {tried[0]:g} to {tried[-1]:g}"
            problem = f"arm {self.arm!r} diverged at every {values}"
            raise UserError(f"sweep: tune: {problem}; tune over another range")
        return best

    @property
    def bracketed(self) -> bool:
        """Whether a smaller and a larger value than the best one are worse."""
        return self.tried[0] < self.best < self.tried[-1]

    @property
    def near(self) -> list[float]:
        """The values to which the parabola is fitted: those near the best one."""
        reach, x = NEAR * self.number.step * (1 + 1e-6), self.number.x
        is_near = lambda v: abs(x(v) - x(self.best)) <= reach
        is_close = lambda v: self.mean(v) <= self.mean(self.best) + FAR
        return [value for value in self.tried if is_near(value) and is_close(value)]

    @property
    def parabola(self) -> Parabola | None:
        """The parabola around the best value; None with fewer than three values near it."""
        x, near = self.number.x, self.near
        rows = [(x(v), loss, seed) for v in near for seed, loss in self.losses[v].items()]
        return Parabola.of(*zip(*rows, strict=True)) if len(near) > 2 else None

    @property
    def optimum(self) -> float:
        """The parabola's minimum between the best value's neighbors; if unknown, the best value."""
        fit, at = self.parabola, self.tried.index(self.best)
        unknown = fit is None or math.isnan(fit.minimum) or math.isinf(self.interval()[0])
        if unknown or not self.bracketed:
            return self.best
        low, high = (self.number.x(self.tried[n]) for n in (at - 1, at + 1))
        return self.number.value(min(max(fit.minimum, low), high))

    def interval(self) -> tuple[float, float]:
        """Returns the 95 % interval of the optimum; NaN if unknown, infinite if not identified."""
        if self.parabola is None:
            return math.nan, math.nan
        low, high = self.parabola.interval()
        spell = lambda x: self.number.value(x) if math.isfinite(x) else x
        return spell(low), spell(high)

    @property
    def flatness(self) -> float:
        """The loss that a factor of 2 from the minimum costs, in nats; NaN without a minimum."""
        fit = self.parabola
        return float(fit.c[2]) if fit is not None and fit.c[2] > 0 else math.nan

    def next_values(self, config: Experiment) -> list[float]:
        """Returns the values to try next: the grid, then one at a time, then none."""
        number, tried = self.number, self.tried
        if not tried:
            return number.grid
        if len(tried) >= len(number.grid) + number.more:
            return []
        at, x = tried.index(self.best), number.x
        if self.bracketed:
            neighbors = sorted((tried[at - 1], tried[at + 1]), key=self.mean)
            candidates = [number.value((x(self.best) + x(value)) / 2) for value in neighbors]
        else:
            candidates = [number.value(x(self.best) + (number.step if at else -number.step))]
        for value in candidates:
            with contextlib.suppress(UserError):  # of a value that the config does not allow
                if value > 0 and value not in tried and changed(config, {number.field: value}):
                    return [value]
        return []


def check(sweep: Sweep, configs: Mapping[str, Experiment]) -> None:
    """Raises UserError if a value that is tried first is invalid in an arm."""
    for config, number in itertools.product(configs.values(), sweep.tune):
        for value in number.grid:
            changed(config, {number.field: value}, "sweep: tune: ")


class Trial(NamedTuple):
    """An arm with values of the tuned numbers. It is an arm of the study DIR/tuning."""

    arm: str
    numbers: Mapping[str, float]

    @property
    def name(self) -> str:
        spelled = (f"{field.rpartition('.')[2]}={x:g}" for field, x in self.numbers.items())
        return "-".join([self.arm, *spelled])

    def losses(self, study: Study) -> dict[int, float]:
        """Returns seed -> validation loss; nothing while a run is unfinished."""
        losses = {}
        for seed in tuning_seeds(study.sweep):
            run = load_run(study.folder / "tuning" / self.name / f"seed-{seed}", [], self.name)
            if run is None or (run.diverged is None and math.isnan(run.outcome(METRIC))):
                return {}
            losses[seed] = run.outcome(METRIC) if run.diverged is None else math.inf
        return losses


def search(study: Study) -> tuple[list[Curve], list[Trial]]:
    """Replays the search. Returns the finished curves, and all trials with those that are next."""
    curves, trials = [], []
    for arm, config in study.configs.items():
        setting: dict[str, float] = {}
        for number in study.sweep.tune:
            curve, known = Curve(arm, number, dict(setting), {}), True
            while known and (values := curve.next_values(config)):
                new = [Trial(arm, setting | {number.field: value}) for value in values]
                trials += new
                losses = dict(zip(values, (trial.losses(study) for trial in new), strict=True))
                known = all(losses.values())
                curve = curve._replace(losses=curve.losses | losses)
            if not known:
                break
            curves.append(curve)
            setting[number.field] = curve.optimum
    return curves, trials


def tuning_seeds(sweep: Sweep) -> tuple[int, ...]:
    """Returns the seeds of the tuning runs: those after the seeds of the comparison."""
    start = max(sweep.seeds) + 1
    return tuple(range(start, start + sweep.tune_seeds))


def stages(study: Study) -> Iterator[Study]:
    """Yields the studies of a sweep, itself last. Each must finish before the next is requested."""
    sweep = study.sweep
    while sweep.tune:
        curves, trials = search(study)
        if len(curves) == len(study.configs) * len(sweep.tune):
            optima = {x.arm: {**x.setting, x.number.field: x.optimum} for x in curves}
            configs = {arm: changed(config, optima[arm]) for arm, config in study.configs.items()}
            yield _part(study, "tuned", sweep, configs, study.facts)
            break
        points = [Point(x.name, {**sweep.arms[x.arm], **x.numbers}) for x in trials]
        question = f"Which {' and '.join(x.name for x in sweep.tune)} is best for each arm?"
        tuning = Sweep(Grid(points), question, seeds=tuning_seeds(sweep), metric=METRIC)
        configs = {x.name: changed(study.configs[x.arm], x.numbers) for x in trials}
        facts = {x.name: study.facts[x.arm] for x in trials}
        yield _part(study, "tuning", tuning, configs, facts)
    yield study


def _part(study: Study, name: str, sweep: Sweep, configs, facts) -> Study:
    replace, folder = dataclasses.replace, study.folder / name
    facts = {arm: replace(facts[arm], warmup=warmup(c)) for arm, c in configs.items()}
    sweep = replace(sweep, tune=(), tune_seeds=1)
    return replace(study, folder=folder, sweep=sweep, configs=configs, facts=facts)


def publish(study: Study, is_first: bool) -> None:
    """Writes a stage on the first host of a pod. The other hosts wait for it."""
    if is_first:
        study.write()
    written = lambda: (study.folder / "sweep.json").exists() and load_study(study.folder).configs
    while not is_first and not (written() or {}).keys() >= study.configs.keys():
        time.sleep(PATIENCE)


def wait_for(study: Study, report: Callable[[str], None]) -> None:
    """Waits for all runs of a stage, also on other machines. Raises UserError if one has failed."""
    told = False
    while unfinished := [run for run in study.runs if not run.status().is_finished]:
        for run in unfinished:
            if (status := run.status()).kind == "failed":
                raise UserError(f"sweep: tuning needs all runs, but {run.name}: {status.why}")
        if not told:
            report(f"waiting for {count(len(unfinished), 'run')} of other machines")
        told = True
        time.sleep(PATIENCE)
