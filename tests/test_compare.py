"""What is said of results: statistics against SciPy, verdicts and reports over runs that are made up."""

import dataclasses
import json
import math
import re

import numpy as np
import pytest
from scipy import stats
from studies import facts_of, made_up

from transformer import Sweep, UserError, arms, chain, product, scan, vary
from transformer.lab import figures, guard, report, results, verdict
from transformer.lab.statistics import corrected, difference, mean
from transformer.lab.study import Study

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


@pytest.mark.parametrize("arms", [4, 12])
def test_of_equal_arms_one_is_seldom_told_from_the_best(arms):
    """The best is chosen by the same numbers, which the report's note says: it is more than 5 studies of 100, but not many more."""
    rng, told = np.random.default_rng(2), 0
    for _ in range(600):
        values = rng.normal(size=(arms, 3))
        best = values.mean(axis=1).argmin()
        told += any(
            one.tells
            for one in corrected(
                {
                    n: difference(dict(enumerate(values[n])), dict(enumerate(values[best])))
                    for n in range(arms)
                    if n != best
                }
            ).values()
        )
    assert 0.04 < told / 600 < 0.125


def test_holm_holds_the_family():
    """Of many comparisons of nothing, something is found in one study of twenty, and not in most."""
    found = {
        name: dataclasses.replace(difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.5}), p=p)
        for name, p in zip("abcd", (0.01, 0.04, 0.03, math.nan), strict=True)
    }
    assert {name: one.p for name, one in corrected(found).items() if name != "d"} == {
        "a": 0.03,
        "b": 0.06,
        "c": 0.06,
    }
    rng, wrong = np.random.default_rng(2), []
    draw = lambda: dict(enumerate(rng.normal(size=5)))
    for _ in range(400):
        base = draw()
        wrong.append(
            any(
                one.tells
                for one in corrected({str(i): difference(draw(), base) for i in range(6)}).values()
            )
        )
    assert 0 < np.mean(wrong) < 0.08


def test_too_few_to_tell():
    assert math.isnan(mean([3.0]).low) and mean([]).count == 0
    assert math.isnan(difference({0: 1.0}, {0: 2.0}).p) and not difference({0: 1.0}, {0: 2.0}).tells
    same = {0: 1.0, 1: 2.0}
    assert difference(same, same).p == 1.0 and not difference(same, same).tells
    for shift in (
        1.0,
        0.1,
    ):  # the same in every seed, to the last bit or but for rounding: no spread, no evidence
        one = difference({seed: x + shift for seed, x in same.items()}, same)
        assert math.isnan(one.p) and not one.tells and one.mean.mean == pytest.approx(shift)


@pytest.mark.parametrize(("value", "half", "said"), [
    (5.2694, 0.0273, "5.269 ± 0.027"), (0.99999968, 8.5e-8, "1.000000 ± 0.000000"), (1234.5678, 8.5e-8, "1,234.57 ± 0.00"),
    (9.2e-6, 1.2e-5, "0.000009 ± 0.000012"), (0.5, 0.0, "0.500 ± 0.000"), (0.0, 0.02, "0.000 ± 0.020"),
])  # fmt: skip
def test_numbers_have_the_digits_that_their_interval_allows(value, half, said):
    assert verdict.spell(verdict.Mean(value, value - half, value + half, 3)) == said


# ---- verdicts and reports


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
    assert (
        b.to_baseline.tells
        and not c.to_baseline.tells
        and a.among_best
        and c.among_best
        and not b.among_best
    )
    assert (
        "is worse than" in said
        and "cannot be told from" in said
        and "corrected for 2 comparisons" in said
    )
    assert a.value.half > 0.1 > b.to_baseline.mean.half, "pairs see what means do not"
    higher = dataclasses.replace(
        found.results, sweep=dataclasses.replace(found.results.sweep, higher_is_better=True)
    )
    assert "is better than" in " ".join(verdict.judge(higher).sentences)


def test_what_cannot_be_told_shares_a_sentence(tmp_path):
    """Two arms are named, ten are counted; the table has them all."""
    for others in (2, 10):
        for arm in range(others + 1):
            for seed in range(3):
                made_up(
                    tmp_path / str(others),
                    f"arm{arm}",
                    seed,
                    4.0 + 0.1 * seed * (-1) ** arm + (arm == 1) * 0.05 * (seed == 1),
                    model__d_ff=32 + 8 * arm,
                )
    few, many = compare(tmp_path / "2").sentences, compare(tmp_path / "10").sentences
    assert few[-1].startswith("arm1 and arm2 cannot be told from arm0: p = ")
    assert (
        "10 others cannot be told from" in many[0]
        and many[-1].startswith("10 others cannot be told from arm0: p = ")
        and len(many) == 2
    )


