"""The laboratory: runs that are trained together, and whole sweeps."""

import dataclasses
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from studies import configs_and_facts, experiment, make_study, write_run
from xla_flags import one_device_flags

from transformer import Sweep, UserError, vary
from transformer.cli import main
from transformer.lab import runner
from transformer.lab.study import Study
from transformer.lab.together import NUMBERS, program_key, train_together
from transformer.mapping import to_mapping
from transformer.runs.loop import train
from transformer.runs.metrics import read_metrics

# ---- Runs that are trained together


def test_runs_trained_together_equal_runs_trained_alone(tmp_path):
    """Each run has its own seed, dropout, learning rate, weight decay, warm-up and b2.

    A run that diverges does not affect the others. Each of six devices trains one run.
    """
    numbers = [
        (0, 0.1, 1e-3, 0.1, 4, 0.98),
        (1, 0.1, 1e-3, 0.1, 4, 0.98),
        (0, 0.1, 3e-3, 0.1, 4, 0.9),
        (0, 0.1, 1e-3, 0.3, 2, 0.98),
        (0, 0.4, 1e-3, 0.1, 4, 0.98),
        (0, 0.1, 1e30, 0.1, 4, 0.98),
    ]
    configs = [
        experiment(
            **dict(zip([field.replace(".", "__") for field in NUMBERS], values, strict=True))
        )
        for values in numbers
    ]
    folders = [tmp_path / "together" / str(n) for n in range(len(configs))]
    steps = train_together(configs, folders)
    assert steps[:5] == [8] * 5 and steps[5] < 8
    for n in range(5):
        folder_alone = tmp_path / "alone" / str(n)
        train(
            dataclasses.replace(configs[n], mesh=dataclasses.replace(configs[n].mesh, data=1)),
            folder_alone,
        )
        together_lines, alone_lines = read_metrics(folders[n]), read_metrics(folder_alone)
        assert [line["step"] for line in together_lines] == [
            line["step"] for line in alone_lines
        ] and len(together_lines) == 6
        for a, b in zip(together_lines, alone_lines, strict=True):
            keys = [key for key in a if not key.startswith(("time/", "memory/"))]
            np.testing.assert_allclose(
                [a[key] for key in keys], [b[key] for key in keys], rtol=2e-4, err_msg=str(n)
            )
    losses = [read_metrics(folder)[-1]["eval/loss"] for folder in folders[:5]]
    assert len(set(losses)) == 5, "every number has an effect"
    assert any(line.get("train/diverged") for line in read_metrics(folders[5]))
    assert json.loads((folders[0] / "manifest.json").read_text())["trained_together"] == 6


def test_runs_trained_together_resume(tmp_path):
    """Runs resume together from a checkpoint, but not from different steps."""
    shorter = [
        experiment(
            seed=s, train__checkpoint_every=4, optimizer__schedule="constant", train__steps=4
        )
        for s in (0, 1)
    ]
    longer = [
        dataclasses.replace(config, train=dataclasses.replace(config.train, steps=8))
        for config in shorter
    ]
    folders = [tmp_path / str(n) for n in range(2)]
    assert train_together(shorter, folders) == [4, 4] and train_together(longer, folders) == [8, 8]
    whole = [tmp_path / f"whole{n}" for n in range(2)]
    train_together(longer, whole)
    loss = lambda folder: read_metrics(folder)[-1]["eval/loss"]
    np.testing.assert_allclose([loss(f) for f in folders], [loss(f) for f in whole], rtol=1e-6)
    apart = [tmp_path / f"apart{n}" for n in range(2)]
    train(
        dataclasses.replace(shorter[0], mesh=dataclasses.replace(shorter[0].mesh, data=1)), apart[0]
    )
    with pytest.raises(ValueError, match="are at different steps"):
        train_together(longer, apart)


def test_only_runs_that_differ_in_numbers_train_together():
    base = experiment()
    assert (
        program_key(base)
        == program_key(experiment(seed=3))
        == program_key(experiment(optimizer__learning_rate=0.5))
        != program_key(experiment(model__d_ff=48))
    )
    assert (
        program_key(experiment(model__dropout=0.1))
        == program_key(experiment(model__dropout=0.2))
        != program_key(base)
    )  # zero dropout gives another program
    assert program_key(experiment(mesh__tensor=2)) is None
    with pytest.raises(ValueError, match="more than numbers"):
        train_together([base, experiment(model__d_ff=48)], [None, None])


# ---- Whole sweeps

FILE = """
from transformer import *
def get_config():
    return CONFIG
def sweep():
    return Sweep(
        vary("optimizer.learning_rate", low=1e-3, wild=1e30), seeds=2,
        question="Does an excessive learning rate train?",
    )
"""


