"""The laboratory: statistics against SciPy, the guard, runs trained together, whole sweeps, and reports over runs made up here."""

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import TINY
from scipy import stats

from transformer import Sweep, UserError, arms, product, scan, vary
from transformer.cli import main
from transformer.config import Experiment
from transformer.config_io import from_mapping, override, to_mapping
from transformer.lab import guard, report, results, runner, verdict
from transformer.lab.statistics import corrected, difference, mean
from transformer.lab.study import Study
from transformer.lab.together import NUMBERS, alike, train_together
from transformer.training.loop import train
from transformer.training.metrics import read_metrics
from transformer.training.recorder import Diverged


def experiment(**changes) -> Experiment:
    tree = {
        "model": {"family": "decoder", **TINY, "vocab_size": 512, "max_length": 32, "position": "rotary"},
        "data": {"corpus": "pydoc", "length": 32, "batch_size": 8, "held_out": 4, "tokenizer": {"kind": "bpe"}},
        "optimizer": {"warmup_steps": 4, "learning_rate": 1e-3},
        "train": {"steps": 8, "log_every": 2, "eval_every": 4, "eval_batches": 2, "tensorboard": False},
    }  # fmt: skip
    for field, value in changes.items():
        override(tree, field.replace("__", "."), value)
    return from_mapping(Experiment, tree)


# ---- statistics


def test_means_and_differences_are_students():
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, 6), rng.normal(3.5, 1, 6)
    low, high = stats.t.interval(0.95, 5, loc=a.mean(), scale=stats.sem(a))
    found = mean(a)
    np.testing.assert_allclose([found.mean, found.low, found.high], [a.mean(), low, high])
    pairs = stats.ttest_rel(a, b)
    one = difference(dict(enumerate(a)), dict(enumerate(b)) | {9: 100.0})
    assert one.p == pytest.approx(pairs.pvalue) and one.mean.count == 6
    np.testing.assert_allclose([one.mean.low, one.mean.high], pairs.confidence_interval(0.95))


def test_an_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(1)
    covered = [(one := mean(rng.normal(size=3))).low <= 0 <= one.high for _ in range(4000)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.015)


def test_holm_holds_the_family():
    """Of many comparisons of nothing, something is found in one study of twenty, and not in most."""
    found = {name: dataclasses.replace(difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.5}), p=p) for name, p in zip("abcd", (0.01, 0.04, 0.03, math.nan), strict=True)}
    assert {name: one.p for name, one in corrected(found).items() if name != "d"} == {"a": 0.03, "b": 0.06, "c": 0.06}
    rng, wrong = np.random.default_rng(2), []
    draw = lambda: dict(enumerate(rng.normal(size=5)))
    for _ in range(400):
        base = draw()
        wrong.append(any(one.tells for one in corrected({str(i): difference(draw(), base) for i in range(6)}).values()))
    assert 0 < np.mean(wrong) < 0.08


def test_too_few_to_tell():
    assert math.isnan(mean([3.0]).low) and mean([]).count == 0
    assert math.isnan(difference({0: 1.0}, {0: 2.0}).p) and not difference({0: 1.0}, {0: 2.0}).tells
    same = {0: 1.0, 1: 2.0}
    assert difference(same, same).p == 1.0 and not difference(same, same).tells
    for shift in (1.0, 0.1):  # the same in every seed, to the last bit or but for rounding: no spread, no evidence
        one = difference({seed: x + shift for seed, x in same.items()}, same)
        assert math.isnan(one.p) and not one.tells and one.mean.mean == pytest.approx(shift)


# ---- the guard


def facts_of(sweep, **base):
    configs = {arm: experiment(**base | {k.replace(".", "__"): v for k, v in changes.items()}) for arm, changes in sweep.arms.items()}
    return configs, {arm: guard.facts(config) for arm, config in configs.items()}


