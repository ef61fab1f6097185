"""Ladders: sweeps over sizes and budgets, and the section "Scaling" of their reports."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from law_coverage import BASE, scaled
from studies import experiment

from transformer import Sweep, UserError, arms, ladder, vary
from transformer.config import Experiment
from transformer.config_io import change
from transformer.lab import guard, report, report_scaling, results
from transformer.lab.ladder import matrix_parameters
from transformer.lab.multipliers import Estimate, fit_all
from transformer.lab.report_scaling import read_points, section
from transformer.lab.study import Study, load_study
from transformer.mapping import from_mapping, to_mapping

WIDTHS = {"A": 8, "B": 16, "C": 24, "D": 40}
SIZES = arms(**{name: {"model.d_model": width} for name, width in WIDTHS.items()})
NORMS = vary("model.norm_placement", "pre", "peri")
TOKENS = 8 * 32  # per step
DECLARED = {"parameters": "peri-norm has more norms"}


def config(**fields):
    return to_mapping(experiment(optimizer__schedule="wsd", **fields))


def make(budgets=(5, 10, 20), **options) -> Sweep:
    options = {"seeds": 2, "declared": DECLARED} | options
    return ladder(config(), options.pop("arms", NORMS), SIZES, budgets, **options)


def experiments(sweep):
    """Returns arm -> the experiment of a ladder's arm."""
    found = {}
    for arm, changes in sweep.arms.items():
        tree = config()
        change(tree, changes)
        found[arm] = from_mapping(Experiment, tree)
    return found


def test_parameters_outside_embeddings_are_counted():
    count = lambda **fields: matrix_parameters(experiment(**fields).model)
    base = {"model__d_model": 16, "model__d_ff": 64, "model__use_bias": False}
    norms = 2 * 16  # gain and offset
    layers = 2 * (4 * 16 * 16 + 2 * 16 * 64 + 2 * norms) + norms
    assert count(**base) == layers
    assert count(**base, model__vocab_size=4096) == layers
    assert count(**base, model__tie_embeddings=False) == layers
    assert count(**base, model__position="learned") == layers
    assert count(**base, model__norm_placement="peri") > layers


def test_steps_decays_and_rules_follow_from_the_size():
    sweep = make(rules={"optimizer.learning_rate": lambda N: 1 / N})
    assert list(sweep.arms) == [f"{arm}-{size}" for size in WIDTHS for arm in ("pre", "peri")]
    for size, width in WIDTHS.items():
        N = matrix_parameters(experiment(model__d_model=width).model)
        for arm in ("pre", "peri"):
            changes, rung = sweep.arms[f"{arm}-{size}"], sweep.ladder[f"{arm}-{size}"]
            assert changes["optimizer.learning_rate"] == 1 / N
            assert changes["train.steps"] == round(20 * N / TOKENS)
            assert changes["optimizer.decay_ends"] == (
                round(5 * N / TOKENS), round(10 * N / TOKENS),
            )  # fmt: skip
            assert 1 <= changes["optimizer.warmup_steps"] <= changes["optimizer.decay_ends"][0] / 4
            assert rung["arm"] == arm and rung["size"] == size
            assert rung["held_out"] == (size == "D")
        assert sweep.ladder[f"pre-{size}"]["N"] == N < sweep.ladder[f"peri-{size}"]["N"]
    assert all(x.optimizer.schedule == "wsd" for x in experiments(sweep).values())
    changes = make((2, 8)).arms["pre-D"]
    assert changes["optimizer.warmup_steps"] == changes["optimizer.decay_ends"][0] // 4 > 1


def test_budgets_in_flops_are_spent():
    budgets = (1e11, 2e11, 4e11)
    sweep = make(budgets, per="flops", arms=vary("model.norm_placement", "pre"))
    for arm, x in experiments(sweep).items():
        facts = guard.facts(x)
        ends = (*x.optimizer.decay_ends, x.train.steps)
        spent = [end * facts.flops_per_step for end in ends]
        np.testing.assert_allclose(spent, budgets, rtol=0.5 / ends[0])
        assert sweep.ladder[arm]["N"] == matrix_parameters(x.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": (20,)}, "one budget of tokens per parameter"),
        ({"budgets": ()}, "use positive numbers"),
        ({"per": "token"}, "per 'token'"),
        ({"seeds": 1}, "3 runs; intervals need 6 or more.*largest size, D, is held out"),
    ],
)
def test_designs_without_a_law_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        make(**options)
    assert make(hold_out=False, seeds=2).ladder["pre-D"]["held_out"] is False


def test_arms_are_compared_with_the_baseline_of_their_size():
    sweep = make(declared={})
    facts = {
        arm: guard.Facts(100 * i + 7 * arm.startswith("peri"), 10.0 * i, "x", (), (), "", 256)
        for i, size in enumerate(WIDTHS, 1)
        for arm in (f"pre-{size}", f"peri-{size}")
    }
    (line,) = guard.undeclared(sweep, facts)
    assert line == "parameters: pre-A 100, peri-A 107, and 3 more"
    facts["pre-B"] = dataclasses.replace(facts["pre-B"], data=("length=8",))
    assert guard.undeclared(sweep, facts)[1].endswith("pre-B length=8, peri-B none of these")
    assert sweep.reference("peri-C") == "pre-C" and Sweep(NORMS).reference("peri") == "pre"


