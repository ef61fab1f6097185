"""Token mixers: their equations against slow loops, and the properties of every mixer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle_mixers
import pytest
from conftest import make, small, start_decoding, tokens

from transformer import UserError
from transformer.config import MeshConfig
from transformer.decoding.beam import beam_search
from transformer.decoding.prefill import advance, prefill
from transformer.model.cache import LayerState
from transformer.model.layout import flatten, part as layer_part, unflatten, where
from transformer.model.masks import Tokens
from transformer.model.mixers.base import MIXERS, Context
from transformer.model.mixers.forgetting import bfloat16_parts
from transformer.model.network import build_model
from transformer.model.positions import build
from transformer.parallel.mesh import make_mesh, use
from transformer.registry import Registry

MLA = {"name": "mla", "kv_rank": 12, "q_rank": 10, "d_rope": 6}
DELTA = {"name": "gated_delta", "chunk": 5}
MODELS = {
    "attention": {"position": "rotary"},
    "window": {"position": "rotary", "window": 3},
    "mla": {"mixer": MLA, "position": "rotary"},
    "mla_window": {"mixer": "mla", "position": "alibi", "window": 4, "d_value": 6},
    "gated_delta": {"mixer": DELTA, "position": "none"},
    "differential": {"mixer": "differential", "position": "rotary", "num_kv_heads": 2},
    "forgetting": {"mixer": "forgetting", "position": "none", "d_value": 6},
    "forgetting_window": {
        "mixer": "forgetting", "position": "rotary", "window": 3, "qk_norm": True,
        "attention_gate": "elementwise",
    },
    "canon": {"position": "rotary", "num_kv_heads": 2, "qk_norm": True, "canon": "ABCD"},
    "value_residual": {
        "position": "rotary", "num_kv_heads": 2, "value_residual": "learned",
        "num_decoder_layers": 4, "layer_pattern": ({}, {"mixer": DELTA}),
    },
    "alternating": {
        "position": "rotary", "num_decoder_layers": 4,
        "layer_pattern": (
            {"mixer": DELTA, "norm_placement": "post"}, {"mixer": "mla", "norm_placement": "pre"},
        ),
    },
    "lstm": {"mixer": "lstm", "position": "none", "norm_placement": "res_post"},
    "gru": {
        "position": "rotary", "num_decoder_layers": 4,
        "layer_pattern": ({"mixer": "gru"}, {"mixer": "rnn", "feed_forward": "none"}, {}, {}),
    },
    "lstm_alone": {
        "mixer": "lstm", "position": "none", "num_heads": 8, "feed_forward": "none", "d_ff": 0,
        "norm_placement": "none",
    },
    "lstm_alternating": {
        "position": "rotary", "num_decoder_layers": 4,
        "layer_pattern": ({"mixer": "lstm", "feed_forward": "none"}, {"window": 3}),
    },
}  # fmt: skip


def mixer_config(name: str, family: str = "decoder", **fields):
    overrides = {"num_kv_heads": 0} | MODELS[name] | fields
    if name == "lstm":
        overrides |= {"num_heads": 8}  # must be the default, because no layer has heads
    return small(family, **overrides)


@functools.cache
def cached_model(name: str):
    model, params = make(mixer_config(name))
    return model, params, jax.jit(functools.partial(model.apply))


def left_padded(*starts):
    """Returns (padding mask, positions) of sequences of 16 tokens that begin at `starts`."""
    start = np.array(starts)[:, None]
    return jnp.asarray(np.arange(16) >= start), jnp.maximum(jnp.arange(16) - start, 0)


def first_mixer(config) -> dict:
    """Returns random parameters of the first layer's mixer, in float64."""
    layer = make(config)[1]["decoder"]["layers_0"][config.token_mixer.scope]
    return jax.tree.map(lambda a: np.asarray(a, np.float64), layer)


