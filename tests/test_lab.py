"""The laboratory: the guard, runs trained together, whole sweeps."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from studies import experiment, facts_of, made_up, make_study

from transformer import Sweep, UserError, arms, vary
from transformer.cli import main
from transformer.lab import guard, prepare, results, runner
from transformer.lab.study import Planned, Study
from transformer.lab.together import NUMBERS, alike, train_together
from transformer.mapping import to_mapping
from transformer.runs.loop import train
from transformer.runs.metrics import read_metrics
from transformer.runs.recorder import Diverged
from transformer.runs.run import Run

# ---- the guard


def test_what_is_not_declared_is_refused():
    sweep = Sweep(vary("model.position", "rotary", "t5", "alibi"))
    configs, found = facts_of(sweep)
    assert found["t5"].parameters - found["rotary"].parameters == 32 * 4
    with pytest.raises(
        UserError, match=r"parameters: rotary [\d,]+, t5 [\d,]+ .*declared=\{'parameters'"
    ):
        guard.check(sweep, configs, found)
    guard.check(dataclasses.replace(sweep, declared={"parameters": "T5's bias"}), configs, found)
    guard.check(
        Sweep(vary("model.position", "rotary", "alibi")),
        *({arm: of[arm] for arm in ("rotary", "alibi")} for of in (configs, found)),
    )
    with pytest.raises(
        UserError, match="'params' is nothing that is compared; there is: parameters"
    ):
        guard.check(dataclasses.replace(sweep, declared={"params": "?"}), configs, found)


def test_one_experiment_under_two_names_is_refused():
    sweep = Sweep(
        arms(plain={}, alibi={"model.position": "alibi"}, said={"model.position": "alibi"})
    )
    configs, found = facts_of(sweep)
    with pytest.raises(UserError, match="'alibi' and 'said' are the same experiment"):
        guard.check(
            dataclasses.replace(sweep, declared=dict.fromkeys(guard.GIVEN_BY, "whatever")),
            configs,
            found,
        )


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        (vary("model.d_ff", 32, 64), "flops"),
        (vary("model.max_length", 32, 2048), None),
        (
            arms(
                reads={},
                fills={
                    "model.family": "encoder",
                    "model.num_encoder_layers": 2,
                    "model.num_decoder_layers": 0,
                    "data.objective": "masked_lm",
                },
            ),
            "tokenizer",
        ),
        (vary("data.batch_size", 8, 16), None),  # said by the field itself
        (vary("optimizer.warmup_steps", 1, 4), None),
        (vary("model.attention_backend", "reference", "blockwise"), None),
    ],
)
def test_each_fact_is_found(grid, name):
    sweep = Sweep(grid, declared={"parameters": "of it"})
    _, found = facts_of(sweep)
    lines = guard.undeclared(sweep, found)
    assert any(line.startswith(name) for line in lines) if name else not lines


def test_arms_that_read_more_are_shown_to(tmp_path):
    for grid, reads in (
        (vary("data.batch_size", 8, 16), ("2.0k", "4.1k")),
        (vary("model.position", "rotary", "alibi"), ()),
    ):
        sweep = Sweep(grid)
        said = prepare.describe(Study(tmp_path, sweep, *facts_of(sweep)))
        assert [line.split()[-1] for line in said.splitlines() if line.endswith(reads)] == list(
            reads
        ) and ("training tokens" in said) == bool(reads)


def test_another_backend_is_found():
    """A scheme that blocks cannot serve falls back to the plain path, where nobody asked for it."""
    sweep = Sweep(
        vary("model.position", "rotary", "cope"),
        declared=dict.fromkeys(("parameters", "flops"), "of it"),
    )
    _, found = facts_of(sweep, model__attention_backend="blockwise")
    (line,) = guard.undeclared(sweep, found)
    assert line == "attention: rotary blockwise, cope reference"


@pytest.mark.parametrize("what", ["parameters", "flops"])
def test_arms_are_sized_equal(what):
    sweep = Sweep(vary("model.num_decoder_layers", 2, 4), match=what)
    configs, before = facts_of(sweep, model__d_ff=512)
    found = {
        arm: guard.facts(config)
        for arm, config in guard.matched(sweep, configs, {}, lambda line: None).items()
    }
    of = lambda facts: [getattr(one, what) for one in facts.values()]
    assert abs(np.subtract(*of(before))) > 0.2 * of(before)[0]
    np.testing.assert_allclose(*of(found), rtol=guard.CLOSE)
    assert not any(line.startswith(what) for line in guard.undeclared(sweep, found))


def test_what_cannot_be_sized_is_refused():
    sweep = Sweep(vary("model.num_decoder_layers", 1, 9), match="parameters")
    configs, _ = facts_of(sweep)
    with pytest.raises(
        UserError, match="'num_decoder_layers=9' cannot be sized to the baseline's parameters"
    ):
        guard.matched(sweep, configs, {}, lambda line: None)
    with pytest.raises(UserError, match="sizes arms by model.d_ff, which varies"):
        guard.matched(
            Sweep(vary("model.d_ff", 8, 16), match="flops"),
            facts_of(Sweep(vary("model.d_ff", 8, 16)))[0],
            {},
            print,
        )


def test_what_is_sized_in_one_may_differ_a_little_in_the_other():
    """d_ff goes in eights: parameters made equal to 1 % leave FLOPs that differ as little, and more is still refused."""
    sweep = Sweep(vary("model.position", "rotary", "alibi"), match="parameters")
    configs, found = facts_of(sweep)
    near, far = (
        {
            "rotary": found["rotary"],
            "alibi": dataclasses.replace(found["alibi"], flops=found["rotary"].flops * by),
        }
        for by in (1.005, 1.02)
    )
    guard.check(sweep, configs, near)
    with pytest.raises(UserError, match="flops: rotary") as refused:
        guard.check(sweep, configs, far)
    assert "size them equal" not in str(refused.value), "that is what was asked for"
    with pytest.raises(UserError, match="flops: rotary .*(.|\n)*size them equal: match='flops'"):
        guard.check(dataclasses.replace(sweep, match=""), configs, near)


def test_arms_train_as_long_as_the_baseline():
    """And a sweep that goes on does so with the steps that were measured first."""
    sweep = Sweep(vary("model.num_decoder_layers", 1, 8), match="time")
    configs, _ = facts_of(sweep)
    once = guard.matched(sweep, configs, {}, lambda line: None)
    base, deep = (one.train.steps for one in once.values())
    assert base == 8 > deep >= 1
    noted = {
        arm: dataclasses.replace(one, train=dataclasses.replace(one.train, steps=n))
        for n, (arm, one) in zip((8, 77), once.items(), strict=True)
    }
    assert guard.matched(sweep, configs, noted, pytest.fail) == noted
    others, _ = facts_of(sweep, train__steps=80)
    assert (
        8
        < list(guard.matched(sweep, others, noted, lambda line: None).values())[1].train.steps
        < 80
    )


# ---- runs together


def test_runs_together_equal_runs_alone(tmp_path):
    """Seeds, rates, decay and dropout, each in its place; a run that diverges takes no other along; three devices take two runs each."""
    numbers = [
        (0, 1e-3, 0.1, 0.1),
        (1, 1e-3, 0.1, 0.1),
        (0, 3e-3, 0.1, 0.1),
        (0, 1e-3, 0.3, 0.1),
        (0, 1e-3, 0.1, 0.4),
        (0, 1e30, 0.1, 0.1),
    ]
    configs = [
        experiment(**dict(zip([field.replace(".", "__") for field in NUMBERS], one, strict=True)))
        for one in numbers
    ]
    folders = [tmp_path / "together" / str(n) for n in range(len(configs))]
    done = train_together(configs, folders)
    assert done[:5] == [8] * 5 and done[5] < 8
    for n in range(5):
        alone = tmp_path / "alone" / str(n)
        train(
            dataclasses.replace(configs[n], mesh=dataclasses.replace(configs[n].mesh, data=1)),
            alone,
        )
        ours, theirs = read_metrics(folders[n]), read_metrics(alone)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs] and len(
            ours
        ) == 6
        for a, b in zip(ours, theirs, strict=True):
            same = [key for key in a if not key.startswith(("time/", "memory/"))]
            np.testing.assert_allclose(
                [a[key] for key in same], [b[key] for key in same], rtol=2e-4, err_msg=str(n)
            )
    losses = [read_metrics(folder)[-1]["eval/loss"] for folder in folders[:5]]
    assert len(set(losses)) == 5, "every number matters"
    assert any(line.get("train/diverged") for line in read_metrics(folders[5]))
    assert json.loads((folders[0] / "manifest.json").read_text())["trained_together"] == 6


def test_runs_together_go_on(tmp_path):
    """Cut off after a checkpoint; not where one is further than the other."""
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
    with pytest.raises(ValueError, match="stand at different steps"):
        train_together(longer, apart)


def test_what_is_no_number_is_trained_apart():
    base = experiment()
    assert (
        alike(base)
        == alike(experiment(seed=3))
        == alike(experiment(optimizer__learning_rate=0.5))
        != alike(experiment(model__d_ff=48))
    )
    assert (
        alike(experiment(model__dropout=0.1))
        == alike(experiment(model__dropout=0.2))
        != alike(base)
    )  # none is another program
    assert alike(experiment(mesh__tensor=2)) is None
    with pytest.raises(ValueError, match="more than numbers"):
        train_together([base, experiment(model__d_ff=48)], [None, None])


# ---- whole sweeps

FILE = """
from transformer import *
def get_config():
    return CONFIG
