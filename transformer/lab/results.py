"""Reads runs from their directories, groups them by arm, and leaves out incomparable ones."""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from transformer.config import Experiment
from transformer.data.store import TEXT_FIELDS
from transformer.errors import UserError, nearest
from transformer.evaluation.evaluators.base import measures
from transformer.files import read_json
from transformer.lab.guard import allowed_facts
from transformer.lab.statistics import Mean, mean
from transformer.lab.study import Study, load_study
from transformer.mapping import to_mapping
from transformer.output import count, listed
from transformer.runs.metrics import parse_metrics
from transformer.runs.rundir import flatten_fields, load_config, read_manifest
from transformer.sweeps import RESERVED, Grid, Point, Sweep
from transformer.units import kind


class RunResult(NamedTuple):
    """The config, logged metrics and manifest of a run."""

    folder: Path
    config: Experiment
    lines: tuple[dict, ...]  # metrics.jsonl
    manifest: Mapping
    tested: Mapping  # test.json

    @property
    def diverged(self) -> int | None:
        """The step at which the run diverged, or None. A run has diverged if its training loss was
        not finite, or if its final loss is more than twice the loss of uniform predictions."""
        losses = [x for x in map(self.outcome, ("test/loss", "eval/loss")) if not math.isnan(x)]
        if losses and losses[0] > 2 * uniform_loss(self.config):
            return self.step
        return next((line["step"] for line in self.lines if line.get("train/diverged")), None)

    def data(self, *keys: str):
        """Returns what the manifest records of the data under these keys, or None."""
        entry = self.manifest.get("data")
        for key in keys:
            entry = entry.get(key) if isinstance(entry, Mapping) else None
        return entry

    @property
    def step(self) -> int:
        """The last logged step."""
        return max(line["step"] for line in self.lines)

    def outcome(self, name: str) -> float:
        """Returns the final value of a metric, or NaN if it is missing or the run is unfinished."""
        finished = "converted_from" in self.manifest or self.step >= self.config.train.steps
        final_lines = [line for line in self.lines if name in line and line["step"] == self.step]
        return float(final_lines[-1][name]) if finished and final_lines else math.nan

    def lacks(self, name: str) -> str:
        """Returns the reason why a metric has no `outcome`."""
        if self.step < self.config.train.steps:
            return f"is unknown: the run is at step {self.step:,} of {self.config.train.steps:,}"
        return "has no final value" if any(name in x for x in self.lines) else "is not logged yet"

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Returns (step, value) for all finite values of a metric."""
        finite = (line for line in self.lines if math.isfinite(line.get(name, math.nan)))
        return [(line["step"], line[name]) for line in finite]

    def values(self, name: str) -> list[float]:
        return [float(line[name]) for line in self.lines if name in line]

    def last(self, name: str) -> float:
        """Returns the last value of a metric, or NaN if there is none."""
        return next(reversed(self.values(name)), math.nan)

    @property
    def names(self) -> set[str]:
        return {name for line in self.lines for name in line} - {"step"}

    @property
    def together(self) -> int:
        """The number of runs in the program that trained this run most recently."""
        return self.manifest.get("trained_together", 1)

    @property
    def speed(self) -> float:
        """Median of the logged tokens per second, which excludes compilation and evaluation."""
        return statistics.median(self.values("time/tokens_per_second") or [math.nan])

    def spent(self) -> list[tuple[int, float, float]]:
        """Returns cumulative (step, tokens, seconds). Runs trained together share the time."""
        totals, tokens, seconds = [(0, 0.0, 0.0)], 0.0, 0.0
        for line in [line for line in self.lines if "train/tokens" in line]:
            tokens += line["train/tokens"]
            speed = line.get("time/tokens_per_second", 0.0) * line.get("time/together", 1)
            seconds += line["train/tokens"] / speed if speed else 0.0
            totals.append((line["step"], tokens, seconds))
        return totals


def uniform_loss(config: Experiment) -> float:
    """Returns the loss of uniform predictions over tokens, classes or positions: log V nats."""
    model = config.model
    classes = config.data.length if model.pooling == "span" else model.num_labels
    return math.log(max(model.vocab_size if config.objective.predicts_tokens else classes, 2))


class Arm(NamedTuple):
    """The runs of one setting of the varied fields, by seed."""

    name: str
    changes: Mapping[str, object]
    runs: Mapping[int, RunResult]
    flops: float = 0.0  # per input token; 0 if unknown
    flops_per_step: float = 0.0
    parameters: int = 0

    def values(self, metric: str) -> dict[int, float]:
        """Returns seed -> final value, for finished runs that did not diverge."""
        ended = {seed: run for seed, run in self.runs.items() if run.diverged is None}
        return {seed: x for seed, run in ended.items() if math.isfinite(x := run.outcome(metric))}

    def mean(self, metric: str) -> Mean:
        """Returns the mean of these values, with its interval."""
        return mean(list(self.values(metric).values()), kind(metric).bounds)

    @property
    def diverged(self) -> dict[int, int]:
        """Seed -> step of divergence, for diverged runs."""
        return {seed: run.diverged for seed, run in self.runs.items() if run.diverged is not None}

    @property
    def speed(self) -> float:
        """Mean tokens per second over the runs that logged it."""
        speeds = [run.speed for run in self.runs.values() if not math.isnan(run.speed)]
        return sum(speeds) / len(speeds) if speeds else math.nan


class Results(NamedTuple):
    """The inputs of a comparison: the sweep, its arms, and reasons why runs were left out."""

    title: str
    sweep: Sweep
    arms: Mapping[str, Arm]  # the baseline first
    left_out: tuple[str, ...]
    folders: tuple[Path, ...]
    study: Study | None = None  # of a sweep; None for runs that are not of one

    @property
    def predicts_tokens(self) -> bool:
        """Whether the runs predict tokens. Classifiers predict labels only."""
        return self.runs[0].config.objective.predicts_tokens

    @property
    def runs(self) -> list[RunResult]:
        return [run for arm in self.arms.values() for run in arm.runs.values()]


def read(folders: Sequence[Path], metric="", baseline="", higher_is_better=None) -> Results:
    """Returns the results of a sweep directory or of several run directories. Runs that differ only
    in the seed form one arm, named after the first. Raises UserError if nothing can be compared."""
    studies = [folder for folder in folders if (folder / "sweep.json").exists()]
    if studies and len(folders) > 1:
        raise UserError(f"compare: {studies[0]} is a sweep; pass either one sweep or several runs")
    study = load_study(folders[0]) if studies else None
    sweep, arms, left_out = _of_study(study) if study else _of_runs(folders)
    if not any(arm.runs for arm in arms.values()):
        raise UserError(f"compare: nothing to compare: {listed(left_out, 1, last=', ')}")
    decider = metric or sweep.metric
    ended = [run for arm in arms.values() for run in arm.runs.values() if run.diverged is None]
    if ended and not any(decider in line for run in ended for line in run.lines):
        names = ", ".join(sorted({name for run in ended for name in run.names})) or "nothing yet"
        raise UserError(f"compare: no run has {decider!r}; --metric may be one of: {names}")
    if decider != sweep.metric or higher_is_better is not None:
        sweep = dataclasses.replace(sweep, metric=decider, higher_is_better=higher_is_better)
    if baseline and baseline not in arms:
        raise UserError(f"--baseline: no arm {baseline!r}; {nearest(baseline, arms)}")
    sweep = dataclasses.replace(sweep, baseline=baseline or sweep.baseline)
    arms = _comparable({sweep.baseline: arms[sweep.baseline]} | arms, sweep, left_out)
    for arm in arms.values():
        for seed, run in arm.runs.items():
            if run.diverged is None and not math.isfinite(run.outcome(decider)):
                left_out.append(f"{arm.name}, seed {seed}: {decider} {run.lacks(decider)}")
    title = folders[0].resolve().name if len(folders) == 1 else count(len(arms), "arm")
    return Results(sweep.question or title, sweep, arms, tuple(left_out), tuple(folders), study)


def _of_study(study: Study) -> tuple[Sweep, dict[str, Arm], list[str]]:
    left_out, arms = [], {}
    for name, changes in study.sweep.arms.items():
        runs = {}
        for run in (run for run in study.runs if run.arm == name):
            if (status := run.status()).kind == "failed":
                left_out.append(f"{name}, seed {run.config.seed}: {status.kind}: {status.why}")
            elif loaded := load_run(run.folder, left_out, f"{name}, seed {run.config.seed}"):
                runs[run.config.seed] = loaded
        facts = study.facts[name]
        arms[name] = Arm(name, changes, runs, facts.flops, facts.flops_per_step, facts.parameters)
    return study.sweep, arms, left_out


def _of_runs(folders: Sequence[Path]) -> tuple[Sweep, dict[str, Arm], list[str]]:
    groups: dict[str, list[RunResult]] = {}
    left_out: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"compare: no directory {folder}")
        if not (folder / "config.json").exists():
            runs = sorted(str(file.parent) for file in folder.glob("*/config.json"))
            names = " ".join(runs[:3]) + " ..." * (len(runs) > 3)
            hint = f"; pass the runs in it: {names}" if runs else ""
            missing = "(no config.json) and no sweep (no sweep.json)"
            raise UserError(f"compare: no run in {folder} {missing}{hint}")
        if run := load_run(folder, left_out, str(folder)):
            settings = to_mapping(dataclasses.replace(run.config, seed=0))
            groups.setdefault(json.dumps(settings, sort_keys=True), []).append(run)
    if not groups:
        raise UserError(f"compare: nothing to compare: {'; '.join(left_out)}")
    arms, base = {}, flatten_fields(to_mapping(next(iter(groups.values()))[0].config))
    for runs in groups.values():
        name = _name(runs[0].folder.resolve())
        name = name if name not in arms else f"{name}-{len(arms)}"
        fields = flatten_fields(to_mapping(runs[0].config)).items()
        changes = {k: v for k, v in fields if base.get(k) != v and k != "seed"}
        by_seed = {run.config.seed: run for run in runs}
        if len(by_seed) < len(runs):
            left_out.append(f"{name}: several runs have the same seed; only the last is used")
        arms[name] = Arm(name, changes, by_seed, parameters=runs[0].manifest.get("parameters", 0))
    seeds = sorted({seed for arm in arms.values() for seed in arm.runs})
    grid = Grid(Point(name, {"arm": name}) for name in arms)
    return Sweep(grid, seeds=tuple(seeds)), arms, left_out


def _name(folder: Path) -> str:
    """Returns an arm's name: that of the run's folder, or of its parent for folders of a seed."""
    folder = folder.parent if re.fullmatch(r"seed-?\d+", folder.name) else folder
    name = re.sub(r"[^A-Za-z0-9_.=+-]", "_", folder.name).lstrip("_.-+=") or "run"
    return f"{name}_" if name in RESERVED else name


def load_run(folder: Path, left_out: list[str], name: str) -> RunResult | None:
    """Reads a run. If it cannot be read, adds the reason to `left_out` and returns None."""
    if not (folder / "config.json").exists():
        left_out.append(f"{name}: not started")
        return None
    try:
        config, manifest = load_config(folder), read_manifest(folder)
        tested = read_json(file) if (file := folder / "test.json").exists() else {}
        parsed = parse_metrics(folder)
    except UserError as e:
        left_out.append(f"{name}: {e}")
        return None
    numbers = lambda line: {key: x for key, x in line.items() if isinstance(x, (int, float))}
    lines = [line for line in parsed if line is not None]
    if textual := sorted({key for line in lines for key in line.keys() - numbers(line).keys()}):
        left_out.append(f"{name}: {', '.join(textual)}: not numeric in metrics.jsonl")
    lines = [numbers(line) for line in lines]
    if damaged := len(parsed) - len(lines):
        left_out.append(f"{name}: metrics.jsonl has {count(damaged, 'damaged line')}")
    if not lines:
        left_out.append(f"{name}: has logged nothing yet")
        return None
    return RunResult(folder, config, tuple(lines), manifest, tested)


def _comparable(arms: dict[str, Arm], sweep: Sweep, left_out: list[str]) -> dict[str, Arm]:
    """Leaves out runs that were evaluated unlike those of the first arm, the baseline."""
    first, comparable = next(run for arm in arms.values() for run in arm.runs.values()), {}
    for name, arm in arms.items():
        # A damaged manifest may contain NaN, which differs from itself.
        others = {seed: run for seed, run in arm.runs.items() if run is not first}
        why = {seed: x for seed, run in others.items() if (x := _why_not(run, first, sweep))}
        left_out += [f"{name}, seed {n}: {x}, and cannot be compared" for n, x in why.items()]
        runs = {seed: run for seed, run in arm.runs.items() if seed not in why}
        comparable[name] = arm._replace(runs=runs)
    return comparable


def _why_not(run: RunResult, first: RunResult, sweep: Sweep) -> str | None:
    part, allowed = "valid" if sweep.metric.startswith("eval/") else "test", allowed_facts(sweep)
    same = lambda *keys: run.data(*keys) == first.data(*keys)
    varied = set(sweep.fields) & {f"data.{name}" for name in TEXT_FIELDS}
    if not (same(part, "sha256") or varied or "data" in sweep.declared):
        measured = "validated" if part == "valid" else "tested"
        return f"was {measured} on a different text from {first.folder}"
    in_tokens = kind(sweep.metric, first.config.objective.predicts_tokens).of_tokens
    if in_tokens and "tokenizer" not in sweep.declared and not same("tokenizer_sha256"):
        why = f"and {sweep.metric} depends on it (test/bits_per_byte does not)"
        return f"has a different tokenizer from {first.folder}, {why}"
    if "data" not in allowed and not same("objective"):
        here, there = run.data("objective"), first.data("objective")
        return f"has a different objective ({here}) from {first.folder} ({there})"
    value, reference = (measures(x.config.train.evaluators, sweep.metric) for x in (run, first))
    if value != reference:
        return f"was measured by {value}, {first.folder} by {reference}"
    if part == "valid":
        here, there = (x.config.train.eval_batches for x in (run, first))
        counts = f"{here or 'all'} batches, {first.folder} on {there or 'all'}"
        return f"was validated on {counts}" if here != there and "data" not in allowed else None
    for field in ("eval_overlap", "decoding"):
        value, reference = run.tested.get(field), first.tested.get(field)
        varies = any(x.rpartition(".")[0] == field or x == f"data.{field}" for x in sweep.fields)
        if None not in (value, reference) and value != reference and not varies:
            here, there = _spell(value, reference), _spell(reference, value)
            return f"was evaluated with {field} = {here}, {first.folder} with {there}"
    return None


def _spell(x, reference) -> str:
    """Returns a value as text. Of a table, only the entries that differ from the reference."""
    if not isinstance(x, Mapping):
        return str(x)
    return ", ".join(f"{k} {v}" for k, v in x.items() if reference.get(k) != v) or "unset"