def test_what_is_not_declared_is_refused():
    sweep = Sweep(vary("model.position", "rotary", "t5", "alibi"))
    _, found = facts_of(sweep)
    assert found["t5"].parameters - found["rotary"].parameters == 32 * 4
    with pytest.raises(UserError, match=r"parameters: rotary [\d,]+, t5 [\d,]+\n(.|\n)*declared=\{'parameters'"):
        guard.check(sweep, found)
    guard.check(dataclasses.replace(sweep, declared={"parameters": "T5's bias"}), found)
    guard.check(Sweep(vary("model.position", "rotary", "alibi")), {arm: found[arm] for arm in ("rotary", "alibi")})
    with pytest.raises(UserError, match="'params' is nothing that is compared; there is: parameters"):
        guard.check(dataclasses.replace(sweep, declared={"params": "?"}), found)


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        (vary("model.d_ff", 32, 64), "flops"),
        (vary("model.max_length", 32, 2048), None),
        (arms(reads={}, fills={"model.family": "encoder", "model.num_encoder_layers": 2, "data.objective": "masked_lm"}), "tokenizer"),
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


def test_another_backend_is_found():
    """A scheme that blocks cannot serve falls back to the plain path, where nobody asked for it."""
    sweep = Sweep(vary("model.position", "rotary", "cope"), declared=dict.fromkeys(("parameters", "flops"), "of it"))
    _, found = facts_of(sweep, model__attention_backend="blockwise")
    (line,) = guard.undeclared(sweep, found)
    assert line == "attention: rotary blockwise, cope reference"


@pytest.mark.parametrize("what", ["parameters", "flops"])
def test_arms_are_sized_equal(what):
    sweep = Sweep(vary("model.num_decoder_layers", 2, 4), match=what)
    configs, before = facts_of(sweep, model__d_ff=512)
    found = {arm: guard.facts(config) for arm, config in guard.matched(sweep, configs, {}, lambda line: None).items()}
    of = lambda facts: [getattr(one, what) for one in facts.values()]
    assert abs(np.subtract(*of(before))) > 0.2 * of(before)[0]
    np.testing.assert_allclose(*of(found), rtol=guard.CLOSE)
    assert not any(line.startswith(what) for line in guard.undeclared(sweep, found))


def test_what_cannot_be_sized_is_refused():
    sweep = Sweep(vary("model.num_decoder_layers", 1, 9), match="parameters")
    configs, _ = facts_of(sweep)
    with pytest.raises(UserError, match="'num_decoder_layers=9' cannot be sized to the baseline's parameters"):
        guard.matched(sweep, configs, {}, lambda line: None)
    with pytest.raises(UserError, match="sizes arms by model.d_ff, which varies"):
        guard.matched(Sweep(vary("model.d_ff", 8, 16), match="flops"), facts_of(Sweep(vary("model.d_ff", 8, 16)))[0], {}, print)


def test_arms_train_as_long_as_the_baseline():
    """And a sweep that goes on does so with the steps that were measured first."""
    sweep = Sweep(vary("model.num_decoder_layers", 1, 8), match="time")
    configs, _ = facts_of(sweep)
    once = guard.matched(sweep, configs, {}, lambda line: None)
    base, deep = (one.train.steps for one in once.values())
    assert base == 8 > deep >= 1
    noted = {arm: dataclasses.replace(one, train=dataclasses.replace(one.train, steps=n)) for n, (arm, one) in zip((8, 77), once.items(), strict=True)}
    assert guard.matched(sweep, configs, noted, pytest.fail) == noted
    others, _ = facts_of(sweep, train__steps=80)
    assert 8 < list(guard.matched(sweep, others, noted, lambda line: None).values())[1].train.steps < 80


# ---- runs together


