"""Training objectives: sequences match the papers, and only their random parts change by epoch.

Every objective is also trained and evaluated. Invalid configs raise errors.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, model_fields, small, start_decoding, tokens

from transformer.config import Experiment, MeshConfig
from transformer.data.objectives.base import Segment
from transformer.data.pipeline import open_data
from transformer.decoding.prefill import advance
from transformer.errors import UserError
from transformer.mapping import from_mapping
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.runs.evaluate import evaluate, load_trained
from transformer.runs.loop import train

PAIR_LABELS = {"token_types": 2, "num_labels": 2, "pooling": "cls", "pooler": True}


def experiment(text, objective, family, model=(), **data):
    name = objective if isinstance(objective, str) else objective.get("name", "")
    files = {"classification": "label.tsv", "tagging": "tags.tsv", "extractive_qa": "answers.tsv"}
    file = files.get(name, "text.txt")
    format = "tsv" if file.endswith("tsv") else "text"
    return from_mapping(
        Experiment,
        {
            "model": model_fields(family, **{"vocab_size": 380, "max_length": 64, **dict(model)}),
            "mesh": {"data": 1},
            "optimizer": {"learning_rate": 1e-2, "warmup_steps": 5, "epsilon": 1e-4},
            "data": {
                "train": str(text / file),
                "format": format,
                "objective": objective,
                "length": 40,
                "batch_size": 8,
                "held_out": 40,
                **data,
            },
            "train": {"steps": 60, "log_every": 20, "tensorboard": False},
        },
    )


NEXT_SENTENCE = {"name": "masked_lm", "next_sentence": True}
SPANS = {"name": "span_corruption", "sentinels": 12, "mean_length": 2.0}
CASES = {
    "masked": ("masked_lm", "encoder", {}, {}),
    "masked words": ({"name": "masked_lm", "whole_words": True}, "encoder", {}, {"packing": False}),
    "next sentence": (NEXT_SENTENCE, "encoder", PAIR_LABELS, {"packing": False, "length": 15}),
    "spans": (SPANS, "encoder_decoder", {}, {"target_length": 16}),
    "spans, decoder": (SPANS, "decoder", {"prefix_lm": True, "position": "t5"}, {}),
    "ul2": ({"name": "ul2", "sentinels": 20}, "encoder_decoder", {}, {}),
    "prefix": ("prefix_lm", "decoder", {"prefix_lm": True, "position": "alibi"}, {}),
    "prefix, two sides": ("prefix_lm", "encoder_decoder", {}, {"target_length": 24}),
    "classification": ("classification", "encoder",
                       {"num_labels": 2, "pooling": "mean", "lm_head": False}, {"packing": False}),
    "classification, decoder": ("classification", "decoder", {"num_labels": 2, "pooling": "last"},
                                {"packing": False, "buckets": (16, 40)}),
    "tagging": ("tagging", "encoder", {"num_labels": 2, "lm_head": False}, {"packing": False}),
    "answers": ("extractive_qa", "encoder", {"num_labels": 2, "pooling": "span", "lm_head": False},
                {"packing": False}),
}  # fmt: skip


def data_of(text, case, **more):
    objective, family, model, data = CASES[case]
    return open_data(experiment(text, objective, family, model, **data | more))


@pytest.mark.parametrize("case", CASES)
def test_draws_depend_only_on_seed_epoch_and_sequence(text, case):
    data, reopened = data_of(text, case), data_of(text, case)
    batches, n = data.batches("train"), data.batches("train").per_epoch
    for step in (n + 3, 0, 3):
        jax.tree.map(np.testing.assert_array_equal, batches[step], reopened.batches("train")[step])
    valid = data.batches("valid")
    jax.tree.map(np.testing.assert_array_equal, valid[0], data.batches("valid")[0])
    draws = []
    draw = lambda epoch: draws.append(epoch) or np.random.default_rng(epoch)
    rows = data.config.objective.sequences(data.stores[""], "train", data.config)
    segments = lambda epoch: rows.segments(5, lambda: draw(epoch))
    same = len(segments(0)) == len(segments(1)) and all(
        np.array_equal(getattr(a, field.name), getattr(b, field.name))
        for a, b in zip(segments(0), segments(1), strict=True)
        for field in dataclasses.fields(Segment)
    )
    assert (
        same == (not draws) and ("classification" in case or case in ("tagging", "answers")) <= same
    )


@pytest.mark.parametrize("case", ["masked", "masked words"])
def test_masked_texts_begin_with_bos(text, case):
    data = data_of(text, case)
    chosen, tokenizer = data.config.objective, data.tokenizer
    rows = chosen.sequences(data.stores[""], "train", data.config)
    segments = [x for i in range(9) for x in rows.segments(i, lambda i=i: np.random.default_rng(i))]
    assert len(segments) >= 9
    for segment in segments:
        for ids in (segment.inputs, segment.targets):
            assert ids[0] == tokenizer.bos and tokenizer.bos not in ids[1:]


def test_prefix_length_is_random_and_prefix_has_no_target_tokens(text):
    data = data_of(text, "prefix")
    rows, cuts = data.config.objective.sequences(data.stores[""], "train", data.config), set()
    for seed in range(30):
        (segment,) = rows.segments(
            int(np.argmax(rows.lengths)), lambda seed=seed: np.random.default_rng(seed)
        )
        cuts.add(segment.prefix)
        assert segment.weights.tolist() == [
            float(i >= segment.prefix - 1) for i in range(len(segment.targets))
        ]
        assert 0 < segment.weights.sum() < len(segment.targets)
    assert len(cuts) > 4
    batch = data.batches("train")[0]
    np.testing.assert_array_equal(
        batch["prefix"].sum(1), [(row > 0).argmax() + 1 for row in batch["weights"]]
    )


def test_prefix_attends_to_itself_bidirectionally():
    """A sequence has two documents. The first has a prefix of three tokens."""
    model, params = make(small("decoder", prefix_lm=True, position="t5"))
    x = tokens(0, 1, 9)
    packing = {
        "segment_ids": jnp.array([[1] * 5 + [2] * 4]),
        "positions": jnp.array([[*range(5), *range(4)]]),
        "prefix_mask": jnp.array([[1, 1, 1, 0, 0, 0, 0, 0, 0]]),
    }
    apply = jax.jit(model.apply)
    base = apply(params, x, **packing)
    depends = np.stack(
        [
            np.abs(np.asarray(apply(params, x.at[0, s].set(3), **packing) - base))[0].max(-1) > 0
            for s in range(9)
        ],
        1,
    )
    expected = np.zeros((9, 9), bool)
    expected[:5, :5], expected[5:, 5:] = np.tril(np.ones((5, 5))), np.tril(np.ones((4, 4)))
    assert not (depends == expected).all()
    expected[:3, :3] = True
    np.testing.assert_array_equal(depends, expected)
    with pytest.raises(ValueError, match="set model.prefix_lm=True"):
        build_model(small("decoder")).apply(params, x, **packing)


@pytest.mark.parametrize("position", ["t5", "rotary", "alibi", "shaw"])
def test_decoding_after_a_prefix_equals_full_forward_pass(position):
    model, params = make(small("decoder", prefix_lm=True, position=position))
    x = tokens(0, 2, 8)
    prefix = jnp.arange(8)[None] < 4
    whole = jax.jit(model.apply)(params, x, prefix_mask=jnp.broadcast_to(prefix, x.shape))
    causal = jax.jit(model.apply)(params, x)
    assert np.abs(np.asarray(whole - causal))[:, :3].max() > 1e-2
    logits, memory = start_decoding(model, params, x[:, :4], 8)
    step = jax.jit(lambda t, m: advance(model, params, t, m))
    for t in range(4, 8):
        np.testing.assert_allclose(logits, whole[:, t - 1], atol=3e-5)
        logits, memory = step(x[:, t], memory)


def test_labels_and_tags_align_with_texts_and_words(text):
    data = data_of(text, "tagging")
    assert data.stores[""].meta["classes"] == ["animal", "other"]
    batch = data.batches("train")[0]
    for row in range(8):
        ids, labels, weights = (batch[f][row] for f in ("inputs", "labels", "label_weights"))
        words = data.tokenizer.decode(ids[batch["segments"][row] > 0]).split()
        assert ["animal" if word in ("cat", "dog") else "other" for word in words] == [
            data.stores[""].meta["classes"][i] for i in labels[weights > 0]
        ]
        assert data.tokenizer.starts_word[ids[weights > 0]].all()
    data = data_of(text, "classification")
    batch = data.batches("train")[0]
    for row in range(8):
        decoded = data.tokenizer.decode(batch["inputs"][row])
        label = data.stores[""].meta["classes"][batch["labels"][row]]
        assert label == ("cat" if "cat" in decoded else "none")


def test_split_does_not_group_texts_by_label(text):
    meta = data_of(text, "classification").stores[""].meta
    assert min(meta[part]["examples"] for part in ("train", "valid", "test")) >= 40


@pytest.mark.parametrize("case", CASES)
def test_every_objective_trains_and_is_evaluated(text, tmp_path, case):
    objective, family, model, data = CASES[case]
    config, steps = (
        experiment(text, objective, family, model, **data),
        200 if case in ("tagging", "answers") else 60,
    )
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
    assert train(config, tmp_path / "run") == steps
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses[-1] < losses[0] - 0.1
    stream = open_data(config).batches("train")
    inputs = [
        sum(np.count_nonzero(x) for name, x in stream[step].items() if name.endswith("segments"))
        for step in range(20)
    ]
    assert lines[0]["train/tokens"] == sum(inputs)
    if "masked" in case:  # tokens are counted whether or not they are predicted
        assert sum(inputs) > 3 * sum(stream[step]["weights"].sum() for step in range(20))
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        metrics = evaluate(load_trained(tmp_path / "run", config, mesh), mesh)
    scores_every_token = config.objective.scores_every_token
    assert metrics["loss"] > 0 and ("bits_per_byte" in metrics) == scores_every_token
    if case == "next sentence":
        assert 0 < metrics["labels_accuracy"] <= 1 and metrics["labels_loss"] > 0
    if family == "encoder" and "classification" in case:
        assert metrics["accuracy"] > 0.9
    if case in ("tagging", "answers"):
        assert metrics["accuracy"] > (0.95 if case == "tagging" else 0.6)


@pytest.mark.parametrize(
    ("objective", "family", "model", "data", "message"),
    [
        ("masked_lm", "decoder", {}, {},
         "'masked_lm' trains a model of family 'encoder', but model.family = 'decoder'"),
        ("masked_ml", "encoder", {}, {},
         "data.objective: unknown value 'masked_ml'; did you mean 'masked_lm'"),
        ({"name": "masked_lm", "rat": 0.3}, "encoder", {}, {},
         "has no option 'rat'; did you mean 'rate'"),
        ({"name": "masked_lm", "rate": 1.5}, "encoder", {}, {}, r"rate: 1.5 must lie in \[0, 1\)"),
        ({"name": "masked_lm", "mask": 0.9, "random": 0.2}, "encoder", {}, {},
         "mask = 0.9 and random = 0.2, which must not be negative or add up to more than 1"),
        (NEXT_SENTENCE, "encoder", {}, {}, "set model.token_types=2, model.num_labels=2"),
        (NEXT_SENTENCE, "encoder", PAIR_LABELS, {},
         "one pair in each sequence; set data.packing=False"),
        ("masked_lm", "encoder", {"lm_head": False, "num_labels": 2}, {},
         "predicts tokens; set model.lm_head=True"),
        ("prefix_lm", "decoder", {}, {}, "set model.prefix_lm=True"),
        ("prefix_lm", "decoder", {"prefix_lm": True}, {"target_length": 8},
         "data.target_length: 8, but model.family = 'decoder' has one stack"),
        ({"name": "span_corruption", "sentinels": 1}, "encoder_decoder", {}, {},
         "1 sentinels, but [23] spans in pieces of"),
        ({"name": "span_corruption", "rate": 0.0}, "encoder_decoder", {}, {},
         "data.objective.rate: 0.0 must be more than 0"),
        ({"name": "span_corruption", "mean_length": 0.0}, "encoder_decoder", {}, {},
         "data.objective.mean_length: 0.0 is too small; at least 1"),
        ({"rate": 0.3}, "encoder", {}, {}, "data.objective: unknown value ''"),
        ("causal_lm", "decoder", {"prefix_lm": True}, {},
         "model.prefix_lm: True, but data.objective 'causal_lm' defines no prefix"),
        (NEXT_SENTENCE, "encoder", PAIR_LABELS, {"packing": False, "length": 4},
         "sequences of at least 5 tokens"),
        ("classification", "decoder", {"num_labels": 2, "pooling": "cls"}, {"packing": False},
         "the first token of a decoder attends only to itself"),
        ("classification", "encoder", {}, {}, "set model.num_labels"),
        ("classification", "encoder", {"num_labels": 2}, {"packing": False},
         "set model.pooling to cls, mean or last"),
        ("classification", "encoder", {"num_labels": 2, "pooling": "mean"}, {},
         "set data.packing=False"),
        ("tagging", "encoder", {"num_labels": 2, "pooling": "mean"}, {"packing": False},
         "set it to none"),
        ("extractive_qa", "encoder", {"num_labels": 2}, {"packing": False},
         "set model.pooling='span'"),
        ("extractive_qa", "encoder", {"num_labels": 3, "pooling": "span"}, {"packing": False},
         "model.num_labels: 3, but model.pooling='span' scores two ends; set it to 2"),
    ],
)  # fmt: skip
def test_invalid_objectives_raise(text, objective, family, model, data, message):
    with pytest.raises(UserError, match=message):
        experiment(text, objective, family, model, **data)


def test_prefix_lm_requires_a_decoder():
    with pytest.raises(UserError, match=r"model\.prefix_lm: True has no .*family='decoder'"):
        small("encoder", prefix_lm=True)


def test_malformed_labels_and_tags_raise(text, tmp_path):
    with pytest.raises(UserError, match=r"model\.num_labels: 5, but the text has 2: cat, none"):
        open_data(
            experiment(
                text,
                "classification",
                "encoder",
                {"num_labels": 5, "pooling": "mean"},
                packing=False,
            )
        )
    (tmp_path / "tags.tsv").write_text("".join(f"a b c {i}\tx y x\n" for i in range(200)))
    with pytest.raises(UserError, match=r"4 words, but 3 tags: 'a b c"):
        open_data(
            experiment(
                tmp_path, "tagging", "encoder", {"num_labels": 2, "vocab_size": 280}, packing=False
            )
        )
    (tmp_path / "label.tsv").write_text("".join(f"text {i}\t{i % 2}\n" for i in range(200)))
    (tmp_path / "valid.tsv").write_text("another text\t2\n")
    config = experiment(
        tmp_path,
        "classification",
        "encoder",
        {"num_labels": 2, "pooling": "mean", "vocab_size": 280},
        packing=False,
    )
    with pytest.raises(
        UserError, match=r"the label '2' of 'another text' is not among those of training: 0, 1"
    ):
        open_data(
            dataclasses.replace(
                config, data=dataclasses.replace(config.data, valid=str(tmp_path / "valid.tsv"))
            )
        )


def test_buckets_hold_both_sides_of_a_prefix(text):
    data = data_of(
        text, "prefix, two sides", length=40, target_length=20, buckets=(16, 40), packing=False
    )
    batches = data.batches("train")
    for step in range(batches.per_epoch):
        batch = batches[step]
        assert batch["inputs"].shape[1] * 2 == batch["source"].shape[1]
        for row in range(len(batch["source"])):
            source = batch["source"][row][batch["source_segments"][row] > 0]
            # generate() also ends a source with eos.
            assert not len(source) or source[-1] == data.tokenizer.eos


def test_split_without_a_full_sequence_raises(text):
    config = experiment(
        text,
        NEXT_SENTENCE,
        "encoder",
        {**PAIR_LABELS, "max_length": 256},
        packing=False,
        length=256,
    )
    with pytest.raises(
        UserError,
        match=r"data\.length: the train split has no sequence of 256 tokens "
        r"\(\d+ texts are too short",
    ):
        open_data(config).batches("train")


def test_vocabulary_too_small_for_special_tokens_raises(text):
    for size, message in (
        (20, "leaves no piece besides the 23 special tokens"),
        (60, "and data.objective needs 23 more for special tokens"),
    ):
        config = experiment(
            text, {"name": "ul2", "sentinels": 20}, "encoder_decoder", {"vocab_size": size}
        )
        with pytest.raises(UserError, match=message):
            open_data(config)


def test_words_dropped_by_the_tokenizer_do_not_shift_tags(text, tmp_path):
    """Tags stay with their words, and a byte-level tokenizer keeps the spaces before words."""
    tokenizers = pytest.importorskip("tokenizers", reason="the test extra brings it")
    (tmp_path / "tags.tsv").write_text(
        "".join(f"the \u200e cat {i}\tA B C D\n" for i in range(200)), encoding="utf-8"
    )
    for make_tokenizer in (tokenizers.BertWordPieceTokenizer, tokenizers.ByteLevelBPETokenizer):
        tokenizer = make_tokenizer()
        special_tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer.train_from_iterator(
            [f"the cat {i}" for i in range(200)],
            vocab_size=380,
            special_tokens=special_tokens,
            show_progress=False,
        )
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        spec = {"path": str(tmp_path / "tokenizer.json")}
        data = open_data(
            experiment(
                tmp_path, "tagging", "encoder", {"num_labels": 4}, packing=False, tokenizer=spec
            )
        )
        batch = data.batches("train")[0]
        drops_word = make_tokenizer is tokenizers.BertWordPieceTokenizer
        for row in range(8):
            has_tag = batch["label_weights"][row] > 0
            tags = [data.stores[""].meta["classes"][i] for i in batch["labels"][row][has_tag]]
            assert tags == (["A", "C", "D"] if drops_word else ["A", "B", "C", "D"])
            words = [data.tokenizer.decode([i]).strip() for i in batch["inputs"][row][has_tag]]
            assert words[0] == "the" and "cat" in words
        if not drops_word:
            assert data.tokenizer.decode(batch["inputs"][0]).startswith("the \u200e cat")