def sweep():
    return Sweep(vary("optimizer.learning_rate", low=1e-3, wild=1e30), seeds=2, question="Does a rate without measure train?")
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep of two arms and two seeds, one arm of which diverges, run by the command line."""
    home = tmp_path_factory.mktemp("sweep")
    config = to_mapping(experiment())
    config["model"] |= {"d_head": 0, "num_kv_heads": 0}
    (home / "x.py").write_text(FILE.replace("CONFIG", repr(config)))
    environment = os.environ | {
        "TRANSFORMER_DATA": str(tmp_path_factory.getbasetemp() / "data"),
        "XLA_FLAGS": "",
    }
    environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir

    def sweep(*more):
        command = [
            sys.executable,
            "-m",
            "transformer",
            "sweep",
            f"--config={home / 'x.py'}",
            f"--workdir={home / 'runs'}",
            *more,
        ]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    return home / "runs", sweep, sweep("--jobs=2", "--together=1")


def test_a_sweep_ends_with_every_run_over(swept):
    folder, sweep, first = swept
    assert first.returncode == 0, first.stderr
    assert "low (baseline)" in first.stdout and re.search(r"low +done \d\.\d+ +done", first.stderr)
    assert (
        re.search(r"wild +diverged @\d +diverged @\d", first.stderr)
        and "4 of 4 runs are over" in first.stderr
    )
    assert all((folder / "low" / f"seed-{seed}" / "test.json").exists() for seed in (0, 1))
    before = sorted(path.stat().st_mtime for path in folder.rglob("metrics.jsonl"))
    again = sweep("--dry-run")
    assert (
        again.returncode == 0 and "over: low/seed-0 (done), wild/seed-0 (diverged)" in again.stdout
    ), again.stderr
    assert before == sorted(path.stat().st_mtime for path in folder.rglob("metrics.jsonl"))
    for more in ((), ("--dry-run",)):
        refused = sweep("--config.train.steps=9", *more)
        assert (
            refused.returncode == 2
            and "arm 'low' is another: train.steps was 8, is 9" in refused.stderr
        ), refused.stdout


def test_the_time_left_is_by_the_work_left(tmp_path, monkeypatch):
    """Of two runs the short one is over in 100 seconds; the other has three times as many steps."""
    sweep = Sweep(vary("train.steps", 8, 24), seeds=1)
    study, clock, said = Study(tmp_path, sweep, *facts_of(sweep)), [0.0], io.StringIO()
    monkeypatch.setattr(runner.time, "monotonic", lambda: clock[0])
    table = runner.Table(study, said)
    table.show(last=True)
    (made_up(tmp_path, "steps=8", 0, 4.0) / "test.json").write_text('{"step": 8}')
    clock[0] = 100.0
    table.show(last=True)
    assert said.getvalue().splitlines()[-1].endswith("1:40 so far, 5:00 left")


def test_a_sweep_is_compared(swept, capsys):
    folder, *_ = swept
    assert main(["compare", str(folder)]) == 0
    said = capsys.readouterr()
    page = (folder / "report" / "index.html").read_text()
    assert (
        re.search(r"x\.py, sha256 [0-9a-f]{16}", page)
        and "Does a rate without measure train?&quot;" in page
    ), "the experiment file is in the report"
    assert (
        "wild diverged with 2 of 2 seeds" in said.out
        and f"report: {folder / 'report' / 'index.html'}" in said.err
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


def test_who_has_a_run_has_it_alone(tmp_path):
    run, other = make_study(tmp_path).runs[:2]
    assert run.take() and not run.take() and run.status().kind == "running" and other.take()
    run.release("it broke")
    assert run.status().kind == "failed" and run.status().why == "it broke"
    assert run.take() and run.status().kind == "running", "what has failed may be tried again"
    os.utime(run.claim.file, (0, 0))
    assert run.status().kind == "waiting" and run.take(), "nobody has renewed it"
    dead = dataclasses.replace(run.claim.holder(), pid="999999999")
    run.claim.file.write_text(str(dead))
    assert run.take(), "its process is dead"
    earlier = dataclasses.replace(run.claim.holder(), began=run.claim.holder().began + "0")
    run.claim.file.write_text(str(earlier))
    assert run.take(), "its process is dead, and this one has its number by chance"
    child = subprocess.Popen(["sleep", "60"])
    run.claim.hand_over(child.pid)
    run.release()
    assert run.claim.alive() and not run.take(), (
        "the process that has it lives, whatever becomes of the one that began it"
    )
    child.kill()
    child.wait()
    assert run.take()
    run.release()
    assert not run.claim.alive()


def test_who_works_on_a_run_may_end_while_it_is_asked(tmp_path, monkeypatch):
    run = make_study(tmp_path).runs[0]
    monkeypatch.setattr(Planned, "take", lambda run: False)
    with pytest.raises(UserError, match=f"--runs: another process works on {run.name}; wait"):
        run.keep()


def test_a_dead_claim_goes_to_one(tmp_path):
    """Two machines find it dead; one is faster, the other leaves it to it."""
    run = make_study(tmp_path).runs[0]
    run.take()
    run.claim.file.write_text("elsewhere 1 0")
    os.utime(run.claim.file, (0, 0))
    dead = run.claim.holder()
    assert run.take()
    assert not run.claim._clear(dead) and run.claim.alive(), "what was made since is put back"
    run.claim.file.write_text("")  # another is just writing it
    assert run.claim.alive() and not run.take()


def test_runs_are_trained_with_those_that_stand_where_they_do(tmp_path, monkeypatch):
    """And what ends one of them ends no other."""
    study, trained = make_study(tmp_path, seeds=5), []
    study.write()
    runs = [run for run in study.runs if run.arm == "rotary"]
    for run, step in zip(runs, (0, 0, 4, 4, 6), strict=True):
        (run.folder / "checkpoints" / str(step)).mkdir(parents=True) if step else None

    def together(configs, folders):
        trained.append([config.seed for config in configs])
        for folder in folders:
            (folder / "checkpoints" / "8").mkdir(parents=True)

    monkeypatch.setattr(runner, "train_together", together)

    def alone(config, folder):
        trained.append([config.seed])
        raise Diverged("no number")

    monkeypatch.setattr("transformer.runs.loop.train", alone)
    evaluated = []
    assert work(tmp_path, runs, evaluated.append) == 0
    assert trained == [[0, 1], [2, 3], [4]] and len(evaluated) == 5


def work(folder, runs, evaluate) -> int:
    """`runner.work` in this process, whose signals it leaves as they were."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        return runner.work(folder, [run.name for run in runs], evaluate)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_one_run_of_a_group_dies_of_is_nothing_to_the_others(tmp_path, monkeypatch, capsys):
    """Neither a damaged checkpoint, for which they are trained each by itself, nor an evaluation that fails."""
    study, evaluated = make_study(tmp_path, seeds=4), []
    study.write()
    runs = [run for run in study.runs if run.arm == "rotary"]

    def begin(config, folder):
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
            begin(*one) for one in zip(configs[1:], folders[1:], strict=True)
        ],
    )
    monkeypatch.setattr("transformer.runs.loop.train", begin)
    assert work(tmp_path, runs, evaluate) == 1
    assert evaluated == [0, 3] and [run.status().kind for run in runs] == [
        "trained",
        "failed",
        "failed",
        "trained",
    ]
    assert re.match(r".*rotary/seed-1: damaged; see .*\.log$", runs[1].status().why) and runs[
        2
    ].status().why.startswith("ValueError: a fault; see ")
    said = capsys.readouterr().err
    assert (
        "each by itself, since together" in said
        and "Traceback" in said
        and "error: rotary/seed-2: ValueError: a fault" in said
    )
    with pytest.raises(ValueError, match="a fault"):
        work(tmp_path, [runs[2]], evaluate)
    assert not any(run.claim.alive() for run in runs)


