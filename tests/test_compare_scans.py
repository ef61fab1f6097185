"""What fields and numbers do over the settings of a sweep, and the page that says it."""

import dataclasses
import math
import re

import numpy as np
import pytest
from studies import facts_of, made_up
from test_compare import compare

from transformer import Sweep, UserError, arms, chain, product, scan, vary
from transformer.lab import report, results, verdict
from transformer.lab.study import Study


def test_what_a_field_does_over_all_settings_of_the_others(tmp_path):
    grid = product(vary("model.d_ff", narrow=32, wide=64), vary("model.d_model", thin=16, thick=32))
    sweep = Sweep(grid, seeds=3, declared=dict.fromkeys(("parameters", "flops"), "of it"))
    configs, found = facts_of(sweep)
    Study(tmp_path, sweep, configs, found).write()
    for name in configs:
        for seed in range(3):
            made_up(
                tmp_path,
                name,
                seed,
                4.0
                + 0.2 * seed
                + (0.1 + 0.001 * seed) * ("wide" in name)
                + 0.01 * seed * ("thick" in name),
            )
    told = verdict.judge(results.read([tmp_path])).factors
    wide, thick = told["model.d_ff"]["wide - narrow"], told["model.d_model"]["thick - thin"]
    assert wide.mean.mean == pytest.approx(0.101) and wide.tells and not thick.tells
    configs["beside"] = dataclasses.replace(next(iter(configs.values())), seed=7)
    beside = dataclasses.replace(
        sweep, grid=chain(grid, arms(beside={"optimizer.weight_decay": 0.3}))
    )
    Study(tmp_path, beside, configs, found | {"beside": next(iter(found.values()))}).write()
    assert verdict.judge(results.read([tmp_path])).factors == told, (
        "an arm beside the grid takes nothing from it"
    )


def test_a_number_that_the_sweep_goes_through(tmp_path):
    """Of two placements, one fails from a rate on (a seed diverges, another ends with more than knowing nothing) and is worse by more."""
    sweep = Sweep(
        product(
            vary("model.norm_placement", "pre", "post"),
            scan("optimizer.learning_rate", 1e-3, 1e-1, 3),
        ),
        seeds=2,
        declared={"parameters": "of it"},
    )
    configs, found = facts_of(sweep)
    assert list(configs) == [
        f"{place}-learning_rate={rate}" for place in ("pre", "post") for rate in (0.001, 0.01, 0.1)
    ]
    Study(tmp_path, sweep, configs, found).write()
    losses = {"pre": (5.0, 4.0, 4.5), "post": (4.6, None, 9.0)}
    for name, loss in zip(configs, (*losses["pre"], *losses["post"]), strict=True):
        for seed in range(2):
            made_up(tmp_path, name, seed, loss and loss + 0.1 * seed, diverged=0 if loss else 3)
    judged = verdict.judge(results.read([tmp_path]))
    pre, post = judged.scans
    nothing = math.log(next(iter(configs.values())).model.vocab_size)
    assert (pre.setting, pre.best, pre.stable) == ("pre", 0.01, (0.001, 0.1)) and (
        post.setting,
        post.best,
        post.stable,
    ) == ("post", 0.001, (0.001, 0.001))
    assert pre.sensitivity == pytest.approx(np.mean([5.05, 4.05, 4.55]) - 4.05)
    assert (
        post.sensitivity == pytest.approx(np.mean([4.65, nothing, nothing]) - 4.65)
        and 4 < nothing < 9
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


def test_settings_of_other_fields_are_other_scans(tmp_path):
    """glu=True and qk_norm=True are two settings, though both are called True."""
    rates = scan("optimizer.learning_rate", 1e-3, 1e-1, 3)
    gated, normed = (
        arms(
            **{
                f"{field}{n}": {"optimizer.learning_rate": 10.0 ** (n - 3), f"model.{field}": True}
                for n in range(3)
            }
        )
        for field in ("glu", "qk_norm")
    )
    sweep = Sweep(
        chain(rates, gated, normed), seeds=1, declared={"parameters": "of it", "flops": "of it"}
    )
    configs, found = facts_of(sweep)
    Study(tmp_path, sweep, configs, found).write()
    for at, name in enumerate(configs):
        made_up(tmp_path, name, 0, 4.0 + 0.1 * at)
    judged = verdict.judge(results.read([tmp_path]))
    assert [
        [round(one.mean, 3) for one in scanned.points.values()] for scanned in judged.scans
    ] == [[4.0, 4.1, 4.2], [4.3, 4.4, 4.5], [4.6, 4.7, 4.8]]


def test_of_many_arms_the_scan_speaks(tmp_path):
    """Where few values are scanned each arm is compared with the baseline in a sentence, where many are the scan's sentence does; divergences
    are told of all."""
    for points in (3, 10):
        folder = tmp_path / str(points)
        sweep = Sweep(scan("optimizer.learning_rate", 1e-3, 1e-1, points), seeds=3)
        configs, found = facts_of(sweep)
        Study(folder, sweep, configs, found).write()
        for at, name in enumerate(configs):
            for seed in range(3):
                dead = at == points - 1 and seed == 0
                made_up(
                    folder,
                    name,
                    seed,
                    None if dead else 5.0 - 0.3 * at + 0.01 * seed * (-1) ** at,
                    diverged=3 if dead else 0,
                )
        sentences = verdict.judge(results.read([folder])).sentences
        assert any("is better than learning_rate=0.001" in line for line in sentences) == (
            points == 3
        )
        assert any(line.startswith(f"Of {points} values of learning_rate") for line in sentences)
        assert any(
            line.startswith("learning_rate=0.1 diverged with 1 of 3 seeds") for line in sentences
        )


def test_the_page_stands_alone(tmp_path):
    for seed in (0, 1, 2):
        made_up(tmp_path, "a", seed, 4.0 + 0.1 * seed, eval_losses=(6.0, 5.0))
        made_up(tmp_path, "b<b>", seed, 4.5 + 0.1 * seed**2, eval_losses=(5.5, 4.5), model__d_ff=48)
    for layer in range(3):
        made_up(
            tmp_path,
            f"deep{layer}",
            0,
            4.0,
            model__d_ff=64 + 8 * layer,
            train__evaluators=("depth_profile",),
            more={
                f"eval/depth/{what}/decoder/{n:02d}/feed_forward": (n + 1) * (what == "gradient")
                for n in range(3)
                for what in ("gradient", "update")
            },
        )
    page = report.write(compare(tmp_path), tmp_path / "report").read_text()
    assert (tmp_path / "report" / "figures" / "gradient_by_depth_decoder_first.png").exists()
    for said in (page, (tmp_path / "report" / "report.md").read_text()):
        assert re.search(r"deep1\W+(td\W+)*1\.000 \(one seed\)\W+(td\W+)*2\.000", said), (
            "a profile has its numbers"
        )
        assert re.search(
            r"Norm of the gradient by layer, decoder, before the first step "
            r"\(one batch of \d+ sequences\)",
            said,
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
    assert (
        page.count("data:image/png;base64,") == 6
    )  # seeds, differences, loss by steps, tokens and time, a profile before the first step; at the end none was taken
    for name in ("summary", "runs", "curves"):
        assert len((tmp_path / "report" / f"{name}.csv").read_text().splitlines()) > 2
    assert {path.suffix for path in (tmp_path / "report" / "figures").iterdir()} == {".png", ".pdf"}