def mixer_output(config, params, x, segments, layer=0):
    """Returns the output of a layer's mixer alone, for x [B, T, D]."""
    cfg = config.layers("decoder")[layer]
    tokens = Tokens(jnp.arange(x.shape[1])[None], jnp.asarray(segments))
    scheme = build(cfg.layer_position).bind(None, cfg.stack_facts("decoder"))
    module = cfg.token_mixer.build(cfg, "decoder", 1.0, 1.0)(name=None)
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    arguments = Context(tokens, tokens, layer=layer), scheme.at(tokens.positions_BxT), None, True
    out, _ = module.apply({"params": params}, x.astype(cfg.dtype), *arguments)
    return np.asarray(out, np.float32)


@pytest.mark.parametrize("window", [0, 3])
def test_mla_matches_its_equations(window):
    config = small(
        "decoder",
        mixer=MLA,
        position="rotary",
        norm="rmsnorm",
        scan_layers=False,
        window=window,
        num_kv_heads=0,
        d_value=5,
    )
    _, params = make(config)
    mixer_params = params["decoder"]["layers_0"]["self_attention"]
    x = np.random.default_rng(0).standard_normal((2, 9, 16)).astype(np.float32)

    def rotate(vector, t):
        half = len(vector) // 2
        angle = t / 10_000 ** (np.arange(half) / half)
        a, b = vector[:half], vector[half:]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
        )

    params64 = jax.tree.map(lambda a: np.asarray(a, np.float64), mixer_params)
    expected = np.stack(
        [oracle_mixers.mla(config, params64, x_TxD, 12, 6, rotate, window) for x_TxD in x]
    )
    unrotated = np.stack(
        [oracle_mixers.mla(config, params64, x_TxD, 12, 6, window=window) for x_TxD in x]
    )
    assert np.abs(expected - unrotated).max() > 1e-2, "the rotation must have an effect"
    actual = mixer_output(config, mixer_params, x, np.ones((2, 9), int))
    np.testing.assert_allclose(actual, expected, atol=2e-5)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_differential_attention_matches_its_equations(kv_heads):
    """In the second layer, whose lambda_0 differs from the first layer's."""
    options = {"num_heads": 4, "num_kv_heads": kv_heads, "d_value": 5, "use_bias": False}
    config = small("decoder", mixer="differential", position="none", scan_layers=False, **options)
    params64 = first_mixer(config)
    x = np.random.default_rng(0).standard_normal((1, 9, 16)).astype(np.float32)
    expected = [oracle_mixers.differential(config, params64, x[0], layer) for layer in (0, 1)]
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    for layer in (0, 1):
        actual = mixer_output(config, params64, x, np.ones((1, 9), int), layer=layer)
        np.testing.assert_allclose(actual[0], expected[layer], atol=2e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forgetting_attention_matches_its_equations(dtype):
    """Also for bfloat16, in which the sum of the logarithms would have few digits."""
    options = {"position": "none", "scan_layers": False, "num_kv_heads": 0, "use_bias": False}
    config = small("decoder", mixer="forgetting", **options)
    params64 = first_mixer(config)
    params64["forget"]["bias"] = params64["forget"]["bias"] - 1.0  # c reaches -80
    x = np.random.default_rng(0).standard_normal((1, 60, 16)).astype(np.float32)
    segments = np.array([[0] * 3 + [1] * 40 + [2] * 17])
    expected = oracle_mixers.forgetting(config, params64, x[0], segments[0])
    params64["forget"]["kernel"] *= 0.0
    assert (
        np.abs(expected - oracle_mixers.forgetting(config, params64, x[0], segments[0])).max() > 0.1
    )
    params64 = first_mixer(config)
    params64["forget"]["bias"] = params64["forget"]["bias"] - 1.0
    actual = mixer_output(config.part(dtype=dtype), params64, x, segments)[0]
    error = np.abs(np.where(segments[0][:, None] > 0, actual - expected, 0.0)).max()
    assert error < (1e-4 if dtype == "float32" else 0.02 * np.abs(expected).max())


def test_a_sum_is_exact_in_three_parts_of_bfloat16():
    x = jnp.asarray(np.random.default_rng(0).standard_normal(100) * 1000, jnp.float32)
    parts = bfloat16_parts(x)
    np.testing.assert_array_equal(parts.astype(jnp.bfloat16).astype(jnp.float32), parts)
    np.testing.assert_array_equal(jnp.sum(parts[:, ::-1], axis=-1), x)
    assert np.abs(parts[:, 0] - x).max() > 0.1
    weights = jnp.arange(300.0).reshape(100, 3) + 0.123
    gradient = jax.grad(lambda x: jnp.sum(weights * bfloat16_parts(x)))(x)
    np.testing.assert_array_equal(gradient, weights[:, 0])


@pytest.mark.parametrize("twice", [False, True])
def test_gated_delta_matches_its_recurrence(twice):
    """Chunks that do and do not divide the length, padding in front, and several documents."""
    segments = np.array([[0, 0, 1, 1, 1, 1, 1, 2, 2, 3, 3, 3, 3], [1] * 11 + [0, 0]])
    x = np.random.default_rng(1).standard_normal((2, 13, 16)).astype(np.float32)
    for chunk in (1, 4, 13, 64):
        mixer = {"name": "gated_delta", "chunk": chunk, "negative_eigenvalues": twice}
        config = small(
            "decoder", mixer=mixer, position="none", scan_layers=False, num_kv_heads=0, d_value=6
        )
        _, params = make(config)
        mixer_params = params["decoder"]["layers_0"]["gated_delta"]
        params64 = jax.tree.map(lambda a: np.asarray(a, np.float64), mixer_params)
        expected = np.stack(
            [
                oracle_mixers.gated_delta(config, params64, x_TxD, segments_T, twice=twice)
                for x_TxD, segments_T in zip(x, segments, strict=True)
            ]
        )
        actual = mixer_output(config, mixer_params, x, segments)
        np.testing.assert_allclose(
            np.where(segments[..., None] > 0, actual, 0), expected, atol=3e-5, err_msg=str(chunk)
        )


@pytest.mark.parametrize("name", MODELS)
def test_cached_decoding_in_parts_equals_full_forward_pass(name):
    """Prompts are padded on the left. Parts have one or several tokens."""
    model, params, apply = cached_model(name)
    x, (padding_mask, positions) = tokens(0, 2, 16), left_padded(0, 3)
    whole = apply(params, x, padding_mask=padding_mask, positions=positions)
    start = jax.jit(lambda params, x, mask: prefill(model, params, x, 16, None, mask))
    logits, cache = start(params, x[:, :8], padding_mask[:, :8])
    np.testing.assert_allclose(logits, whole[:, 7], atol=1e-4)
    decode = jax.jit(functools.partial(model.apply, method="decode"))
    for part in ((8, 9), (9, 12), (12, 13), (13, 16)):
        part_logits, cache = decode(params, x[:, slice(*part)], cache)
        np.testing.assert_allclose(
            part_logits, whole[:, slice(*part)], atol=1e-4, err_msg=str(part)
        )


@pytest.mark.parametrize("name", MODELS)
def test_beam_search_scores_equal_teacher_forcing(name, monkeypatch):
    """The score of a hypothesis is its log-probability in one forward pass, over the penalty. The
    cache grows twice.
    """
    monkeypatch.setattr("transformer.decoding.prefill.MANY", 4)
    model, params, apply = cached_model(name)
    prompt, limits, (mask, positions) = tokens(7, 2, 12), (4, 3), left_padded(0, 3)
    search = functools.partial(beam_search, model, beam_size=3, alpha=2.0, max_new=4, eos_id=1)
    found, scores = jax.jit(search)(params, prompt, jnp.array(limits), prompt_mask_BxP=mask[:, :12])
    lengths = []
    for beam in range(3):
        x = jnp.concatenate([prompt, found[:, beam]], axis=1)
        logits = apply(params, x, padding_mask=mask, positions=positions)
        logp = np.asarray(jax.nn.log_softmax(logits))
        for row in np.flatnonzero(scores[:, beam] > -1e8):  # the others are missing
            text = [int(token) for token in found[row, beam]][: limits[row]]
            length = next((i + 1 for i, token in enumerate(text) if token == 1), limits[row])
            expected = sum(logp[row, 11 + i, text[i]] for i in range(length))
            penalty = ((5 + length) / 6) ** 2.0
            np.testing.assert_allclose(scores[row, beam], expected / penalty, rtol=1e-4)
            lengths.append(length)
    assert max(lengths) > 2, "the states of beams must be read"


@pytest.mark.parametrize("name", MODELS)
def test_scanned_layers_equal_unrolled_ones(name):
    scanned, params, apply = cached_model(name)
    unrolled = build_model(dataclasses.replace(scanned.config, scan_layers=False))
    flat = flatten(params)
    places = where(scanned.config, flat)
    layers = unflatten(
        {path: layer_part(flat[old], index) for path, (old, index) in places.items()}
    )
    assert jax.tree.structure(layers) != jax.tree.structure(params)
    x, (mask, positions) = tokens(0, 2, 16), left_padded(0, 3)
    np.testing.assert_allclose(
        jax.jit(unrolled.apply)(layers, x, padding_mask=mask, positions=positions),
        apply(params, x, padding_mask=mask, positions=positions),
        atol=1e-4,
    )


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_do_not_leak(name):
    _, params, apply = cached_model(name)
    x = tokens(1, 1, 16)
    segments = jnp.array([[1] * 5 + [2] * 6 + [3] * 5])
    positions = jnp.array([[*range(5), *range(6), *range(5)]])
    packed = apply(params, x, segment_ids=segments, positions=positions)
    for first, last in ((0, 5), (5, 11), (11, 16)):
        np.testing.assert_allclose(
            packed[:, first:last], apply(params, x[:, first:last]), atol=1e-4
        )
    assert np.abs(packed - apply(params, x)).max() > 1e-2, (
        "without segments, the documents must affect each other"
    )


@pytest.mark.parametrize("name", MODELS)
def test_remat_and_sharding_keep_loss_and_gradients(name):
    """Rematerialized and sharded over data, fsdp and tensor: the same loss and gradients."""
    config = mixer_config(name)
    model, params, _ = cached_model(name)
    x = tokens(2, 4, 12)

    def loss(model):
        return lambda params: jnp.mean(jnp.square(model.apply(params, x).astype(jnp.float32)))

    value, grads = jax.jit(jax.value_and_grad(loss(model)))(params)
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(grads)), (
        "every parameter has a gradient"
    )
    remat = build_model(dataclasses.replace(config, remat="full"))
    with use(make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))):
        sharded, sharded_grads = jax.jit(jax.value_and_grad(loss(remat)))(params)
    np.testing.assert_allclose(sharded, value, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max() + 1e-6),
        sharded_grads,
        grads,
    )


