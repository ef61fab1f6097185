"""Tuning: the search of each arm, the parabola and its interval, and a whole tuned sweep."""

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
from studies import configs_and_facts, experiment, write_run

from transformer import Sweep, UserError, product, tuned, vary, zipped
from transformer.cli import main
from transformer.lab import report, report_tuning, results, tuning
from transformer.lab.statistics import Parabola
from transformer.lab.study import Study, load_study
from transformer.mapping import to_mapping

RATE = "optimizer.learning_rate"


def make_study(folder, *numbers, seeds=2, tune_seeds=1):
    sweep = Sweep(
        vary("model.position", "rotary", "alibi"), tune=numbers, seeds=seeds, tune_seeds=tune_seeds
    )
    return Study(folder, sweep, *configs_and_facts(sweep))


def finish(stage, loss_of):
    """Writes the runs of a stage that are missing, with made-up losses."""
    for run in stage.runs:
        if not run.folder.exists():
            loss = loss_of(run.config)
            fields = {f"optimizer__{name}": getattr(run.config.optimizer, name) for name in (
                "learning_rate", "warmup_steps", "b2")}  # fmt: skip
            losses = {"diverged": 4} if math.isinf(loss) else {"eval_losses": (9.0, loss)}
            fields["model__position"] = run.config.model.position
            fields["model__d_ff"] = run.config.model.d_ff
            write_run(stage.folder, run.arm, run.config.seed, min(loss, 9.0), **losses, **fields)


def play(study, loss_of):
    """Plays all stages, and returns them."""
    stages = []
    for stage in tuning.stages(study):
        stages.append(stage)
        if stage is not study:
            stage.write()
            finish(stage, loss_of)
    return stages


def bowl(optimum, curvature=0.02):
    """A loss that is a parabola in log2 of the learning rate, with its own optimum per arm."""
    x = lambda config: math.log2(
        config.optimizer.learning_rate / optimum[str(config.model.position)]
    )
    return lambda config: 3.0 + curvature * x(config) ** 2


# ---- The numbers


def test_grid_is_even_on_a_log_scale():
    assert tuned(RATE, 1e-3, 1.6e-2).grid == [1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2]
    assert tuned("optimizer.warmup_steps", 10, 40, points=3).grid == [10, 20, 40]
    assert tuned("optimizer.b2", 0.9, 0.999, points=3).grid == [0.9, 0.99, 0.999]
    number = tuned("optimizer.b2", 0.9, 0.999, points=3)
    assert all(number.value(number.x(x)) == x for x in number.grid)
    assert number.step == pytest.approx(math.log2(10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tuned(RATE, 1e-2, 1e-3), "use 0 < low < high"),
        (lambda: tuned("optimizer.b2", 0.9, 1.5), "use 0 < low < high < 1"),
        (lambda: tuned(RATE, 1e-3, 1e-2, points=2), "needs 3 points"),
        (lambda: Sweep(vary(RATE, 1e-3, 1e-2), tune=tuned(RATE, 1e-3, 1.0)), "also varies"),
        (lambda: Sweep(vary("model.d_ff", 8, 16), tune=(tuned(RATE, 1, 2),) * 2), "different ones"),
        (lambda: Sweep(vary("model.d_ff", 8, 16), tune=RATE), "set tuned"),
        (lambda: Sweep(vary("model.d_ff", 8, 16), tune_seeds=2), "no effect without tune"),
    ],
)
def test_invalid_tuning_raises(make, message):
    with pytest.raises(UserError, match=message):
        make()


def test_values_that_an_arm_refuses_raise_before_anything_runs(tmp_path):
    study = make_study(tmp_path, tuned("model.num_heads", 1, 3, points=3))  # 3 does not divide 32
    with pytest.raises(UserError, match="num_heads"):
        tuning.check(study.sweep, study.configs)


# ---- The search


def test_each_arm_is_compared_at_its_own_optimum(tmp_path):
    """The arms have different optima, one of them beyond the grid. Both get equally many runs."""
    optimum = {"rotary": 5e-3, "alibi": 2.9e-2}
    study = make_study(tmp_path, tuned(RATE, 1e-3, 1.6e-2))
    *_, tuned_stage, last = play(study, bowl(optimum))
    assert last is study and tuned_stage.folder == tmp_path / "tuned"
    curves, trials = tuning.search(study)
    assert {c.arm: len(c.tried) for c in curves} == {"rotary": 7, "alibi": 7}
    assert len(trials) == 14 == 2 * study.sweep.tuning_runs
    rates = {arm: config.optimizer.learning_rate for arm, config in tuned_stage.configs.items()}
    assert rates == {arm: pytest.approx(x, rel=0.06) for arm, x in optimum.items()}
    assert all(curve.bracketed for curve in curves)
    assert max(curves[1].tried) == pytest.approx(6.4e-2)  # two steps beyond the grid
    assert curves[0].flatness == pytest.approx(0.02, rel=1e-3)
    # Nothing else differs from the file, and the seeds of the comparison are fresh.
    for arm, config in tuned_stage.configs.items():
        rate = study.configs[arm].optimizer.learning_rate
        restored = dataclasses.replace(config.optimizer, learning_rate=rate)
        assert dataclasses.replace(config, optimizer=restored) == study.configs[arm]
    tuning_runs = load_study(tmp_path / "tuning").runs
    assert {run.config.seed for run in tuning_runs} == {2}
    assert {run.config.seed for run in tuned_stage.runs} == {0, 1}


