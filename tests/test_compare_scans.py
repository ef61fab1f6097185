"""The effects of fields over the settings of a sweep, scans of numbers, and the report page."""

import dataclasses
import math
import re

import numpy as np
import pytest
from studies import configs_and_facts, write_run
from test_compare import compare

from transformer import Sweep, UserError, arms, chain, product, scan, vary
from transformer.lab import report, results, verdict
from transformer.lab.study import Study


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
    factors = verdict.derive_verdict(results.read([tmp_path])).factors
    wide, thick = factors["model.d_ff"]["wide - narrow"], factors["model.d_model"]["thick - thin"]
    assert wide.mean.mean == pytest.approx(0.101) and wide.is_detectable and not thick.is_detectable
    configs["beside"] = dataclasses.replace(next(iter(configs.values())), seed=7)
    extended = dataclasses.replace(
        sweep, grid=chain(grid, arms(beside={"optimizer.weight_decay": 0.3}))
    )
    Study(tmp_path, extended, configs, facts | {"beside": next(iter(facts.values()))}).write()
    assert verdict.derive_verdict(results.read([tmp_path])).factors == factors, (
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
        assert any("is better than learning_rate=0.001" in line for line in sentences) == (
            points == 3
        )
        assert any(line.startswith(f"Of {points} values of learning_rate") for line in sentences)
        assert any(
            line.startswith("learning_rate=0.1 diverged in 1 of 3 seeds") for line in sentences
        )


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
    assert (
        not re.search(r"""(src|href)=["'](?!data:)""", page)
        and "url(" not in page
        and "<script" not in page
    )
    assert "b_b_" in page and "viewport" in page
    # Seeds, differences, loss by steps, by tokens and by time, and a profile before the first step;
    # there is no profile at the end.
    assert page.count("data:image/png;base64,") == 6
    for name in ("summary", "runs", "curves"):
        assert len((tmp_path / "report" / f"{name}.csv").read_text().splitlines()) > 2
    assert {path.suffix for path in (tmp_path / "report" / "figures").iterdir()} == {".png", ".pdf"}