def test_the_same_difference_in_every_seed_is_not_among_the_best(tmp_path):
    """Shares that are 0 or 1 with every seed: nothing is claimed, and nobody is called equal."""
    for name, shares in {
        "all": (1.0, 1.0, 1.0),
        "most": (1.0, 0.99, 1.0),
        "none": (0.0, 0.0, 0.0),
        "same": (1.0, 1.0, 1.0),
    }.items():
        for seed, share in enumerate(shares):
            made_up(
                tmp_path,
                name,
                seed,
                4.0,
                test_bleu=share,
                model__d_ff=32 + 8 * len(name) + ord(name[0]),
            )
    found = compare(tmp_path, metric="test/bleu")
    assert [name for name, row in found.rows.items() if row.among_best] == ["all", "most", "same"]
    assert any(
        line.startswith(
            "none has a difference to all of -1.000 in each of 3 seeds: without a spread"
        )
        for line in found.sentences
    )


def test_who_ends_with_nothing_learned_has_failed(tmp_path):
    """A loss of 1e30 is no result to take a mean of: it is a divergence that no rounding made infinite."""
    for seed in (0, 1, 2):
        made_up(tmp_path, "a", seed, 4.0 + 0.1 * seed)
        made_up(tmp_path, "b", seed, 1e30 if seed else 4.2, model__d_ff=48)
    found = compare(tmp_path)
    assert (
        found.rows["b"].value.count == 1
        and found.rows["b"].arm.diverged == {1: 8, 2: 8}
        and not found.rows["b"].among_best
    )
    assert any(
        line.startswith("b diverged with 2 of 3 seeds, at step 8, 8") for line in found.sentences
    )


def test_who_lacks_a_seed_is_not_the_best(tmp_path):
    """A seed is easy or hard for all arms: who lacks the hard one has the better mean of what is left."""
    for seed, hard in enumerate((0.5, 0.0, 0.1)):
        made_up(tmp_path, "a", seed, 4.0 + hard)
        made_up(tmp_path, "b", seed, 4.1 + hard + 0.01 * seed if seed else None, model__d_ff=48)
    found = compare(tmp_path)
    assert (
        found.rows["b"].value.mean < found.rows["a"].value.mean
        and "a has the best mean" in found.sentences[0]
    )


def test_arms_that_are_equal_have_no_best(tmp_path):
    for arm in ("a", "b"):
        for seed in (0, 1):
            made_up(tmp_path, arm, seed, 4.0, test_bleu=0.0, model__d_ff=32 + 8 * ord(arm))
    assert (
        compare(tmp_path, metric="test/bleu").sentences[0]
        == "By test/bleu (BLEU) no arm differs from another with any seed: 0.000 ± 0.000."
    )


def test_speed_is_that_of_most_of_a_run(tmp_path):
    """Not of the lines in which it compiled or evaluated."""
    run = made_up(tmp_path, "a", 0, 4.0)
    lines = [
        {"step": n + 1, "train/tokens": 100, "time/tokens_per_second": speed}
        for n, speed in enumerate((1.0, 50.0, 52.0, 2.0, 51.0))
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "test/loss": 4.0}\n'
    )
    made_up(tmp_path, "b", 0, 4.0, model__d_ff=48)
    assert compare(tmp_path).rows["a"].tokens_per_second == 50.0


def test_of_many_arms_the_best_have_lines(tmp_path):
    for arm in range(15):
        made_up(
            tmp_path,
            f"arm{arm:02d}",
            0,
            None if arm == 3 else 4.0 - 0.1 * arm,
            diverged=5 * (arm == 3),
            eval_losses=(6.0, 5.0),
            model__d_ff=32 + 8 * arm,
        )
    pictures = figures.draw(compare(tmp_path))
    said, picture = pictures["loss_by_steps"]
    drawn = [text.get_text() for text in picture.legends[0].get_texts()]
    assert (
        drawn == ["arm00", *(f"arm{arm:02d}" for arm in range(4, 15))]
        and "best 11 of 15 arms; the numbers of all are in curves.csv" in said
    )
    assert len(pictures["by_arm"][1].axes[0].get_yticks()) == 14, "all that came to an end"


