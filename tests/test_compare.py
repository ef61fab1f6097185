"""Verdicts and reports on synthetic runs."""

import dataclasses
import json
import re

import pytest
from studies import write_run

from transformer import UserError
from transformer.lab import figures, report, report_tables, results, verdict


def compare(folder, **options):
    runs = sorted(path.parent for path in folder.glob("*/*/config.json"))
    return verdict.derive_verdict(results.read(runs, **options))


def test_verdict_agrees_with_confidence_intervals(tmp_path):
    for seed, noise in enumerate((0.0, 0.3, 0.1, 0.2)):  # a seed is easy or hard for all arms
        write_run(tmp_path, "a", seed, 4.0 + noise)
        write_run(tmp_path, "b", seed, 4.1 + noise + 0.001 * seed, model__d_ff=48)
        write_run(tmp_path, "c", seed, 4.0 + noise + (-1) ** seed * 0.05, model__d_ff=64)
    judged = compare(tmp_path)
    assert list(judged.rows) == ["a", "b", "c"]
    a, b, c = judged.rows.values()
    assert [row.outcome for row in (a, b, c)] == ["baseline", "worse", "not detectable"]
    assert re.fullmatch(
        r"b is worse than a: its test/loss is 0\.1015 \[0\.09\d\d, 0\.10\d\d\] nats per "
        r"token higher; c does not differ detectably from a: the difference is \+0\.000 "
        r"\[-0\.\d+, \+0\.\d+\] nats per token \(95 % intervals over 4 seeds, corrected "
        r"p < 0\.001 for the detectable difference\)\.",
        judged.sentences[0],
    )
    assert a.value.half > 0.1 > b.to_baseline.mean.half, "pairing narrows the interval"
    higher = judged.results._replace(
        sweep=dataclasses.replace(judged.results.sweep, higher_is_better=True)
    )
    assert (
        verdict.derive_verdict(higher).sentences[0].startswith("b is better than a: its test/loss")
    )


def test_indistinguishable_arms_share_a_sentence(tmp_path):
    """The verdict names two arms but only counts ten; the table contains them all."""
    for count in (2, 10):
        for arm in range(count + 1):
            for seed in range(3):
                write_run(
                    tmp_path / str(count),
                    f"arm{arm}",
                    seed,
                    4.0 + 0.1 * seed * (-1) ** arm + (arm == 1) * 0.05 * (seed == 1),
                    model__d_ff=32 + 8 * arm,
                )
    few, many = compare(tmp_path / "2").sentences, compare(tmp_path / "10").sentences
    assert few[0].startswith(
        "arm1 and arm2 do not differ detectably from arm0: the differences are"
    )
    several = "10 other arms do not differ detectably from arm0: the differences are between"
    assert many[0].startswith(several)
    assert len(few) == len(many) == 1 and few[0].endswith("or more).")


def test_clear_winner_is_named_first(tmp_path):
    """The verdict ranks better arms by their difference; one arm alone gets its p value."""
    for seed, noise in enumerate((0.0, 0.3, 0.1)):
        write_run(tmp_path, "a", seed, 4.0 + noise)
        write_run(tmp_path, "b", seed, 3.9 + noise + 0.001 * seed, model__d_ff=48)
        write_run(tmp_path, "c", seed, 3.5 + noise + 0.001 * seed, model__d_ff=64)
    assert (
        compare(tmp_path)
        .sentences[0]
        .startswith(
            "c and b are better than a: their test/loss is 0.4990 [0.4965, 0.5015] and "
            "0.0990 [0.0965, 0.1015] nats per token lower (95 % intervals over 3 seeds, corrected "
            "p < 0.001"
        )
    )
    runs = sorted(path.parent for path in tmp_path.glob("[ab]/*/config.json"))
    assert verdict.derive_verdict(results.read(runs)).sentences == (
        "b is better than a: its test/loss is 0.0990 [0.0965, 0.1015] nats per token lower "
        "(95 % interval over 3 seeds, p < 0.001).",
    )