def test_a_stop_that_comes_with_the_last_step_leaves_it_whole_and_begins_no_other(
    tmp_path, monkeypatch
):
    study, evaluated = make_study(tmp_path, seeds=2), []
    study.write()
    evaluating = Run.evaluate

    def stop_then_evaluate(run):
        if run.step == run.config.train.steps:
            signal.raise_signal(signal.SIGTERM)
        evaluating(run)

    monkeypatch.setattr(Run, "evaluate", stop_then_evaluate)
    first, second = study.runs[:2]
    assert work(tmp_path, [first, second], evaluated.append) == 143
    assert first.saved() == 8 and second.saved() == 0 and not evaluated
    assert (
        "eval/loss" in read_metrics(first.folder)[-1]
        and read_metrics(first.folder)[-1]["step"] == 8
    )


def test_a_sweep_waits_for_what_another_works_on_and_takes_over_what_it_leaves(
    tmp_path, monkeypatch, capsys
):
    study = make_study(tmp_path, seeds=1)
    study.write()
    monkeypatch.setattr(runner, "PATIENCE", 0.1)
    other = subprocess.Popen(["sleep", "2"])
    for run in study.runs:
        run.take()
        run.claim.hand_over(other.pid)
    with pytest.raises(UserError, match=r"--runs: process \d+ on .* works on rotary/seed-0; wait"):
        work(tmp_path, study.runs[:1], print)
    threading.Thread(target=other.wait).start()  # or it stays as a zombie, which is there
    begun, start = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **more: (
            begun.append((command[-1], other.poll()))
            or start([sys.executable, "-c", "raise SystemExit(1)"], **more)
        ),
    )
    assert runner.run_study(study, jobs=1, shard=(1, 1), most=1) == 1
    assert [name for name, _ in begun] == ["--runs=rotary/seed-0", "--runs=alibi/seed-0"] and all(
        code == 0 for _, code in begun
    ), "after its end"