def test_one_seed_claims_nothing(tmp_path):
    made_up(tmp_path, "a", 0, 4.0)
    made_up(tmp_path, "b", 0, 9.0, model__d_ff=48)
    found = compare(tmp_path)
    said = " ".join(found.sentences)
    assert (
        "no interval can be had, and nothing is claimed" in said
        and "worse" not in said
        and "better" not in said
    )
    assert not any(row.to_baseline and row.to_baseline.tells for row in found.rows.values())
    assert "one seed" in report.markdown(found) and "there are no intervals" in report.markdown(
        found
    )


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
    for words in (
        "was tested on another text",
        "has another tokenizer",
        "test/loss is no number",
        "test/loss is not there (yet)",
        "has logged nothing yet",
    ):
        assert words in told
    assert next(iter(found.rows.values())).value.count == 2
    page = report.write(found, tmp_path / "report")
    assert "was tested on another text" in page.read_text()


def test_what_the_sweep_asks_about_may_differ(tmp_path):
    """Arms of another text are compared where what varies says which text they are judged on; rows of another length do not."""
    for field, values, counts in (
        ("data.held_out", (4, 5), [2, 2]),
        ("data.length", (8, 16), [2, 0]),
    ):
        folder = tmp_path / field
        sweep = Sweep(
            vary(field, *values), seeds=2, declared=dict.fromkeys(("parameters", "flops"), "of it")
        )
        configs, found = facts_of(sweep)
        Study(folder, sweep, configs, found).write()
        for name in configs:
            for seed in range(2):
                made_up(folder, name, seed, 4.0 + seed, test=name)
        judged = verdict.judge(results.read([folder]))
        assert [row.value.count for row in judged.rows.values()] == counts
        assert len(
            [line for line in judged.results.left_out if "was tested on another text" in line]
        ) == 4 - sum(counts)
        assert ("on texts of their own" in report.markdown(judged)) == (field == "data.held_out")


def test_tokens_of_another_tokenizer_are_not_compared(tmp_path):
    """Neither before nor after: nats per token of 300 pieces are less than of 512, whatever the model knows. Answers and bytes are the same."""
    by = lambda metric: Sweep(
        vary("model.vocab_size", 512, 300),
        seeds=2,
        metric=metric,
        declared=dict.fromkeys(("parameters", "flops"), "of it"),
    )
    configs, found = facts_of(by("test/loss"))
    with pytest.raises(
        UserError,
        match=r"metric 'test/loss' is of tokens, and 'vocab_size=300' has others than 'vocab_size=512'.*test/bits_per_byte",
    ):
        guard.check(by("test/loss"), configs, found)
    for allowed in (
        by("test/bits_per_byte"),
        dataclasses.replace(
            by("test/loss"),
            declared=dict.fromkeys(("parameters", "flops", "tokenizer"), "one id is kept"),
        ),
    ):
        guard.check(allowed, configs, found)
    Study(tmp_path, by("test/bleu"), configs, found).write()
    for name in configs:
        for seed in range(2):
            made_up(tmp_path, name, seed, 4.0 + seed, tokenizer=name, test_bleu=4.0 + seed)
    counts = {
        metric: [
            row.value.count
            for row in verdict.judge(results.read([tmp_path], metric=metric)).rows.values()
        ]
        for metric in ("test/bleu", "test/loss")
    }
    assert counts == {"test/bleu": [2, 2], "test/loss": [2, 0]}


def test_a_classifiers_loss_is_of_labels(tmp_path):
    """So it has their unit, and another tokenizer is no matter."""
    labels = dict(model__family="encoder", model__num_encoder_layers=2, model__num_decoder_layers=0, model__pooling="mean", model__num_labels=3, model__lm_head=False, data__objective="classification", data__packing=False)  # fmt: skip
    sweep = Sweep(
        vary("model.vocab_size", 512, 300),
        seeds=2,
        metric="test/loss",
        declared=dict.fromkeys(("parameters", "flops"), "of it"),
    )
    guard.check(sweep, *facts_of(sweep, **labels))
    for arm, vocab in (("a", 512), ("b", 300)):
        for seed in range(2):
            made_up(
                tmp_path,
                arm,
                seed,
                1.0 + 0.1 * seed,
                tokenizer=arm,
                test_bleu=0.5,
                model__vocab_size=vocab,
                **labels,
            )
    judged = compare(tmp_path, metric="test/loss")
    page = report.markdown(judged)
    assert (
        [row.value.count for row in judged.rows.values()] == [2, 2]
        and "nats per label" in page
        and "per token" not in page
    )


def test_validation_is_of_the_same_text_and_as_much_of_it(tmp_path):
    for arm, batches, text in (("a", 2, "v"), ("b", 4, "v"), ("c", 2, "w")):
        run = made_up(
            tmp_path,
            arm,
            0,
            4.0,
            eval_losses=(5.0, 4.0),
            train__eval_batches=batches,
            model__d_ff=32 + 8 * ord(arm),
        )
        manifest = json.loads((run / "manifest.json").read_text())
        (run / "manifest.json").write_text(
            json.dumps(manifest | {"data": manifest["data"] | {"valid": {"sha256": text}}})
        )
    found = results.read([tmp_path / arm / "seed-0" for arm in "abc"], metric="eval/loss")
    assert [bool(arm.runs) for arm in found.arms.values()] == [True, False, False]
    assert (
        "was validated on 4 batches" in found.left_out[0]
        and "was validated on another text" in found.left_out[1]
    )
    assert all(
        arm.runs for arm in results.read([tmp_path / arm / "seed-0" for arm in "abc"]).arms.values()
    ), "of the test nothing differs"


