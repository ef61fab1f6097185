"""Synthetic tasks: the generated text, and how answers are judged."""

import dataclasses
import itertools
import json
import re

import numpy as np
import pytest
from conftest import TINY, model_fields

from transformer import UserError
from transformer.config import Experiment
from transformer.data import probes
from transformer.data.pipeline import open_data
from transformer.decoding.generate import Generator
from transformer.lab import inspection
from transformer.mapping import from_mapping
from transformer.parallel.mesh import make_mesh, use
from transformer.runs.evaluate import evaluate, load_trained
from transformer.runs.loop import train


def is_correct(task: str, question: str, answer: str) -> bool:
    """Returns whether the answer is right, computed independently of the generator."""
    match task:
        case "copy" | "reverse" | "sort":
            return (
                answer
                == {
                    "copy": question,
                    "reverse": "".join(reversed(question)),
                    "sort": "".join(sorted(question)),
                }[task]
            )
        case "addition":
            return int(answer) == eval(re.sub(r"\b0+(\d)", r"\1", question))
        case "induction":
            letters, query = question[:-1], question[-1]
            return query in letters and (letters.split(query)[-1] + query)[0] == answer
        case "needle":
            return question[:-1].count(question[-1]) == 1 and f"{question[-1]}{answer}" in question
        case "dyck":
            brackets = question + answer
            while (shorter := re.sub(r"\(\)|\[\]|\{\}", "", brackets)) != brackets:
                brackets = shorter
            return not brackets and not re.search(r"[(\[{]", answer) and bool(answer)


@pytest.mark.parametrize("task", probes.TASKS)
def test_generated_answers_are_correct(task):
    spec = probes.parse(f"{task}:4-24:300")
    examples = list(spec.draw())
    assert (
        len(set(examples)) > 250
        and examples == list(spec.draw())
        and examples != list(probes.parse(f"{task}:4-25:300").draw())
    )
    for question, answer in examples:
        assert is_correct(task, question, answer), (question, answer)
    wrong = sum(
        is_correct(task, question, other_answer)
        for (question, answer), (_, other_answer) in itertools.pairwise(examples)
        if answer != other_answer
    )
    assert wrong == 0
    lengths = {len(question.split("+")[0]) - (task == "needle") for question, _ in examples}
    assert lengths == set(range(4, 25)), "examples have all lengths of the range, and no others"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("copi:1-4", "did you mean 'copy'"),
        ("copy", "TASK:SHORTEST-LONGEST"),
        ("copy:4-1", "1 <= SHORTEST <= LONGEST"),
        ("copy:0-3", "1 <= SHORTEST"),
    ],
)
def test_invalid_probe_paths_raise(path, message):
    with pytest.raises(UserError, match=f"data.train: .*{message}"):
        experiment("decoder", path)


def experiment(family: str, path: str = "copy:1-3:2000", **changes) -> Experiment:
    return from_mapping(
        Experiment,
        {
            "model": model_fields(
                family,
                {**TINY, "num_encoder_layers": 1},
                d_model=32,
                d_ff=64,
                num_heads=2,
                position="rotary",
                **changes,
            ),
            "data": {
                "format": "probe",
                "train": path,
                "objective": "seq2seq",
                "length": 16,
                "batch_size": 32,
                "held_out": 32,
                "tokenizer": {"kind": "char"},
            },
            "optimizer": {"warmup_steps": 10, "learning_rate": 1e-2},
            "mesh": {"data": 1},
            "train": {
                "steps": 120,
                "tensorboard": False,
                "evaluators": (
                    {"name": "probe", "lengths": (2, 5), "examples": 64},
                    "bleu_by_length",
                ),
            },
        },
    )


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_exact_scores_match_generated_answers(family, tmp_path):
    config = experiment(family)
    train(config, tmp_path)
    with use(make_mesh(config.mesh)) as mesh:
        trained = load_trained(tmp_path, config, mesh)
        evaluate(trained, mesh)
        metrics, exact_shares = json.loads((tmp_path / "test.json").read_text()), []
        for length in (2, 5):
            questions, answers = zip(
                *probes.TaskSpec("copy", length, length, 64).draw("probe "), strict=True
            )
            written = Generator(config, trained.params, trained.tokenizer)(questions)
            exact_shares.append(np.mean([a == b for a, b in zip(answers, written, strict=True)]))
            assert metrics[f"probe/exact/{length:05d}"] == pytest.approx(exact_shares[-1])
            assert (
                metrics[f"probe/exact/{length:05d}"] <= metrics[f"probe/tokens/{length:05d}"] < 1.01
            )
    samples = [
        dict(re.split(r" {2,}", line) for line in block.splitlines())
        for block in (tmp_path / "samples.txt").read_text().split("\n\n")
    ]
    assert (
        metrics["exact"]
        == np.mean([sample["model"] == sample["source"] for sample in samples])
        > 0.2
        and "bleu" not in metrics
    )
    assert exact_shares[0] > 0.2 and exact_shares[0] != exact_shares[1], (
        "the model learned part of the task, so the comparison is meaningful"
    )


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("task", probes.TASKS)
def test_held_out_questions_are_not_in_training(task, turned):
    config = experiment("encoder_decoder", f"{task}:8-12:600", vocab_size=64)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, reverse=turned, test=f"{task}:8-11:600")
    )
    store = open_data(config).stores[""]
    question, answer = (1, 0) if turned else (0, 1)
    held_out, tested = (store.examples(part) for part in ("valid", "test"))
    pairs = [
        tuple(reversed(pair)) if turned else pair for pair in probes.parse(config.data.train).draw()
    ]
    train = [pair for pair in pairs if pair not in set(held_out)]
    assert len(train) + len(held_out) == 600 and len({pair[question] for pair in held_out}) == 32
    assert not {pair[question] for pair in train} & {pair[question] for pair in held_out}
    if task in ("needle", "induction"):
        assert {pair[answer] for pair in held_out} <= {pair[answer] for pair in train}, (
            "these tasks have few answers, and training covers all of them"
        )
    assert store.meta["overlap"] == {
        "test": sum(pair[question] in {pair[question] for pair in train} for pair in tested)
    }


