"""Distribution of runs over processes: claims, shards, groups, and failures within a group."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from studies import make_study, write_run

from transformer import UserError
from transformer.lab import results, runner
from transformer.lab.study import PlannedRun
from transformer.runs.metrics import Diverged, read_metrics
from transformer.runs.run import Run


def test_only_one_process_holds_a_run(tmp_path):
    run, other = make_study(tmp_path).runs[:2]
    assert run.take() and not run.take() and run.status().kind == "running" and other.take()
    run.release("it broke")
    assert run.status().kind == "failed" and run.status().why == "it broke"
    assert run.take() and run.status().kind == "running", "a failed run may be retried"
    os.utime(run.claim.file, (0, 0))
    assert run.status().kind == "waiting" and run.take(), "the claim was not renewed"
    dead = dataclasses.replace(run.claim.holder(), pid="999999999")
    run.claim.file.write_text(str(dead))
    assert run.take(), "the holder is dead"
    earlier_process = dataclasses.replace(run.claim.holder(), began=run.claim.holder().began + "0")
    run.claim.file.write_text(str(earlier_process))
    assert run.take(), "the holder is dead, and another process has its PID"
    child = subprocess.Popen(["sleep", "60"])
    run.claim.hand_over(child.pid)
    run.release()
    assert run.claim.alive() and not run.take(), (
        "the holder is alive, even if the process that started it is not"
    )
    child.kill()
    child.wait()
    assert run.take()
    run.release()
    assert not run.claim.alive()


def test_keep_raises_if_the_claim_cannot_be_taken(tmp_path, monkeypatch):
    run = make_study(tmp_path).runs[0]
    monkeypatch.setattr(PlannedRun, "take", lambda run: False)
    with pytest.raises(UserError, match=f"--runs: another process works on {run.name}; wait"):
        run.keep()


def test_dead_claim_is_taken_over_once(tmp_path):
    """Two machines find a dead claim. Only the faster one takes it."""
    run = make_study(tmp_path).runs[0]
    run.take()
    run.claim.file.write_text("elsewhere 1 0")
    os.utime(run.claim.file, (0, 0))
    dead = run.claim.holder()
    assert run.take()
    assert not run.claim._stored.remove(dead) and run.claim.alive(), (
        "a claim that was made since is restored"
    )
    run.claim.file.write_text("")  # another process is writing it
    assert run.claim.alive() and not run.take()


def test_runs_at_the_same_step_train_together(tmp_path, monkeypatch):
    """Runs at the same step are trained together. One that diverges does not end the others."""
    study, trained = make_study(tmp_path, seeds=5), []
    study.write()
    runs = [run for run in study.runs if run.arm == "rotary"]
    for run, step in zip(runs, (0, 0, 4, 4, 6), strict=True):
        (run.folder / "checkpoints" / str(step)).mkdir(parents=True) if step else None

    def fake_train_together(configs, folders):
        trained.append([config.seed for config in configs])
        for folder in folders:
            (folder / "checkpoints" / "8").mkdir(parents=True)

    monkeypatch.setattr(runner, "train_together", fake_train_together)

    def fake_train(config, folder):
        trained.append([config.seed])
        raise Diverged("the loss is not finite")

    monkeypatch.setattr("transformer.runs.loop.train", fake_train)
    evaluated = []
    assert run_worker(tmp_path, runs, evaluated.append) == 0
    assert trained == [[0, 1], [2, 3], [4]] and len(evaluated) == 5


def run_worker(folder, runs, evaluate) -> int:
    """Calls `runner.train_and_evaluate` in this process, and restores the signal handler."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        return runner.train_and_evaluate(folder, [run.name for run in runs], evaluate)
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_failed_run_does_not_stop_the_others_of_its_group(tmp_path, monkeypatch, capsys):
    """One failure, in training or evaluation, does not stop the other runs.

    If training together fails, the runs are trained one by one.
    """
    study, evaluated = make_study(tmp_path, seeds=4), []
    study.write()
    runs = [run for run in study.runs if run.arm == "rotary"]

    def train_one(config, folder):
        if config.seed == 1:
            raise UserError(f"{folder}: damaged")
        (folder / "checkpoints" / "8").mkdir(parents=True)
        return 8

    def evaluate(run):
        if run.config.seed == 2:
            raise ValueError("a fault\nof two lines")
        evaluated.append(run.config.seed)

    monkeypatch.setattr(
        runner,
        "train_together",
        lambda configs, folders: [
            train_one(*args) for args in zip(configs[1:], folders[1:], strict=True)
        ],
    )
    monkeypatch.setattr("transformer.runs.loop.train", train_one)
    assert run_worker(tmp_path, runs, evaluate) == 1
    assert evaluated == [0, 3] and [run.status().kind for run in runs] == [
        "trained",
        "failed",
        "failed",
        "trained",
    ]
    assert re.match(r".*rotary/seed-1: damaged; see .*\.log$", runs[1].status().why) and runs[
        2
    ].status().why.startswith("ValueError: a fault; see ")
    errors = capsys.readouterr().err
    assert (
        "trained one by one, because training together failed" in errors
        and "Traceback" in errors
        and "error: rotary/seed-2: ValueError: a fault" in errors
    )
    with pytest.raises(ValueError, match="a fault"):
        run_worker(tmp_path, [runs[2]], evaluate)
    assert not any(run.claim.alive() for run in runs)