def test_what_the_test_leaves_out_is_told(tmp_path):
    for arm, size in (("a", 32), ("b", 48)):
        run = made_up(tmp_path, arm, 0, 4.0, model__d_ff=size)
        (run / "test.json").write_text(
            json.dumps(
                {"step": 8, "left_out": {"pairs too long: dropped": 3} if arm == "b" else {}}
            )
        )
    assert (
        "Of the test text arms leave out: a nothing; b pairs too long: dropped 3."
        in report.markdown(compare(tmp_path))
    )


def test_a_run_may_lie_in_a_folder_of_any_name(tmp_path):
    runs = [
        made_up(tmp_path, name, 0, 4.0, model__d_ff=32 + 8 * n)
        for n, name in enumerate(("logs", "b b", "=="))
    ]
    assert list(results.read(runs).arms) == ["logs_", "b_b", "run"]


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
    for seed, last in (
        (1, 4.5),
        (2, 6.0),
    ):  # of three seeds two come there; a seed that the baseline has not tells nothing
        made_up(tmp_path, "a", seed, 4.0, eval_losses=(6.0, 5.0))
        made_up(tmp_path, "b", seed, 4.0, eval_losses=(5.5, last), model__d_ff=48)
    made_up(tmp_path, "c", 7, 4.0, eval_losses=(4.0, 3.0), model__d_ff=64)
    found = compare(tmp_path)
    assert (
        found.rows["b"].reaches.count,
        found.rows["b"].reaches.seeds,
        found.rows["c"].reaches.seeds,
    ) == (2, 3, 1)
    assert any(
        "75% of its steps, 2 of 3 seeds" in cell for row in report.outcome(found) for cell in row
    )


def test_which_way_is_better_is_known_by_name(tmp_path):
    """Of BLEU more, of loss less; a sweep may decide by one and be looked at by the other."""
    for seed in (0, 1, 2):
        made_up(tmp_path, "a", seed, 4.0, test_bleu=30.0 + 0.1 * seed)
        made_up(
            tmp_path, "b", seed, 3.9 + 0.001 * seed, test_bleu=25.0 + 0.2 * seed, model__d_ff=48
        )
    assert report.measured(compare(tmp_path, metric="test/loss"))[:2] == [
        ["arm", "test/bleu"],
        ["a", "30.10 ± 0.25"],
    ]
    assert report.measured(compare(tmp_path, metric="test/bleu"))[0] == ["arm", "test/loss"]
    by_bleu, by_loss = (
        compare(tmp_path, metric=metric).sentences for metric in ("test/bleu", "test/loss")
    )
    assert "a has the best mean" in by_bleu[0] and "b is worse than a" in by_bleu[1]
    assert "b has the best mean" in by_loss[0] and "b is better than a" in by_loss[1]
    assert (
        "a has the best mean"
        in compare(tmp_path, metric="test/loss", higher_is_better=True).sentences[0]
    )
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
        (tmp_path / arm / "seed-0" / "test.json").write_text(
            json.dumps({"step": 8, "decoding": {"beam_size": size, "max_extra": 10}})
        )
    found = compare(tmp_path)
    assert [row.value.count for row in found.rows.values()] == [3, 2, 0] and "c" not in " ".join(
        found.sentences
    ).split()
    said = " ".join(found.results.left_out)
    assert (
        "seed 1: test/loss is not known: the run is at step 4 of 8" in said
        and "evaluated with decoding = beam_size 4" in said
    )


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
        "pre: of 3 values of learning_rate, 0.01 has the best mean" in line
        and "at 0.01 alone within 5% of it; from 0.001 to 0.1 no seed failed" in line
        for line in judged.sentences
    )
    page = report.write(judged, tmp_path / "report").read_text()
    assert (
        "Sensitivity (Wortsman" in page
        and (tmp_path / "report" / "figures" / "scan_optimizer.learning_rate.png").exists()
    )
    with pytest.raises(UserError, match="from a number over 0"):
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
        assert any(line.startswith(f"of {points} values of learning_rate") for line in sentences)
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
            r"Norm of the gradient by layer, decoder, before the first step \(one batch of \d+ rows\)",
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
