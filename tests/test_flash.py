"""Fused attention equals `reference`: values and gradients, for every mask, option and scheme.
The kernels for TPUs are interpreted on CPUs; test_flash_gpu.py tests those for GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, small, start_decoding, tokens
from jax.sharding import NamedSharding, PartitionSpec
from test_attention_backends import assert_trees_close, bound_scheme, value_and_gradients

from transformer.config import MeshConfig
from transformer.model import attention_backends
from transformer.model.attention_backends import BACKENDS, Inputs, choose, flash, record
from transformer.model.attention_backends.base import _keep
from transformer.model.attention_backends.flash import call
from transformer.model.attention_backends.flash.tiles import EMPTY, FULL, PARTIAL, Limits
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Mask, Tokens, window, zigzag
from transformer.model.positions import SCHEMES
from transformer.parallel.mesh import make_mesh, use

T = 384
PACKED = jnp.array([[1] * 90 + [2] * 230 + [0] * 64, [1] * T])
AT = jnp.stack(
    [jnp.concatenate([jnp.arange(90), jnp.arange(230), jnp.zeros(64, int)]), jnp.arange(T)]
).astype(jnp.int32)
ORDERED = Tokens(AT, PACKED, order="contiguous")
SHUFFLED = Tokens(AT[:, ::-1], PACKED[:, ::-1])
PREFIX = ORDERED.replace(until_BxT=jnp.maximum(AT, 40))
BOTH_WAYS, PAST = SAME_SEGMENT, SAME_SEGMENT & CAUSAL
MASKS = {
    "both ways": (BOTH_WAYS, ORDERED, {}),
    "causal": (PAST, ORDERED, {}),
    "window": (PAST & window(70), ORDERED, {}),
    "window both ways": (BOTH_WAYS & window(130), ORDERED, {}),
    "prefix": (PAST, PREFIX, {}),
    "cap": (PAST, ORDERED, {"soft_cap": 2.0}),
    "sink": (PAST, ORDERED, {"sink_N": jnp.array([0.3, -1.0, 2.0, 0.0])}),
    "dropout": (PAST, ORDERED, {"dropout": 0.2, "dropout_key": jax.random.key(3)}),
    "everything": (
        BOTH_WAYS & window(200),
        ORDERED,
        {
            "soft_cap": 3.0,
            "sink_N": jnp.array([0.3, -1.0, 2.0, 0.0]),
            "dropout": 0.1,
            "dropout_key": jax.random.key(4),
        },
    ),
}
DISTANCE_BIASES = [name for name, scheme in SCHEMES.items() if scheme().is_distance_bias]


TOLERANCES = {"fire": 1e-3}
"""In float32, the gradient of FIRE's first matrix has an error of 3e-4 in the reference."""

BY_CONTENT = ["shaw", "transformer_xl", "deberta"]
"""Functions of distance and content."""

DEBERTA_V3 = {
    "name": "deberta", "max_distance": 90, "buckets": 8, "shared": True, "norm": True,
}  # fmt: skip


