"""Fused attention equals `reference`, and reports the inputs that it does not support.

On CPUs, the kernel for TPUs is interpreted, and the backend for GPUs uses XLA's implementation.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from test_attention_backends import assert_trees_close, bound_scheme, value_and_gradients

from transformer.config import MeshConfig
from transformer.model import attention_backends
from transformer.model.attention_backends import BACKENDS, Inputs, choose, record
from transformer.model.attention_backends.splash import with_slopes
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Mask, Tokens, window
from transformer.model.positions.relative import alibi_slopes
from transformer.parallel.mesh import make_mesh, use

T = 256
PACKED = jnp.array([[1] * 90 + [2] * 130 + [0] * 36, [1] * T])
AT = jnp.stack(
    [jnp.concatenate([jnp.arange(90), jnp.arange(130), jnp.zeros(36, int)]), jnp.arange(T)]
).astype(jnp.int32)
ORDERED = Tokens(AT, PACKED, order="rows")
OTHERS = Tokens(
    AT[:, :128], jnp.where(jnp.arange(128) < 100, 1, 0)[None].repeat(2, 0), order="rows"
)  # without keys for the second document of the first sequence

CASES = {
    "both ways": (SAME_SEGMENT, None, {}),
    "causal": (SAME_SEGMENT & CAUSAL, None, {}),
    "rotary": (SAME_SEGMENT & CAUSAL, "rotary", {}),  # rotates queries and keys beforehand
    "alibi": (SAME_SEGMENT & CAUSAL, "alibi", {}),
    "alibi in a window": (SAME_SEGMENT & CAUSAL & window(70), "alibi", {}),
    "window": (SAME_SEGMENT & CAUSAL & window(130), None, {}),
    "window both ways": (SAME_SEGMENT & window(20), None, {}),
    "cap": (SAME_SEGMENT & CAUSAL, None, {"soft_cap": 2.0}),
    "sink": (SAME_SEGMENT & CAUSAL, None, {"sink_N": jnp.array([0.3, -1.0, 2.0, 0.0])}),
}


def random_qkv(keys=T, kv_heads=2, d_value=24, batch=2):
    k = jax.random.split(jax.random.key(1), 3)
    shapes = ((batch, T, 4, 16), (batch, keys, kv_heads, 16), (batch, keys, kv_heads, d_value))
    return tuple(jax.random.normal(key, shape) for key, shape in zip(k, shapes, strict=True))


def assert_matches_reference(q, k, v, attention_inputs, backend="splash"):
    assert BACKENDS[backend].why_not(q, k, v, attention_inputs) is None
    actual, expected = (
        value_and_gradients(BACKENDS[name].attend, q, k, v, attention_inputs)
        for name in (backend, "reference")
    )
    assert all(np.abs(grad).max() > 1e-2 for grad in expected[1][:3])
    assert_trees_close(actual, expected, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_splash_matches_reference(case):
    mask, position, options = CASES[case]
    position = position and bound_scheme(position, "decoder", ORDERED)
    assert_matches_reference(
        *random_qkv(), Inputs(mask, ORDERED, ORDERED, position, 0.3, **options)
    )


@pytest.mark.parametrize("case", [case for case, (_, _, options) in CASES.items() if not options])
def test_cudnn_matches_reference(case):
    mask, position, options = CASES[case]
    position = position and bound_scheme(position, "decoder", ORDERED)
    assert_matches_reference(
        *random_qkv(d_value=16),
        Inputs(mask, ORDERED, ORDERED, position, 0.3, **options),
        backend="cudnn",
    )


def test_cudnn_call_arguments_and_unsupported_inputs(monkeypatch):
    """Checks the arguments of the cuDNN call, which is mocked, and the inputs without support."""
    from transformer.model.attention_backends import cudnn

    calls = []
    monkeypatch.setattr(cudnn, "platform", lambda: "gpu")
    monkeypatch.setattr(
        jax.nn,
        "dot_product_attention",
        lambda q, k, v, **options: calls.append((q.shape, v.shape, options)) or jnp.zeros_like(q),
    )
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(d_value=16))
    alibi = Inputs(
        SAME_SEGMENT & CAUSAL, ORDERED, ORDERED, bound_scheme("alibi", "decoder", ORDERED), 0.3
    )
    assert BACKENDS["cudnn"].why_not(q, k, v, alibi) is None
    assert BACKENDS["cudnn"].attend(q, k, v, alibi).shape == q.shape
    ((q_shape, v_shape, options),) = calls
    assert q_shape[-1] == v_shape[-1] == 24 and options["mask"].shape == (2, 1, T, T)
    assert options["implementation"] == "cudnn" and options["is_causal"] and options["scale"] == 0.3
    no_position = alibi.replace(position=None)
    unsupported = {
        "bfloat16": (random_qkv(d_value=16), no_position),
        "does not support soft caps": ((q, k, v), no_position.replace(soft_cap=1.0)),
        "does not support sinks": ((q, k, v), no_position.replace(sink_N=jnp.zeros(4))),
        "does not support dropout": (
            (q, k, v),
            no_position.replace(dropout=0.1, dropout_key=jax.random.key(0)),
        ),
        "head sizes 16 for queries and keys, 8 for values": ((q, k, v[..., :8]), no_position),
        "are not even": ((q[:, :-1], k, v), no_position),
        "changes logits": ((q, k, v), alibi.replace(mask=SAME_SEGMENT)),
    }
    for reason, (arrays, attention_inputs) in unsupported.items():
        assert reason in BACKENDS["cudnn"].why_not(*arrays, attention_inputs), reason
    monkeypatch.setattr(cudnn, "MAX_PAIRS", 100)
    assert "too large" in BACKENDS["cudnn"].why_not(q, k, v, no_position)


def test_splash_matches_reference_for_queries_without_keys():
    q, k, v = random_qkv(keys=128)
    attention_inputs = Inputs(SAME_SEGMENT, ORDERED, OTHERS, None, 0.3)
    assert not np.any(BACKENDS["reference"].attend(q, k, v, attention_inputs)[0, 90:])
    assert_matches_reference(q, k, v, attention_inputs)


@pytest.mark.parametrize(
    ("kv_heads", "sizes"),
    [
        (2, {"data": 2, "fsdp": 2, "tensor": 2}),
        (1, {"data": 2, "tensor": 4}),
        (4, {"fsdp": 4, "expert": 2}),
    ],
)
def test_splash_shards_over_sequences_and_heads(kv_heads, sizes):
    mesh = make_mesh(MeshConfig(**{"data": 1} | sizes))
    q, k, v = (jnp.concatenate([x] * 2) for x in random_qkv(kv_heads=kv_heads))
    tokens = jax.tree.map(lambda x: jnp.concatenate([x] * 2), ORDERED)
    attention_inputs = Inputs(
        SAME_SEGMENT & CAUSAL, tokens, tokens, bound_scheme("alibi", "decoder", tokens), 0.3
    )
    expected = value_and_gradients(BACKENDS["reference"].attend, q, k, v, attention_inputs)
    with use(mesh):
        shard = lambda tree: jax.tree.map(
            lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp")))), tree
        )
        actual = value_and_gradients(
            BACKENDS["splash"].attend,
            *shard((q, k, v)),
            attention_inputs.replace(q_tokens=shard(tokens), k_tokens=shard(tokens)),
        )
    assert len(actual[0].sharding.device_set) == 8
    assert_trees_close(actual, expected, atol=1e-4)


def test_alibi_in_bfloat16_is_exact():
    """The product m s of a slope and a position is exact for 24 heads and positions to 65,535.

    m and s are split into features of eight bits; without the split, bfloat16 would round them.
    """
    positions = jnp.concatenate([jnp.arange(600), jnp.arange(65_000, 65_536)]).astype(jnp.int32)[
        None
    ]
    slopes = jnp.asarray(alibi_slopes(24), jnp.float32)
    q, k = (jnp.zeros((1, n, 24, 1), jnp.bfloat16) for n in (1, positions.size))
    q, k = with_slopes(q, k, slopes, positions)
    assert q.dtype == k.dtype == jnp.bfloat16
    actual = np.einsum("BTNF,BSNF->NS", *(np.asarray(x, np.float64) for x in (q, k)))
    expected = np.asarray(slopes, np.float64)[:, None] * np.asarray(positions, np.float64)
    np.testing.assert_array_equal(actual, expected)
    rounded = np.asarray(slopes.astype(jnp.bfloat16), np.float64)[:, None] * np.asarray(
        positions.astype(jnp.bfloat16), np.float64
    )
    assert np.abs(rounded - expected).max() > 10


def test_splash_reports_unsupported_inputs():
    q, k, v = random_qkv()
    base = Inputs(SAME_SEGMENT & CAUSAL, ORDERED, ORDERED, None, 0.3)
    unordered = ORDERED.replace(order="")
    even_distances = Mask(
        lambda q, k: (q.positions_BxT[:, :, None] + k.positions_BxS[:, None]) % 2 == 0, "even"
    )
    unsupported = {
        "the position scheme": base.replace(position=bound_scheme("t5", "decoder", ORDERED)),
        "changes logits": base.replace(
            position=bound_scheme("alibi", "decoder", ORDERED), soft_cap=2.0
        ),
        "does not support dropout": base.replace(dropout=0.1, dropout_key=jax.random.key(0)),
        "positions may be 65,536": base.replace(
            position=bound_scheme("alibi", "decoder", ORDERED),
            q_tokens=ORDERED.replace(order="growing"),
            k_tokens=ORDERED.replace(order="growing"),
        ),
        "the mask": base.replace(mask=SAME_SEGMENT & CAUSAL & even_distances),
        "does not support the mask": base.replace(mask=CAUSAL),
        "is unknown": base.replace(q_tokens=unordered, k_tokens=unordered),
        "the order of tokens": base.replace(q_tokens=ORDERED.replace(until_BxT=AT)),
    }
    for reason, attention_inputs in unsupported.items():
        assert reason in BACKENDS["splash"].why_not(q, k, v, attention_inputs), reason
    assert "multiples of 128" in BACKENDS["splash"].why_not(q[:, :200], k, v, base)
    assert BACKENDS["splash"].why_not(q, k, v, base) is None


def test_auto_selects_splash_on_tpu_where_supported(monkeypatch):
    from transformer.model.attention_backends import splash

    q, k, v = random_qkv()
    attention_inputs = Inputs(SAME_SEGMENT & CAUSAL, ORDERED, ORDERED, None, 0.3)
    assert choose("auto", q, k, v, attention_inputs) is BACKENDS["reference"].attend
    for module in (attention_backends, splash):
        monkeypatch.setattr(module, "platform", lambda: "tpu")
    with record() as backends:
        assert choose("auto", q, k, v, attention_inputs) is BACKENDS["splash"].attend
        dropout = attention_inputs.replace(dropout=0.1, dropout_key=jax.random.key(0))
        assert choose("auto", q, k, v, dropout) is BACKENDS["reference"].attend
    assert backends == {
        "splash": "",
        "reference": "splash: it does not support dropout on attention weights",
    }
    monkeypatch.setattr(attention_backends, "LONG", T)
    assert (
        choose("splash", q, k, v, dropout)
        is choose("auto", q, k, v, dropout)
        is BACKENDS["blockwise"].attend
    )
    assert choose("reference", q, k, v, attention_inputs) is BACKENDS["reference"].attend
    monkeypatch.undo()
    for module in (attention_backends, splash):
        monkeypatch.setattr(module, "platform", lambda: "gpu")
    assert choose("splash", q, k, v, attention_inputs) is BACKENDS["reference"].attend


def test_record_can_be_nested():
    q, k, v = random_qkv()
    attention_inputs = Inputs(SAME_SEGMENT & CAUSAL, ORDERED, ORDERED, None, 0.3)
    with record() as outer:
        with record() as inner:
            choose("blockwise", q, k, v, attention_inputs)
        choose("reference", q, k, v, attention_inputs)
    assert inner == {"blockwise": ""} and outer == {"blockwise": "", "reference": ""}
