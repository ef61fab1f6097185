"""Every backend matches the reference: values and gradients, for every scheme and mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, schemes, small, tokens
from jax.sharding import NamedSharding, PartitionSpec

from transformer.config import MeshConfig
from transformer.model import positions
from transformer.model.attention_backends import (
    BACKENDS,
    Inputs,
    blockwise as blockwise_module,
    choose,
    record,
    ring,
)
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens, window, zigzag
from transformer.model.positions import SCHEMES
from transformer.parallel.mesh import make_mesh, use

T, N, K, H = 11, 4, 2, 4
PACKED = jnp.array([[1] * 4 + [2] * 5 + [0] * 2, [1] * 9 + [2] * 2])
AT = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]])
ORDERED = Tokens(AT, PACKED, order="contiguous")
SHUFFLED = Tokens(AT[:, ::-1], PACKED[:, ::-1])
PREFIX = Tokens(AT, PACKED, jnp.maximum(AT, 2), order="contiguous")
MASKS = {
    "both ways": (SAME_SEGMENT, ORDERED, {}),
    "causal": (SAME_SEGMENT & CAUSAL, ORDERED, {}),
    "causal, in no order": (SAME_SEGMENT & CAUSAL, SHUFFLED, {}),
    "window": (SAME_SEGMENT & CAUSAL & window(3), ORDERED, {}),
    "window both ways": (SAME_SEGMENT & window(2), ORDERED, {}),
    "prefix": (SAME_SEGMENT & CAUSAL, PREFIX, {}),
    "cap": (SAME_SEGMENT & CAUSAL, ORDERED, {"soft_cap": 2.0}),
    "sink": (SAME_SEGMENT & CAUSAL, ORDERED, {"sink_N": jnp.array([0.3, -1.0, 2.0, 0.0])}),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blockwise_module.Einsum, "block", 4)


def random_qkv(d_value=H, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = ((2, T, N, H), (2, T, K, H), (2, T, K, d_value))
    return tuple(
        jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)
    )


def bound_scheme(position, side, where, d_value=H, **fields):
    """Returns a scheme bound to one layer, with random parameters. FIRE's threshold is 9.5."""
    facts = small(side, position=position, d_value=d_value, **fields).stack_facts(side)
    draw = np.random.default_rng(0)

    def param(name, init, shape, dtype):
        mean = 10.0 if name == "fire_threshold" else 0.0
        return jnp.asarray(mean + 0.5 * draw.standard_normal(shape), dtype)

    kernels = draw.standard_normal((2, facts.d_model, facts.num_heads, facts.d_head)) / 4
    project = [lambda x, w=w: jnp.einsum("RD,DNH->RNH", x, w) for w in kernels]
    scheme = positions.build(position).bind(param, facts).bind_layer(param, facts)
    return scheme.project(*project).at(where.positions_BxT)


def value_and_gradients(attend, q, k, v, inputs):
    """Returns the output, and the gradients of a randomly weighted sum of it.

    The gradients are with respect to queries, keys, values, the scheme's parameters and the sink.
    """
    weight = jax.random.normal(jax.random.key(2), (*q.shape[:3], v.shape[-1]))

    def loss(q, k, v, position, sink_N):
        out = attend(q, k, v, inputs.replace(position=position, sink_N=sink_N))
        return jnp.sum(out * weight), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3, 4), has_aux=True))(
        q, k, v, inputs.position, inputs.sink_N
    )
    return out, grads


def assert_trees_close(a, b, rtol=2e-5, atol=2e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol, atol), a, b)


def cases():
    """Returns (mask, position) pairs.

    They combine each mask with a scheme that adds to the logits (t5) and with one that depends on
    the content (shaw), and each other pairwise scheme with the usual mask of its families.
    """
    masks = {"encoder": "both ways", "decoder": "causal"}
    pairs = [(mask, position) for mask in MASKS for position in ("t5", "shaw")]
    return pairs + [
        (masks[side], position)
        for side, position in schemes("encoder", "decoder")
        if SCHEMES[position].pairwise and position not in ("t5", "shaw")
    ]