def test_difference_that_the_correction_makes_undetectable_is_explained(tmp_path):
    noises = {"b": (0.10, 0.16, 0.2), "c": (0.1, -0.2, 0.05), "d": (-0.1, 0.2, 0.05)}
    for seed in range(3):
        write_run(tmp_path, "a", seed, 4.0)
        for n, (arm, noise) in enumerate(noises.items()):
            write_run(tmp_path, arm, seed, 4.0 + noise[seed], model__d_ff=48 + 8 * n)
    judged = compare(tmp_path)
    versus = judged.rows["b"].to_baseline
    assert versus.mean.low > 0 and versus.p > 0.05
    assert judged.rows["b"].outcome == "inconclusively worse"
    answer = (
        "It is inconclusive whether b is worse than a: its test/loss is 0.15 [0.03, 0.28] nats per "
        "token higher in 3 of 3 seeds; c and d do not differ detectably from a: the differences are"
    )
    assert judged.sentences[0].startswith(answer) and "corrected p = 0.10" in judged.sentences[0]
    text = report.rendered("report.md", judged, report.sections(judged))
    assert "inconclusive if its 95 % t interval" in text.replace("\n", " ")
    # A single comparison that other tests make undetectable: both p values, and the seeds.
    (alone,) = verdict._clauses(judged.results, "a", {"b": versus})
    assert alone == "it" + answer.partition(";")[0][2:]
    assert verdict._sentence([alone], {"b": versus}).endswith("p = 0.034, corrected p = 0.10).")
    single = verdict._sentence([alone], {"b": versus._replace(p=versus.alone)})
    assert single.endswith("seeds, p = 0.034).")


def test_constant_difference_is_not_tested(tmp_path):
    """A share that is 0 or 1 in every seed supports no claim, not even that arms are equal."""
    for name, shares in {
        "all": (1.0, 1.0, 1.0),
        "most": (1.0, 0.99, 1.0),
        "none": (0.0, 0.0, 0.0),
        "same": (1.0, 1.0, 1.0),
    }.items():
        for seed, share in enumerate(shares):
            write_run(
                tmp_path,
                name,
                seed,
                4.0,
                test_bleu=share,
                model__d_ff=32 + 8 * len(name) + ord(name[0]),
            )
    judged = compare(tmp_path, metric="test/bleu")
    outcomes = {name: row.outcome for name, row in judged.rows.items()}
    assert outcomes == {
        "all": "baseline", "most": "not detectable", "none": "untested", "same": "not detectable"
    }  # fmt: skip
    assert "about none, no conclusion is possible" in judged.sentences[0]
    assert "none: -1.000 from all in each seed, which leaves no spread for a t-test." in (
        judged.sentences
    )


def test_huge_final_loss_counts_as_divergence(tmp_path):
    """A loss of 1e30 is a divergence that stayed finite; means exclude it."""
    for seed in (0, 1, 2):
        write_run(tmp_path, "a", seed, 4.0 + 0.1 * seed)
        write_run(tmp_path, "b", seed, 1e30 if seed else 4.2, model__d_ff=48)
    judged = compare(tmp_path)
    assert (
        judged.rows["b"].value.count == 1
        and judged.rows["b"].arm.diverged == {1: 8, 2: 8}
        and judged.rows["b"].outcome == "untested"
    )
    assert any(
        line.startswith("b diverged in 2 of 3 seeds, at step 8, 8") for line in judged.sentences
    )


def test_arm_that_lacks_a_seed_is_not_better(tmp_path):
    """A seed is easy or hard for all arms; an arm without the hard seed has a better mean.

    Only common seeds are compared, so the verdict is that it is worse.
    """
    for seed, difficulty in enumerate((0.5, 0.0, 0.1)):
        write_run(tmp_path, "a", seed, 4.0 + difficulty)
        write_run(
            tmp_path, "b", seed, 4.1 + difficulty + 0.001 * seed if seed else None, model__d_ff=48
        )
    judged = compare(tmp_path)
    assert judged.rows["b"].value.mean < judged.rows["a"].value.mean and judged.sentences[
        0
    ].startswith("b is worse than a")


def test_equal_arms_are_called_equal(tmp_path):
    for arm in ("a", "b"):
        for seed in (0, 1):
            write_run(tmp_path, arm, seed, 4.0, test_bleu=0.0, model__d_ff=32 + 8 * ord(arm))
    assert (
        compare(tmp_path, metric="test/bleu").sentences[0]
        == "By test/bleu (BLEU), all arms are equal in every seed: 0.000 ± 0.000."
    )


