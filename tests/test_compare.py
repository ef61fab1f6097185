"""What is said of results: statistics against SciPy, verdicts and reports over runs that are made up."""

import dataclasses
import json

import pytest
from studies import made_up

from transformer import UserError
from transformer.lab import figures, report, results, verdict

# ---- statistics


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
        and "no detectable difference from" in said
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
    assert few[-1].startswith("arm1 and arm2 have no detectable difference from arm0: p = ")
    assert (
        "no detectable difference between it and 10 other arms" in many[0]
        and many[-1].startswith("10 other arms have no detectable difference from arm0: p = ")
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
            "none has a difference from all of -1.000 in each of 3 seeds, which leaves no spread"
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
        == "By test/bleu (BLEU), all arms are equal in every seed: 0.000 ± 0.000."
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
        and "best 11 of 15 arms; curves.csv lists all arms" in said
    )
    assert len(pictures["by_arm"][1].axes[0].get_yticks()) == 14, "all that came to an end"


def test_one_seed_claims_nothing(tmp_path):
    made_up(tmp_path, "a", 0, 4.0)
    made_up(tmp_path, "b", 0, 9.0, model__d_ff=48)
    found = compare(tmp_path)
    said = " ".join(found.sentences)
    assert (
        "too few for an interval, so no conclusion is drawn" in said
        and "worse" not in said
        and "better" not in said
    )
    assert not any(row.to_baseline and row.to_baseline.tells for row in found.rows.values())
    assert "one seed" in report.markdown(found) and "there are no intervals" in report.markdown(
        found
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
        "75% of baseline steps, 2 of 3 seeds" in cell
        for row in report.outcome(found)
        for cell in row
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
    with pytest.raises(UserError, match="metric 'test/beauty': its direction is unknown"):
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
        "seed 1: test/loss is unknown: the run is at step 4 of 8" in said
        and "evaluated with decoding = beam_size 4" in said
    )