def test_runs_together_equal_runs_alone(tmp_path):
    """Seeds, rates, decay and dropout, each in its place; a run that diverges takes no other along; three devices take two runs each."""
    numbers = [(0, 1e-3, 0.1, 0.1), (1, 1e-3, 0.1, 0.1), (0, 3e-3, 0.1, 0.1), (0, 1e-3, 0.3, 0.1), (0, 1e-3, 0.1, 0.4), (0, 1e30, 0.1, 0.1)]
    configs = [experiment(**dict(zip([field.replace(".", "__") for field in NUMBERS], one, strict=True))) for one in numbers]
    folders = [tmp_path / "together" / str(n) for n in range(len(configs))]
    done = train_together(configs, folders)
    assert done[:5] == [8] * 5 and done[5] < 8
    for n in range(5):
        alone = tmp_path / "alone" / str(n)
        train(dataclasses.replace(configs[n], mesh=dataclasses.replace(configs[n].mesh, data=1)), alone)
        ours, theirs = read_metrics(folders[n]), read_metrics(alone)
        assert [line["step"] for line in ours] == [line["step"] for line in theirs] and len(ours) == 6
        for a, b in zip(ours, theirs, strict=True):
            same = [key for key in a if not key.startswith(("time/", "memory/"))]
            np.testing.assert_allclose([a[key] for key in same], [b[key] for key in same], rtol=2e-4, err_msg=str(n))
    losses = [read_metrics(folder)[-1]["eval/loss"] for folder in folders[:5]]
    assert len(set(losses)) == 5, "every number matters"
    assert any(line.get("train/diverged") for line in read_metrics(folders[5]))
    assert json.loads((folders[0] / "manifest.json").read_text())["trained_together"] == 6


def test_runs_together_go_on(tmp_path):
    """Cut off after a checkpoint; not where one is further than the other."""
    shorter = [experiment(seed=s, train__checkpoint_every=4, optimizer__schedule="constant", train__steps=4) for s in (0, 1)]
    longer = [dataclasses.replace(config, train=dataclasses.replace(config.train, steps=8)) for config in shorter]
    folders = [tmp_path / str(n) for n in range(2)]
    assert train_together(shorter, folders) == [4, 4] and train_together(longer, folders) == [8, 8]
    whole = [tmp_path / f"whole{n}" for n in range(2)]
    train_together(longer, whole)
    loss = lambda folder: read_metrics(folder)[-1]["eval/loss"]
    np.testing.assert_allclose([loss(f) for f in folders], [loss(f) for f in whole], rtol=1e-6)
    apart = [tmp_path / f"apart{n}" for n in range(2)]
    train(dataclasses.replace(shorter[0], mesh=dataclasses.replace(shorter[0].mesh, data=1)), apart[0])
    with pytest.raises(ValueError, match="stand at different steps"):
        train_together(longer, apart)