def test_decoding_states_have_minimal_sizes():
    sizes = lambda name, slots: [
        x.shape for x in jax.tree.leaves(cached_model(name)[0].empty_cache(2, slots).layers)
    ]
    layers = lambda *shapes: [*shapes] * cached_model("attention")[0].config.num_layers("decoder")
    assert sizes("window", 16) == layers(*[(2, 4, 3, 4)] * 2), "a window of 3 keeps 3 slots"
    assert sizes("attention", 16) == layers(*[(2, 4, 16, 4)] * 2)
    assert sizes("mla", 16) == layers((2, 16, 12), (2, 16, 6)), "18 numbers per token, not 32"
    assert sizes("gated_delta", 16) == sizes("gated_delta", 1000)
    grown = cached_model("window")[0].empty_cache(2, 16).branch(3).grow(5)
    assert [x.shape for x in jax.tree.leaves(grown.layers)] == layers(*[(2, 4, 9, 4)] * 2)
    assert grown.tokens.segments_BxT.shape == (6, 31), "three beams, 16 tokens and 15 slots"


def test_beams_share_the_cached_source():
    model, params = make(small("encoder_decoder", position="t5"))
    source, prompt = tokens(3, 2, 6), tokens(4, 2, 1)
    _, memory = start_decoding(model, params, prompt, 8, source)
    cache = memory.branch(3)
    for layer in cache.layers:
        assert isinstance(layer, LayerState)
        slots = layer.mixer.k_BxKxSxH.value
        assert len(slots) == len(layer.source.value.k_BxKxSxH) == 2
    next_tokens = tokens(5, 6, 1)[:, 0]
    logits, _ = jax.jit(functools.partial(advance, model))(params, next_tokens, cache)
    apply = jax.jit(model.apply)
    for beam in range(3):
        rows = jnp.arange(2) * 3 + beam
        target = jnp.concatenate([prompt, next_tokens[rows, None]], axis=1)
        expected = apply(params, source, target)[:, -1]
        np.testing.assert_allclose(logits[rows], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: small("decoder", mixer="gated"),
         "model.mixer: unknown value 'gated'; did you mean 'gated_delta'?"),
        (lambda: small("decoder", mixer={"name": "mla", "rank": 3}),
         "model.mixer: 'mla' has no option 'rank'"),
        (lambda: small("decoder", mixer={"name": "mla", "kv_rank": -1}),
         "model.mixer.kv_rank: -1 is too small"),
        (lambda: small("encoder", mixer="gated_delta", position="none", num_kv_heads=0),
         "model.family='decoder'"),
        (lambda: small("decoder", mixer="gated_delta", num_kv_heads=0, position="none",
                       prefix_lm=True),
         "causal"),
        (lambda: small("decoder", mixer="gated_delta", num_kv_heads=0, position="rotary"),
         "model.position: 'rotary' has no effect on mixer"),
        (lambda: small("decoder", mixer="gated_delta", num_kv_heads=0, position="none", window=3),
         "model.window: 3 has no effect without a mixer"),
        (lambda: small("decoder", mixer="forgetting", num_kv_heads=0, position="none",
                       causal=False),
         "'forgetting' is causal; set model.family='decoder'"),
        (lambda: small("decoder", mixer="differential", num_heads=8, num_kv_heads=1),
         "model.num_kv_heads: 1 is odd, and 'differential' pairs heads"),
        (lambda: small("decoder", position="none", value_residual="fixed",
                       layer_pattern=({"mixer": "gated_delta"}, {})),
         "model.value_residual: the first layer's mixer = 'gated_delta' does not support it"),
        (lambda: small("decoder", mixer="mla", position="rotary"),
         "model.num_kv_heads: 2 has no effect without a mixer"),
        (lambda: small("decoder", mixer="mla", num_kv_heads=0, position="shaw"),
         "which does not apply score and value"),
        (lambda: small("decoder", num_kv_heads=0,
                       layer_pattern=({"mixer": "gated_delta", "window": 3}, {})),
         "window = 3 has no effect with mixer"),
        (lambda: small("decoder", layer_pattern=({"d_ff": 3}, {})),
         "'d_ff' cannot differ between layers"),
        (lambda: small("decoder", norm_placement="post",
                       layer_pattern=({"norm_placement": "pre"}, {"norm_placement": "peri"})),
         "model.norm_placement: 'post' has no effect"),
    ],
)  # fmt: skip
def test_unsupported_mixer_configs_raise(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_registering_a_name_twice_raises():
    registry = Registry("model.mixer", "transformer.model.mixers")
    first, second = type("One", (), {}), type("Other", (), {})
    registry.register("one")(first)
    assert registry.register("one")(first) is first and first.name == "one"
    with pytest.raises(ValueError, match="'one' is .*One"):
        registry.register("one")(second)
    assert {"attention", "mla", "gated_delta"} <= set(MIXERS)