def test_report_compares_tuned_and_untuned_arms(tmp_path):
    """At the settings of the file, rotary is better. With tuning, the arms are alike."""
    study = make_study(tmp_path, tuned(RATE, 1e-3, 1.6e-2), seeds=3)
    study.write()
    noise = {0: 0.0, 1: 0.0005, 2: -0.0005}
    at = bowl({"rotary": 1e-3, "alibi": 1.6e-2})
    tilt = lambda c: 0.001 * (c.seed % 2) * (c.model.position == "alibi")
    loss = lambda c: at(c) + noise.get(c.seed, 0.0) + tilt(c)
    play(study, loss)
    finish(study, loss)
    verdict, (section,) = report.judge([tmp_path], "", "", None)
    assert verdict.rows["alibi"].outcome == "not detectable"
    assert verdict.sentences[0].startswith("With each arm tuned: ")
    change = verdict.sentences[1]
    assert "alibi (+0.32" in change and "] to +0.0003 [" in change
    assert ") from worse (untuned) to not detectable (tuned)" in change
    optima, both = section.tables
    assert optima[1][1].startswith("0.001 ") and optima[2][1].startswith("0.016")
    assert both[2][0] == "alibi" and both[2][-1].startswith("-0.32")  # 4 doublings squared
    page = report.write(verdict, tmp_path / "report", [section]).read_text()
    assert "p\u00a0=\u00a0" in page.partition("</ul>")[0]  # a line does not end within "p = 0.1"
    assert "<h2>Tuning</h2>" in page and (tmp_path / "report/figures").glob("tuning_*.png")
    assert "8 steps of pydoc, learning rate 0.001 to 0.016" in page
    assert "up to 7 runs, with seed 3, which" in page and "Slopes:" not in page
    commands = report.reproduction_commands
    assert "--untuned" in commands(results.read([tmp_path]))
    assert "--untuned" not in commands(verdict.results)
    shutil.rmtree(tmp_path / "tuned")
    assert report.judge([tmp_path], "", "", None)[0].sentences[0].startswith("Without tuning: ")


def test_report_names_the_arms_whose_optimum_is_only_bounded(tmp_path):
    study = make_study(tmp_path, tuned(RATE, 1e-3, 1.6e-2, more=0))
    study.write()
    at = bowl({"rotary": 8e-3, "alibi": 8e-3}, curvature=2.0)
    play(study, at)
    sentences = report.judge([tmp_path], "", "", None)[0].sentences
    known = "only known to be between 0.004 and 0.016; 0.008 was used."
    assert sentences[1] == f"The best learning_rate of rotary and alibi is {known}"
    assert sentences[0].startswith("With each arm tuned (some optima are uncertain): ")


def test_report_names_the_arms_whose_interval_is_unbounded(tmp_path):
    """The losses of alibi do not lie on a parabola, so its interval is unbounded."""
    study = make_study(tmp_path, tuned(RATE, 1e-3, 1.6e-2, more=0))
    study.write()
    noise = {2e-3: 0.02, 4e-3: 0.0, 8e-3: 0.02}
    of_alibi = lambda c: 3.0 + noise.get(c.optimizer.learning_rate, 0.021)
    at = bowl({"rotary": 4e-3})
    play(study, lambda c: of_alibi(c) if c.model.position == "alibi" else at(c))
    verdict, (section,) = report.judge([tmp_path], "", "", None)
    unknown = "has no finite 95 % interval; the best value tried was used."
    assert f"The best learning_rate of alibi {unknown}" in verdict.sentences
    assert [row[1] for row in section.tables[0][1:]][1] == "0.004 (best value tried)"