@pytest.mark.parametrize(("mask", "position"), cases())
def test_blockwise_matches_reference(mask, position):
    rule, where, options = MASKS[mask]
    side = "decoder" if rule.causal else "encoder"
    inputs = Inputs(rule, where, where, bound_scheme(position, side, where, 3), 0.4, **options)
    arguments = (*random_qkv(3), inputs)
    expected = value_and_gradients(BACKENDS["reference"].attend, *arguments)
    assert all(np.abs(g).max() > 1e-3 for g in expected[1][:3])
    assert_trees_close(value_and_gradients(BACKENDS["blockwise"].attend, *arguments), expected)


@pytest.mark.parametrize("position", SCHEMES)
def test_by_index_applies_if_logits_depend_on_distances_alone(position):
    inputs = Inputs(
        SAME_SEGMENT & CAUSAL, ORDERED, ORDERED, bound_scheme(position, "decoder", ORDERED, 3), 0.4
    )
    by_index = inputs.by_index()
    if position in ("fire", "cope"):
        assert by_index is inputs
        return
    assert by_index.q_tokens.positions_BxT.shape == (1, T)
    on_logits = ("alibi", "t5", "shaw", "transformer_xl", "deberta", "kerple", "sandwich")
    assert (inputs.logits_position is not None) == (position in on_logits)
    if inputs.logits_position is not None:
        out = [
            BACKENDS["reference"].attend(*random_qkv(3), variant)
            for variant in (by_index, inputs, inputs.replace(position=None))
        ]
        assert np.abs(out[1] - out[2]).max() > 1e-3
        assert_trees_close(*out[:2])
    for unchanged in (
        inputs.replace(mask=CAUSAL),
        inputs.replace(q_tokens=SHUFFLED, k_tokens=SHUFFLED),
    ):
        assert unchanged.by_index() is unchanged


def test_by_index_keeps_the_mask_of_a_prefix():
    inputs = Inputs(SAME_SEGMENT & CAUSAL, PREFIX, PREFIX, None, 0.4)
    masks = [x.mask(x.q_tokens, x.k_tokens) for x in (inputs, inputs.by_index())]
    assert np.any(masks[0] != SAME_SEGMENT(PREFIX, PREFIX) & CAUSAL(ORDERED, ORDERED))
    np.testing.assert_array_equal(*masks)


def test_padded_slots_of_the_last_block_are_masked():
    """Every mask excludes the padded slots of a block; 11 keys leave one in the last block."""
    q, k, v = random_qkv()
    inputs = Inputs(
        CAUSAL,
        ORDERED.replace(segments_BxT=jnp.ones_like(PACKED)),
        ORDERED.replace(segments_BxT=jnp.ones_like(PACKED)),
        None,
        0.4,
    )
    assert_trees_close(
        BACKENDS["blockwise"].attend(q, k, v, inputs), BACKENDS["reference"].attend(q, k, v, inputs)
    )


def test_fully_masked_blocks_are_skipped():
    count = lambda mask, where: len(
        blockwise_module.needed(Inputs(mask, where, where, None, 1.0), 16, 16, (4, 4))
    )
    assert count(SAME_SEGMENT, ORDERED) == 16
    assert count(SAME_SEGMENT & CAUSAL, ORDERED) == 10
    assert count(SAME_SEGMENT & CAUSAL, SHUFFLED) == 16
    assert count(SAME_SEGMENT & CAUSAL, PREFIX) == 16
    assert count(SAME_SEGMENT & CAUSAL & window(4), ORDERED) == 7
    assert count(SAME_SEGMENT & window(2), ORDERED) == 10


def test_dropout_keeps_mean_and_gradient_matches_finite_differences():
    q, k, v = random_qkv()
    inputs = Inputs(SAME_SEGMENT & CAUSAL, ORDERED, ORDERED, None, 0.5)
    attend = jax.jit(
        lambda q, key: BACKENDS["blockwise"].attend(
            q, k, v, inputs.replace(dropout=0.4, dropout_key=key)
        )
    )
    average = jnp.mean(
        jax.lax.map(lambda i: attend(q, jax.random.key(i)), jnp.arange(3000)), axis=0
    )
    np.testing.assert_allclose(average, BACKENDS["blockwise"].attend(q, k, v, inputs), atol=0.15)
    key, direction = jax.random.key(5), jax.random.normal(jax.random.key(6), q.shape)
    assert np.abs(attend(q, key) - attend(q, jax.random.key(7))).max() > 0.1
    loss = lambda q: jnp.sum(attend(q, key) ** 2)
    slope = jnp.sum(jax.grad(loss)(q) * direction)
    step = 1e-2
    np.testing.assert_allclose(
        slope, (loss(q + step * direction) - loss(q - step * direction)) / (2 * step), rtol=1e-2
    )