@pytest.fixture(scope="module")
def finished_sweep(tmp_path_factory):
    """The folder, command and result of a sweep of two arms and two seeds; one arm diverges."""
    home = tmp_path_factory.mktemp("sweep")
    config = to_mapping(experiment())
    config["model"] |= {"d_head": 0, "num_kv_heads": 0}
    (home / "x.py").write_text(FILE.replace("CONFIG", repr(config)))
    environment = os.environ | {
        "TRANSFORMER_DATA": str(tmp_path_factory.getbasetemp() / "data"),
        "XLA_FLAGS": one_device_flags(),
    }

    def sweep(*options):
        command = [
            sys.executable,
            "-m",
            "transformer",
            "sweep",
            f"--config={home / 'x.py'}",
            f"--workdir={home / 'runs'}",
            *options,
        ]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    return home / "runs", sweep, sweep("--jobs=2", "--together=1")


def test_sweep_finishes_every_run(finished_sweep):
    folder, sweep, first = finished_sweep
    assert first.returncode == 0, first.stderr
    assert "low (baseline)" in first.stdout and re.search(r"low +done \d\.\d+ +done", first.stderr)
    assert (
        re.search(r"wild +diverged @\d +diverged @\d", first.stderr)
        and "4 of 4 runs finished" in first.stderr
    )
    assert all((folder / "low" / f"seed-{seed}" / "test.json").exists() for seed in (0, 1))
    before = sorted(path.stat().st_mtime for path in folder.rglob("metrics.jsonl"))
    dry_run = sweep("--dry-run")
    assert (
        dry_run.returncode == 0
        and "finished: low/seed-0 (done), wild/seed-0 (diverged)" in dry_run.stdout
    ), dry_run.stderr
    assert before == sorted(path.stat().st_mtime for path in folder.rglob("metrics.jsonl"))
    for options in ((), ("--dry-run",)):
        refused = sweep("--config.train.steps=9", *options)
        assert (
            refused.returncode == 2
            and "a different arm 'low': train.steps was 8, is 9" in refused.stderr
        ), refused.stdout


def test_time_left_is_proportional_to_remaining_steps(tmp_path, monkeypatch):
    """The short run takes 100 seconds, and the other run has three times as many steps."""
    sweep = Sweep(vary("train.steps", 8, 24), seeds=1)
    study, clock, output = Study(tmp_path, sweep, *configs_and_facts(sweep)), [0.0], io.StringIO()
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    table = runner.Table(study, output)
    table.show(last=True)
    (write_run(tmp_path, "steps=8", 0, 4.0) / "test.json").write_text('{"step": 8}')
    clock[0] = 100.0
    table.show(last=True)
    assert output.getvalue().splitlines()[-1].endswith("1:40 elapsed, 5:00 left")


def test_compare_reports_a_sweep(finished_sweep, capsys):
    folder, *_ = finished_sweep
    assert main(["compare", str(folder)]) == 0
    output = capsys.readouterr()
    page = (folder / "report" / "index.html").read_text()
    assert (
        re.search(r"x\.py, sha256 [0-9a-f]{16}", page)
        and "Does an excessive learning rate train?&#34;" in page
    ), "the experiment file is in the report"
    assert (
        "wild diverged in 2 of 2 seeds" in output.out
        and f"report: {folder / 'report' / 'index.html'}" in output.err
    )
    assert {path.name for path in (folder / "report").iterdir()} == {
        "index.html",
        "report.md",
        "summary.csv",
        "runs.csv",
        "curves.csv",
        "figures",
    }
    assert main(["compare", str(folder), "--metric=test/blue"]) == 2
    assert "no run has 'test/blue'; --metric may be one of: " in capsys.readouterr().err


def test_sweep_without_the_seed_of_an_existing_run_raises(tmp_path):
    make_study(tmp_path, seeds=3).write()
    write_run(tmp_path, "rotary", 2, 4.0)
    with pytest.raises(UserError, match="contains run rotary/seed-2, whose seed is not in"):
        make_study(tmp_path, seeds=2).check()
    make_study(tmp_path, seeds=4).check()


def test_missing_metric_is_reported(tmp_path, capsys):
    """The log lists the metrics that exist instead, which `compare --metric` can still use."""
    base = make_study(tmp_path)
    study = dataclasses.replace(
        base, sweep=dataclasses.replace(base.sweep, metric="test/bleu", higher_is_better=None)
    )
    study.write()
    for run in study.runs:
        write_run(tmp_path, run.arm, run.config.seed, 4.0)
        (run.folder / "test.json").write_text(json.dumps({"step": run.config.train.steps}))
    assert runner.run_study(study, jobs=1, shard=(1, 1), max_group=1) == 0
    errors = capsys.readouterr().err
    assert errors.count("done: without test/bleu; there is test/loss") == len(study.runs) + 1, (
        "once per run, and once at the end"
    )
    assert errors.splitlines()[-1].startswith("rotary/seed-0  done: without")