@pytest.fixture
def study(tmp_path) -> Path:
    """Returns the directory of a ladder, with losses from laws whose multiplier is 1.2."""
    sweep = make(seeds=3)
    configs, rng = experiments(sweep), np.random.default_rng(0)
    flops = {arm: 7.0 * rung["N"] for arm, rung in sweep.ladder.items()}
    facts = {
        arm: guard.Facts(rung["N"], flops[arm], "reference", (), (), "", TOKENS)
        for arm, rung in sweep.ladder.items()
    }
    Study(tmp_path, sweep, configs, facts).write()
    common = {(size, seed): rng.normal(0, 2e-3) for size in WIDTHS for seed in sweep.seeds}
    for arm, x in configs.items():
        rung = sweep.ladder[arm]
        law = BASE if rung["arm"] == "pre" else scaled(1.2)
        for seed in sweep.seeds:
            run = tmp_path / arm / f"seed-{seed}"
            run.mkdir(parents=True)
            (run / "config.json").write_text(json.dumps(to_mapping(x) | {"seed": seed}))
            (run / "manifest.json").write_text(json.dumps({"data": {}, "devices": ["cpu"]}))
            noise = common[rung["size"], seed] + rng.normal(0, 1e-3)
            ends = (*x.optimizer.decay_ends, x.train.steps)
            # The law of larger models, whose losses are not those of diverged runs.
            loss = lambda D, law=law, N=rung["N"]: law.loss(1e4 * N, 1e4 * D)
            losses = [loss(end * TOKENS) * np.exp(noise) for end in ends]
            lines = [{"step": n, "eval/loss": y} for n, y in zip(ends, losses, strict=True)]
            lines.append({"step": ends[-1], "test/loss": losses[-1]})
            (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return tmp_path


def test_the_report_of_a_ladder_has_multipliers_and_predictions(study):
    assert load_study(study).sweep.ladder["peri-D"]["held_out"] is True
    judged, more = report.judge([study], "", "", None)
    points, missing = read_points(judged.results)
    assert not missing and points["pre"].loss.shape == (12, 3)
    np.testing.assert_allclose(points["pre"].C, 7 * points["pre"].N * points["pre"].D)
    assert "times the compute of pre for equal loss" in judged.sentences[0]
    (effect,) = [sentence for sentence in judged.sentences if "than pre:" in sentence]
    assert effect.startswith("Averaged over the sizes, peri is better than pre: its test/loss is")
    page = report.write(judged, study / "report", more).read_text()
    text = (study / "report/report.md").read_text()
    assert "<h2>Scaling</h2>" in page and "held out" in text and "(extrapolated)" in text
    assert "peri needs 0." in text and "times the compute of pre for equal loss" in text
    rows = (study / "report/scaling.csv").read_text().splitlines()
    assert len(rows) == 1 + 2 * 4 * 3 * 3 and rows[0] == "arm,size,seed,N,D,FLOPs,loss"
    assert (study / "report/figures/scaling.png").exists()
    fitted = {name: x.rows([r for r in x.runs if r[0] != "D"]) for name, x in points.items()}
    k = fit_all(fitted, "pre").multiplier("peri", float(points["pre"].C[-4, -1]))
    assert k.low < 1.2 < k.high and k.low > 1


def test_the_held_out_size_is_predicted_and_not_fitted(study, monkeypatch):
    monkeypatch.setattr(report_scaling, "profile", lambda *_: Estimate(1.0, 1.0, 1.0))
    before = section(results.read([study]))
    for file in study.glob("*-D/*/metrics.jsonl"):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [line | {"eval/loss": 1.1 * line.get("eval/loss", 0.0)} for line in lines[:-1]]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = section(results.read([study]))
    multipliers, laws, predictions = range(3)
    assert before.tables[multipliers] == after.tables[multipliers]
    assert before.tables[laws] == after.tables[laws]
    for row, shifted in zip(
        before.tables[predictions][1:], after.tables[predictions][1:], strict=True
    ):
        assert row[:4] == shifted[:4] and row[6] == "yes" and shifted[6] == "no"
        error = lambda row: float(row[5].rstrip("%"))
        assert abs(error(row)) < 1 and error(shifted) == pytest.approx(10, abs=1.2)


def test_unfinished_and_diverged_runs_are_named_and_left_out(study):
    run = study / "peri-A/seed-1/metrics.jsonl"
    run.write_text("".join(run.read_text().splitlines(True)[1:]))
    with (study / "pre-B/seed-0/metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/diverged": true}\n')
    read = results.read([study])
    points, missing = read_points(read)
    assert missing == {"peri-A, seed 1": "it is not finished", "pre-B, seed 0": "it diverged"}
    assert len(points["pre"].runs) == len(points["peri"].runs) == 11
    assert any("peri-A, seed 1" in line for line in section(read).lines)


def test_too_few_runs_leave_no_law_but_a_reason(study):
    for seed in (1, 2):
        for size in "ABC":
            (study / f"peri-{size}/seed-{seed}/metrics.jsonl").unlink()
    text = " ".join(section(results.read([study])).lines)
    assert "peri has no scaling law: 3 runs" in text and "needs" not in text.split("peri has")[1]


def test_other_sweeps_have_no_section(study):
    tree = json.loads((study / "sweep.json").read_text())
    (study / "sweep.json").write_text(json.dumps(tree | {"ladder": {}}))
    assert not section(results.read([study]))
    assert report.judge([study], "", "", None)[1] == []
