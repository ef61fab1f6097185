"""Prepares a study from an experiment file: builds, sizes, checks and describes its arms."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from transformer.config_io import load_arms
from transformer.errors import UserError
from transformer.lab import tuning
from transformer.lab.guard import SET_BY, check, facts, matched
from transformer.lab.runner import share_of
from transformer.lab.study import Study, load_study
from transformer.output import columns, count, human_count, human_tokens
from transformer.parallel.mesh import disable_tpu_search
from transformer.parallel.processes import start_processes


def study(file: str, folder: Path, overrides: Mapping[str, str], report: Callable) -> Study:
    """Returns the study of a file, and writes nothing. Raises UserError for incomparable arms."""
    sweep, configs = load_arms(file, overrides)
    disable_tpu_search()
    start_processes()
    previous = load_study(folder) if (folder / "sweep.json").exists() else None
    before = previous.configs if previous and previous.sweep.match == sweep.match else {}
    configs = matched(sweep, configs, before, report)
    facts_of = {arm: facts(config) for arm, config in configs.items()}
    check(sweep, configs, facts_of)
    tuning.check(sweep, configs)
    text = Path(file.partition(":")[0]).read_text()
    return Study(folder, sweep, configs, facts_of, file, text, overrides)


def prepare_in_subprocess(file: str, folder: Path, overrides: Mapping[str, str]) -> None:
    """Writes sweep.json in a subprocess, since this one must not hold the device that runs need."""
    options = [f"--config.{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "transformer", "sweep", f"--config={file}"]
    command += [f"--workdir={folder}", "--prepare", *options]
    if code := subprocess.run(command).returncode:
        raise SystemExit(code if code > 0 else 1)


def parse_shard(text: str) -> tuple[int, int]:
    """Parses I/N: '2/4' -> (2, 4)."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--shard: {text!r} is not I/N (machine I of N); pass 2/4, for example")
    return int(number), int(count)


def describe(study: Study) -> str:
    """Describes the study, and how each arm's model and program differ from the baseline's."""
    sweep, base = study.sweep, study.facts[study.sweep.baseline]
    tokens = {arm: study.facts[arm].tokens * study.configs[arm].train.steps for arm in sweep.arms}
    differ = len(set(tokens.values())) > 1
    head = ["arm", "changes", "parameters", "FLOPs per token", "attention"]
    rows = [[*head, *["training tokens"] * differ]]
    of_mapping = lambda x: "{" + ", ".join(f"{key}: {value}" for key, value in x.items()) + "}"
    short = lambda value: of_mapping(value) if isinstance(value, Mapping) else value
    for arm, changes in sweep.arms.items():
        properties = study.facts[arm]
        settings = " ".join(f"{field}={short(value)}" for field, value in changes.items())
        extra = properties.parameters - base.parameters
        parameters = f"{properties.parameters:,}" + (f" ({extra:+,})" if extra else "")
        excess = properties.flops / base.flops - 1
        flops = human_count(properties.flops) + (f" ({excess:+.1%})" if excess else "")
        name = arm + (" (baseline)" if arm == sweep.baseline else "")
        row = [name, settings, parameters, flops, properties.attention]
        rows.append([*row, *[human_tokens(tokens[arm])] * differ])
    lines = [f"question    {sweep.question}"] if sweep.question else []
    steps = sorted({config.train.steps for config in study.configs.values()})
    trained = f"{steps[0]:,} to {steps[-1]:,} steps" if steps[1:] else f"{steps[0]:,} steps each"
    better = "higher" if sweep.higher_is_better else "lower"
    lines.append(f"metric      {sweep.metric}, {better} is better")
    seeds = f"{count(len(sweep.seeds), 'seed')} ({', '.join(map(str, sweep.seeds))})"
    lines.append(f"runs        {count(len(sweep.arms), 'arm')} x {seeds}, {trained}")
    for number in sweep.tune:
        more = f" and {number.more} more" if number.more else ""
        first = ", ".join(f"{value:g}" for value in number.grid)
        lines.append(f"tuned       {number.field}: {first}{more}, for each arm")
    if sweep.tune:
        runs = f"{sweep.tuning_runs} runs per arm by {tuning.METRIC}"
        seeds = ", ".join(map(str, tuning.tuning_seeds(sweep)))
        lines.append(f"            {runs} (seeds {seeds}); then the runs above, tuned and untuned")
    lines += [f"declared    {x}: {sweep.declared[x]}" for x in SET_BY if x in sweep.declared]
    lines += [f"control     {arm}: {reason}" for arm, reason in sweep.controls.items()]
    lines += [f"matched     {sweep.match}"] * bool(sweep.match)
    return "\n".join([*lines, "", *columns(rows)]) + "\n"


def describe_runs(study: Study, shard: tuple[int, int], max_group: int) -> str:
    """Describes the runs that are left, in order, and those that are finished."""
    statuses = {run.name: run.status() for run in study.runs}
    finished = [f"{name} ({s.kind})" for name, s in statuses.items() if s.is_finished]
    lines = [""]
    state = {n: "" if s.kind == "waiting" else f" ({s.kind})" for n, s in statuses.items()}
    for n, unit in enumerate(share_of(study, shard, max_group), 1):
        names = ", ".join(run.name + state[run.name] for run in unit)
        lines.append(f"{n:>3}. {names}{'  together' if len(unit) > 1 else ''}")
    lines += [f"for machine {shard[0]}; the other {shard[1] - 1} run the rest"] * (shard[1] > 1)
    lines += [f"finished: {', '.join(finished)}"] * bool(finished)
    return "\n".join(lines) + "\n"
