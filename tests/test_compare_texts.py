"""Which runs can be compared: texts, tokenizers, labels, and exclusions."""

import dataclasses
import json
import math

import pytest
from studies import configs_and_facts, write_run
from test_compare import compare

from transformer import Sweep, UserError, vary
from transformer.lab import guard, report, results, verdict
from transformer.lab.study import Study


def markdown(judged) -> str:
    return report.rendered("report.md", judged, report.sections(judged))


def test_incomparable_runs_are_excluded(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path, "a", seed, 4.0 + seed)
        write_run(tmp_path, "b", seed, 4.1 + seed, test="other", model__d_ff=48)
        write_run(tmp_path, "c", seed, 4.2 + seed, tokenizer="other", model__d_ff=64)
        write_run(tmp_path, "d", seed, float("nan") if seed else None, model__d_ff=72)
        write_run(tmp_path, "e", seed, 4.3 + seed, model__d_ff=80)
    (tmp_path / "e" / "seed-1" / "metrics.jsonl").write_text('{"step": 8, "test/lo')
    judged = compare(tmp_path)
    exclusions = "\n".join(judged.results.left_out)
    for words in (
        "was tested on a different text",
        "has a different tokenizer",
        "test/loss has no final value",
        "test/loss is not logged yet",
        "has logged nothing yet",
    ):
        assert words in exclusions
    assert next(iter(judged.rows.values())).value.count == 2
    page = report.write(judged, tmp_path / "report")
    assert "was tested on a different text" in page.read_text()


def test_test_text_may_differ_if_the_sweep_varies_it(tmp_path):
    """Arms with different test texts are compared if the varied field sets the text.

    `data.held_out` does. `data.length` changes the sequence length, so its arms are not compared.
    """
    for field, values, counts in (
        ("data.held_out", (4, 5), [2, 2]),
        ("data.length", (8, 16), [2, 0]),
    ):
        folder = tmp_path / field
        sweep = Sweep(
            vary(field, *values),
            seeds=2,
            declared=dict.fromkeys(("parameters", "flops"), "follows from the fields"),
        )
        configs, facts = configs_and_facts(sweep)
        Study(folder, sweep, configs, facts).write()
        for name in configs:
            for seed in range(2):
                write_run(folder, name, seed, 4.0 + seed, test=name)
        judged = verdict.derive_verdict(results.read([folder]))
        assert [row.value.count for row in judged.rows.values()] == counts
        assert len(
            [line for line in judged.results.left_out if "was tested on a different text" in line]
        ) == 4 - sum(counts)
        assert ("tested on different texts" in markdown(judged)) == (field == "data.held_out")


def test_losses_per_token_of_different_tokenizers_are_not_compared(tmp_path):
    """Neither the check before training nor the report compares them.

    Nats per token are lower with 300 pieces than with 512, whatever the quality of the model.
    Answers and bytes do not depend on the tokenizer.
    """
    sweep_by = lambda metric: Sweep(
        vary("model.vocab_size", 512, 300),
        seeds=2,
        metric=metric,
        declared=dict.fromkeys(("parameters", "flops"), "follows from the fields"),
    )
    configs, facts = configs_and_facts(sweep_by("test/loss"))
    with pytest.raises(
        UserError,
        match=r"metric 'test/loss' depends on the tokenizer, and arm 'vocab_size=300' has a "
        r"different tokenizer from 'vocab_size=512'.*test/bits_per_byte",
    ):
        guard.check(sweep_by("test/loss"), configs, facts)
    for allowed in (
        sweep_by("test/bits_per_byte"),
        dataclasses.replace(
            sweep_by("test/loss"),
            declared=dict.fromkeys(("parameters", "flops", "tokenizer"), "varied on purpose"),
        ),
    ):
        guard.check(allowed, configs, facts)
    Study(tmp_path, sweep_by("test/bleu"), configs, facts).write()
    for name in configs:
        for seed in range(2):
            write_run(tmp_path, name, seed, 4.0 + seed, tokenizer=name, test_bleu=4.0 + seed)
    counts = {
        metric: [
            row.value.count
            for row in verdict.derive_verdict(results.read([tmp_path], metric=metric)).rows.values()
        ]
        for metric in ("test/bleu", "test/loss")
    }
    assert counts == {"test/bleu": [2, 2], "test/loss": [2, 0]}


def test_classification_loss_is_per_label(tmp_path):
    """Its unit is nats per label, so arms with different tokenizers are comparable."""
    labels = dict(
        model__family="encoder",
        model__num_encoder_layers=2,
        model__num_decoder_layers=0,
        model__pooling="mean",
        model__num_labels=3,
        model__lm_head=False,
        data__objective="classification",
        data__packing=False,
    )
    sweep = Sweep(
        vary("model.vocab_size", 512, 300),
        seeds=2,
        metric="test/loss",
        declared=dict.fromkeys(("parameters", "flops"), "follows from the fields"),
    )
    guard.check(sweep, *configs_and_facts(sweep, **labels))
    for arm, vocab in (("a", 512), ("b", 300)):
        for seed in range(2):
            write_run(
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
    page = markdown(judged)
    assert (
        [row.value.count for row in judged.rows.values()] == [2, 2]
        and "nats per label" in page
        and "nats per token" not in page
    )


def test_validation_losses_need_the_same_text_and_batch_count(tmp_path):
    for arm, batches, text in (("a", 2, "v"), ("b", 4, "v"), ("c", 2, "w")):
        run = write_run(
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
    compared = results.read([tmp_path / arm / "seed-0" for arm in "abc"], metric="eval/loss")
    assert [bool(arm.runs) for arm in compared.arms.values()] == [True, False, False]
    assert (
        "was validated on 4 batches" in compared.left_out[0]
        and "was validated on a different text" in compared.left_out[1]
    )
    assert all(
        arm.runs for arm in results.read([tmp_path / arm / "seed-0" for arm in "abc"]).arms.values()
    ), "the test texts do not differ"


def test_run_with_nan_in_its_manifest_is_comparable_to_itself(tmp_path):
    for arm, size in (("a", 32), ("b", 48)):
        write_run(tmp_path, arm, 0, 4.0, eval_losses=(5.0, 4.0), model__d_ff=size)
    file = tmp_path / "a" / "seed-0" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"data": manifest["data"] | {"objective": math.nan}}))
    compared = results.read([tmp_path / arm / "seed-0" for arm in "ab"], metric="eval/loss")
    assert [bool(arm.runs) for arm in compared.arms.values()] == [True, False]
    assert compared.predicts_tokens


def test_report_lists_exclusions_from_the_test_text(tmp_path):
    for arm, size in (("a", 32), ("b", 48)):
        run = write_run(tmp_path, arm, 0, 4.0, model__d_ff=size)
        (run / "test.json").write_text(
            json.dumps({"step": 8, "left_out": {"pairs were dropped": 3} if arm == "b" else {}})
        )
    assert (
        "Excluded from the test text, by arm: a (nothing); b (3 pairs were dropped)."
        in markdown(compare(tmp_path))
    )