def test_what_is_no_number_is_trained_apart():
    base = experiment()
    assert alike(base) == alike(experiment(seed=3)) == alike(experiment(optimizer__learning_rate=0.5)) != alike(experiment(model__d_ff=48))
    assert alike(experiment(model__dropout=0.1)) == alike(experiment(model__dropout=0.2)) != alike(base)  # none is another program
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
    environment = os.environ | {"TRANSFORMER_DATA": str(tmp_path_factory.getbasetemp() / "data"), "XLA_FLAGS": ""}
    environment["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir

    def sweep(*more):
        command = [sys.executable, "-m", "transformer", "sweep", f"--config={home / 'x.py'}", f"--workdir={home / 'runs'}", *more]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    return home / "runs", sweep, sweep("--jobs=2", "--together=1")


def test_a_sweep_ends_with_every_run_over(swept):
    folder, sweep, first = swept
    assert first.returncode == 0, first.stderr
    assert "low (baseline)" in first.stdout and re.search(r"low +done \d\.\d+ +done", first.stderr)
    assert re.search(r"wild +diverged @\d +diverged @\d", first.stderr) and "4 of 4 runs are over" in first.stderr
    assert all((folder / "low" / f"seed-{seed}" / "test.json").exists() for seed in (0, 1))
    before = sorted(path.stat().st_mtime for path in folder.rglob("metrics.jsonl"))
    again = sweep("--dry-run")
    assert again.returncode == 0 and "over: low/seed-0 (done), wild/seed-0 (diverged)" in again.stdout, again.stderr
    assert before == sorted(path.stat().st_mtime for path in folder.rglob("metrics.jsonl"))
    refused = sweep("--config.train.steps=9")
    assert refused.returncode == 2 and "arm 'low' is another: train.steps was 8, is 9" in refused.stderr


def test_a_sweep_is_compared(swept, capsys):
    folder, *_ = swept
    assert main(["compare", str(folder)]) == 0
    said = capsys.readouterr()
    page = (folder / "report" / "index.html").read_text()
    assert re.search(r"x\.py, sha256 [0-9a-f]{16}", page) and "Does a rate without measure train?&quot;" in page, "the experiment file is in the report"
    assert "wild diverged with 2 of 2 seeds" in said.out and f"report: {folder / 'report' / 'index.html'}" in said.err
    assert {path.name for path in (folder / "report").iterdir()} == {"index.html", "report.md", "summary.csv", "runs.csv", "curves.csv", "figures"}
    assert main(["compare", str(folder), "--metric=test/blue"]) == 2
    assert "no run has 'test/blue'; --metric may be one of: " in capsys.readouterr().err


def make_study(folder, seeds=2):
    sweep = Sweep(vary("model.position", "rotary", "alibi"), seeds=seeds)
    configs, found = facts_of(sweep)
    return Study(folder, sweep, configs, found)


def test_who_has_a_run_has_it_alone(tmp_path):
    run, other = make_study(tmp_path).runs[:2]
    assert run.claim() and not run.claim() and run.status().kind == "running" and other.claim()
    run.release("it broke")
    assert run.status().kind == "failed" and run.status().why == "it broke"
    assert run.claim() and run.status().kind == "running", "what has failed may be tried again"
    claim = next((tmp_path / "claims").glob("rotary*"))
    os.utime(claim, (0, 0))
    assert run.status().kind == "waiting" and run.claim(), "nobody has renewed it"
    claim.write_text(f"{os.uname().nodename} 999999999")
    assert run.claim(), "its process is dead"
    child = subprocess.Popen(["sleep", "60"])
    run.hand_over(child.pid)
    run.release()
    assert run.claimed() and not run.claim(), "the process that has it lives, whatever becomes of the one that began it"
    child.kill()
    child.wait()
    assert run.claim()
    run.release()
    assert not run.claimed()


def test_a_dead_claim_goes_to_one(tmp_path):
    """Two machines find it dead; one is faster, the other leaves it to it."""
    run = make_study(tmp_path).runs[0]
    run.claim()
    file = next((tmp_path / "claims").glob("rotary*"))
    file.write_text("elsewhere 1")
    os.utime(file, (0, 0))
    dead = run._claimant()
    assert run.claim()
    assert not run._clear(dead) and run.claimed(), "what was made since is put back"
    file.write_text("")  # another is just writing it
    assert run.claimed() and not run.claim()


def test_runs_are_trained_with_those_that_stand_where_they_do(tmp_path, monkeypatch):
    """And what ends one of them ends no other."""
    study, trained = make_study(tmp_path, seeds=5), []
    study.write()
    runs = [run for run in study.runs if run.arm == "rotary"]
    for run, step in zip(runs, (0, 0, 4, 4, 6), strict=True):
        (run.folder / "checkpoints" / str(step)).mkdir(parents=True) if step else None
    monkeypatch.setattr(runner, "train_together", lambda configs, folders: [trained.append([c.seed for c in configs])] and [8] * len(configs))

    def alone(config, folder):
        trained.append([config.seed])
        raise Diverged("no number")

    monkeypatch.setattr("transformer.training.loop.train", alone)
    evaluated = []
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert runner.work(tmp_path, [run.name for run in runs], evaluated.append) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert trained == [[0, 1], [2, 3], [4]] and len(evaluated) == 5


def test_a_sweep_keeps_the_seeds_it_has(tmp_path):
    make_study(tmp_path, seeds=3).write()
    made_up(tmp_path, "rotary", 2, 4.0)
    with pytest.raises(UserError, match="holds a run, rotary/seed-2, of a seed that this sweep has not"):
        make_study(tmp_path, seeds=2).check()
    make_study(tmp_path, seeds=4).check()


def test_shards_take_every_run_once(tmp_path):
    study = make_study(tmp_path, seeds=5)
    units = runner.groups(study, study.runs, 2)
    assert [len(unit) for unit in units] == [2, 2, 1, 2, 2, 1] and all(len({run.arm for run in unit}) == 1 for unit in units)
    shares = [units[i - 1 :: 4] for i in range(1, 5)]
    assert sorted(run.name for share in shares for unit in share for run in unit) == sorted(run.name for run in study.runs)
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
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: start([sys.executable, "-c", program, command[-1]], **more))
    assert runner.run_study(study, jobs=1, shard=(1, 1), most=8) == 1
    said = capsys.readouterr().err
    assert "rotary/seed-0  failed: ended by SIGKILL (out of memory?)" in said and "alibi/seed-0  failed: exit code 1: no such thing" in said
    with pytest.raises(UserError, match="nothing to compare: rotary, seed 0: failed: ended by SIGKILL .*, and 1 more"):
        results.read([tmp_path])
    made_up(tmp_path, "alibi", 0, None)
    made_up(tmp_path, "rotary", 0, 4.0)
    (tmp_path / "claims" / "rotary.seed-0.failed").unlink()
    assert any("alibi, seed 0: failed: exit code 1: no such thing" in line for line in results.read([tmp_path]).left_out), "and the rest comes"


