"""Waiting sequences replace those that have ended, and the texts do not change."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from conftest import SMALL, make, model_fields

from transformer import build_optimizer
from transformer.config import Experiment, MeshConfig
from transformer.decoding.generate import Generator
from transformer.mapping import from_mapping
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.training.state import abstract_state

EOS = (2, 3, 5, 7, 11, 13)
SIZE = 4


def generator(family: str, model: dict, decoding: dict) -> Generator:
    """A model with random parameters, whose texts are numbers, such as "17 5 31"."""
    model = {"eos_id": EOS, "pad_id": 0} | model
    if "encoder" in family:
        model = {"decoder_start_id": 1} | model
    pairs = {"corpus": "tatoeba_en_es", "objective": "seq2seq"}
    config = from_mapping(
        Experiment,
        {
            "model": model_fields(family, SMALL, **model),
            "data": {"length": 12} | (pairs if "encoder" in family else {"corpus": "pydoc"}),
            "decoding": {"max_extra": 9, "batch_size": SIZE} | decoding,
        },
    )
    tokenizer = types.SimpleNamespace(
        pad=0, bos=1, eos=2, source_prefix_ids=[],
        encode=lambda texts: [[int(n) for n in text.split()] for text in texts],
        decode=lambda tokens: "".join(f" {n}" for n in tokens if n),
    )  # fmt: skip
    return Generator(config, make(config.model, noise=1.0)[1], tokenizer)


def texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(map(str, rng.integers(4, 37, rng.integers(1, 9)))) for _ in range(count)]


def by_batch(generate: Generator, texts: list[str]) -> list[str]:
    """Returns the texts that are generated without replacement, batch by batch."""
    batches = [texts[n : n + SIZE] for n in range(0, len(texts), SIZE)]
    return [text for batch in batches for text in generate(batch)]


@pytest.mark.parametrize(
    ("family", "model", "decoding"),
    [
        ("encoder_decoder", {"position": "learned"}, {}),
        ("encoder_decoder", {"position": "t5"}, {"beam_size": 3, "length_penalty": 1.0}),
        ("decoder", {"window": 4, "position": "rotary"}, {"temperature": 2.0}),
        (
            "decoder",
            {"window": 4, "position": "shaw", "canon": "A"},
            {"beam_size": 2, "length_penalty": 1.0},
        ),
        (
            "decoder",
            {"mixer": "gated_delta", "position": "none", "num_kv_heads": 4},
            {"temperature": 10.0},
        ),
    ],
)
def test_replacing_ended_sequences_does_not_change_texts(family, model, decoding):
    prompts, alone = texts(23), generator(family, model, decoding)
    expected = by_batch(alone, prompts)
    together = generator(family, model, decoding)
    replaced, replace, done = [], together._batches._replace, []

    def watched(old, new, rows):
        replaced.append((rows >= 0).sum())
        state = replace(old, new, rows)
        segments, ended = state.cache.tokens.segments_BxT, ~together._search.active(state)
        ended = np.repeat(ended, state.cache.beams)
        assert not np.any(np.asarray(segments)[ended])  # or their positions grow without a limit
        return state

    together._batches._replace = watched
    assert together(prompts, done.append) == expected
    assert done == [*range(1, 24)]
    assert sum(replaced) == 23 - SIZE
    lengths = [len(text.split()) for text in expected]
    slots = 9 if family == "decoder" else 24
    assert len(set(lengths)) > 3 and sum(lengths) / SIZE > slots  # all slots were used


@pytest.mark.parametrize("count", [1, SIZE, 23])
def test_cache_grows_behind_padding(count, monkeypatch):
    """A cache with padding on the left is full before any text has many tokens."""
    model, prompts = {"position": "rotary", "max_length": 48}, texts(23)[:count]
    prompts[0] = " ".join(["17"] * 17)  # of the 32 tokens that such prompts are padded to
    decoding = {"temperature": 2.0, "max_extra": 12}
    expected = by_batch(generator("decoder", model, decoding), prompts)
    monkeypatch.setattr("transformer.decoding.prefill.MANY", 4)
    assert generator("decoder", model, decoding)(prompts) == expected
    assert max(len(text.split()) for text in expected) > 6  # the cache grew


def test_texts_are_the_same_on_a_mesh():
    model = {"position": "rotary", "vocab_size": 40}
    fields = ("encoder_decoder", model, {})
    one_device, on_mesh = generator(*fields), generator(*fields)
    prompts, model = texts(15), build_model(on_mesh.config.model)
    with use(make_mesh(MeshConfig(fsdp=2, tensor=2))) as mesh:
        optimizer = build_optimizer(on_mesh.config.optimizer, 1, on_mesh.config.model)
        shardings = abstract_state(on_mesh.config, model, optimizer, mesh)[1]
        sharded = jax.device_put(on_mesh.params, shardings.params)
        on_mesh = dataclasses.replace(on_mesh, params=sharded)
        assert len(jax.tree.leaves(on_mesh.params)[0].sharding.device_set) == 8
        assert on_mesh(prompts) == by_batch(one_device, prompts)
