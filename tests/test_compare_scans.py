"""The effects of fields over the settings of a sweep, scans of numbers, and the report page."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from scipy import stats
from studies import configs_and_facts, write_run
from test_compare import compare

from transformer import Sweep, UserError, arms, chain, product, scan, vary
from transformer.lab import figures, report, report_tables as tables, results, verdict
from transformer.lab.formatting import spell
from transformer.lab.report_tables import disturbances
from transformer.lab.statistics import mean
from transformer.lab.study import Study
from transformer.units import kind


def test_effect_of_a_field_over_all_settings_of_the_others(tmp_path):
    grid = product(vary("model.d_ff", narrow=32, wide=64), vary("model.d_model", thin=16, thick=32))
    sweep = Sweep(
        grid, seeds=3, declared=dict.fromkeys(("parameters", "flops"), "follows from the fields")
    )
    configs, facts = configs_and_facts(sweep)
    Study(tmp_path, sweep, configs, facts).write()
    for name in configs:
        for seed in range(3):
            write_run(
                tmp_path,
                name,
                seed,
                4.0
                + 0.2 * seed
                + (0.1 + 0.001 * seed) * ("wide" in name)
                + 0.01 * seed * ("thick" in name),
            )
    found = verdict.derive_verdict(results.read([tmp_path])).effects
    assert [effect.name for effect in found] == [
        "d_ff: wide - narrow",
        "d_model: thick - thin",
        "d_ff: wide - narrow x d_model: thick - thin",
    ]  # fmt: skip
    wide, thick, both = (effect.versus for effect in found)
    assert wide.mean.mean == pytest.approx(0.101) and wide.is_detectable and not thick.is_detectable
    assert both.mean.mean == pytest.approx(0.0, abs=1e-12) and not both.is_detectable
    configs["beside"] = dataclasses.replace(next(iter(configs.values())), seed=7)
    extended = dataclasses.replace(
        sweep, grid=chain(grid, arms(beside={"optimizer.weight_decay": 0.3}))
    )
    Study(tmp_path, extended, configs, facts | {"beside": next(iter(facts.values()))}).write()
    assert verdict.derive_verdict(results.read([tmp_path])).effects == found, (
        "an arm outside the grid does not change the effects"
    )


def test_scan_reports_best_value_stable_range_and_sensitivity(tmp_path):
    """One of two placements fails from some learning rate on, and is more sensitive to the rate.

    At one rate its seeds diverge; at the next, their final loss exceeds that of a uniform
    prediction.
    """
    sweep = Sweep(
        product(
            vary("model.norm_placement", "pre", "post"),
            scan("optimizer.learning_rate", 1e-3, 1e-1, 3),
        ),
        seeds=2,
        declared={"parameters": "follows from the fields"},
    )
    configs, facts = configs_and_facts(sweep)
    assert list(configs) == [
        f"{placement}-learning_rate={rate}"
        for placement in ("pre", "post")
        for rate in (0.001, 0.01, 0.1)
    ]
    Study(tmp_path, sweep, configs, facts).write()
    losses = {"pre": (5.0, 4.0, 4.5), "post": (4.6, None, 9.0)}
    for name, loss in zip(configs, (*losses["pre"], *losses["post"]), strict=True):
        for seed in range(2):
            write_run(tmp_path, name, seed, loss and loss + 0.1 * seed, diverged=0 if loss else 3)
    judged = verdict.derive_verdict(results.read([tmp_path]))
    pre, post = judged.scans
    uniform = math.log(next(iter(configs.values())).model.vocab_size)
    assert (pre.setting, pre.best, pre.stable) == ("pre", 0.01, (0.001, 0.1)) and (
        post.setting,
        post.best,
        post.stable,
    ) == ("post", 0.001, (0.001, 0.001))
    assert pre.sensitivity == pytest.approx(np.mean([5.05, 4.05, 4.55]) - 4.05)
    assert (
        post.sensitivity == pytest.approx(np.mean([4.65, uniform, uniform]) - 4.65)
        and 4 < uniform < 9
    )
    assert any(
        "With pre, of 3 values of learning_rate, 0.01 has the best mean" in line
        and "range within 5% of it: 0.01 alone; range without failed seeds: 0.001 to 0.1" in line
        for line in judged.sentences
    )
    page = report.write(judged, tmp_path / "report").read_text()
    assert (
        "Sensitivity (Wortsman" in page
        and (tmp_path / "report" / "figures" / "scan_optimizer.learning_rate.png").exists()
    )
    with pytest.raises(UserError, match="use 0 < low < high"):
        scan("optimizer.learning_rate", 0.0, 1.0, 3)


def test_arms_that_set_different_fields_form_separate_scans(tmp_path):
    """glu=True and qk_norm=True are two settings, although both values are True."""
    rates = scan("optimizer.learning_rate", 1e-3, 1e-1, 3)
    glu_arms, norm_arms = (
        arms(
            **{
                f"{field}{n}": {"optimizer.learning_rate": 10.0 ** (n - 3), f"model.{field}": True}
                for n in range(3)
            }
        )
        for field in ("glu", "qk_norm")
    )
    sweep = Sweep(
        chain(rates, glu_arms, norm_arms),
        seeds=1,
        declared={"parameters": "follows from the fields", "flops": "follows from the fields"},
    )
    configs, facts = configs_and_facts(sweep)
    Study(tmp_path, sweep, configs, facts).write()
    for index, name in enumerate(configs):
        write_run(tmp_path, name, 0, 4.0 + 0.1 * index)
    judged = verdict.derive_verdict(results.read([tmp_path]))
    assert [
        [round(point.mean, 3) for point in scanned.points.values()] for scanned in judged.scans
    ] == [[4.0, 4.1, 4.2], [4.3, 4.4, 4.5], [4.6, 4.7, 4.8]]


def test_scan_of_many_values_gets_one_sentence(tmp_path):
    """A scan of few values also gets a sentence per arm; a scan of many gets only its own.

    Divergences are reported in both cases.
    """
    for points in (3, 10):
        folder = tmp_path / str(points)
        sweep = Sweep(scan("optimizer.learning_rate", 1e-3, 1e-1, points), seeds=3)
        configs, facts = configs_and_facts(sweep)
        Study(folder, sweep, configs, facts).write()
        for index, name in enumerate(configs):
            for seed in range(3):
                diverges = index == points - 1 and seed == 0
                write_run(
                    folder,
                    name,
                    seed,
                    None if diverges else 5.0 - 0.3 * index + 0.01 * seed * (-1) ** index,
                    diverged=3 if diverges else 0,
                )
        sentences = verdict.derive_verdict(results.read([folder])).sentences
        assert ("is better than learning_rate=0.001" in sentences[0]) == (points == 3)
        assert sentences[0].startswith("The best learning_rate by test/loss") == (points == 10)
        assert any(line.startswith(f"Of {points} values of learning_rate") for line in sentences)
        assert any(
            line.startswith("learning_rate=0.1 diverged in 1 of 3 seeds") for line in sentences
        )


def test_best_values_of_many_settings_are_counted(tmp_path):
    positions = "none", "rotary", "alibi", "t5", "kerple", "sandwich", "shaw", "learned", "fire"
    grid = product(vary("model.position", *positions), vary("model.d_ff", 32, 48, 64))
    best = lambda name: 64 if name.startswith(("t5", "shaw")) else 48
    loss = lambda name, seed: 4.0 + 0.01 * abs(int(name.rpartition("=")[2]) - best(name))
    answer = grid_study(tmp_path, grid, loss).sentences[0]
    counted = "is 48 in 7 settings and 64 in 2 settings."
    assert answer == f"The best d_ff by test/loss (nats per token) {counted}"


def test_report_page_is_self_contained(tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path, "a", seed, 4.0 + 0.1 * seed, eval_losses=(6.0, 5.0))
        write_run(
            tmp_path, "b<b>", seed, 4.5 + 0.1 * seed**2, eval_losses=(5.5, 4.5), model__d_ff=48
        )
    for layer in range(3):
        write_run(
            tmp_path,
            f"deep{layer}",
            0,
            4.0,
            model__d_ff=64 + 8 * layer,
            train__evaluators=("depth_profile",),
            more={
                f"eval/depth/{quantity}/decoder/{n:02d}/feed_forward": (n + 1)
                * (quantity == "gradient")
                for n in range(3)
                for quantity in ("gradient", "update")
            },
        )
    page = report.write(compare(tmp_path), tmp_path / "report").read_text()
    assert (tmp_path / "report" / "figures" / "gradient_by_depth_decoder_first.png").exists()
    for text in (page, (tmp_path / "report" / "report.md").read_text()):
        assert re.search(r"deep1\W+(td\W+)*1\.000 \(one seed\)\W+(td\W+)*2\.000", text), (
            "the report contains the numbers of a profile"
        )
        assert re.search(
            r"Norm of the gradient by layer, decoder, before the first step "
            r"\(one batch of \d+ sequences\)",
            text,
        )
    assert (
        "gradient_by_depth_decoder_first,deep2,2,3.0,,,1"
        in (tmp_path / "report" / "profiles.csv").read_text()
    )
    assert not re.search(r"""src=["']?(?!["']?data:)""", page) and "url(" not in page
    links = set(re.findall(r'href="?([^">]+)', page))
    assert {"summary.csv", "report.md", "figures/by_arm.png", "figures/by_arm.pdf"} < links
    for link in links:
        assert (tmp_path / "report" / link).is_file()
    assert "b_b_" in page and "viewport" in page
    # Differences, values, loss by steps (tokens are proportional to them) and by time, and a
    # profile before the first step; there is no profile at the end.
    assert page.count("data:image/svg+xml;base64,") == 5
    assert re.findall(r">Figure (\d+)\.", page) == list("12345")
    assert "<details><summary>Evaluator depth_profile</summary>" in page
    for name in ("summary", "runs", "curves"):
        assert len((tmp_path / "report" / f"{name}.csv").read_text().splitlines()) > 2
    assert {path.suffix for path in (tmp_path / "report" / "figures").iterdir()} == {".png", ".pdf"}


def grid_study(folder, grid, loss_of, **options):
    """Writes a study of three seeds and returns its verdict."""
    sweep = Sweep(grid, seeds=3, declared={"parameters": "varied", "flops": "varied"}, **options)
    configs, facts = configs_and_facts(sweep)
    Study(folder, sweep, configs, facts).write()
    for name in configs:
        for seed in range(3):
            write_run(folder, name, seed, loss_of(name, seed))
    return verdict.derive_verdict(results.read([folder]))


def test_interaction_equals_the_difference_of_differences(tmp_path):
    """Two placements, two position schemes: the interaction of each seed, computed by hand."""
    rng = np.random.default_rng(0)
    losses = {"pre-rotary": 4.8, "pre-alibi": 4.7, "post-rotary": 4.6, "post-alibi": 4.65}
    noise = {name: 0.01 * rng.normal(size=3) for name in losses}
    loss_of = lambda name, seed: losses[name] + 0.3 * seed + noise[name][seed]
    grid = product(
        vary("model.norm_placement", "pre", "post"), vary("model.position", "rotary", "alibi")
    )
    judged = grid_study(tmp_path, grid, loss_of)
    y = {name: np.array([loss_of(name, seed) for seed in range(3)]) for name in losses}
    with_rotary, with_alibi = (y[f"post-{x}"] - y[f"pre-{x}"] for x in ("rotary", "alibi"))
    by_hand = stats.ttest_1samp(with_alibi - with_rotary, 0.0)
    both = judged.effects[-1]
    assert both.versus.mean.mean == pytest.approx(np.mean(with_alibi - with_rotary))
    assert [x.mean for x in both.at] == pytest.approx([with_rotary.mean(), with_alibi.mean()])
    interval = by_hand.confidence_interval(0.95)
    assert (both.versus.mean.low, both.versus.mean.high) == pytest.approx(tuple(interval))
    averaged = stats.ttest_1samp((with_rotary + with_alibi) / 2, 0.0).pvalue
    gain = (y["pre-alibi"] - y["pre-rotary"] + y["post-alibi"] - y["post-rotary"]) / 2
    raw = sorted([by_hand.pvalue, averaged, stats.ttest_1samp(gain, 0.0).pvalue])
    holm = np.maximum.accumulate(np.multiply(raw, (3, 2, 1)))
    ps = sorted(effect.versus.p for effect in judged.effects)
    assert ps == pytest.approx(np.minimum(holm, 1))
    (sentence,) = [line for line in judged.sentences if "depend on" in line]
    ends = [stats.ttest_1samp(x, 0.0).confidence_interval(0.95) for x in (with_rotary, with_alibi)]
    at = [
        f"{x.mean():+.3f} [{low:+.3f}, {high:+.3f}]"
        for x, (low, high) in zip((with_rotary, with_alibi), ends, strict=True)
    ]
    assert sentence.startswith(
        "Does the effect of norm_placement depend on position? Yes: post instead of pre changes "
        f"test/loss by {at[0]} with rotary and by {at[1]} with alibi. The difference of these "
        "differences is +0.1"
    )
    # The first field of the grid is the one that the study asks about.
    answer, *others = judged.sentences
    assert answer.startswith(
        "Averaged over position, post is better than pre: its test/loss is 0.1"
    )
    assert not any("post instead of pre lowers" in line for line in others)
    caption, figure = figures.answer(judged)["differences"]
    (axes,) = figure.axes
    ticks = [text.get_text().partition("\n") for text in axes.get_yticklabels()]
    assert [name for name, *_ in ticks[:3]] == [
        "norm_placement: post - pre", "position: alibi - rotary", "pre-alibi"
    ]  # fmt: skip
    assert f"its test/loss is {ticks[0][2][1:6]}" in answer and "Black: the effect" in caption
    assert any("are better than pre-rotary" in line for line in others)
    page = report.write(judged, tmp_path / "report").read_text()
    assert "Interaction of norm_placement and position" in page
    assert "norm_placement: post - pre x position: alibi - rotary" in page
    assert len((tmp_path / "report" / "effects.csv").read_text().splitlines()) == 4


def test_interactions_of_three_fields_average_over_the_third(tmp_path):
    """The effect of d_ff depends on d_model by 0.2, and on the position by nothing."""
    rng = np.random.default_rng(1)
    grid = product(
        vary("model.d_ff", narrow=32, wide=64),
        vary("model.d_model", thin=16, thick=32),
        vary("model.position", "rotary", "alibi", "sinusoidal"),
    )
    loss_of = lambda name, seed: (
        4.0 - 0.2 * ("wide-thick" in name) + 0.5 * ("alibi" in name) + 0.001 * rng.normal()
    )
    judged = grid_study(tmp_path, grid, loss_of)
    found = {effect.name: effect.versus for effect in judged.effects}
    assert len(found) == 4 + 1 + 2 + 2
    width = found.pop("d_ff: wide - narrow x d_model: thick - thin")
    assert width.mean.mean == pytest.approx(-0.2, abs=0.005) and width.is_detectable
    assert not any(x.is_detectable for name, x in found.items() if " x position" in name)
    text = " ".join(judged.sentences)
    assert "Does the effect of d_ff depend on d_model? Yes: wide instead of narrow" in text
    assert "depend on position? Not detectably, in any of 2 contrasts." in text
    assert "Averaged over d_ff and d_model, alibi instead of rotary raises test/loss by" in text


def test_intervals_end_at_the_bounds_of_a_metric(tmp_path):
    for arm, size in (("a", 32), ("b", 48)):
        for seed, bleu in enumerate((0.1, 2.0, 0.3)):
            write_run(tmp_path, arm, seed, 4.0 + seed, test_bleu=bleu, model__d_ff=size)
    value = compare(tmp_path, metric="test/bleu").rows["a"].value
    assert value.low == 0.0 and value.high == value.mean + value.half
    assert spell(value) == "0.8 [0.0, 3.4]"
    assert kind("test/loss", predicts_tokens=False).bounds == (0.0, math.inf)
    assert kind("test/accuracy", predicts_tokens=False).bounds == (0.0, 1.0)
    assert mean([0.95, 1.0, 0.9], kind("test/probe/exact/0004").bounds).high == 1.0
    assert kind("eval/attention/logit/decoder/00").bounds == (-math.inf, math.inf)


def test_speed_compares_arms_only_under_equal_conditions(tmp_path):
    """A report shows speed among the costs only if hosts are equal and no other job ran."""

    def speeds(folder, other_cores=0.02, hosts=("h", "h"), together=(1, 1)):
        for n, (arm, size) in enumerate((("a", 32), ("b", 48))):
            run = write_run(tmp_path / folder, arm, 0, 4.0, model__d_ff=size)
            extra = {"host": hosts[n], "cores": 8, "trained_together": together[n]}
            manifest = json.loads((run / "manifest.json").read_text())
            (run / "manifest.json").write_text(json.dumps(manifest | extra))
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 8, "time/other_cores": other_cores}) + "\n")
        judged = compare(tmp_path / folder)
        titles = [section.title for section in report.sections(judged) if section]
        (cost,) = [section for section in report.sections(judged) if section.title == "Cost"]
        shown = "tokens/s" in cost.tables[0][0]
        assert shown == ("Speed, disturbed" not in titles)
        return shown, disturbances(judged.results)

    assert speeds("equal") == (True, [])
    assert speeds("hosts", hosts=("h", "i"))[1] == ['Runs differ in host: "h"; "i".']
    assert speeds("groups", together=(3, 1))[1] == ["Runs differ in trained together: 1; 3."]
    shown, (why,) = speeds("busy", other_cores=0.9)
    assert not shown and "used up to 0.9 of the host's 8 cores" in why


