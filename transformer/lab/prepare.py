"""From an experiment file to a study: arms built, compared, sized, shown."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from transformer.config_io import load_arms
from transformer.errors import UserError
from transformer.lab.guard import GIVEN_BY, check, facts, matched
from transformer.lab.runner import share_of
from transformer.lab.study import Study, load_study
from transformer.parallel.mesh import look_for_no_tpu
from transformer.parallel.processes import start_processes
from transformer.runs.metrics import columns, human_count


def study(
    file: str, folder: Path, overrides: Mapping[str, str], tell: Callable[[str], None]
) -> Study:
    """The study of an experiment file; writes nothing. Raises UserError where its arms cannot be compared."""
    sweep, configs = load_arms(file, overrides)
    look_for_no_tpu()
    start_processes()
    there = load_study(folder) if (folder / "sweep.json").exists() else None
    configs = matched(
        sweep, configs, there.configs if there and there.sweep.match == sweep.match else {}, tell
    )
    found = {arm: facts(config) for arm, config in configs.items()}
    check(sweep, configs, found)
    return Study(
        folder, sweep, configs, found, file, Path(file.partition(":")[0]).read_text(), overrides
    )


def elsewhere(file: str, folder: Path, overrides: Mapping[str, str]) -> None:
    """The same in a process of its own, which writes sweep.json: this one must not hold the device that its runs need."""
    given = [f"--config.{key}={value}" for key, value in overrides.items()]
    command = [
        sys.executable,
        "-m",
        "transformer",
        "sweep",
        f"--config={file}",
        f"--workdir={folder}",
        "--prepare",
        *given,
    ]
    if code := subprocess.run(command).returncode:
        raise SystemExit(code if code > 0 else 1)


def parse_shard(text: str) -> tuple[int, int]:
    """'2/4' -> (2, 4)."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--shard: {text!r}; I/N, where this is machine I of N: 1/4, 2/4, 3/4, 4/4")
    return int(number), int(count)


def describe(study: Study) -> str:
    """What was asked, and what each arm changes from the baseline in the model and program that are built."""
    sweep, base = study.sweep, study.facts[study.sweep.baseline]
    reads = {arm: study.facts[arm].tokens * study.configs[arm].train.steps for arm in sweep.arms}
    as_much = len(set(reads.values())) == 1
    rows = [
        [
            "arm",
            "changes",
            "parameters",
            "FLOP a token",
            "attention",
            *([] if as_much else ["training tokens"]),
        ]
    ]
    for arm, changes in sweep.arms.items():
        one = study.facts[arm]
        said = " ".join(f"{field}={_short(value)}" for field, value in changes.items())
        more = one.parameters - base.parameters
        parameters = f"{one.parameters:,}" if not more else f"{one.parameters:,} ({more:+,})"
        flops = human_count(one.flops) + (
            "" if one.flops == base.flops else f" ({one.flops / base.flops - 1:+.1%})"
        )
        rows.append(
            [
                arm + (" (baseline)" if arm == sweep.baseline else ""),
                said,
                parameters,
                flops,
                one.attention,
                *([] if as_much else [human_count(reads[arm])]),
            ]
        )
    lines = [f"asked       {sweep.question}"] if sweep.question else []
    steps = sorted({config.train.steps for config in study.configs.values()})
    trained = (
        f"{steps[0]:,} steps each" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,} steps"
    )
    lines.append(
        f"decides     {sweep.metric}, {'higher' if sweep.higher_is_better else 'lower'} is better"
    )
    lines.append(
        f"runs        {len(sweep.arms)} arms x {len(sweep.seeds)} seeds ({', '.join(map(str, sweep.seeds))}), {trained}"
    )
    for name in GIVEN_BY:
        if name in sweep.declared:
            lines.append(f"declared    {name}: {sweep.declared[name]}")
    for arm, why in sweep.controls.items():
        lines.append(f"control     {arm}: {why}")
    if sweep.match:
        lines.append(f"matched     {sweep.match}")
    lines += ["", *columns(rows)]
    return "\n".join(lines) + "\n"


def describe_runs(study: Study, shard: tuple[int, int], most: int) -> str:
    """What would run, in which order, and what is done."""
    statuses = {run.name: run.status() for run in study.runs}
    over = [f"{name} ({status.kind})" for name, status in statuses.items() if status.over]
    lines = [""]
    for n, unit in enumerate(share_of(study, shard, most), 1):
        said = ", ".join(
            run.name
            + (f" ({statuses[run.name].kind})" if statuses[run.name].kind != "waiting" else "")
            for run in unit
        )
        lines.append(f"{n:>3}. {said}{'  together' if len(unit) > 1 else ''}")
    if shard[1] > 1:
        lines.append(f"of machine {shard[0]}; the rest is of the other {shard[1] - 1}")
    if over:
        lines.append(f"over: {', '.join(over)}")
    return "\n".join(lines) + "\n"


def _short(value) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {x}" for key, x in value.items()) + "}"
    return str(value)
