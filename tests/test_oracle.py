"""The model against the oracle, a slow and direct forward pass (oracle.py).

Covers every family, norm placement, position scheme and attention variant.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import (
    jit_if_scanned,
    make,
    masks,
    run_random,
    schemes,
    small,
    start_decoding,
    tokens,
    unrolled,
)
from flax.core import FrozenDict

from transformer.decoding.prefill import advance
from transformer.model.layout import flatten, part, unflatten, where
from transformer.model.placements.base import PLACEMENTS

FAMILIES = ("encoder", "decoder", "encoder_decoder")

VARIANTS = {
    "multi-head": {"num_kv_heads": 4},
    "multi-query": {"num_kv_heads": 1},
    "d_k and d_v": {"d_head": 6, "d_value": 3},
    "query/key norm": {"qk_norm": True},
    "one norm for all heads": {"qk_norm": True, "qk_norm_joint": True, "num_kv_heads": 2},
    "soft cap": {"attention_soft_cap": 1.5, "logit_soft_cap": 2.0},
    "window": {"window": 3},
    "sink": {"attention_sink": True},
    "gate": {"attention_gate": "elementwise"},
    "bilinear": {"attention_score": "bilinear", "position": "rotary", "num_kv_heads": 2},
    "additive": {"attention_score": "additive", "position": "alibi", "num_kv_heads": 2},
    "no W_O": {"attention_out": False, "attention_gate": "headwise"},
    "value residual": {"value_residual": "fixed", "num_kv_heads": 2},
    "learned value residual": {"value_residual": "learned", "v_norm": True},
    "gate per head": {"attention_gate": "headwise", "attention_sink": True},
    "no scaling": {"attention_scale": 1.0},
    "parallel": {"parallel": True},
    "parallel peri": {"parallel": True, "norm_placement": "peri"},
    "gated": {"glu": True, "activation": "silu"},
    "experts": {"feed_forward": {"name": "experts", "num_experts": 5, "top_k": 2}},
    "shared expert": {
        "feed_forward": {"name": "experts", "num_experts": 4, "top_k": 2, "shared": 2}, "glu": True,
    },
    "biased router": {
        "feed_forward": {
            "name": "experts", "num_experts": 5, "top_k": 2, "score": "sigmoid", "bias_rate": 0.1,
        },
    },
    "gated experts": {
        "feed_forward": {"name": "experts", "num_experts": 4, "top_k": 1, "normalize": False},
        "glu": True, "use_bias": False,
    },
    "clipped experts": {
        "feed_forward": {"name": "experts", "num_experts": 4, "top_k": 2, "router_use_bias": True},
        "glu": True, "glu_limit": 0.4, "activation": "quick_gelu",
    },
    "clipped units": {"glu": True, "glu_limit": 0.4, "activation": "silu"},
    "roomy experts": {
        "feed_forward": {"name": "experts", "num_experts": 4, "top_k": 2, "capacity_factor": 4.0},
    },
    "gelu, no bias": {"activation": "gelu", "use_bias": False},
    "gelu_tanh, some biases": {"activation": "gelu_tanh", "use_bias": False, "qkv_bias": True},
    "rmsnorm": {"norm": "rmsnorm", "norm_zero_centered": True},
    "dynamic tanh": {"norm": "dynamic_tanh", "qk_norm": True, "embedding_norm": True},
    "detach norm": {"norm": "detach_norm"},
    "layer scale": {"norm_placement": {"name": "peri", "layer_scale": 0.1}, "parallel": True},
    "blocks of two": {"norm_placement": {"name": "attention_residuals", "block": 2}},
    "two streams": {
        "norm_placement": {"name": "hyper_connections", "streams": 2, "res_norm": True},
    },
    "HybridNorm": {
        "norm_placement": {"name": "hybrid_norm", "pre_first": False},
        "qk_norm": True, "v_norm": True,
    },
    "bare norm": {"norm_gain": False, "norm_offset": False, "norm_epsilon": 1e-2},
    "embedding": {"embedding_norm": True, "embedding_scale": True, "d_embedding": 6},
    "head": {
        "tie_embeddings": False, "logit_bias": True, "logit_scale": 0.3, "head_transform": True,
    },
    "first layer without norm": {"first_norm": False, "embedding_norm": True},
    "local and global": {
        "position": "rotary",
        "layer_pattern": (
            {"window": 2}, {"window": 0, "position": {"name": "rotary", "theta": 50.0}},
        ),
    },
    "two tables": {
        "position": "t5",
        "layer_pattern": ({"position": {"name": "t5", "num_buckets": 8, "max_distance": 6}}, {}),
    },
    "rotary, then none": {"layer_pattern": ({"position": "rotary"}, {"position": "none"})},
    "partial rotary": {
        "position": {"name": "rotary", "fraction": 0.5, "layout": "interleaved"}, "d_head": 8,
    },
    "linear": {
        "position": {"name": "rotary", "scaling": {"name": "linear", "factor": 2.0}}, "d_head": 8,
    },
    "proportional": {
        "position": {"name": "rotary", "scaling": {"name": "proportional", "share": 0.6}},
        "d_head": 8, "activation": "relu_squared",
    },
    "slope 1": {"position": {"name": "alibi", "slopes": (1.0,)}, "activation": "linear"},
    "given slopes": {"position": {"name": "alibi", "slopes": (0.5, 0.1, 0.0, 2.0)}},
    "learned slopes": {"position": {"name": "alibi", "slopes": "learned"}},
    "ntk": {
        "position": {"name": "rotary", "scaling": {"name": "ntk", "factor": 2.0}}, "d_head": 8,
    },
    "dynamic": {
        "position": {
            "name": "rotary",
            "scaling": {"name": "dynamic", "factor": 2.0, "original_length": 3},
        },
        "d_head": 8,
    },
    "short longrope": {
        "position": {
            "name": "rotary", "theta": 50.0,
            "scaling": {
                "name": "longrope", "original_length": 16, "attention_factor": 1.3,
                "short_factors": (1.0, 1.1, 1.2, 2.0), "long_factors": (1.0, 2.0, 4.0, 9.0),
            },
        },
        "d_head": 8,
    },
    "longrope": {
        "position": {
            "name": "rotary", "theta": 50.0,
            "scaling": {
                "name": "longrope", "original_length": 3, "attention_factor": 1.3,
                "short_factors": (1.0, 1.1, 1.2, 2.0), "long_factors": (1.0, 2.0, 4.0, 9.0),
            },
        },
        "d_head": 8,
    },
    "yarn": {
        "position": {
            "name": "rotary", "theta": 50.0,
            "scaling": {"name": "yarn", "factor": 4.0, "original_length": 16},
        },
        "d_head": 8,
    },
    "llama3": {
        "position": {
            "name": "rotary", "theta": 50.0,
            "scaling": {"name": "llama3", "factor": 4.0, "original_length": 32},
        },
        "d_head": 8,
    },
    "offset, halves": {"position": {"name": "learned", "offset": 2}},
    "sinusoids in halves": {"position": {"name": "sinusoidal", "layout": "halves", "base": 100.0}},
    "near keys": {"position": {"name": "shaw", "max_distance": 2, "values": False}},
    "near deberta": {"position": {"name": "deberta", "max_distance": 2}},
    "deberta v3": {
        "position": {
            "name": "deberta", "max_distance": 4, "buckets": 4, "shared": True, "norm": True,
        },
        "norm_epsilon": 0.1,
    },
}  # fmt: skip


def padded_inputs(config, batch=2):
    """Returns tokens, or source and target, with padding at the end of the last sequence."""
    if config.is_encoder_decoder:
        return tokens(0, batch, 7).at[-1, 5:].set(0), tokens(1, batch, 5).at[-1, 3:].set(0)
    return (tokens(0, batch, 6).at[-1, 4:].set(0),)


def unstack_layers(config, params):
    """Returns the parameters with one subtree per layer, the layout that the oracle reads."""
    flat = flatten(params)
    return unflatten({name: part(flat[path], i) for name, (path, i) in where(config, flat).items()})


def assert_matches_oracle(config, compiled=False):
    """Checks the model against the oracle: as one scanned and rematerialized program if `compiled`,
    and otherwise operation by operation. JAX compiles operations of equal shapes once for all
    tests, so the latter takes a third of the time.

    The tolerance covers the float32 rounding of the largest logit. At an ill-conditioned token, a
    change of the last bit of the parameters moves the oracle's own logits by as much. There, the
    tolerance is eight times the largest of four such moves.
    """
    inputs = padded_inputs(config)
    if compiled:
        model, params = make(dataclasses.replace(config, remat="full"))
        logits = jax.jit(model.apply)(params, *inputs, **masks(*inputs))
        layers = unstack_layers(model.config, params)
    else:
        unscanned = dataclasses.replace(config, scan_layers=False)
        logits, layers = run_random(unscanned, *inputs, **masks(*inputs))
    exact = lambda layers: oracle.forward(config, layers, *inputs, **masks(*inputs))
    expected, real = exact(layers), np.asarray(inputs[-1]) != 0
    logits = np.asarray(logits)
    largest = np.abs(expected[real]).max()
    assert largest > 0.1
    error, allowed = np.abs(logits - expected)[real].max(axis=-1), 1e-5 + 3e-6 * largest
    if (error > allowed).any():
        rng = np.random.default_rng(0)
        nudge = lambda x: np.float64(x) * (1 + 2.0**-24 * rng.choice([-1, 1], np.shape(x)))
        nudged = [exact(jax.tree.map(nudge, layers)) for _ in range(4)]
        moved = np.abs(np.stack(nudged) - expected)[:, real].max(axis=(0, -1))
        allowed = np.maximum(allowed, 8 * moved)
    assert (error <= allowed).all(), f"errors by token: {error}, allowed: {allowed}"


def with_placement(family, position, placement):
    """Returns a config with a placement that affects each of its layers."""
    depth = 3 if placement in oracle.TOPOLOGIES and family != "encoder_decoder" else 2
    depths = {f"num_{side}_layers": depth for side in ("encoder", "decoder") if side in family}
    spec = {"name": "mix_ln", "share": 0.5} if placement == "mix_ln" else placement
    return small(family, position=position, norm_placement=spec, **depths)


def triples():
    """Returns every (family, scheme, placement) and whether to compile it.

    Each scheme and each placement is compiled at least once for each family.
    """
    names, cases = sorted(PLACEMENTS), []
    for family in FAMILIES:
        each = sorted(position for _, position in schemes(family))
        for (i, position), (j, placement) in itertools.product(enumerate(each), enumerate(names)):
            compiled = j == i % len(names) or i == j % len(each)
            cases.append((family, position, placement, compiled))
    return cases


@pytest.mark.parametrize(("family", "position", "placement", "compiled"), triples())
def test_every_family_position_and_placement(family, position, placement, compiled):
    assert_matches_oracle(with_placement(family, position, placement), compiled)


def test_the_oracle_has_every_placement():
    assert oracle.PLACEMENTS.keys() | oracle.TOPOLOGIES.keys() == PLACEMENTS.keys()


@pytest.mark.parametrize(("family", "variant"), list(itertools.product(FAMILIES, VARIANTS)))
def test_every_variant(family, variant):
    """Each variant is compiled in one of the families."""
    compiled = list(VARIANTS).index(variant) % len(FAMILIES) == FAMILIES.index(family)
    assert_matches_oracle(small(family, **VARIANTS[variant]), compiled)


def test_contextual_positions_beyond_their_table():
    assert_matches_oracle(small("decoder", position={"name": "cope", "max_positions": 3}))


@pytest.mark.parametrize("position", [p for _, p in schemes("decoder")])
def test_packed_segments(position):
    config = unrolled("decoder", position=position)
    model, params = make(config)
    x, layer_params = tokens(0, 1, 9), unstack_layers(config, params)
    packing = {
        "segment_ids": np.array([[1] * 4 + [2] * 5]),
        "positions": np.array([[*range(4), *range(5)]]),
    }
    expected = oracle.forward(config, layer_params, x, **packing)
    assert np.abs(expected - oracle.forward(config, layer_params, x)).max() > 1e-2
    np.testing.assert_allclose(model.apply(params, x, **packing), expected, atol=3e-5)


@pytest.mark.parametrize("places", ["A", "B", "C", "D", "ABCD"])
def test_canon_layers(places):
    more = {"position": "rotary", "qk_norm": True, "num_kv_heads": 2, "glu": len(places) == 1}
    config = small("decoder", canon=places, **more)
    assert_matches_oracle(config, compiled=len(places) == 4)
    config = dataclasses.replace(config, scan_layers=False)
    model, params = make(config)
    x, segments = tokens(0, 1, 9), {"segment_ids": np.array([[1] * 4 + [2] * 5])}
    expected = oracle.forward(config, params, x, **segments)
    leaking = {**segments, "segment_ids": np.ones((1, 9), int)}
    without = {k: 0 * v if "canon" in k else v for k, v in flatten(params).items()}
    for other, where_ in ((params, leaking), (unflatten(without), segments)):
        assert np.abs(expected - oracle.forward(config, other, x, **where_)).max() > 1e-2
    np.testing.assert_allclose(model.apply(params, x, **segments), expected, atol=3e-5)


# Attention within a prefix is bidirectional, so only the schemes of encoders apply.
@pytest.mark.parametrize("position", [p for _, p in schemes("encoder")])
def test_prefix_attention(position):
    """Packs two documents whose prefixes have three and two tokens."""
    config = unrolled("decoder", position=position, prefix_lm=True)
    model, params = make(config)
    x, layer_params = tokens(0, 1, 9), unstack_layers(config, params)
    packing = {
        "segment_ids": np.array([[1] * 5 + [2] * 4]),
        "positions": np.array([[*range(5), *range(4)]]),
        "prefix_mask": np.array([[1, 1, 1, 0, 0, 1, 1, 0, 0]]),
    }
    expected = oracle.forward(config, layer_params, x, **packing)
    causal = oracle.forward(
        config, layer_params, x, **packing | {"prefix_mask": 0 * packing["prefix_mask"]}
    )
    assert np.abs(expected - causal).max() > 1e-2
    np.testing.assert_allclose(model.apply(params, x, **packing), expected, atol=3e-5)


@pytest.mark.parametrize(
    "variant",
    [
        "multi-query",
        "d_k and d_v",
        "window",
        "sink",
        "local and global",
        "two tables",
        "soft cap",
        "parallel peri",
        "experts",
    ],
)
@pytest.mark.parametrize("scan", [True, False])
def test_cached_decoding(variant, scan):
    """Prefills three tokens, then decodes one token at a time."""
    config = small("decoder", **VARIANTS[variant], scan_layers=scan)
    model, params = make(config)
    x = tokens(0, 2, 8)
    expected = oracle.forward(config, unstack_layers(config, params), x)
    logits, memory = start_decoding(model, params, x[:, :3], 8)
    step = jit_if_scanned(model, lambda t, m: advance(model, params, t, m))
    for t in range(3, 8):
        np.testing.assert_allclose(logits, expected[:, t - 1], atol=3e-5)
        logits, memory = step(x[:, t], memory)
    np.testing.assert_allclose(logits, expected[:, -1], atol=3e-5)


@pytest.mark.parametrize("scan", [True, False])
def test_encoder_of_another_size(scan):
    own = {"d_model": 24, "num_heads": 3, "num_kv_heads": 3, "d_ff": 20}
    own |= {"layer_pattern": ({"window": 3}, {})}
    more = {"embedding_scale": True, "position": "rotary", "scan_layers": scan}
    config = small("encoder_decoder", encoder=own, share_embeddings=False, **more)
    model, params = make(config)
    assert params["embedding"]["embedding"].shape == (37, 24)
    inputs = padded_inputs(config)
    layers, real = unstack_layers(config, params), np.asarray(inputs[-1]) != 0
    expected = oracle.forward(config, layers, *inputs, **masks(*inputs))
    narrow = config.part(encoder=FrozenDict(own | {"layer_pattern": ()}))
    assert np.abs(expected - oracle.forward(narrow, layers, *inputs, **masks(*inputs))).max() > 1e-2
    logits = jit_if_scanned(model, model.apply)(params, *inputs, **masks(*inputs))
    np.testing.assert_allclose(np.asarray(logits)[real], expected[real], atol=3e-5)
    source, target = tokens(1, 2, 6), tokens(2, 2, 4)
    full = oracle.forward(config, layers, source, target)
    logits, memory = start_decoding(model, params, target[:, :3], 8, source)
    np.testing.assert_allclose(logits, full[:, 2], atol=3e-5)
    logits, _ = advance(model, params, target[:, 3], memory)
    np.testing.assert_allclose(logits, full[:, 3], atol=3e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_close(family):
    """bfloat16 has 8 significant bits: errors stay below 6% of the largest logit."""
    config = small(family, position="rotary", dtype="bfloat16")
    model, params = make(config, noise=0.2)
    inputs = padded_inputs(config)
    expected, real = (
        oracle.forward(config, unstack_layers(config, params), *inputs, **masks(*inputs)),
        np.asarray(inputs[-1]) != 0,
    )
    logits = np.asarray(jax.jit(model.apply)(params, *inputs, **masks(*inputs)), np.float64)
    error = np.abs(logits - expected)[real].max() / np.abs(expected[real]).max()
    assert 1e-4 < error < 0.06


def test_token_types():
    config = small("encoder", token_types=3)
    model, params = make(config)
    (x,) = padded_inputs(config)
    layer_params, types = (
        unstack_layers(config, params),
        jnp.asarray(np.random.default_rng(0).integers(0, 3, x.shape)),
    )
    expected = oracle.forward(config, layer_params, x, token_types=types, **masks(x))
    assert np.abs(expected - oracle.forward(config, layer_params, x, **masks(x))).max() > 1e-2
    real = np.asarray(x) != 0
    logits = jax.jit(model.apply)(params, x, token_types=types, **masks(x))
    np.testing.assert_allclose(np.asarray(logits)[real], expected[real], atol=3e-5)