def test_stop_at_the_last_step_finishes_it_and_starts_no_other_run(tmp_path, monkeypatch):
    study, evaluated = make_study(tmp_path, seeds=2), []
    study.write()
    original_evaluate = Run.evaluate

    def stop_then_evaluate(run):
        if run.step == run.config.train.steps:
            signal.raise_signal(signal.SIGTERM)
        original_evaluate(run)

    monkeypatch.setattr(Run, "evaluate", stop_then_evaluate)
    first, second = study.runs[:2]
    assert run_worker(tmp_path, [first, second], evaluated.append) == 143
    assert first.saved() == 8 and second.saved() == 0 and not evaluated
    assert (
        "eval/loss" in read_metrics(first.folder)[-1]
        and read_metrics(first.folder)[-1]["step"] == 8
    )


def test_sweep_waits_for_other_processes_and_takes_over_their_runs(tmp_path, monkeypatch, capsys):
    study = make_study(tmp_path, seeds=1)
    study.write()
    monkeypatch.setattr(runner, "PATIENCE", 0.1)
    other = subprocess.Popen(["sleep", "2"])
    for run in study.runs:
        run.take()
        run.claim.hand_over(other.pid)
    with pytest.raises(UserError, match=r"--runs: process \d+ on .* works on rotary/seed-0; wait"):
        run_worker(tmp_path, study.runs[:1], print)
    threading.Thread(target=other.wait).start()  # a zombie would count as alive
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: (
            started.append((command[-1], other.poll()))
            or popen([sys.executable, "-c", "raise SystemExit(1)"], **options)
        ),
    )
    assert runner.run_study(study, jobs=1, shard=(1, 1), max_group=1) == 1
    assert [name for name, _ in started] == ["--runs=rotary/seed-0", "--runs=alibi/seed-0"] and all(
        code == 0 for _, code in started
    ), "after the other process ended"


def test_shards_cover_every_run_once(tmp_path):
    study = make_study(tmp_path, seeds=5)
    groups = runner.groups(study, study.runs, 2)
    assert [len(group) for group in groups] == [2, 2, 1, 2, 2, 1] and all(
        len({run.arm for run in group}) == 1 for group in groups
    )
    shares = [groups[i - 1 :: 4] for i in range(1, 5)]
    assert sorted(run.name for share in shares for group in share for run in group) == sorted(
        run.name for run in study.runs
    )
    assert [len(group) for group in runner.groups(study, study.runs, 1)] == [1] * 10


def test_shard_assignment_does_not_depend_on_finished_runs(tmp_path):
    study = make_study(tmp_path, seeds=2)
    names = lambda i: [run.name for group in runner.share_of(study, (i, 2), 1) for run in group]
    before = names(1) + names(2)
    assert len(before) == 4
    write_run(tmp_path, *before[0].split("/seed-")[:1], int(before[0][-1]), 4.0, diverged=3)
    assert names(1) + names(2) == before[1:]


def test_killed_run_is_reported_and_the_sweep_continues(tmp_path, monkeypatch, capsys):
    study = make_study(tmp_path, seeds=1)
    study.write()
    program = (
        "import sys, os; print('error: no such thing'); "
        "os.kill(os.getpid(), 9) if 'rotary' in sys.argv[-1] else sys.exit(1)"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **options: popen([sys.executable, "-c", program, command[-1]], **options),
    )
    assert runner.run_study(study, jobs=1, shard=(1, 1), max_group=8) == 1
    errors = capsys.readouterr().err
    assert (
        "rotary/seed-0  failed: ended by SIGKILL (out of memory?)" in errors
        and "alibi/seed-0  failed: exit code 1: no such thing" in errors
    )
    with pytest.raises(
        UserError,
        match="nothing to compare: rotary, seed 0: failed: ended by SIGKILL .*, and 1 more",
    ):
        results.read([tmp_path])
    write_run(tmp_path, "alibi", 0, None)
    write_run(tmp_path, "rotary", 0, 4.0)
    (tmp_path / "claims" / "rotary.seed-0.failed").unlink()
    assert any(
        "alibi, seed 0: failed: exit code 1: no such thing" in line
        for line in results.read([tmp_path]).left_out
    ), "the other runs are compared"


def test_a_run_that_crashes_after_a_stop_signal_is_stopped_and_not_failed(tmp_path, monkeypatch):
    study = make_study(tmp_path, seeds=1)
    study.write()
    started = tmp_path / "started"
    program = (
        "import os, pathlib, signal, sys, time; "
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGSEGV)); "
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda _, **options: popen([sys.executable, "-c", program, started], **options),
    )
    stopping = contextlib.nullcontext(started.exists)
    monkeypatch.setattr(runner, "_stopping", lambda: stopping)
    assert runner.run_study(study, jobs=1, shard=(1, 1), max_group=1) == 143
    assert not list((tmp_path / "claims").glob("*.failed"))