def test_probe_examples_are_not_in_training():
    """The evaluator draws other examples than training does, even for the same path."""
    questions = lambda purpose: {
        question for question, _ in probes.TaskSpec("copy", 12, 12, 256).draw(purpose)
    }
    assert len(questions("probe ")) == 256 and questions("") == {
        question for question, _ in probes.parse("copy:12-12:256").draw()
    }
    assert not questions("probe ") & questions("")


def test_decoder_targets_are_only_the_answer():
    config = experiment("decoder")
    data = open_data(config)
    sequences = data.config.objective.sequences(data.stores[""], "train", config)
    assert max(map(len, sequences.members)) > 1, "several pairs share a sequence"
    tokenizer, (first, *_) = data.tokenizer, sequences.segments(0, None)
    question, answer = (
        tokenizer.decode(data.stores[""].texts("train", side)[sequences.members[0][0]])
        for side in (0, 1)
    )
    (answer_ids,) = tokenizer.encode([answer])
    assert first.inputs.tolist() == [
        tokenizer.bos,
        *tokenizer.encode([question])[0],
        tokenizer.eos,
        *answer_ids,
    ]
    assert first.targets.tolist() == [*first.inputs[1:], tokenizer.eos]
    assert (
        first.targets[first.weights > 0].tolist() == [*answer_ids, tokenizer.eos]
        and first.prefix is None
    )
    prefix_config = experiment("decoder", prefix_lm=True)
    assert (
        prefix_config.objective.sequences(data.stores[""], "train", prefix_config)
        .segments(0, None)[0]
        .prefix
        == len(question) + 2
    )


@pytest.mark.parametrize("prefix_lm", [False, True])
def test_inspected_segments_match_training_segments(prefix_lm):
    """`inspect` passes a pair to a decoder as training does.

    For a text alone, the targets of a prefix LM are its second half.
    """
    config = experiment("decoder", prefix_lm=prefix_lm)
    data = open_data(config)
    sequences = data.config.objective.sequences(data.stores[""], "train", config)
    question, answer = (
        data.tokenizer.decode(data.stores[""].texts("train", side)[sequences.members[0][0]])
        for side in (0, 1)
    )
    trained, (segment, truncated) = (
        sequences.segments(0, None)[0],
        inspection._segment(config, data.tokenizer, question, answer),
    )
    assert (
        not truncated and segment.prefix == trained.prefix and (segment.prefix is None) != prefix_lm
    )
    for field in ("inputs", "targets", "weights"):
        np.testing.assert_array_equal(getattr(segment, field), getattr(trained, field))
    data_of_text = dataclasses.replace(
        config.data, format="text", train="x", objective="prefix_lm" if prefix_lm else "causal_lm"
    )
    text_config = dataclasses.replace(
        config, data=data_of_text, train=dataclasses.replace(config.train, evaluators=())
    )
    segment, _ = inspection._segment(text_config, data.tokenizer, "abcdef", "")
    assert segment.weights.tolist() == [1.0 - prefix_lm] * 3 + [1.0] * 3 and segment.prefix == (
        4 if prefix_lm else None
    )


def test_pairs_too_long_for_a_decoder_are_dropped_or_cut():
    for too_long in ("drop", "cut"):
        base = experiment("decoder", "copy:6-10:200")
        config = from_mapping(
            Experiment,
            {
                "model": base.model,
                "data": {**vars(base.data), "too_long": too_long, "packing": False},
            },
        )
        data = open_data(config)
        sequences = data.config.objective.sequences(data.stores[""], "train", config)
        sizes = [
            sum(len(data.stores[""].texts("train", side)[i]) for side in (0, 1))
            for i in range(len(data.stores[""].texts("train", 0)))
        ]
        num_long = sum(size > 16 for size in sizes)
        assert 0 < num_long < len(sizes) and list(sequences.report.values()) == [num_long]
        assert (
            len(sequences.lengths) == (len(sizes) if too_long == "cut" else len(sizes) - num_long)
            and max(sequences.lengths) <= 16
        )
        for row in range(len(sequences.lengths)):
            (segment,) = sequences.segments(row, None)
            assert (
                len(segment.inputs) == len(segment.targets) == sequences.lengths[row]
                and segment.targets[-1] == data.tokenizer.eos
            )