def test_report_states_how_an_optimum_depends_on_a_size(tmp_path):
    """The best learning rate falls as 1 / d_ff, whatever the position scheme."""
    grid = product(
        vary("model.position", "rotary", "alibi"),
        zipped(
            vary("model.activation", "gelu", "relu", "silu", "linear"),
            vary("model.d_ff", 32, 64, 128, 1024),
            vary("model.max_length", 64, 65, 66, 67),
        ),
    )
    sweep = Sweep(
        grid, tune=tuned(RATE, 1e-3, 1.6e-2, more=0), seeds=1,
        declared={"parameters": "sizes vary", "flops": "sizes vary"},
    )  # fmt: skip
    study = Study(tmp_path, sweep, *configs_and_facts(sweep))
    study.write()
    x = lambda c: math.log2(c.optimizer.learning_rate * c.model.d_ff / (64 * 4e-3))
    play(study, lambda config: 3.0 + 0.02 * x(config) ** 2)
    verdict, (section,) = report.judge([tmp_path], "", "", None)
    rows = section.tables[-1][1:]
    # max_length follows d_ff, so it has no slope of its own. The activation is no size.
    assert [row[:3] for row in rows] == [["learning_rate", "model.d_ff", "rotary"],
                                         ["learning_rate", "model.d_ff", "alibi"]]  # fmt: skip
    # The optimum of the largest size is the smallest value tried: a bound, which has no part.
    optima = "0.008, 0.004, 0.002, 0.001 (not bracketed)"
    assert all(row[3].startswith("-1.00") and row[4] == optima for row in rows)
    changes = "The best learning_rate changes detectably with model.d_ff: rotary -1.00 ["
    assert any(sentence.startswith(changes) for sentence in verdict.sentences)
    study = dataclasses.replace(study, folder=tmp_path / "edge")
    study.write()
    play(study, lambda config: 3.0 - config.optimizer.learning_rate)
    verdict, (section,) = report.judge([study.folder], "", "", None)
    assert {row[3] for row in section.tables[-1][1:]} == {"not identified"}
    unknown = "The best learning_rate changes detectably with model.d_ff in no arm; no slope is "
    assert any(sentence == f"{unknown}identified." for sentence in verdict.sentences)


def test_optimum_beyond_all_values_is_not_bracketed(tmp_path):
    study = make_study(tmp_path, tuned(RATE, 1e-3, 4e-3, points=3, more=1))
    play(study, bowl({"rotary": 2e-3, "alibi": 1.0}))
    rotary, alibi = tuning.search(study)[0]
    assert rotary.bracketed and not alibi.bracketed
    assert alibi.optimum == alibi.best == max(alibi.tried) == 8e-3


def test_divergence_brackets_an_optimum(tmp_path):
    """Values that diverge count as tried, and as worse than all others."""
    at = bowl({"rotary": 8e-3, "alibi": 8e-3})
    loss = lambda config: math.inf if config.optimizer.learning_rate > 8e-3 else at(config)
    study = make_study(tmp_path, tuned(RATE, 1e-3, 1.6e-2))
    play(study, loss)
    curve = tuning.search(study)[0][0]
    assert curve.best == 8e-3 and curve.bracketed and curve.optimum == pytest.approx(8e-3, rel=0.1)
    study = make_study(tmp_path / "all", tuned(RATE, 1e-3, 1.6e-2))
    with pytest.raises(UserError, match="diverged at every learning_rate"):
        play(study, lambda config: math.inf)


def test_optimum_without_near_values_is_the_best_value_tried(tmp_path):
    at = bowl({"rotary": 8e-3, "alibi": 8e-3}, curvature=2.0)
    study = make_study(tmp_path, tuned(RATE, 1e-3, 1.6e-2, more=0))
    play(study, at)
    curve = tuning.search(study)[0][0]
    assert curve.bracketed and curve.parabola is None and curve.optimum == 8e-3
    assert report_tuning._optimum(curve) == "0.008 (best value tried)"


def test_optimum_next_to_a_cliff_is_the_best_value_tried(tmp_path):
    """Losses fall slowly and rise steeply, so the minimum of the parabola is far from the best."""
    losses = {1e-3: 3.25, 2e-3: 3.06, 4e-3: 3.0, 8e-3: 3.16}
    study = make_study(tmp_path, tuned(RATE, 1e-3, 8e-3, points=4, more=0))
    play(study, lambda config: losses[config.optimizer.learning_rate])
    curve = tuning.search(study)[0][0]
    assert curve.best == curve.optimum == 4e-3 and math.isinf(curve.interval()[0])
    assert 2**curve.parabola.minimum < 3.5e-3