# ---- comparisons of runs that are made up


def made_up(folder, arm, seed, loss, *, more=(), test="t", tokenizer="k", diverged=0, eval_losses=(), test_bleu=None, test_beauty=None, **changes):
    where = folder / arm / f"seed-{seed}"
    where.mkdir(parents=True)
    (where / "config.json").write_text(json.dumps(to_mapping(experiment(seed=seed, **changes))))
    data = {"objective": "CausalLM", "tokenizer_sha256": tokenizer, "test": {"sha256": test, "examples": 4}}
    (where / "manifest.json").write_text(json.dumps({"data": data, "devices": ["cpu"], "parameters": 100, "attention_backends": {"reference": ""}}))
    lines = [{"step": 4 * (n + 1), "eval/loss": x} for n, x in enumerate(eval_losses)]
    lines += [{"step": 0, **dict(more)}] if more else []
    lines += [{"step": 8, "train/loss": 3.0, "train/tokens": 1000, "time/tokens_per_second": 100.0}]
    lines += [{"step": diverged, "train/diverged": True}] if diverged else [] if loss is None else [{"step": 8, "test/loss": loss}]
    lines += [{"step": 8, f"test/{name}": x} for name, x in {"bleu": test_bleu, "beauty": test_beauty}.items() if x is not None]
    (where / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return where


def compare(folder, **given):
    study = sorted(path.parent for path in folder.glob("*/*/config.json"))
    return verdict.judge(results.read(study, **given))


def test_a_verdict_claims_what_the_interval_does(tmp_path):
    for seed, noise in enumerate((0.0, 0.3, 0.1, 0.2)):  # a seed is good or bad for all arms
        made_up(tmp_path, "a", seed, 4.0 + noise)
        made_up(tmp_path, "b", seed, 4.1 + noise + 0.001 * seed, model__d_ff=48)
        made_up(tmp_path, "c", seed, 4.0 + noise + (-1) ** seed * 0.05, model__d_ff=64)
    found = compare(tmp_path)
    said = " ".join(found.sentences)
    assert list(found.rows) == ["a", "b", "c"]
    a, b, c = found.rows.values()
    assert b.to_baseline.tells and not c.to_baseline.tells and a.among_best and c.among_best and not b.among_best
    assert "is worse than" in said and "cannot be told from" in said and "corrected for 2 comparisons" in said
    assert a.value.half > 0.1 > b.to_baseline.mean.half, "pairs see what means do not"
    higher = dataclasses.replace(found.results, sweep=dataclasses.replace(found.results.sweep, higher_is_better=True))
    assert "is better than" in " ".join(verdict.judge(higher).sentences)


def test_one_seed_claims_nothing(tmp_path):
    made_up(tmp_path, "a", 0, 4.0)
    made_up(tmp_path, "b", 0, 9.0, model__d_ff=48)
    found = compare(tmp_path)
    said = " ".join(found.sentences)
    assert "no interval can be had, and nothing is claimed" in said and "worse" not in said and "better" not in said
    assert not any(row.to_baseline and row.to_baseline.tells for row in found.rows.values())
    assert "one seed" in report.markdown(found) and "there are no intervals" in report.markdown(found)


def test_what_cannot_be_compared_is_left_out_and_the_rest_comes(tmp_path):
    for seed in (0, 1):
        made_up(tmp_path, "a", seed, 4.0 + seed)
        made_up(tmp_path, "b", seed, 4.1 + seed, test="other", model__d_ff=48)
        made_up(tmp_path, "c", seed, 4.2 + seed, tokenizer="other", model__d_ff=64)
        made_up(tmp_path, "d", seed, float("nan") if seed else None, model__d_ff=72)
        made_up(tmp_path, "e", seed, 4.3 + seed, model__d_ff=80)
    (tmp_path / "e" / "seed-1" / "metrics.jsonl").write_text('{"step": 8, "test/lo')
    found = compare(tmp_path)
    told = "\n".join(found.results.left_out)
    for words in ("was tested on another text", "has another tokenizer", "test/loss is no number", "test/loss is not there (yet)", "has logged nothing yet"):
        assert words in told
    assert next(iter(found.rows.values())).value.count == 2
    page = report.write(found, tmp_path / "report")
    assert "was tested on another text" in page.read_text()


def test_what_the_sweep_asks_about_may_differ(tmp_path):
    """Arms of another objective or text are compared where that is what varies."""
    sweep = Sweep(vary("data.length", 8, 16), seeds=2, declared=dict.fromkeys(("parameters", "flops"), "of it"))
    configs, found = facts_of(sweep)
    Study(tmp_path, sweep, configs, found).write()
    for name in configs:
        for seed in range(2):
            made_up(tmp_path, name, seed, 4.0 + seed, test=name)
    judged = verdict.judge(results.read([tmp_path]))
    assert not judged.results.left_out and [row.value.count for row in judged.rows.values()] == [2, 2]
    assert "on texts of their own" in report.markdown(judged)


def test_divergence_is_a_result(tmp_path):
    for seed in (0, 1):
        made_up(tmp_path, "a", seed, 4.0 + seed)
        made_up(tmp_path, "b", seed, 4.0 + seed, diverged=5 if seed else 0, model__d_ff=48)
    found = compare(tmp_path)
    assert any("diverged with 1 of 2 seeds, at step 5" in line for line in found.sentences)
    assert [row.value.count for row in found.rows.values()] == [2, 1]


def test_when_an_arm_is_as_good_as_the_baseline_at_its_end(tmp_path):
    made_up(tmp_path, "a", 0, 4.0, eval_losses=(6.0, 5.0))
    made_up(tmp_path, "b", 0, 4.0, eval_losses=(5.5, 4.5), model__d_ff=48)
    made_up(tmp_path, "c", 0, 4.0, eval_losses=(6.5, 6.0), model__d_ff=64)
    a, b, c = compare(tmp_path).rows.values()
    said = [(row.reaches.share, row.reaches.count, row.reaches.seeds) for row in (a, b)]
    assert said == [(1.0, 1, 1), (0.75, 1, 1)] and (c.reaches.count, c.reaches.seeds) == (0, 1)
    for seed, last in ((1, 4.5), (2, 6.0)):  # of three seeds two come there; a seed that the baseline has not tells nothing
        made_up(tmp_path, "a", seed, 4.0, eval_losses=(6.0, 5.0))
        made_up(tmp_path, "b", seed, 4.0, eval_losses=(5.5, last), model__d_ff=48)
    made_up(tmp_path, "c", 7, 4.0, eval_losses=(4.0, 3.0), model__d_ff=64)
    found = compare(tmp_path)
    assert (found.rows["b"].reaches.count, found.rows["b"].reaches.seeds, found.rows["c"].reaches.seeds) == (2, 3, 1)
    assert any("75% of its steps, 2 of 3 seeds" in cell for row in report.outcome(found) for cell in row)


def test_which_way_is_better_is_known_by_name(tmp_path):
    """Of BLEU more, of loss less; a sweep may decide by one and be looked at by the other."""
    for seed in (0, 1, 2):
        made_up(tmp_path, "a", seed, 4.0, test_bleu=30.0 + 0.1 * seed)
        made_up(tmp_path, "b", seed, 3.9 + 0.001 * seed, test_bleu=25.0 + 0.2 * seed, model__d_ff=48)
    by_bleu, by_loss = (compare(tmp_path, metric=metric).sentences for metric in ("test/bleu", "test/loss"))
    assert "a has the best mean" in by_bleu[0] and "b is worse than a" in by_bleu[1]
    assert "b has the best mean" in by_loss[0] and "b is better than a" in by_loss[1]
    assert "a has the best mean" in compare(tmp_path, metric="test/loss", higher_is_better=True).sentences[0]
    again = report.again(compare(tmp_path, metric="test/bleu", baseline="b").results)
    assert again.endswith("--metric=test/bleu --baseline=b")
    made_up(tmp_path, "c", 0, 4.0, test_beauty=1.0)
    with pytest.raises(UserError, match="metric 'test/beauty': say which way is better"):
        compare(tmp_path, metric="test/beauty")


def test_what_is_not_over_is_not_compared(tmp_path):
    """Half a training, or a model that was decoded otherwise, is no result of its arm."""
    for seed in (0, 1, 2):
        made_up(tmp_path, "a", seed, 4.0 + 0.1 * seed)
        made_up(tmp_path, "b", seed, 4.5 + 0.1 * seed, model__d_ff=48)
        half = made_up(tmp_path, "c", seed, None, model__d_ff=64)
        (half / "metrics.jsonl").write_text('{"step": 4, "train/loss": 3.0, "test/loss": 1.0}\n')
    for arm, size in (("a", 1), ("b", 4)):
        (tmp_path / arm / "seed-0" / "test.json").write_text(json.dumps({"step": 8, "decoding": {"beam_size": size, "max_extra": 10}}))
    found = compare(tmp_path)
    assert [row.value.count for row in found.rows.values()] == [3, 2, 0] and "c" not in " ".join(found.sentences).split()
    said = " ".join(found.results.left_out)
    assert "seed 1: test/loss is not known: the run is at step 4 of 8" in said and "evaluated with decoding = beam_size 4" in said


def test_what_a_field_does_over_all_settings_of_the_others(tmp_path):
    grid = product(vary("model.d_ff", narrow=32, wide=64), vary("model.d_model", thin=16, thick=32))
    sweep = Sweep(grid, seeds=3, declared=dict.fromkeys(("parameters", "flops"), "of it"))
    configs, found = facts_of(sweep)
    Study(tmp_path, sweep, configs, found).write()
    for name in configs:
        for seed in range(3):
            made_up(tmp_path, name, seed, 4.0 + 0.2 * seed + (0.1 + 0.001 * seed) * ("wide" in name) + 0.01 * seed * ("thick" in name))
    told = verdict.judge(results.read([tmp_path])).factors
    wide, thick = told["model.d_ff"]["wide - narrow"], told["model.d_model"]["thick - thin"]
    assert wide.mean.mean == pytest.approx(0.101) and wide.tells and not thick.tells


def test_a_number_that_the_sweep_goes_through(tmp_path):
    """Of two placements, one fails from a rate on (a seed diverges, another ends with more than knowing nothing) and is worse by more."""
    sweep = Sweep(product(vary("model.norm_placement", "pre", "post"), scan("optimizer.learning_rate", 1e-3, 1e-1, 3)), seeds=2, declared={"parameters": "of it"})
    configs, found = facts_of(sweep)
    assert list(configs) == [f"{place}-learning_rate={rate}" for place in ("pre", "post") for rate in (0.001, 0.01, 0.1)]
    Study(tmp_path, sweep, configs, found).write()
    losses = {"pre": (5.0, 4.0, 4.5), "post": (4.6, None, 9.0)}
    for name, loss in zip(configs, (*losses["pre"], *losses["post"]), strict=True):
        for seed in range(2):
            made_up(tmp_path, name, seed, loss and loss + 0.1 * seed, diverged=0 if loss else 3)
    judged = verdict.judge(results.read([tmp_path]))
    pre, post = judged.scans
    nothing = math.log(next(iter(configs.values())).model.vocab_size)
    assert (pre.setting, pre.best, pre.stable) == ("pre", 0.01, (0.001, 0.1)) and (post.setting, post.best, post.stable) == ("post", 0.001, (0.001, 0.001))
    assert pre.sensitivity == pytest.approx(np.mean([5.05, 4.05, 4.55]) - 4.05)
    assert post.sensitivity == pytest.approx(np.mean([4.65, nothing, nothing]) - 4.65) and 4 < nothing < 9
    assert any("pre: of 3 values of learning_rate, 0.01 has the best mean" in line and "from 0.001 to 0.1 no seed failed" in line for line in judged.sentences)
    page = report.write(judged, tmp_path / "report").read_text()
    assert "Sensitivity (Wortsman" in page and (tmp_path / "report" / "figures" / "scan_optimizer.learning_rate.png").exists()
    with pytest.raises(UserError, match="from a number over 0"):
        scan("optimizer.learning_rate", 0.0, 1.0, 3)


def test_the_page_stands_alone(tmp_path):
    for seed in (0, 1, 2):
        made_up(tmp_path, "a", seed, 4.0 + 0.1 * seed, eval_losses=(6.0, 5.0))
        made_up(tmp_path, "b<b>", seed, 4.5 + 0.1 * seed**2, eval_losses=(5.5, 4.5), model__d_ff=48)
    for layer in range(3):
        made_up(tmp_path, f"deep{layer}", 0, 4.0, model__d_ff=64 + 8 * layer, more={f"eval/depth/gradient/decoder/{n:02d}/feed_forward": n + 1 for n in range(3)})
    page = report.write(compare(tmp_path), tmp_path / "report").read_text()
    assert (tmp_path / "report" / "figures" / "gradient_by_depth_decoder_first.png").exists()
    for said in (page, (tmp_path / "report" / "report.md").read_text()):
        assert re.search(r"deep1\W+(td\W+)*1\.000 \(one seed\)\W+(td\W+)*2\.000", said), "a profile has its numbers"
    assert "gradient_by_depth_decoder_first,deep2,2,3.0,,,1" in (tmp_path / "report" / "profiles.csv").read_text()
    assert not re.search(r"""(src|href)=["'](?!data:)""", page) and "url(" not in page and "<script" not in page
    assert "b_b_" in page and "viewport" in page
    assert page.count("data:image/png;base64,") == 7  # seeds, differences, loss by steps, tokens and time, two profiles
    for name in ("summary", "runs", "curves"):
        assert len((tmp_path / "report" / f"{name}.csv").read_text().splitlines()) > 2
    assert {path.suffix for path in (tmp_path / "report" / "figures").iterdir()} == {".png", ".pdf"}