def test_blockwise_is_close_to_reference_in_bfloat16():
    q, k, v = random_qkv(dtype=jnp.bfloat16)
    inputs = Inputs(
        SAME_SEGMENT & CAUSAL, ORDERED, ORDERED, bound_scheme("alibi", "decoder", ORDERED), 0.4
    )
    ours, expected = (
        value_and_gradients(BACKENDS[b].attend, q, k, v, inputs) for b in ("blockwise", "reference")
    )
    assert ours[0].dtype == jnp.bfloat16
    assert_trees_close(
        *(jax.tree.map(lambda x: np.asarray(x, np.float32), x) for x in (ours, expected)),
        rtol=0.1,
        atol=0.06,
    )


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
def test_model_loss_and_gradients_agree_across_backends(family):
    """Includes cross-attention, where source and target differ in length."""
    inputs = (tokens(0, 2, 13),) + ((tokens(1, 2, 9),) if family == "encoder_decoder" else ())
    results = {}
    for backend in ("reference", "blockwise", "flash"):
        model, params = make(
            small(
                family, position="t5", attention_backend=backend, attention_sink=True, remat="full"
            )
        )
        with record() as used:
            loss = lambda p: jnp.sum(jnp.square(model.apply(p, *inputs)))  # noqa: B023
            results[backend] = jax.jit(jax.value_and_grad(loss))(params)
        assert used == {backend: ""}
    for backend in ("blockwise", "flash"):
        (loss, grads), (expected_loss, expected_grads) = results[backend], results["reference"]
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        assert_trees_close(grads, expected_grads, rtol=1e-3, atol=1e-3)


def test_unsupported_inputs_fall_back_and_record_the_reason():
    q, k, v = random_qkv()
    inputs = Inputs(
        SAME_SEGMENT & CAUSAL, ORDERED, ORDERED, bound_scheme("cope", "decoder", ORDERED), 0.4
    )
    with record() as used:
        assert choose("blockwise", q, k, v, inputs) is BACKENDS["reference"].attend
    assert used == {"reference": "blockwise: the position scheme needs all keys of a query at once"}


def test_auto_selects_blockwise_for_long_sequences():
    where = Tokens(jnp.arange(4096)[None], jnp.ones((1, 4096), jnp.int32), order="contiguous")
    shape = lambda n: jax.ShapeDtypeStruct((1, n, 4, 8), jnp.float32)
    inputs = Inputs(SAME_SEGMENT & CAUSAL, where, where, None, 1.0)
    assert (
        choose("auto", shape(4096), shape(4096), shape(4096), inputs)
        is BACKENDS["blockwise"].attend
    )
    assert (
        choose("auto", shape(1), shape(4096), shape(4096), inputs) is BACKENDS["reference"].attend
    )


SPREAD_T = 24
SPREAD = Tokens(
    jnp.stack(
        [jnp.arange(24), jnp.concatenate([jnp.arange(15), jnp.arange(7), jnp.zeros(2, int)])]
    ),
    jnp.stack([jnp.ones(24, int), jnp.repeat(jnp.array([1, 2, 0]), jnp.array([15, 7, 2]))]),
    order="contiguous",
)


