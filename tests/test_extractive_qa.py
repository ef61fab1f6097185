"""Extraction of answers: labels, the loss and errors. test_objectives.py trains with it."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import answer_tags
from test_objectives import data_of, experiment

from transformer.data.objectives.classification import ExtractiveQA
from transformer.data.pipeline import open_data
from transformer.errors import UserError
from transformer.lab.guard import facts
from transformer.lab.results import uniform_loss
from transformer.training.step import ModelOutputs


def test_answers_are_words_and_missing_ones_are_at_bos(text):
    data, answers = data_of(text, "answers"), []
    batch = data.batches("train")[0]
    for row in range(8):
        ids, labels, weights = (batch[f][row] for f in ("inputs", "labels", "label_weights"))
        words = data.tokenizer.decode(ids[batch["segments"][row] > 0]).split()
        tags = answer_tags(" ".join(words)).split()
        assert labels[weights > 0].tolist() == [0, *(tag == "answer" for tag in tags)]
        answers.append("answer" in tags)
    assert 0 < sum(answers) < 8


def test_loss_of_a_span_is_that_of_its_ends_among_the_words():
    """Computed by hand: one answer of several words, a text without an answer, and padding."""
    labels = np.array([[0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]])
    weights = np.array([[1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]])
    logits = np.random.default_rng(0).normal(size=(3, 6, 2)).astype(np.float32)
    logits[0, 2, 0] = logits[0, 4, 1] = logits[1, 0, 0] = 5.0  # both ends, and one end
    logits[1, 3, 1] = 5.0
    batch = {"labels": jnp.array(labels), "label_weights": jnp.array(weights, jnp.float32)}
    for smoothing in (0.0, 0.1):
        outputs = ModelOutputs(None, None, jnp.array(logits), smoothing)
        (found,) = ExtractiveQA().losses(outputs, batch).values()
        expected = nll = 0.0
        for row, ends in ((0, (2, 4)), (1, (0, 0))):
            words = np.flatnonzero(weights[row])
            for side, end in enumerate(ends):
                x = logits[row, words, side]
                logp = x - np.log(np.exp(x).sum())
                target = logp[list(words).index(end)]
                expected -= ((1 - smoothing) * target + smoothing * logp.mean()) / 2
                nll -= target / 2
        assert float(found.loss) == pytest.approx(expected, rel=1e-5)
        assert float(found.nll) == pytest.approx(nll, rel=1e-5)
        assert (float(found.correct), float(found.weight)) == (1.0, 2.0)
        assert float(ExtractiveQA().weights(batch)["labels"]) == 2.0


def test_text_without_the_tag_of_answers_raises(tmp_path):
    (tmp_path / "answers.tsv").write_text("".join(f"a b {i}\ty z z\n" for i in range(200)))
    span = {"num_labels": 2, "pooling": "span", "vocab_size": 280}
    with pytest.raises(UserError, match=r"data: tags y, z; tag the words of an answer 'answer'"):
        open_data(experiment(tmp_path, "extractive_qa", "encoder", span, packing=False)).batches(
            "train"
        )


def test_uniform_predictions_choose_among_the_positions(text):
    """A run whose loss is more than twice that of uniform predictions counts as diverged."""
    fields = {"num_labels": 2, "pooling": "span", "lm_head": False}
    config = experiment(text, "extractive_qa", "encoder", fields, packing=False)
    assert uniform_loss(config) == pytest.approx(np.log(config.data.length))


def test_programs_are_known_without_text(text):
    fields = {"num_labels": 2, "pooling": "span", "lm_head": False}
    assert facts(experiment(text, "extractive_qa", "encoder", fields, packing=False)).flops > 0