def test_speed_ignores_compilation_and_evaluation(tmp_path):
    """Log lines that include compilation or evaluation do not count."""
    run = write_run(tmp_path, "a", 0, 4.0)
    lines = [
        {"step": n + 1, "train/tokens": 100, "time/tokens_per_second": speed}
        for n, speed in enumerate((1.0, 50.0, 52.0, 2.0, 51.0))
    ]
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 8, "test/loss": 4.0}\n'
    )
    write_run(tmp_path, "b", 0, 4.0, model__d_ff=48)
    assert compare(tmp_path).results.arms["a"].speed == 50.0


def test_loss_plot_shows_baseline_and_best_of_many_arms(tmp_path):
    for arm in range(15):
        write_run(
            tmp_path,
            f"arm{arm:02d}",
            0,
            None if arm == 3 else 4.0 - 0.1 * arm,
            diverged=5 * (arm == 3),
            eval_losses=(6.0, 5.0),
            model__d_ff=32 + 8 * arm,
        )
    judged = compare(tmp_path)
    caption, figure = figures.curves(judged)["loss_by_steps"]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert (
        labels == ["arm00", *(f"arm{arm:02d}" for arm in range(4, 15))]
        and "11 best other arms, of 15 in all; curves.csv contains all arms" in caption
    )
    ticks = figures.answer(judged)["by_arm"][1].axes[0].get_xticks()
    assert len(ticks) == 14, "all arms that finished"


def test_single_seed_supports_no_conclusion(tmp_path):
    write_run(tmp_path, "a", 0, 4.0)
    write_run(tmp_path, "b", 0, 9.0, model__d_ff=48)
    judged = compare(tmp_path)
    text = " ".join(judged.sentences)
    assert judged.sentences[0] == (
        "No conclusion is possible: the variation between seeds is unknown, because no two arms "
        "share two seeds."
    )
    assert "worse" not in text and "better" not in text
    assert not any(
        row.to_baseline and row.to_baseline.is_detectable for row in judged.rows.values()
    )
    text = report.rendered("report.md", judged, report.sections(judged))
    assert "one seed" in text and "there are no intervals" in text


def test_folder_names_become_valid_arm_names(tmp_path):
    runs = [
        write_run(tmp_path, name, 0, 4.0, model__d_ff=32 + 8 * n)
        for n, name in enumerate(("logs", "b b", "=="))
    ]
    assert list(results.read(runs).arms) == ["logs_", "b_b", "run"]


def test_divergence_is_reported(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "a", seed, 4.0 + seed)
        write_run(tmp_path, "b", seed, 4.0 + seed, diverged=5 if seed else 0, model__d_ff=48)
    judged = compare(tmp_path)
    assert any("diverged in 1 of 2 seeds, at step 5" in line for line in judged.sentences)
    assert [row.value.count for row in judged.rows.values()] == [2, 1]
    for seed in (0, 1):
        write_run(tmp_path, "c", seed, 3.0 + seed + 0.01 * seed, model__d_ff=64)
        write_run(tmp_path, "d", seed, None, diverged=3, model__d_ff=72)
    answer = compare(tmp_path).sentences[0]
    assert answer.startswith("c is better than a") and "; d diverged in every seed (" in answer
    for seed in (0, 1):
        write_run(tmp_path / "gone", "a", seed, None, diverged=3)
        write_run(tmp_path / "gone", "b", seed, 4.0 + seed, model__d_ff=48)
        write_run(tmp_path / "gone", "c", seed, 4.5 + seed, model__d_ff=64)
    assert compare(tmp_path / "gone").sentences[0] == (
        "No comparison is possible: the baseline, a, lacks a value of test/loss (nats per token)."
    )


def test_share_of_steps_to_reach_the_baseline(tmp_path):
    write_run(tmp_path, "a", 0, 4.0, eval_losses=(6.0, 5.0))
    write_run(tmp_path, "b", 0, 4.0, eval_losses=(5.5, 4.5), model__d_ff=48)
    write_run(tmp_path, "c", 0, 4.0, eval_losses=(6.5, 6.0), model__d_ff=64)
    a, b, c = compare(tmp_path).rows.values()
    reached = lambda row: (sum(x <= 1 for x in row.reaches), len(row.reaches))
    assert [a.reaches, b.reaches] == [[1.0], [0.75]] and reached(c) == (0, 1)
    # Two of three seeds reach it; a seed that the baseline lacks does not count.
    for seed, last in ((1, 4.5), (2, 6.0)):
        write_run(tmp_path, "a", seed, 4.0, eval_losses=(6.0, 5.0))
        write_run(tmp_path, "b", seed, 4.0, eval_losses=(5.5, last), model__d_ff=48)
    write_run(tmp_path, "c", 7, 4.0, eval_losses=(4.0, 3.0), model__d_ff=64)
    judged = compare(tmp_path)
    assert reached(judged.rows["b"]) == (2, 3) and len(judged.rows["c"].reaches) == 1
    assert any(
        "75% of baseline steps, 2 of 3 seeds" in cell
        for row in report_tables.outcome(judged)
        for cell in row
    )


