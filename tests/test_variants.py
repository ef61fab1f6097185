"""Fields of a model that some families of Transformers need.

Each field has its documented effect, and works with caches, padding and packing.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import init_model, make, masks, small, start_decoding, tokens

from transformer import UserError
from transformer.decoding.prefill import advance
from transformer.model.attention_backends import Inputs, reference
from transformer.model.layout import flatten, layer_shapes
from transformer.model.masks import SAME_SEGMENT, Tokens
from transformer.model.modules import Norm
from transformer.model.network import abstract_params, build_model

VARIANTS = {
    "parallel": {"parallel": True, "norm_placement": "peri"},
    "window": {"window": 3},
    "qk_norm": {"qk_norm": True, "norm": "rmsnorm"},
    "qk_norm_joint": {"qk_norm": True, "qk_norm_joint": True},
    "soft_caps": {"attention_soft_cap": 2.0, "logit_soft_cap": 3.0},
    "sink": {"attention_sink": True},
    "gate": {"attention_gate": "elementwise"},
    "without_w_o": {"attention_out": False},
    "gate_per_head": {"attention_gate": "headwise"},
    "d_value": {"d_value": 6},
    "d_embedding": {"d_embedding": 8},
    "biases": {"use_bias": False, "qkv_bias": True},
    "head": {"head_transform": True, "logit_scale": 0.25, "logit_bias": True},
    "zero_centered": {"norm_zero_centered": True},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_changes_logits_and_decodes_from_its_cache(name):
    config = small("encoder_decoder", position="t5", **VARIANTS[name])
    model, params = make(config)
    source, target = tokens(1, 2, 6).at[1, 4:].set(0), tokens(2, 2, 7)
    padding = masks(source, target)
    full_logits = jax.jit(model.apply)(params, source, target, **padding)
    plain = build_model(
        small(
            "encoder_decoder", position="t5", norm=config.norm, norm_placement=config.norm_placement
        )
    )
    shapes = lambda module: jax.tree.map(
        jnp.shape, jax.eval_shape(module.init, jax.random.key(0), source, target)
    )
    # A variant without additional parameters must change the logits.
    if shapes(plain) == shapes(model):
        plain_logits = jax.jit(plain.apply)(params, source, target, **padding)
        assert np.abs(np.asarray(plain_logits - full_logits)).max() > 1e-3
    logits, memory = start_decoding(model, params, target[:, :2], 10, source)
    step = jax.jit(lambda t, memory: advance(model, params, t, memory))
    for t in range(2, 7):
        np.testing.assert_allclose(logits, full_logits[:, t - 1], atol=3e-5)
        logits, memory = step(target[:, t], memory)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
def test_nan_in_padding_does_not_reach_loss_or_gradient(family):
    """The embedding of the padding token is NaN. With a mask alone, 0 * NaN would be NaN."""
    model, params = make(small(family, tie_embeddings=False))
    inputs = [
        tokens(i, 2, 6).at[:, 4:].set(0) for i in range(2 if family == "encoder_decoder" else 1)
    ]

    def loss(table):
        p = params | {"embedding": {"embedding": table}}
        return jnp.square(model.apply(p, *inputs, **masks(*inputs))[:, :4]).mean()

    table = params["embedding"]["embedding"]
    value, gradient = jax.value_and_grad(loss)(table)
    nan_value, nan_gradient = jax.value_and_grad(loss)(table.at[0].set(jnp.nan))
    assert float(value) == float(nan_value)
    np.testing.assert_array_equal(gradient, nan_gradient)


def test_soft_cap_and_sink_match_their_equations():
    q, k, v = (
        jax.random.normal(key, (1, 3, 2, 4)) for key in jax.random.split(jax.random.key(0), 3)
    )
    tokens = Tokens(jnp.arange(3)[None], jnp.ones((1, 3), jnp.int32))
    sink = jnp.array([0.5, -1.0])
    logits = 1.5 * np.tanh(0.5 * np.einsum("btnh,bsnh->bnts", q, k) / 1.5)
    weights = np.exp(logits) / (
        np.exp(logits).sum(-1, keepdims=True) + np.exp(np.asarray(sink))[None, :, None, None]
    )
    assert (weights.sum(-1) < 0.95).all()
    expected = np.einsum("bnts,bsnh->btnh", weights, v)
    inputs = Inputs(SAME_SEGMENT, tokens, tokens, None, 0.5, 1.5, sink)
    np.testing.assert_allclose(reference(q, k, v, inputs), expected, atol=1e-5)


def test_zero_centered_gain_adds_one_to_the_parameter():
    config = small("decoder", norm="rmsnorm", norm_zero_centered=True)
    model, params = make(config)
    plain = build_model(dataclasses.replace(config, norm_zero_centered=False))
    shifted = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 1 if path[-1].key == "gain" else x, params
    )
    x = tokens(0, 2, 5)
    assert np.abs(np.asarray(plain.apply(params, x) - model.apply(params, x))).max() > 1e-2
    np.testing.assert_allclose(plain.apply(shifted, x), model.apply(params, x), atol=1e-5)


def test_detached_statistics_are_constants_of_the_gradient():
    """DetachNorm: y = (x - m) / s as in LayerNorm, but dy/dx = 1 / s."""
    x = jnp.array([[1.0, 4.0, -2.0, 7.0]])
    sides = {}
    for name in ("layernorm", "detach_norm"):
        norm = Norm(small("encoder", norm=name, norm_gain=False, norm_offset=False))
        sides[name] = jax.vjp(lambda x, norm=norm: norm.apply({}, x), x)
    (y, vjp), (detached, detached_vjp) = sides.values()
    np.testing.assert_array_equal(y, detached)
    g = jnp.array([[1.0, 0.0, 0.0, 2.0]])
    s = np.sqrt(np.var(x) + 1e-6)
    np.testing.assert_allclose(detached_vjp(g)[0], g / s, rtol=1e-6)
    centered = g - g.mean() - y * (g * y).mean()  # Xu et al., section 2
    np.testing.assert_allclose(vjp(g)[0], centered / s, rtol=1e-4, atol=1e-6)


def test_token_types_add_an_embedding_and_default_to_the_first():
    model, params = make(small("encoder", token_types=2))
    x = tokens(0, 2, 5)
    base, first, mixed = (
        model.apply(params, x, **kwargs)
        for kwargs in ({}, {"token_types": 0 * x}, {"token_types": (x % 2).at[:, 0].set(1)})
    )
    np.testing.assert_array_equal(base, first)
    assert np.abs(np.asarray(base - mixed)).max() > 1e-2
    with pytest.raises(UserError, match="token_types"):
        small("decoder", token_types=2)


def test_replacing_a_field_updates_dependent_defaults():
    config = small("decoder")
    names = lambda c: {path[-1].key for path, _ in jax.tree_util.tree_leaves_with_path(make(c)[1])}
    assert "bias" in names(config)
    assert "bias" not in names(dataclasses.replace(config, use_bias=False))
    assert dataclasses.replace(config, d_model=32).embedding_size == 32
    assert dataclasses.replace(config, d_head=8).value_size == 8


def test_random_positions_keep_order_and_act_only_in_training():
    config, random_config = (
        small("decoder", position="sinusoidal", random_positions=n) for n in (0, 90)
    )
    (model, params), x = make(config), tokens(0, 2, 6)
    random_model = build_model(random_config)
    np.testing.assert_array_equal(model.apply(params, x), random_model.apply(params, x))
    train = lambda key, x=x: random_model.apply(
        params, x, deterministic=False, rngs={"dropout": jax.random.key(key)}
    )
    assert np.abs(np.asarray(train(0) - train(1))).max() > 1e-2
    changed = np.abs(np.asarray(train(0) - train(0, x.at[:, 3].set(5)))).max((0, 2))
    np.testing.assert_array_equal(changed > 0, np.arange(6) >= 3)  # causal, so the order is kept
    without_positions = build_model(random_config.part(position="none"))
    random_logits = without_positions.apply(
        params, x, deterministic=False, rngs={"dropout": jax.random.key(0)}
    )
    # Nothing else is random.
    np.testing.assert_allclose(random_logits, without_positions.apply(params, x), atol=1e-6)
    with pytest.raises(
        UserError, match=r"model\.random_positions: 8 is less than model\.max_length = 24"
    ):
        small("decoder", random_positions=8)


@pytest.mark.parametrize(
    ("family", "pooling"),
    [("encoder", "cls"), ("encoder", "mean"), ("decoder", "last"), ("encoder", "none")],
)
def test_classifier_ignores_padding(family, pooling):
    model, params = make(
        small(family, pooling=pooling, num_labels=3, pooler=pooling == "cls", lm_head=False)
    )
    x = tokens(0, 2, 5)
    labels = model.apply(params, x)
    assert labels.shape == ((2, 5, 3) if pooling == "none" else (2, 3))
    with_padding = jnp.pad(x, ((0, 0), (0, 3)))
    padded = model.apply(params, with_padding, **masks(with_padding))
    np.testing.assert_allclose(padded[:, :5] if pooling == "none" else padded, labels, atol=1e-5)
    h = np.asarray(model.apply(params, x, method="hidden")[0])
    pooled = {"cls": h[:, 0], "mean": h.mean(1), "last": h[:, -1], "none": h}[pooling]
    head = params["classifier"]
    if pooling == "cls":
        pooled = np.tanh(pooled @ head["pooler"]["kernel"] + head["pooler"]["bias"])
    np.testing.assert_allclose(
        labels, pooled @ head["labels"]["kernel"] + head["labels"]["bias"], atol=1e-5
    )
    assert "unembedding" not in params


def test_language_model_may_also_classify():
    model, params = make(small("encoder", pooling="cls", pooler=True, num_labels=2))
    x = tokens(0, 2, 5)
    assert model.apply(params, x).shape == (2, 5, 37)
    assert model.apply(params, x, method="classify").shape == (2, 2)
    with pytest.raises(UserError, match=r"model\.num_labels: 2 has no effect, because an encoder"):
        small("encoder_decoder", num_labels=2)
    with pytest.raises(UserError, match=r"model\.lm_head: False leaves the model without outputs"):
        small("decoder", lm_head=False)
    model, params = make(small("encoder", lm_head=False))
    assert params.keys() == {"embedding", "encoder"}
    h_BxTxD, _ = model.apply(params, x, method="hidden")
    np.testing.assert_array_equal(model.apply(params, x), h_BxTxD)


def test_layer_pattern_is_scanned_by_its_period():
    pattern = ({"window": 2}, {"window": 0, "position": "none"})
    config = small("decoder", num_decoder_layers=6, position="rotary", layer_pattern=pattern)
    assert [(layer.window, layer.position) for layer in config.layers("decoder")] == [
        (2, "rotary"),
        (0, "none"),
    ] * 3
    assert config.period("decoder") == 2
    assert small("decoder", num_decoder_layers=5, layer_pattern=pattern).period("decoder") == 5
    assert (
        small("decoder", num_decoder_layers=6, layer_pattern=({"window": 3},)).period("decoder")
        == 1
    )
    _, params = make(config)
    layers = params["decoder"]["layers"]
    assert layers.keys() == {"layer_0", "layer_1"}
    assert layers["layer_1"]["feed_forward"]["in"]["kernel"].shape[0] == 3
    with pytest.raises(
        UserError, match=r"model\.layer_pattern: 'd_model' cannot differ between layers"
    ):
        small("decoder", layer_pattern=({"d_model": 3},))
    with pytest.raises(UserError, match=r"model\.layer_pattern\.window: -1"):
        small("decoder", layer_pattern=({"window": -1},))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"name": "rotary", "scaling": {"name": "yarn", "factor": 2.0}},
            r"model\.position\.scaling\.original_length: must be set",
        ),
        (
            {"name": "rotary", "scaling": {"name": "yarrn"}},
            "model.position.scaling: unknown value 'yarrn'; did you mean 'yarn'",
        ),
        (
            {"name": "rotary", "scaling": {"name": "linear", "factor": 0.5}},
            r"scaling\.factor: 0\.5 must be at least 1",
        ),
        (
            {"name": "rotary", "scaling": {"name": "ntk", "factr": 2.0}},
            "'ntk' has no option 'factr'; did you mean 'factor'",
        ),
        (
            {"name": "rotary", "scaling": {"name": "proportional", "share": 1.0}},
            r"scaling\.share: 1\.0 must be from 0\.5 \(one of 2 pairs\) to below 1",
        ),
        ({"name": "alibi", "slopes": "fixed"}, "slopes: unknown value 'fixed'; choose from"),
        ({"name": "alibi", "slopes": (1.0, 2.0)}, r"slopes: \(1\.0, 2\.0\); set one number, or"),
        ({"name": "alibi", "slopes": (float("nan"),)}, r"slopes: \(nan,\); set one number"),
        (
            {"name": "rotary", "scaling": {"name": "proportional", "share": 0.2}},
            r"scaling\.share: 0\.2 must be from 0\.5",
        ),
        ({"name": "alibi", "slopes": ()}, r"slopes: \(\); set one number, or one for each"),
        ({"name": "alibi", "slopes": 3}, "slopes: expected"),
        ({"name": "shaw", "values": 3}, r"model\.position\.values: expected bool, got 3"),
        (
            {"name": "shaw", "max_distance": True},
            r"model\.position\.max_distance: expected int, got True",
        ),
        ("kerpel", "model.position: unknown value 'kerpel'; did you mean 'kerple'"),
    ],
)
def test_invalid_position_schemes_raise(spec, message):
    with pytest.raises(UserError, match=message):
        small("decoder", position=spec)


# Field -> (changed fields, pattern of the parameters that they may change)
GOVERNS = {
    "norm_placement": ({"norm_placement": "peri"}, r".*_residual/res_norm/.*"),
    "post": (
        {"norm_placement": "post"},
        r".*_residual/(in|out)_norm/.*|(en|de)coder/final_norm/.*",
    ),
    "rezero": (
        {"norm_placement": "rezero"},
        r".*_residual/(in_norm|gate).*|(en|de)coder/final_norm/.*",
    ),
    "position": ({"position": "t5"}, r"(en|de)coder/relative_bias"),
    "learned": ({"position": "learned"}, r"(en|de)coder/position_embedding"),
    "shaw": ({"position": "shaw"}, r".*self_attention/relative_(keys|values)"),
    "rotary": ({"position": "rotary"}, None),
    "window": ({"window": 3}, None),
    "attention_sink": ({"attention_sink": True}, r".*_attention/sink"),
    "qk_norm": ({"qk_norm": True}, r".*_attention/(query|key)_norm/.*"),
    "num_kv_heads": ({"num_kv_heads": 1}, r".*_attention/(key|value)/.*"),
    "d_value": ({"d_value": 3}, r".*_attention/(value|out)/.*"),
    "d_ff": ({"d_ff": 24}, r".*feed_forward/.*"),
    "glu": ({"glu": True}, r".*feed_forward/gate/.*"),
    "activation": ({"activation": "silu"}, None),
    "use_bias": ({"use_bias": False}, r".*/bias"),
    "qkv_bias": ({"qkv_bias": False}, r".*_attention/(query|key|value)/bias"),
    "norm": ({"norm": "rmsnorm"}, r".*norm/offset"),
    "tie_embeddings": ({"tie_embeddings": False}, r"unembedding/kernel"),
    "share_embeddings": ({"share_embeddings": False}, r"target_embedding/.*"),
    "logit_bias": ({"logit_bias": True}, r"unembedding/bias"),
    "vocab_size": ({"vocab_size": 40}, r"embedding/embedding"),
    "dropout": ({"dropout": 0.3}, None),
    "remat": ({"remat": "full"}, None),
    "dtype": ({"dtype": "bfloat16"}, None),
}


@pytest.fixture(scope="module")
def plain_initial_values():
    return initial_values(small("encoder_decoder", position="none"))


def initial_values(config):
    """Returns the initial values by their names in a model with unrolled layers."""
    return {
        name: np.asarray(x)
        for name, x in flatten(
            init_model(dataclasses.replace(config, scan_layers=False))[1]
        ).items()
    }


@pytest.mark.parametrize("field", GOVERNS)
def test_field_changes_only_the_parameters_it_governs(plain_initial_values, field):
    """Checks that all other parameters exist in both models, with the same shapes."""
    fields, pattern = GOVERNS[field]
    changed = small("encoder_decoder", **{"position": "none", **fields})
    assert changed != small("encoder_decoder", position="none")
    shapes = {name: tuple(x.shape) for name, x in plain_initial_values.items()}
    changed_shapes = layer_shapes(changed, flatten(abstract_params(changed)))
    differ = {
        name
        for name in shapes.keys() | changed_shapes.keys()
        if shapes.get(name) != changed_shapes.get(name)
    }
    assert {name for name in differ if not (pattern and re.fullmatch(pattern, name))} == set()
    assert bool(differ) == bool(pattern)


@pytest.mark.parametrize(
    "field", ["norm_placement", "position", "window", "glu", "d_ff", "tie_embeddings"]
)
def test_arms_start_from_the_same_values_of_shared_parameters(plain_initial_values, field):
    fields, pattern = GOVERNS[field]
    start = initial_values(small("encoder_decoder", **{"position": "none", **fields}))
    names = [name for name in plain_initial_values if not (pattern and re.fullmatch(pattern, name))]
    assert len(names) > 20
    for name in names:
        np.testing.assert_array_equal(start[name], plain_initial_values[name], err_msg=name)