def test_curves_that_are_the_same_appear_once(tmp_path):
    for arm, size in (("a", 32), ("b", 48)):
        write_run(tmp_path, arm, 0, 4.0, eval_losses=(6.0, 5.0), model__d_ff=size)
    drawn = figures.curves(compare(tmp_path))
    assert list(drawn) == ["loss_by_steps", "loss_by_time"]
    caption, figure = drawn["loss_by_steps"]
    assert "A step is 125 input tokens in training in every arm" in caption
    low, high = figure.axes[0].get_xlim()
    assert low == 4 and 8 < high < 8.2, "the axis begins with the curves, and shows the last mark"
    log = tmp_path / "b" / "seed-0" / "metrics.jsonl"
    log.write_text(log.read_text().replace("1000", "2000"))
    assert list(figures.curves(compare(tmp_path))) == [
        "loss_by_steps", "loss_by_tokens", "loss_by_time"
    ]  # fmt: skip


def test_costs_contain_those_of_a_plan(tmp_path):
    """`plan --json=DIR/plan.json` adds columns for arms that it planned as they were trained."""
    for arm, size in (("a", 32), ("b", 48), ("c", 64)):
        write_run(tmp_path, arm, 0, 4.0, model__d_ff=size)
    judged = compare(tmp_path)
    judged = judged._replace(results=judged.results._replace(folders=(tmp_path,)))
    assert "kernels" not in tables.cost(judged, False)[0]
    plans = {}
    for arm, seconds, cycles in (("a", 0.05, 3000), ("b", 0.06, 2000), ("c", 0.07, 9000)):
        config = json.loads((tmp_path / arm / "seed-0" / "config.json").read_text())
        config["model"]["position"] = "none" if arm == "b" else config["model"]["position"]
        plans[arm] = {"step_seconds_at_least": seconds, "kernel_cycles": cycles}
        plans[arm] |= {"topology": "v5e-16", "config": config}
    (tmp_path / "plan.json").write_text(json.dumps(plans))
    head, *rows = tables.cost(judged, False)
    assert head[-2:] == ["planned step", "kernels"]
    assert [row[-2:] for row in rows] == [
        ["50.0 ms (v5e-16)", "1.500"], ["-", "-"], ["70.0 ms (v5e-16)", "4.500"],
    ]  # fmt: skip