COSTS = dict(call.COST)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles per sequence, so that all states of tiles occur."""
    monkeypatch.setattr(call, "COST", {"": {128: 1.0}})


@pytest.mark.parametrize(
    ("kind", "tokens", "causal", "ends", "tile"),
    [
        ("", 8192, True, False, 512),
        ("", 512, True, False, 512),
        ("", 700, True, False, 256),  # 768 instead of 1,024 queries
        ("", 100, False, False, 128),
        ("TPU v6 lite", 8192, True, False, 1024),
        ("TPU v6 lite", 2048, True, False, 512),  # 10 tiles instead of 3, whose area is 12
        ("TPU v6 lite", 2048, False, False, 1024),
        ("TPU v6 lite", 8192, True, True, 512),
    ],
)
def test_tiles_are_chosen_by_device_length_mask_and_scheme(
    monkeypatch, kind, tokens, causal, ends, tile
):
    monkeypatch.setattr(call, "COST", {"": COSTS[kind]})
    assert call.tile_size(tokens, causal, ends) == tile


def random_qkv(keys=T, kv_heads=2, d_value=24, batch=2, queries=T, dtype=jnp.float32, size=16):
    k = jax.random.split(jax.random.key(1), 3)
    shapes = (
        (batch, queries, 4, size),
        (batch, keys, kv_heads, size),
        (batch, keys, kv_heads, d_value),
    )
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(k, shapes, strict=True))


def make_inputs(mask: str, position: str | None) -> Inputs:
    rule, where, options = MASKS[mask]
    side = "decoder" if rule.causal and where is not PREFIX else "encoder"
    scheme = position and bound_scheme(position, side, where, 24, d_head=16)
    return Inputs(rule, where, where, scheme, 0.3, **options)


def assert_matches_reference(q, k, v, attention_inputs, atol=1e-4):
    assert BACKENDS["flash"].why_not(q, k, v, attention_inputs) is None
    actual, expected = (
        value_and_gradients(BACKENDS[name].attend, q, k, v, attention_inputs)
        for name in ("flash", "reference")
    )
    assert all(np.abs(grad).max() > 1e-2 for grad in expected[1][:3])
    assert_trees_close(actual, expected, atol=atol)


@pytest.mark.parametrize("position", [None, "rotary", "fire", *DISTANCE_BIASES])
@pytest.mark.parametrize("mask", MASKS)
def test_flash_matches_reference(mask, position):
    if position not in (None, "t5") and mask not in ("causal", "both ways"):
        position = {"rotary": None}.get(position, position)
    assert_matches_reference(
        *random_qkv(), make_inputs(mask, position), TOLERANCES.get(position, 1e-4)
    )


@pytest.mark.parametrize(("kv_heads", "d_value", "keys"), [(4, 16, T), (1, 24, T), (2, 40, 250)])
def test_flash_supports_grouped_heads_value_sizes_and_other_lengths(kv_heads, d_value, keys):
    q, k, v = random_qkv(keys=keys, kv_heads=kv_heads, d_value=d_value)
    k_tokens = jax.tree.map(lambda x: x[:, :keys], ORDERED)
    if keys < T:
        assert_matches_reference(q, k, v, Inputs(BOTH_WAYS, ORDERED, k_tokens, None, 0.3))
        q, q_tokens = q[:, :keys], k_tokens  # no multiple of a tile
    else:
        q_tokens = ORDERED
    scheme = bound_scheme("t5", "decoder", q_tokens)
    assert_matches_reference(q, k, v, Inputs(PAST, q_tokens, k_tokens, scheme, 0.3))


def test_flash_matches_reference_for_tokens_in_any_order():
    assert_matches_reference(*random_qkv(), Inputs(PAST, SHUFFLED, SHUFFLED, None, 0.3))


def test_output_of_queries_without_keys_is_zero():
    """The second document of the first sequence has no keys."""
    keys = Tokens(AT[:, :128], jnp.where(jnp.arange(128) < 100, 1, 0)[None].repeat(2, 0))
    q, k, v = random_qkv(keys=128)
    attention_inputs = Inputs(BOTH_WAYS, ORDERED, keys, None, 0.3)
    assert not np.any(BACKENDS["reference"].attend(q, k, v, attention_inputs)[0, 90:])
    assert_matches_reference(q, k, v, attention_inputs)


@pytest.mark.parametrize("position", [None, "t5", "fire", *BY_CONTENT, DEBERTA_V3])
def test_long_sequences_are_computed_in_pairs_of_blocks(monkeypatch, position):
    monkeypatch.setattr(flash, "block_size", lambda *_: 128)
    assert_matches_reference(*random_qkv(), make_inputs("sink", position))


@pytest.mark.parametrize("position", ["t5", "alibi", "fire", "shaw", "deberta"])
def test_repeated_gradients_are_equal_bit_by_bit(position):
    q, k, v = random_qkv()
    inputs = make_inputs("causal", position)
    first, second = (value_and_gradients(flash.flash, q, k, v, inputs) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_bfloat16_is_as_close_to_float64_as_its_precision_allows():
    """The error is at most that of `reference` in bfloat16, up to a fifth."""
    inputs = make_inputs("causal", "t5")
    exact, rounded = random_qkv(), random_qkv(dtype=jnp.bfloat16)
    expected = value_and_gradients(BACKENDS["reference"].attend, *exact, inputs)
    error = lambda name: jax.tree.map(
        lambda x, y: np.sqrt(np.mean(np.square(np.asarray(x, np.float64) - y))),
        value_and_gradients(BACKENDS[name].attend, *rounded, inputs),
        expected,
    )
    ours, theirs = error("flash"), error("reference")
    assert ours[0] > 1e-4
    jax.tree.map(lambda a, b: np.testing.assert_array_less(a, 1.2 * b + 1e-6), ours, theirs)


@pytest.mark.parametrize(
    ("kv_heads", "sizes", "position"),
    [
        (2, {"data": 2, "fsdp": 2, "tensor": 2}, "t5"),
        (1, {"data": 2, "tensor": 4}, "t5"),
        (4, {"fsdp": 4, "expert": 2}, "t5"),
        (2, {"data": 2, "fsdp": 2, "tensor": 2}, "deberta"),
        (1, {"data": 2, "tensor": 4}, "fire"),
    ],
)
def test_flash_shards_over_sequences_and_heads(kv_heads, sizes, position):
    """Also with dropout, whose mask does not depend on the mesh."""
    mesh = make_mesh(MeshConfig(**{"data": 1} | sizes))
    q, k, v = (jnp.concatenate([x] * 2) for x in random_qkv(kv_heads=kv_heads))
    tokens = jax.tree.map(lambda x: jnp.concatenate([x] * 2), ORDERED)
    options = {"dropout": 0.2, "dropout_key": jax.random.key(3)}
    scheme = bound_scheme(position, "decoder", tokens, 24, d_head=16)
    attention_inputs = Inputs(PAST, tokens, tokens, scheme, 0.3, **options)
    expected = value_and_gradients(BACKENDS["reference"].attend, q, k, v, attention_inputs)
    with use(mesh):
        shard = lambda tree: jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp")))), tree
        )
        actual = value_and_gradients(
            flash.flash,
            *shard((q, k, v)),
            attention_inputs.replace(q_tokens=shard(tokens), k_tokens=shard(tokens)),
        )
    assert len(actual[0].sharding.device_set) == 8
    assert_trees_close(actual, expected, atol=TOLERANCES.get(position, 1e-4))


@pytest.mark.parametrize(
    ("order", "position"),
    [(order, name) for order in ("contiguous", "zigzag") for name in (None, "t5")]
    + [("zigzag", "shaw"), ("zigzag", "fire"), ("contiguous", "deberta")],
)
def test_flash_on_a_ring_matches_reference(order, position):
    """Two devices in a ring hold the tokens, and two the heads."""
    inputs = make_inputs("sink", position)
    q, k, v = random_qkv()
    expected = value_and_gradients(BACKENDS["reference"].attend, q, k, v, inputs)
    reorder = (lambda x: zigzag(x, 2)) if order == "zigzag" else (lambda x: x)
    back = jnp.argsort(reorder(jnp.arange(T)[None])[0])
    by_token = lambda x: jnp.stack(
        [reorder(x[..., i, j]) for i in range(x.shape[2]) for j in range(x.shape[3])], -1
    ).reshape(x.shape)
    tokens = jax.tree.map(reorder, ORDERED).replace(order=order)
    inputs = inputs.replace(q_tokens=tokens, k_tokens=tokens)
    attend = lambda q, k, v, inputs: flash.flash(*map(by_token, (q, k, v)), inputs)[:, back]
    with use(make_mesh(MeshConfig(data=2, context=2, tensor=2))):
        assert flash.why_not(q, k, v, inputs) is None
        assert_trees_close(value_and_gradients(attend, q, k, v, inputs), expected, atol=1e-4)


@pytest.mark.parametrize("position", ["t5", "fire", "rotary", "transformer_xl"])
def test_prefill_and_later_chunks_match_reference(position):
    """Prompts are padded on the left, and the cache has more slots than they have tokens."""
    prompt = tokens(0, 2, 150, 37).at[0, :60].set(0)
    more = tokens(1, 2, 140, 37)
    logits = {}
    for backend in ("flash", "reference"):
        config = small("decoder", position=position, attention_backend=backend, max_length=300)
        model, params = make(config)
        with record() as backends:
            first, memory = start_decoding(model, params, prompt, 300)
            decode = lambda params, cache: model.apply(  # noqa: B023
                params, more, cache, order="contiguous", method="decode"
            )[0]
            logits[backend] = first, jax.jit(decode)(params, memory)
        assert backends == {backend: ""}
    assert_trees_close(logits["flash"], logits["reference"], atol=1e-4)


def test_states_of_tiles_agree_with_the_mask():
    for name, (rule, where, _) in MASKS.items():
        inputs = Inputs(rule, where, where, None, 1.0).by_index()
        mask = np.asarray(rule(where, where))
        tiles = mask.reshape(2, 3, 128, 3, 128).transpose(0, 1, 3, 2, 4).reshape(2, 3, 3, -1)
        states = np.broadcast_to(Limits.of(inputs).states(128, 128), (2, 3, 3))
        assert not tiles[states == EMPTY].any() and tiles[states == FULL].all(), name
        if name == "causal":
            np.testing.assert_array_equal(
                states[1], [[PARTIAL, 0, 0], [FULL, PARTIAL, 0], [FULL, FULL, PARTIAL]]
            )


def test_dropout_masks_have_their_rate_and_no_correlation():
    """Four weights of two queries and two keys are independent, and so are heads and sequences."""
    inputs = Inputs(PAST, ORDERED, ORDERED, None, 1.0, dropout=0.25, dropout_key=jax.random.key(0))
    keep = np.asarray(_keep(inputs, (2, 4, 512, 512)), np.float64)
    assert abs(keep.mean() - 0.75) < 1e-3
    x = keep - 0.75
    noise = (0.25 * 0.75) / 512  # of a mean over 512 x 512 products
    products = {
        "queries": x[0, 0, 1:] * x[0, 0, :-1],
        "keys": x[0, 0, :, 1:] * x[0, 0, :, :-1],
        "heads": x[0, 0] * x[0, 1],
        "sequences": x[0, 0] * x[1, 0],
    }
    for name, product in products.items():
        assert abs(product.mean()) < 4 * noise, name
    squares = x[:, :, ::2, ::2] * x[:, :, 1::2, ::2] * x[:, :, ::2, 1::2] * x[:, :, 1::2, 1::2]
    assert abs(squares.mean()) < 4 * (0.25 * 0.75) ** 2 / np.sqrt(squares.size)


def test_flash_reports_unsupported_inputs():
    q, k, v = random_qkv()
    base = make_inputs("causal", None)
    even = Mask(
        lambda q, k: (q.positions_BxT[:, :, None] + k.positions_BxS[:, None]) % 2 == 0, "even"
    )
    growing = ORDERED.replace(order="increasing")
    unsupported = {
        "is not a function of distance": base.replace(
            position=bound_scheme("cope", "decoder", ORDERED)
        ),
        "distances differ": base.replace(
            position=bound_scheme("alibi", "decoder", ORDERED), q_tokens=growing, k_tokens=growing
        ),
        "the mask": base.replace(mask=PAST & even),
        "does not support the mask": base.replace(mask=CAUSAL),
        "up to 5,000 knots": base.replace(
            position=bound_scheme({"name": "fire", "width": 70}, "decoder", ORDERED)
        ),
    }
    for reason, attention_inputs in unsupported.items():
        assert reason in flash.why_not(q, k, v, attention_inputs), reason


def test_auto_selects_flash_on_tpu_where_supported(monkeypatch):
    q, k, v = random_qkv()
    base, cope = make_inputs("causal", None), make_inputs("causal", "cope")
    assert choose("auto", q, k, v, base) is BACKENDS["reference"].attend
    monkeypatch.setattr(attention_backends, "platform", lambda: "tpu")
    with record() as backends:
        assert choose("auto", q, k, v, base) is BACKENDS["flash"].attend
        assert choose("auto", q, k, v, make_inputs("causal", "shaw")) is flash.flash
        assert choose("auto", q, k, v, cope) is BACKENDS["reference"].attend
    assert backends == {
        "flash": "",
        "reference": "flash: the position scheme is not a function of distance",
    }
    monkeypatch.setattr(attention_backends, "LONG", T)
    where = ORDERED.replace(order="increasing")
    spread = make_inputs("causal", "fire").replace(q_tokens=where, k_tokens=where)
    assert (
        choose("flash", q, k, v, spread)
        is choose("auto", q, k, v, spread)
        is BACKENDS["blockwise"].attend
    )
    assert choose("reference", q, k, v, base) is BACKENDS["reference"].attend
    monkeypatch.setattr(attention_backends, "platform", lambda: "gpu")
    assert choose("auto", q, k, v, base) is BACKENDS["flash"].attend


def test_record_can_be_nested():
    q, k, v = random_qkv()
    attention_inputs = make_inputs("causal", None)
    with record() as outer:
        with record() as inner:
            choose("blockwise", q, k, v, attention_inputs)
        choose("reference", q, k, v, attention_inputs)
    assert inner == {"blockwise": ""} and outer == {"blockwise": "", "reference": ""}