@pytest.mark.parametrize(
    ("mask", "position", "order"),
    [(mask, "t5", "contiguous") for mask in MASKS]
    + [(mask, "shaw", "zigzag") for mask in MASKS if MASKS[mask][0].causal]
    + [
        ("causal", p, "zigzag")
        for _, p in schemes("decoder")
        if SCHEMES[p].pairwise and p != "shaw"
    ],
)
def test_ring_matches_reference(mask, position, order):
    """Shards tokens over three devices and heads over two.

    Compares values and all gradients, including those of the scheme's parameters and the sink.
    """
    rule, where, options = MASKS[mask]
    side = "decoder" if rule.causal else "encoder"
    where = SPREAD.replace(
        order="" if where is SHUFFLED else "contiguous",
        until_BxT=jnp.maximum(SPREAD.positions_BxT, 2) if where is PREFIX else None,
    )
    keys = jax.random.split(jax.random.key(1), 3)
    q, k, v = (
        jax.random.normal(key, (2, SPREAD_T, n, h))
        for key, n, h in zip(keys, (N, K, K), (H, H, 3), strict=True)
    )
    inputs = Inputs(rule, where, where, bound_scheme(position, side, where, 3), 0.4, **options)
    out, grads = value_and_gradients(BACKENDS["reference"].attend, q, k, v, inputs)
    to_order = (lambda x: zigzag(x, 3)) if order == "zigzag" else (lambda x: x)
    from_order = lambda x: (
        jnp.zeros_like(x).at[:, zigzag(jnp.arange(SPREAD_T)[None], 3)[0]].set(x)
        if order == "zigzag"
        else x
    )
    reordered = jax.tree.map(to_order, where).replace(order=order if where.order else "")
    inputs = inputs.replace(q_tokens=reordered, k_tokens=reordered)
    to_order_with_heads = lambda x: jnp.stack(
        [to_order(x[:, :, n, h]) for n in range(x.shape[2]) for h in range(x.shape[3])], -1
    ).reshape(x.shape)
    ring = lambda q, k, v, inputs: from_order(
        BACKENDS["ring"].attend(*map(to_order_with_heads, (q, k, v)), inputs)
    )
    with use(make_mesh(MeshConfig(data=1, context=3, tensor=2))):
        assert BACKENDS["ring"].why_not(q, k, v, inputs) is None
        assert_trees_close(value_and_gradients(ring, q, k, v, inputs), (out, grads))


@pytest.mark.parametrize("backend", ["blockwise", "ring"])
@pytest.mark.parametrize("position", ["rotary", "fire"])
def test_training_memory_is_linear_in_length(monkeypatch, backend, position):
    """In a stack of scanned layers, whose masks and biases are the same.

    JAX computes before the loop over layers what all of them share. It must not do so with the
    masks and biases of all pairs of blocks.
    """
    monkeypatch.setattr(blockwise_module.Einsum, "block", 16)
    fields = {"position": position, "max_length": 512, "attention_backend": backend}
    model, params = make(small("decoder", **fields))
    loss = lambda params, x: jnp.sum(model.apply(params, x))

    def memory(length: int) -> int:
        compiled = jax.jit(jax.grad(loss)).lower(params, tokens(0, 1, length)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    with use(make_mesh(MeshConfig(data=1, context=4))):
        assert 1.3 < memory(512) / memory(256) < 2.3


@pytest.mark.parametrize(
    ("local", "block", "expected"),
    [(16_384, 10_752, 8192), (512, 256, 256), (300, 256, 150), (100, 256, 100), (514, 256, 257)],
)
def test_blocks_of_a_ring_fit_if_a_divisor_allows_it(local, block, expected):
    """A block of 16,384 tokens would not fit in on-chip memory that holds 10,752."""
    assert ring._block_size(local, block) == expected


def test_ring_uses_collective_permutes_and_no_all_gather():
    """A scheme that is not pairwise falls back to the reference path, which gathers the keys."""
    where = jax.tree.map(lambda x: zigzag(x, 4), SPREAD).replace(order="zigzag")
    q, k, v = (jnp.ones((2, SPREAD_T, n, H)) for n in (N, K, K))
    with use(make_mesh(MeshConfig(data=1, context=4))) as mesh:
        spread = NamedSharding(mesh, PartitionSpec(None, "context"))

        def compiled(position, backend):
            inputs = Inputs(
                SAME_SEGMENT & CAUSAL, where, where, bound_scheme(position, "decoder", where), 0.4
            )
            attend = choose("auto", q, k, v, inputs)
            assert attend is BACKENDS[backend].attend
            loss = lambda q, k, v: jnp.sum(attend(q, k, v, inputs) ** 2)
            return (
                jax.jit(jax.grad(loss, (0, 1, 2)), in_shardings=spread)
                .lower(q, k, v)
                .compile()
                .as_text()
            )

        ring = compiled("alibi", "ring")
        assert (
            "collective-permute" in ring and "all-gather" not in ring and "all-to-all" not in ring
        )
        assert "all-gather" in compiled("cope", "reference")
