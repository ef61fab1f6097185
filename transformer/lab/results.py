"""Runs read from their directories, as arms that can be compared; and what was left out of the comparison, and why."""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from transformer.config import Experiment
from transformer.data.store import TEXT_FIELDS
from transformer.errors import UserError, nearest
from transformer.evaluation.measure import measures
from transformer.files import read_json
from transformer.lab.guard import asked
from transformer.lab.study import load_study
from transformer.mapping import to_mapping
from transformer.runs.metrics import parse_metrics
from transformer.runs.rundir import flat, load_config, read_manifest
from transformer.sweeps import RESERVED, Grid, Point, Sweep
from transformer.units import of_tokens


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: of which seed, what it logged, where it came from."""

    folder: Path
    seed: int
    config: Experiment
    lines: tuple[dict, ...]  # of metrics.jsonl
    manifest: Mapping
    tested: Mapping  # test.json

    @property
    def diverged(self) -> int | None:
        """At which step, if it did: its loss was no number any more, or it ended with twice that of knowing nothing and more."""
        ended = [
            x for name in ("test/loss", "eval/loss") if not math.isnan(x := self.outcome(name))
        ]
        if ended and ended[0] > 2 * knowing_nothing(self.config):
            return self.step
        return next((line["step"] for line in self.lines if line.get("train/diverged")), None)

    def last(self, name: str) -> float:
        """The last value of a metric; NaN if there is none."""
        return next((float(line[name]) for line in reversed(self.lines) if name in line), math.nan)

    @property
    def step(self) -> int:
        """The last that was logged."""
        return max(line["step"] for line in self.lines)

    def outcome(self, name: str) -> float:
        """The value of a metric at the run's end; NaN where it has none, or has not come there."""
        whole = "converted_from" in self.manifest or self.step >= self.config.train.steps
        ends = [line for line in self.lines if name in line and line["step"] == self.step]
        return float(ends[-1][name]) if whole and ends else math.nan

    def lacks(self, name: str) -> str:
        """Why there is no `outcome` of a metric."""
        if self.step < self.config.train.steps:
            return f"is not known: the run is at step {self.step:,} of {self.config.train.steps:,}"
        return "is no number" if any(name in line for line in self.lines) else "is not there (yet)"

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value), finite ones."""
        return [
            (line["step"], line[name])
            for line in self.lines
            if name in line and math.isfinite(line[name])
        ]

    def first(self, name: str) -> float:
        """The first value of a metric; NaN if there is none."""
        return next((float(line[name]) for line in self.lines if name in line), math.nan)

    @property
    def names(self) -> set[str]:
        """Of all metrics."""
        return {name for line in self.lines for name in line} - {"step"}

    @property
    def together(self) -> int:
        """So many runs were trained as one program, the last time that it was begun."""
        return self.manifest.get("trained_together", 1)

    @property
    def speed(self) -> float:
        """Tokens a second, the median of what was logged: compiling and evaluating do not count."""
        return statistics.median(
            [line[name] for line in self.lines if (name := "time/tokens_per_second") in line]
            or [math.nan]
        )

    def spent(self) -> list[tuple[int, float, float]]:
        """(step, tokens so far, seconds so far); of runs that were trained together, each has its share of the time."""
        found, tokens, seconds = [(0, 0.0, 0.0)], 0.0, 0.0
        for line in self.lines:
            if "train/tokens" in line:
                tokens += line["train/tokens"]
                speed = line.get("time/tokens_per_second", 0.0)
                seconds += (
                    line["train/tokens"] / speed / line.get("time/together", 1) if speed else 0.0
                )
                found.append((line["step"], tokens, seconds))
        return found


def knowing_nothing(config: Experiment) -> float:
    """The loss of who holds all tokens, or all classes, for equally likely: log V nats."""
    return math.log(
        max(
            config.model.vocab_size
            if config.objective.asks_for_tokens
            else config.model.num_labels,
            2,
        )
    )


@dataclasses.dataclass(frozen=True)
class Arm:
    """The runs of one setting, by seed."""

    name: str
    changes: Mapping[str, object]
    runs: Mapping[int, Run]
    flops: float = 0.0  # of a token that is read; 0: not known
    flops_a_step: float = 0.0
    parameters: int = 0

    def values(self, metric: str) -> dict[int, float]:
        """Seed -> the last value, of the runs that have come to their end with one."""
        return {
            seed: value
            for seed, run in self.runs.items()
            if run.diverged is None and math.isfinite(value := run.outcome(metric))
        }

    @property
    def diverged(self) -> dict[int, int]:
        """Seed -> step."""
        return {seed: run.diverged for seed, run in self.runs.items() if run.diverged is not None}

    @property
    def speed(self) -> float:
        """Tokens a second of a run, over runs that logged it."""
        found = [run.speed for run in self.runs.values() if not math.isnan(run.speed)]
        return sum(found) / len(found) if found else math.nan


@dataclasses.dataclass(frozen=True)
class Results:
    """What is compared: the study, its arms, and what was left out."""

    title: str
    sweep: Sweep
    arms: Mapping[str, Arm]  # the baseline first
    left_out: tuple[str, ...]
    folders: tuple[Path, ...]

    @property
    def asks_for_tokens(self) -> bool:
        """Whether its runs do (a classifier's ask for labels alone)."""
        return next(
            run.config.objective.asks_for_tokens
            for arm in self.arms.values()
            for run in arm.runs.values()
        )


def read(
    folders: Sequence[Path],
    metric: str = "",
    baseline: str = "",
    higher_is_better: bool | None = None,
) -> Results:
    """The results of a sweep's directory, or of several run directories (runs whose configs differ in the seed alone are one arm, named
    after the folder of the first). Raises UserError where nothing can be compared."""
    studies = [folder for folder in folders if (folder / "sweep.json").exists()]
    if studies and len(folders) > 1:
        raise UserError(
            f"compare: {studies[0]} is a sweep, which is compared by itself; name one sweep, or several runs"
        )
    sweep, arms, left_out = _of_study(folders[0]) if studies else _of_runs(folders)
    if not any(arm.runs for arm in arms.values()):
        raise UserError(
            f"compare: nothing to compare: {left_out[0]}"
            + (f", and {len(left_out) - 1} more" if len(left_out) > 1 else "")
        )
    wanted = metric or sweep.metric
    ended = [run for arm in arms.values() for run in arm.runs.values() if run.diverged is None]
    if ended and not any(wanted in line for run in ended for line in run.lines):
        names = sorted({name for run in ended for name in run.names})
        raise UserError(
            f"compare: no run has {wanted!r}; --metric may be one of: {', '.join(names) or 'nothing yet'}"
        )
    if wanted != sweep.metric or higher_is_better is not None:
        sweep = dataclasses.replace(sweep, metric=wanted, higher_is_better=higher_is_better)
    if baseline and baseline not in arms:
        raise UserError(f"--baseline: no arm {baseline!r}; {nearest(baseline, arms)}")
    if baseline:
        sweep = dataclasses.replace(sweep, baseline=baseline)
    arms = {sweep.baseline: arms[sweep.baseline]} | arms
    arms, more = _comparable(arms, sweep)
    left_out += more
    for arm in arms.values():
        for seed, run in arm.runs.items():
            if run.diverged is None and not math.isfinite(run.outcome(sweep.metric)):
                left_out.append(
                    f"{arm.name}, seed {seed}: {sweep.metric} {run.lacks(sweep.metric)}"
                )
    title = folders[0].resolve().name if len(folders) == 1 else f"{len(arms)} arms"
    return Results(title, sweep, arms, tuple(left_out), tuple(folders))


def _of_study(folder: Path) -> tuple[Sweep, dict[str, Arm], list[str]]:
    study, left_out, arms = load_study(folder), [], {}
    for name, changes in study.sweep.arms.items():
        runs = {}
        for run in (run for run in study.runs if run.arm == name):
            if (status := run.status()).kind == "failed":
                left_out.append(f"{name}, seed {run.config.seed}: {status.kind}: {status.why}")
            elif found := _run(run.folder, left_out, f"{name}, seed {run.config.seed}"):
                runs[run.config.seed] = found
        facts = study.facts[name]
        arms[name] = Arm(name, changes, runs, facts.flops, facts.flops_a_step, facts.parameters)
    return study.sweep, arms, left_out


def _of_runs(folders: Sequence[Path]) -> tuple[Sweep, dict[str, Arm], list[str]]:
    groups: dict[str, list[Run]] = {}
    left_out: list[str] = []
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"compare: no directory {folder}")
        if run := _run(folder, left_out, str(folder), must=True):
            groups.setdefault(
                json.dumps(to_mapping(dataclasses.replace(run.config, seed=0)), sort_keys=True), []
            ).append(run)
    if not groups:
        raise UserError(f"compare: nothing to compare: {'; '.join(left_out)}")
    names, arms = [], {}
    for runs in groups.values():
        name = _name(runs[0].folder.resolve())
        names.append(name if name not in names else f"{name}-{len(names)}")
    base = flat(to_mapping(next(iter(groups.values()))[0].config))
    for name, runs in zip(names, groups.values(), strict=True):
        changes = {
            k: v
            for k, v in flat(to_mapping(runs[0].config)).items()
            if base.get(k) != v and k != "seed"
        }
        by_seed = {run.seed: run for run in runs}
        if len(by_seed) < len(runs):
            left_out.append(f"{name}: several runs of one seed; the last counts")
        arms[name] = Arm(name, changes, by_seed, parameters=runs[0].manifest.get("parameters", 0))
    seeds = tuple(sorted({seed for arm in arms.values() for seed in arm.runs}))
    return (
        Sweep(Grid(tuple(Point(name, {"arm": name}) for name in arms)), seeds=seeds),
        arms,
        left_out,
    )


