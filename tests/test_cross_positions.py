"""Position schemes in cross-attention (`cross_position`), compared with the oracle."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import make, masks, small, start_decoding, tokens, unrolled
from test_oracle import assert_matches_oracle, unstack_layers

from transformer import UserError
from transformer.config import MeshConfig
from transformer.decoding.beam import beam_search
from transformer.decoding.prefill import advance
from transformer.model.attention_backends import record
from transformer.model.positions import SCHEMES
from transformer.parallel.mesh import make_mesh, use


def config_of(position, **fields):
    return unrolled("encoder_decoder", position="sinusoidal", cross_position=position, **fields)


def supported():
    """Returns the schemes that cross-attention accepts."""
    for position in SCHEMES:
        with contextlib.suppress(UserError):
            config_of(position)
            yield position


DYNAMIC = {"name": "dynamic", "factor": 2.0, "original_length": 3}
ALL = sorted(set(supported()) - {"none"})


def test_which_schemes_are_supported():
    refused = {"learned", "sinusoidal", "xpos", "cope"}
    assert {*ALL} == SCHEMES.keys() - refused - {"none"}


@pytest.mark.parametrize("position", ALL)
def test_each_scheme_matches_the_oracle(position):
    assert_matches_oracle(config_of(position))


@pytest.mark.parametrize(
    ("fields", "position"),
    [
        ({"num_kv_heads": 1, "attention_sink": True}, "rotary"),
        ({"d_value": 3, "attention_soft_cap": 1.5}, "shaw"),
        ({"d_head": 6}, {"name": "rotary", "layout": "interleaved", "fraction": 1 / 3}),
        ({"attention_score": "additive"}, {"name": "alibi", "slopes": "learned"}),
    ],
)
def test_other_fields_combine_with_it(fields, position):
    assert_matches_oracle(config_of(position, **fields))


@pytest.mark.parametrize("mixer", ["lstm", "mla"])
def test_parameters_have_the_sizes_of_cross_attention(mixer):
    """The heads of MLA have another size, and the LSTM has none."""
    fields = {"mixer": mixer, "num_kv_heads": 0 if mixer == "mla" else 2}
    config = small("encoder_decoder", position="none", cross_position="shaw", **fields)
    layer = make(config)[1]["decoder"]["layers"]["cross_attention"]
    assert layer["position_relative_keys"].shape == (2, 33, 4)


@pytest.mark.parametrize("position", ["rotary", "pope", "t5", "shaw"])
def test_one_compiled_program_matches_the_oracle(position):
    config = small("encoder_decoder", position="t5", cross_position=position)
    assert_matches_oracle(config, compiled=True)


@pytest.mark.parametrize("position", ALL)
def test_distances_are_those_within_documents(position):
    """Of two documents, the second begins at different places in source and target."""
    config = config_of(position)
    model, params = make(config)
    source, target = tokens(0, 1, 9), tokens(1, 1, 9)
    packing = {
        "source_segment_ids": np.array([[1] * 6 + [2] * 3]),
        "source_positions": np.array([[*range(6), *range(3)]]),
        "segment_ids": np.array([[1] * 2 + [2] * 7]),
        "positions": np.array([[*range(2), *range(7)]]),
    }
    layers = unstack_layers(config, params)
    expected = oracle.forward(config, layers, source, target, **packing)
    without = oracle.forward(config_of("none"), layers, source, target, **packing)
    assert np.abs(expected - without).max() > 2e-3
    orders = dict.fromkeys(("source_order", "order"), "contiguous")
    logits = model.apply(params, source, target, **packing, **orders)
    np.testing.assert_allclose(logits, expected, atol=5e-5)


@pytest.mark.parametrize("position", ["rotary", "pope", "t5", "shaw"])
def test_decodes_from_its_cache(position):
    model, params = make(config_of(position))
    source, target = tokens(1, 2, 6).at[1, 4:].set(0), tokens(2, 2, 7)
    expected = model.apply(params, source, target, **masks(source, target))
    logits, memory = start_decoding(model, params, target[:, :2], 10, source)
    for t in range(2, 7):
        np.testing.assert_allclose(logits, expected[:, t - 1], atol=3e-5)
        logits, memory = advance(model, params, target[:, t], memory)


@pytest.mark.parametrize("position", ["rotary", "t5"])
def test_beams_share_the_source(position):
    """The score of a hypothesis is its log-probability in one forward pass."""
    model, params = make(small("encoder_decoder", position="sinusoidal", cross_position=position))
    source, start = tokens(1, 2, 6).at[1, 4:].set(0), jnp.ones((2, 1), jnp.int32)
    search = functools.partial(beam_search, model, beam_size=3, alpha=0.0, max_new=4, eos_id=36)
    options = {"source_BxS": source, "source_mask_BxS": source != 0}
    found, scores = jax.jit(search)(params, start, jnp.full(2, 4), **options)
    apply = jax.jit(model.apply)
    for beam in range(3):
        x = jnp.concatenate([start, found[:, beam]], axis=1)
        assert not (x == 36).any()
        logp = jax.nn.log_softmax(apply(params, source, x, source_padding_mask=source != 0))
        chosen = jnp.take_along_axis(logp[:, :-1], x[:, 1:, None], axis=-1)[..., 0].sum(axis=1)
        np.testing.assert_allclose(scores[:, beam], chosen, rtol=1e-4)


def test_sharded_sequences_have_the_same_logits():
    model, params = make(small("encoder_decoder", position="sinusoidal", cross_position="t5"))
    source, target = tokens(0, 2, 8), tokens(1, 2, 8)
    alone = jax.jit(model.apply)(params, source, target)
    with use(make_mesh(MeshConfig(data=2, context=2, tensor=2))), record() as used:
        sharded = jax.jit(lambda *args: model.apply(*args))(params, source, target)
    assert "ring" in used
    np.testing.assert_allclose(sharded, alone, atol=2e-5)


def test_fused_attention_falls_back_and_says_why():
    reasons = {}
    for position in ("rotary", "t5"):
        model, params = make(config_of(position, attention_backend="flash"))
        with record() as used:
            model.apply(params, tokens(0, 1, 6), tokens(1, 1, 6))
        reasons[position] = used.get("reference", "")
    assert reasons == {"rotary": "", "t5": "flash: distances differ from those in the sequence"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cross_position": "learned"}, "model.cross_position: 'learned' is absolute; choose"),
        ({"cross_position": "xpos"}, "model.cross_position: 'xpos' decays toward the past"),
        ({"cross_position": "cope"}, "model.cross_position: 'cope' counts the tokens before"),
        ({"cross_position": "rotry"}, "model.cross_position: unknown value 'rotry'; did you mean"),
        (
            {"cross_position": {"name": "rotary", "scaling": DYNAMIC}, "d_head": 8},
            "model.cross_position: 'rotary' depends on the length of each sequence; choose",
        ),
        (
            {"cross_position": "rotary", "random_positions": 30},
            "model.cross_position: 'rotary' does not support model.random_positions; choose",
        ),
        (
            {"cross_position": {"name": "rotary", "theta": -1.0}},
            "model.cross_position.theta: -1.0 must be more than 0",
        ),
        (
            {"cross_position": "rotary", "attention_score": "additive", "position": "alibi"},
            "model.cross_position: 'rotary' rotates keys, unlike additive scores",
        ),
    ],
)
def test_invalid_schemes_raise(fields, message):
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        small("encoder_decoder", **fields)


def test_a_family_without_cross_attention_refuses_it():
    with pytest.raises(UserError, match=r"model\.cross_position: 'rotary' has no effect without"):
        small("decoder", cross_position="rotary")