def test_a_sweep_keeps_the_seeds_it_has(tmp_path):
    make_study(tmp_path, seeds=3).write()
    made_up(tmp_path, "rotary", 2, 4.0)
    with pytest.raises(
        UserError, match="holds a run, rotary/seed-2, of a seed that this sweep has not"
    ):
        make_study(tmp_path, seeds=2).check()
    make_study(tmp_path, seeds=4).check()


def test_a_metric_that_no_run_has_is_told(tmp_path, capsys):
    """Of the first run that ends without it, with what there is instead: compare can still be asked for that."""
    plain = make_study(tmp_path)
    study = dataclasses.replace(
        plain, sweep=dataclasses.replace(plain.sweep, metric="test/bleu", higher_is_better=None)
    )
    study.write()
    for run in study.runs:
        made_up(tmp_path, run.arm, run.config.seed, 4.0)
        (run.folder / "test.json").write_text(json.dumps({"step": run.config.train.steps}))
    assert runner.run_study(study, jobs=1, shard=(1, 1), most=1) == 0
    said = capsys.readouterr().err
    assert said.count("done: without test/bleu; there is test/loss") == len(study.runs) + 1, (
        "each in a log, one at the end"
    )
    assert said.splitlines()[-1].startswith("rotary/seed-0  done: without")