def _name(folder: Path) -> str:
    """Of an arm: its folder's, or where that is a seed's the folder's above."""
    folder = folder.parent if re.fullmatch(r"seed-?\d+", folder.name) else folder
    name = re.sub(r"[^A-Za-z0-9_.=+-]", "_", folder.name).lstrip("_.-+=") or "run"
    return f"{name}_" if name in RESERVED else name


def _run(folder: Path, left_out: list[str], name: str, must: bool = False) -> Run | None:
    if not (folder / "config.json").exists():
        if must:
            there = sorted(str(found.parent) for found in folder.glob("*/config.json"))
            way = (
                f"; name the runs in it: {' '.join(there[:3])}{' ...' * (len(there) > 3)}"
                if there
                else ""
            )
            raise UserError(
                f"compare: no run in {folder} (no config.json) and no sweep (no sweep.json){way}"
            )
        left_out.append(f"{name}: not begun")
        return None
    report = folder / "test.json"
    try:
        config, manifest = load_config(folder), read_manifest(folder)
        tested = read_json(report) if report.exists() else {}
        parsed = parse_metrics(folder)
    except UserError as e:
        left_out.append(f"{name}: damaged ({e})")
        return None
    numbers = lambda line: {key: x for key, x in line.items() if isinstance(x, (int, float))}
    lines = [line for line in parsed if line is not None]
    if odd := sorted({key for line in lines for key in line.keys() - numbers(line).keys()}):
        left_out.append(f"{name}: {', '.join(odd)}: no numbers in metrics.jsonl")
    lines = [numbers(line) for line in lines]
    if damaged := len(parsed) - len(lines):
        left_out.append(f"{name}: {damaged} of the lines of metrics.jsonl are damaged")
    if not lines:
        left_out.append(f"{name}: has logged nothing yet")
        return None
    return Run(folder, config.seed, config, tuple(lines), manifest, tested)