def test_metric_name_determines_which_direction_is_better(tmp_path):
    """Higher BLEU and lower loss are better; a report may use another metric than its sweep."""
    for seed in (0, 1, 2):
        write_run(tmp_path, "a", seed, 4.0, test_bleu=30.0 + 0.1 * seed)
        write_run(
            tmp_path, "b", seed, 3.9 + 0.001 * seed, test_bleu=25.0 + 0.2 * seed, model__d_ff=48
        )
    assert report_tables.measured(compare(tmp_path, metric="test/loss"))[:2] == [
        ["arm", "test/bleu"],
        ["a", "30.10 ± 0.25"],
    ]
    assert report_tables.measured(compare(tmp_path, metric="test/bleu"))[0] == ["arm", "test/loss"]
    by_bleu, by_loss = (
        compare(tmp_path, metric=metric).sentences for metric in ("test/bleu", "test/loss")
    )
    assert "b is worse than a: its test/bleu" in by_bleu[0]
    assert "b is better than a: its test/loss" in by_loss[0]
    reversed_ = compare(tmp_path, metric="test/loss", higher_is_better=True)
    assert "b is worse than a" in reversed_.sentences[0]
    command = report.reproduction_commands(
        compare(tmp_path, metric="test/bleu", baseline="b").results
    )
    assert command.endswith("--metric=test/bleu --baseline=b")
    write_run(tmp_path, "c", 0, 4.0, test_beauty=1.0)
    with pytest.raises(UserError, match="metric 'test/beauty': its direction is unknown"):
        compare(tmp_path, metric="test/beauty")


def test_first_screen_states_the_sizes_that_are_known(tmp_path):
    write_run(tmp_path, "a", 0, 4.0)
    write_run(tmp_path, "b", 0, 4.5, model__d_ff=48)
    found = compare(tmp_path).results
    counts = {"a": 1000, "b": 1200}
    sized = {name: x._replace(parameters=counts[name]) for name, x in found.arms.items()}
    unknown = {name: x._replace(parameters=0) for name, x in found.arms.items()}
    text = report.scope(found._replace(arms=sized))
    assert text.startswith("1,000 to 1,200 parameters, ") and text.endswith(" in all arms")
    assert "parameters" not in report.scope(found._replace(arms=unknown))


def test_unfinished_runs_and_other_decoding_settings_are_excluded(tmp_path):
    """A run that is unfinished or was evaluated with other decoding settings is excluded."""
    for seed in (0, 1, 2):
        write_run(tmp_path, "a", seed, 4.0 + 0.1 * seed)
        write_run(tmp_path, "b", seed, 4.5 + 0.1 * seed, model__d_ff=48)
        unfinished = write_run(tmp_path, "c", seed, None, model__d_ff=64)
        (unfinished / "metrics.jsonl").write_text(
            '{"step": 4, "train/loss": 3.0, "test/loss": 1.0}\n'
        )
    for arm, size in (("a", 1), ("b", 4)):
        (tmp_path / arm / "seed-0" / "test.json").write_text(
            json.dumps({"step": 8, "decoding": {"beam_size": size, "max_extra": 10}})
        )
    judged = compare(tmp_path)
    assert [row.value.count for row in judged.rows.values()] == [3, 2, 0] and "c" not in " ".join(
        judged.sentences
    ).split()
    manifest = tmp_path / "b" / "seed-1" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"transformer": "0.1.0"}))
    assert f"{manifest.parent}: workdir: version 0.1.0 of this package wrote" in " ".join(
        compare(tmp_path).results.left_out
    ), "a run of another version is not damaged"
    exclusions = " ".join(judged.results.left_out)
    assert (
        "seed 1: test/loss is unknown: the run is at step 4 of 8" in exclusions
        and "evaluated with decoding = beam_size 4" in exclusions
    )
