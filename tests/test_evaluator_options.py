"""Every option of an evaluator has an effect on the names and values that it yields."""

import dataclasses
import types

import numpy as np
import pytest
from studies import write_run
from test_fields import BOTH, DECODER

from transformer import Sweep, UserError, vary
from transformer.config import Experiment
from transformer.evaluation import losses
from transformer.evaluation.evaluators import EVALUATORS, predictions, translation
from transformer.evaluation.evaluators.base import Evaluator, Kind
from transformer.lab.profiles import profiles
from transformer.lab.results import read
from transformer.mapping import from_mapping
from transformer.units import kind

OPTIONS = {
    "loss_by_position": {"parts": 4},
    "extrapolation": {"times": 2, "tokens": 100, "sliding": False},
    "loss_with": {"change": "model.window=3"},
    "probe": {"task": "copy", "lengths": (3,), "examples": 8}, "bleu_by_length": {"words": 1},
    "translation": {"sentences": 3, "samples": 1},
    "depth_profile": {}, "attention": {}, "logit_lens": {}, "order": {},
}  # fmt: skip
BESIDE = {"loss_with": {"change": "model.window=2"}, "extrapolation": {"times": 4}}


def make_subject(config):
    """A subject whose first three translations are right."""
    targets = ["a b c d", "x y", "z"]
    examples = [(f"a b c d {n}", f"{targets[n // 3]} {n}") for n in range(9)]
    return types.SimpleNamespace(
        config=config,
        mesh=types.SimpleNamespace(size=1),
        with_config=make_subject,
        data=types.SimpleNamespace(tokenizer=Letters, examples=lambda part: examples),
        part="valid",
        programs={},
    )


def test_every_evaluator_option_has_an_effect(monkeypatch):
    """Measurements are stubs, so a result shows only what is measured and how it is summarized."""
    config = from_mapping(
        Experiment,
        {
            "model": BOTH | {"max_length": 32},
            "data": {
                "format": "probe",
                "train": "reverse:1-4",
                "objective": "seq2seq",
                "length": 16,
            },
        },
    )
    decoder_config = from_mapping(
        Experiment,
        {
            "model": DECODER | {"max_length": 16},
            "data": {"corpus": "pydoc", "length": 16, "batch_size": 2},
        },
    )
    texts = ["a b c d"] * 12 + ["a"] * 12
    monkeypatch.setattr(
        losses,
        "mean",
        lambda subject, _, n=0: (hash((subject.config.model, subject.config.data, n)), 0.0),
    )
    monkeypatch.setattr(
        losses,
        "by_token",
        lambda *args: [(np.ones((1, 16)), np.arange(16)[None], np.ones((1, 16)))],
    )
    monkeypatch.setattr(
        predictions, "_right", lambda subject, store, snapshot: (hash(store.target_task), 0.0)
    )
    translations = (texts, texts, [[text] for text in texts])
    snapshot = types.SimpleNamespace(translations=translations)
    untranslated = types.SimpleNamespace(translations=None, params=None)
    monkeypatch.setattr(translation, "Generator", Echo)
    seq2seq = make_subject(config)

    def result(name, option=None, value=None):
        options = BESIDE.get(name, {}) | ({option: value} if option else {})
        subject = seq2seq if name in ("probe", "bleu_by_length") else make_subject(decoder_config)
        at = untranslated if name == "translation" else snapshot
        return repr(list(EVALUATORS.build({"name": name} | options).measure(subject, at)))

    assert OPTIONS.keys() == EVALUATORS.keys()
    unused = []
    for name, cls in EVALUATORS.items():
        assert [f.name for f in dataclasses.fields(cls)] == list(OPTIONS[name]), name
        for option, value in OPTIONS[name].items():
            unused += [f"{name}.{option}"] if result(name) == result(name, option, value) else []
    assert not unused


class Echo:
    """A generator whose translations are the sources."""

    def __init__(self, config, params, tokenizer):
        self.params = params

    def __call__(self, texts):
        return list(texts)


class Letters:
    """A tokenizer with one token per character."""

    eos, source_prefix_ids = 2, ()

    @staticmethod
    def encode(texts):
        return [[4 + ord(c) % 30 for c in text] for text in texts]


class Beauty(Evaluator):
    name = "beauty"
    kinds = {"beauty": Kind("milli-Helens", True, False)}
    profiles = {
        "beauty": ("Beauty by layer", r"test/beauty/(\d+)", "layer", "beauty", "last", ""),
    }


def test_an_evaluator_declares_the_kinds_and_profiles_of_its_metrics(monkeypatch, tmp_path):
    grid, metric = vary("model.norm", "layernorm", "rmsnorm"), "test/beauty/1"
    with pytest.raises(UserError, match="metric 'test/beauty/1': its direction is unknown"):
        Sweep(grid, metric=metric)
    for arm, size in (("a", 32), ("b", 48)):
        run = write_run(tmp_path, arm, 0, 4.0, model__d_ff=size)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "test/beauty/1": 2.0, "test/beauty/2": 3.0}\n')
    results = read([tmp_path / "a" / "seed-0", tmp_path / "b" / "seed-0"])
    assert not profiles(results)
    monkeypatch.setitem(EVALUATORS._all, "beauty", Beauty)
    assert Sweep(grid, metric=metric).higher_is_better and kind(metric).unit == "milli-Helens"
    (profile,) = profiles(results)
    assert profile.caption == "Beauty by layer" and profile.places == [1, 2]