def _comparable(arms: dict[str, Arm], sweep: Sweep) -> tuple[dict[str, Arm], list[str]]:
    """The arms whose runs were judged by the same as the baseline's, but for what the sweep asks about; and what was left out."""
    first = next(run for arm in (arms[sweep.baseline], *arms.values()) for run in arm.runs.values())
    kept, left_out = {}, []
    for name, arm in arms.items():
        runs = {}
        for seed, run in arm.runs.items():
            if why := _why_not(run, first, sweep):
                left_out.append(f"{name}, seed {seed}: {why}, and cannot be compared")
            else:
                runs[seed] = run
        kept[name] = dataclasses.replace(arm, runs=runs)
    return kept, left_out


def _why_not(run: Run, first: Run, sweep: Sweep) -> str | None:
    told, may = lambda run, *keys: _inside(run.manifest, "data", *keys), asked(sweep)
    part, same = (
        "valid" if sweep.metric.startswith("eval/") else "test",
        lambda *keys: told(run, *keys) == told(first, *keys),
    )
    if not same(part, "sha256") and not ("data" in sweep.declared or set(sweep.fields) & TEXT):
        return f"was {'validated' if part == 'valid' else 'tested'} on another text than {first.folder}"
    if (
        "tokenizer" not in sweep.declared
        and not same("tokenizer_sha256")
        and of_tokens(sweep.metric, first.config.objective.asks_for_tokens)
    ):
        return f"has another tokenizer than {first.folder}, so its {sweep.metric} is of other tokens (test/bits_per_byte does not ask for tokens)"
    if "data" not in may and not same("objective"):
        return f"has another objective ({told(run, 'objective')}) than {first.folder} ({told(first, 'objective')})"
    if (here := measures(run.config.train.evaluators, sweep.metric)) != (
        there := measures(first.config.train.evaluators, sweep.metric)
    ):
        return f"was measured by {here}, {first.folder} by {there}"
    if part == "valid":
        here, there = (one.config.train.eval_batches for one in (run, first))
        return (
            f"was validated on {here or 'all'} batches, {first.folder} on {there or 'all'}"
            if here != there and "data" not in may
            else None
        )
    for field in ("eval_overlap", "decoding"):
        here, there = run.tested.get(field), first.tested.get(field)
        if (
            None not in (here, there)
            and here != there
            and not any(
                one.rpartition(".")[0] == field or one == f"data.{field}" for one in sweep.fields
            )
        ):
            return f"was evaluated with {field} = {_said(here, there)}, {first.folder} with {_said(there, here)}"
    return None


TEXT = frozenset(f"data.{name}" for name in TEXT_FIELDS)
"""The fields that say which text arms are judged on."""


def _said(one, other) -> str:
    """What differs, of two values or tables."""
    return (
        ", ".join(f"{k} {v}" for k, v in one.items() if other.get(k) != v) or "nothing else"
        if isinstance(one, Mapping)
        else str(one)
    )


def _inside(tree, *keys):
    for key in keys:
        tree = tree.get(key) if isinstance(tree, Mapping) else None
    return tree