def test_numbers_are_tuned_one_after_another(tmp_path):
    """The second number is tuned at the optimum of the first."""
    rate, warmup = tuned(RATE, 1e-3, 1.6e-2), tuned("optimizer.warmup_steps", 2, 8, points=3)
    study = make_study(tmp_path, rate, warmup)
    at = bowl({"rotary": 4e-3, "alibi": 4e-3})
    loss = lambda c: at(c) + 0.1 * math.log2(c.optimizer.warmup_steps / 4) ** 2
    *_, tuned_stage, _ = play(study, loss)
    for config in tuned_stage.configs.values():
        assert config.optimizer.learning_rate == 4e-3 and config.optimizer.warmup_steps == 4
    curves, _ = tuning.search(study)
    assert [c.number.name for c in curves] == ["learning_rate", "warmup_steps"] * 2
    assert curves[1].setting == {RATE: 4e-3}
    assert tuned_stage.facts["alibi"].warmup == "4 steps, then cosine"


def test_search_waits_for_runs_and_resumes(tmp_path):
    """A stage is the same until its runs are finished, so an interrupted sweep continues."""
    study = make_study(tmp_path, tuned(RATE, 1e-3, 4e-3, points=3, more=0))
    study.write()
    first = next(tuning.stages(study))
    assert list(first.configs) == [
        f"{arm}-learning_rate={rate}"
        for arm in ("rotary", "alibi")
        for rate in (0.001, 0.002, 0.004)
    ]
    first.write()
    finish(first, bowl({"rotary": 2e-3, "alibi": 2e-3}))
    (tmp_path / "tuning" / "alibi-learning_rate=0.002" / "seed-2" / "metrics.jsonl").unlink()
    again = next(tuning.stages(load_study(tmp_path)))
    assert again.configs == first.configs and again.folder == first.folder


# ---- The parabola


def test_parabola_through_exact_points_and_seed_offsets():
    x = [0.0, 1.0, 2.0, 3.0] * 2
    loss = [0.5 * (v - 1.2) ** 2 + 3 + 0.7 * (n > 3) for n, v in enumerate(x)]
    fit = Parabola.of(x, loss, [0] * 4 + [1] * 4)
    assert fit.minimum == pytest.approx(1.2) and fit.c[2] == pytest.approx(0.5)
    assert fit.freedom == 4 and fit.interval() == pytest.approx((1.2, 1.2), abs=1e-5)
    upside_down = Parabola.of([0, 1, 2, 3], [0.0, 1.0, 1.1, 0.0], [0] * 4)
    assert math.isnan(upside_down.minimum) and upside_down.interval() == (-math.inf, math.inf)
    assert math.isnan(Parabola.of([0, 1, 2], [1.0, 0.0, 1.0], [0] * 3).interval()[0])


@pytest.mark.parametrize(("noise", "most"), [(0.004, 0.957), (0.04, 1.0)])
def test_interval_of_the_minimum_covers_95_percent(noise, most):
    """With much noise, intervals that are not identified are infinite, and cover more."""
    rng, covered, finite, studies = np.random.default_rng(3), 0, 0, 5000
    x, seed = np.tile(np.arange(5.0), 2), np.repeat([0, 1], 5)
    for _ in range(studies):
        errors = noise * rng.normal(size=10) + 0.1 * rng.normal(size=2)[seed]
        low, high = Parabola.of(x, 0.05 * (x - 2.3) ** 2 + errors, seed).interval()
        covered += low <= 2.3 <= high
        finite += math.isfinite(high)
    assert 0.943 <= covered / studies <= most
    assert finite == studies if noise < 0.01 else 0 < finite < studies


# ---- A whole sweep

FILE = """
from transformer import *
def get_config():
    return CONFIG
def sweep():
    return Sweep(
        vary("model.position", "rotary"), seeds=1,
        tune=tuned("optimizer.learning_rate", 1e-3, 4e-3, points=3, more=0),
    )
"""


def test_tuned_sweep_runs_in_three_stages(tmp_path, capsys):
    file, folder = tmp_path / "study.py", tmp_path / "sweep"
    file.write_text(FILE.replace("CONFIG", repr(to_mapping(experiment()))))
    command = ["sweep", f"--config={file}", f"--workdir={folder}"]
    assert main([*command, "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "tuned       optimizer.learning_rate: 0.001, 0.002, 0.004, for each arm" in output
    assert "3 runs per arm by eval/loss (seeds 1)" in output
    assert main(command) == 0
    error = capsys.readouterr().err
    assert error.index("tuning:") < error.index("tuned:") < error.index("untuned:")
    names = ("tuning/rotary-learning_rate=0.004/seed-1", "tuned/rotary/seed-0", "rotary/seed-0")
    runs = [json.loads((folder / name / "config.json").read_text()) for name in names]
    rates = [run["optimizer"]["learning_rate"] for run in runs]
    assert rates[0] == 0.004 and 0.001 <= rates[1] <= 0.004 and rates[2] == 0.001
    (curve,), _ = tuning.search(load_study(folder))
    assert curve.tried == [0.001, 0.002, 0.004] and rates[1] == curve.optimum