def test_shards_take_every_run_once(tmp_path):
    study = make_study(tmp_path, seeds=5)
    units = runner.groups(study, study.runs, 2)
    assert [len(unit) for unit in units] == [2, 2, 1, 2, 2, 1] and all(
        len({run.arm for run in unit}) == 1 for unit in units
    )
    shares = [units[i - 1 :: 4] for i in range(1, 5)]
    assert sorted(run.name for share in shares for unit in share for run in unit) == sorted(
        run.name for run in study.runs
    )
    assert [len(unit) for unit in runner.groups(study, study.runs, 1)] == [1] * 10


def test_what_is_whose_does_not_hang_on_what_is_over(tmp_path):
    study = make_study(tmp_path, seeds=2)
    names = lambda i: [run.name for unit in runner.share_of(study, (i, 2), 1) for run in unit]
    before = names(1) + names(2)
    assert len(before) == 4
    made_up(tmp_path, *before[0].split("/seed-")[:1], int(before[0][-1]), 4.0, diverged=3)
    assert names(1) + names(2) == before[1:]


def test_the_death_of_a_run_is_noted_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    study = make_study(tmp_path, seeds=1)
    study.write()
    program = "import sys, os; print('error: no such thing'); os.kill(os.getpid(), 9) if 'rotary' in sys.argv[-1] else sys.exit(1)"
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda command, **more: start([sys.executable, "-c", program, command[-1]], **more),
    )
    assert runner.run_study(study, jobs=1, shard=(1, 1), most=8) == 1
    said = capsys.readouterr().err
    assert (
        "rotary/seed-0  failed: ended by SIGKILL (out of memory?)" in said
        and "alibi/seed-0  failed: exit code 1: no such thing" in said
    )
    with pytest.raises(
        UserError,
        match="nothing to compare: rotary, seed 0: failed: ended by SIGKILL .*, and 1 more",
    ):
        results.read([tmp_path])
    made_up(tmp_path, "alibi", 0, None)
    made_up(tmp_path, "rotary", 0, 4.0)
    (tmp_path / "claims" / "rotary.seed-0.failed").unlink()
    assert any(
        "alibi, seed 0: failed: exit code 1: no such thing" in line
        for line in results.read([tmp_path]).left_out
    ), "and the rest comes"
