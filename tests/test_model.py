"""Properties of every model family, position scheme and norm placement."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import (
    GENERAL_BACKENDS,
    init_model,
    make,
    masks,
    run_random,
    schemes,
    small,
    tokens,
)

from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens, window
from transformer.model.network import build_model
from transformer.model.placements.base import PLACEMENTS
from transformer.model.positions import SCHEMES, Position

FAMILIES = ("encoder", "decoder", "encoder_decoder")


def inputs(config, batch=2, seed=0):
    if config.is_encoder_decoder:
        return tokens(seed, batch, 7), tokens(seed + 1, batch, 5)
    return (tokens(seed, batch, 6),)


def influence(config):
    """Returns bool[T, T]: whether output row i depends on input vector j (a nonzero gradient)."""
    model, params = make(config)
    (x,) = inputs(config, batch=1)

    def out(table):
        patched = jax.tree.map(lambda a: a, params)
        patched["embedding"]["embedding"] = table
        return model.apply(patched, x, method="features")[0][0].sum(-1)

    table = params["embedding"]["embedding"]
    assert len(set(np.asarray(x[0]).tolist())) == x.shape[1], (
        "tokens must differ, so that each row of the table has one position"
    )
    jacobian = jax.jit(jax.jacobian(out))(table)[:, x[0]]
    return np.abs(np.asarray(jacobian)).sum(-1) > 0


@pytest.mark.parametrize(("family", "position"), schemes("decoder", "encoder"))
def test_decoder_is_causal_and_encoder_is_not(family, position):
    """One layer has post-norm, the other pre-norm."""
    placement = {"name": "mix_ln", "share": 0.5}
    deps = influence(small(family, position=position, norm_placement=placement))
    np.testing.assert_array_equal(deps, np.tril(np.ones_like(deps)) if family == "decoder" else 1)


def test_encoder_decoder_is_causal_and_attends_to_the_whole_source():
    model, params = make(small("encoder_decoder"))
    (source, target), apply = inputs(model.config), jax.jit(model.apply)
    base = apply(params, source, target)
    for t in range(target.shape[1]):
        changed = (
            np.abs(np.asarray(apply(params, source, target.at[:, t].set(5)) - base)).max((0, 2)) > 0
        )
        np.testing.assert_array_equal(changed, np.arange(target.shape[1]) >= t)
    for s in range(source.shape[1]):
        assert (
            np.abs(np.asarray(apply(params, source.at[:, s].set(5), target) - base)).max((0, 2)) > 0
        ).all()


@pytest.mark.parametrize(("family", "position"), schemes(*FAMILIES))
def test_padding_and_other_sequences_do_not_change_logits(family, position):
    """Sequences have the same logits alone, padded beside others, and packed as documents.

    The first of the packed documents does not affect the others.
    """
    config = small(family, position=position)
    model, params = make(config)
    sides, run = inputs(config, batch=3), jax.jit(model.apply)
    apply = lambda *sides, **options: np.asarray(run(params, *sides, **options))
    alone = np.concatenate([apply(*(x[i : i + 1] for x in sides)) for i in range(3)])
    padded = [jnp.pad(x, ((0, 0), (0, 4))) for x in sides]
    assert padded[0].shape != sides[0].shape
    beside = apply(*padded, **masks(*padded))[:, : alone.shape[1]]
    np.testing.assert_allclose(beside, alone, atol=2e-5)
    names = ("source_", "") if family == "encoder_decoder" else ("",)
    packed, packing = [x.reshape(1, -1) for x in sides], {}
    for name, x in zip(names, sides, strict=True):
        packing[f"{name}segment_ids"] = jnp.repeat(jnp.array([[1, 2, 3]]), x.shape[1], axis=1)
        packing[f"{name}positions"] = jnp.tile(jnp.arange(x.shape[1]), 3)[None]
    together = apply(*packed, **packing).reshape(alone.shape)
    np.testing.assert_allclose(together, alone, atol=2e-5)
    changed = apply(*(x.at[:, 0].set(5) for x in packed), **packing).reshape(alone.shape)
    assert np.abs(changed[0] - together[0]).max() > 1e-3
    np.testing.assert_array_equal(changed[1:], together[1:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_scanned_layers_equal_unrolled_ones(family, placement):
    config = small(family, norm_placement=placement, position="t5")
    sides, unrolled = inputs(config), dataclasses.replace(config, scan_layers=False)
    unrolled_logits, params = run_random(unrolled, *sides)

    def stack(tree):
        layers = sorted(key for key in tree if key.startswith("layers_"))
        if layers:
            tree = {k: v for k, v in tree.items() if k not in layers} | {
                "layers": jax.tree.map(lambda *x: jnp.stack(x), *(tree[k] for k in layers))
            }
        return {k: stack(v) if isinstance(v, dict) else v for k, v in tree.items()}

    stacked = stack(params)
    assert jax.tree.structure(stacked) != jax.tree.structure(params)
    scanned_logits = jax.jit(build_model(config).apply)(stacked, *sides)
    np.testing.assert_allclose(scanned_logits, unrolled_logits, atol=2e-5)


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("scan", [True, False])
def test_remat_changes_no_gradient(remat, scan):
    config = small("encoder_decoder", dropout=0.2, attention_dropout=0.1, scan_layers=scan)
    model, params = make(config)
    remat_model = build_model(dataclasses.replace(config, remat=remat))
    assert remat_model.config != model.config

    def gradient(m):
        def loss(p):
            return jnp.square(
                m.apply(
                    p, *inputs(config), deterministic=False, rngs={"dropout": jax.random.key(3)}
                )
            ).mean()

        return jax.jit(jax.grad(loss))(params)

    assert "remat" in str(jax.make_jaxpr(lambda p: remat_model.apply(p, *inputs(config)))(params))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
        gradient(model),
        gradient(remat_model),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_compute_keeps_float32_parameters_and_logits(family):
    config = small(family, dtype="bfloat16")
    model, params = make(config)
    exact_model = build_model(dataclasses.replace(config, dtype="float32"))
    exact, rough = (jax.jit(x.apply)(params, *inputs(config)) for x in (exact_model, model))
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    assert rough.dtype == jnp.float32
    assert 0 < np.abs(np.asarray(rough - exact)).max() < 0.15 * np.abs(np.asarray(exact)).max()


def test_multi_query_attention_equals_repeated_kv_heads():
    config = small("decoder", num_kv_heads=1)
    model, params = make(config)
    wide = build_model(dataclasses.replace(config, num_kv_heads=4))

    def repeat(path, x):
        names = [getattr(k, "key", "") for k in path]
        if "key" in names or "value" in names:
            return jnp.repeat(x, 4, axis=-2)
        return x

    repeated = jax.tree_util.tree_map_with_path(repeat, params)
    assert sum(x.size for x in jax.tree.leaves(repeated)) > sum(
        x.size for x in jax.tree.leaves(params)
    )
    np.testing.assert_allclose(
        model.apply(params, *inputs(config)), wide.apply(repeated, *inputs(config)), atol=1e-5
    )


@pytest.mark.parametrize("position", SCHEMES)
def test_only_relative_schemes_are_shift_invariant(position):
    model, params = make(small("decoder", position=position))
    if position == "fire":
        # Beyond its threshold, it normalizes distances by the query position.
        params["decoder"]["fire_threshold"] = jnp.float32(64.0)
    (x,) = inputs(model.config)
    index = jnp.arange(x.shape[1])[None]
    apply = jax.jit(model.apply)
    change = np.abs(
        np.asarray(apply(params, x, positions=index) - apply(params, x, positions=index + 11))
    ).max()
    absolute = SCHEMES[position].embed is not Position.embed
    assert change > 1e-2 if absolute else change < 2e-4


@pytest.mark.parametrize("position", [position for _, position in schemes("encoder")])
def test_encoder_sees_order_only_with_a_position_scheme(position):
    model, params = make(small("encoder", position=position))
    (x,) = inputs(model.config)
    order, apply = np.array([3, 1, 5, 0, 4, 2]), jax.jit(model.apply)
    change = np.abs(np.asarray(apply(params, x[:, order]) - apply(params, x)[:, order])).max()
    assert change < 2e-5 if position == "none" else change > 1e-3


@pytest.mark.parametrize("placement", oracle.PLACEMENTS)
def test_placement_has_exactly_its_norms(placement):
    listed = dict(zip(oracle.PARTS, oracle.PLACEMENTS[placement], strict=True))
    norms = ("in_norm", "res_norm", "out_norm", "gate")
    expected = {part for part in norms if listed[part]}, bool(listed["final_norm"])
    _, params = make(small("encoder_decoder", norm_placement=placement))
    for side in ("encoder", "decoder"):
        stack = params[side]
        parts = {
            part
            for name, tree in stack["layers"].items()
            if name.endswith("_residual")
            for part in tree
        }
        assert (parts, "final_norm" in stack) == expected


def test_deepnorm_scales_residual_stream_and_branches_by_depth():
    config = small(
        "encoder_decoder", norm_placement="deepnorm", num_encoder_layers=3, num_decoder_layers=5
    )
    encoder, decoder = config.placement("encoder"), config.placement("decoder")
    assert encoder.residual_scale == pytest.approx(0.81 * (3**4 * 5) ** (1 / 16))
    assert decoder.residual_scale == pytest.approx(15**0.25)
    alone = small("decoder", norm_placement="deepnorm", num_decoder_layers=5).placement("decoder")
    assert (alone.residual_scale, alone.branch_gain) == (
        pytest.approx(10**0.25),
        pytest.approx(40**-0.25),
    )
    plain, scaled = (
        init_model(small("decoder", norm_placement=p, num_decoder_layers=5))[1]["decoder"]["layers"]
        for p in ("post", "deepnorm")
    )
    for part, gain in {
        "value": alone.branch_gain,
        "out": alone.branch_gain,
        "query": 1.0,
        "key": 1.0,
    }.items():
        np.testing.assert_allclose(
            scaled["self_attention"][part]["kernel"],
            gain * plain["self_attention"][part]["kernel"],
            rtol=1e-5,
        )
    np.testing.assert_allclose(
        scaled["feed_forward"]["in"]["kernel"],
        alone.branch_gain * plain["feed_forward"]["in"]["kernel"],
        rtol=1e-5,
    )


def test_rezero_is_the_identity_at_initialization():
    model, params = init_model(small("decoder", norm_placement="rezero", position="none"))
    (x,) = inputs(model.config)
    h, head = model.apply(params, x, method="features")
    np.testing.assert_array_equal(h, head.matrix_VxE[x])


@pytest.mark.parametrize("position", SCHEMES)
def test_fully_masked_query_gives_zeros_and_finite_gradients(position):
    from transformer.model import positions
    from transformer.model.attention_backends import BACKENDS, Inputs

    config = small("decoder", position=position)
    padded = Tokens(jnp.arange(3)[None], jnp.array([[0, 1, 1]]))  # the first is padding
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (1, 3, n, 4)) for key, n in zip(keys, (4, 2, 2), strict=True))
    param, facts = (
        lambda name, init, shape, dtype: jnp.ones(shape, dtype),
        config.stack_facts("decoder"),
    )
    scheme = (
        positions.build(position)
        .bind(param, facts)
        .bind_layer(param, facts)
        .at(padded.positions_BxT)
    )
    args = Inputs(CAUSAL & SAME_SEGMENT, padded, padded, scheme, config.head_size**-0.5)
    for name in GENERAL_BACKENDS:

        def loss(q, k, v, name=name):
            out = BACKENDS[name].attend(q, k, v, args)
            return jnp.sum(out**2), out

        (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
        np.testing.assert_array_equal(out[0, 0], 0)
        assert np.abs(np.asarray(out[0, 1:])).min() > 0
        assert all(np.isfinite(g).all() for g in grads)


def test_padding_embedding_does_not_affect_real_tokens():
    config = small("encoder")
    model, params = make(config)
    x = jnp.pad(tokens(0, 1, 5), ((0, 0), (0, 2)))
    base = model.apply(params, x, **masks(x))
    poisoned = jax.tree.map(lambda a: a, params)
    poisoned["embedding"]["embedding"] = params["embedding"]["embedding"].at[0].set(1e30)
    np.testing.assert_array_equal(
        model.apply(poisoned, x, **masks(x), method="features")[0][:, :5],
        model.apply(params, x, **masks(x), method="features")[0][:, :5],
    )
    assert base.shape == (1, 7, 37)


def test_masks_compose():
    packed = Tokens(jnp.array([[0, 1, 2, 0, 1]]), jnp.array([[1, 1, 1, 2, 0]]))
    causal_same = np.asarray((CAUSAL & SAME_SEGMENT)(packed, packed)[0])
    expected = np.zeros((5, 5), bool)
    expected[:3, :3] = np.tril(np.ones((3, 3)))
    expected[3, 3] = True
    np.testing.assert_array_equal(causal_same, expected)
    causal_window = np.asarray((CAUSAL & window(2))(packed, packed)[0][:3, :3])
    np.testing.assert_array_equal(causal_window, [[1, 0, 0], [1, 1, 0], [0, 1, 1]])
    either = (window(1) | SAME_SEGMENT)(packed, packed)[0]
    assert bool(either[4, 1])  # the same position, although in no segment
    assert not bool(either[4, 2])


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({"glu": True}, 2 * (16 * 32 + 32)),
        ({"use_bias": False}, -2 * (16 + 8 + 8 + 16 + 32 + 16)),
        ({"tie_embeddings": False}, 16 * 37),
        ({"logit_bias": True}, 37),
        ({"norm": "rmsnorm"}, -5 * 16),
        ({"norm_offset": False}, -5 * 16),
        ({"norm_gain": False, "norm_offset": False}, -5 * 32),
        ({"embedding_norm": True}, 32),
        ({"position": "learned"}, 24 * 16),
        ({"position": "t5"}, 32 * 4),
        ({"num_kv_heads": 1}, -2 * 2 * (16 * 4 + 4)),
    ],
)
def test_field_adds_the_parameters_it_governs(fields, adds):
    count = lambda config: sum(x.size for x in jax.tree.leaves(make(config)[1]))
    assert count(small("decoder", **fields)) - count(small("decoder")) == adds


def test_dropout_drops_at_its_rate_and_keeps_the_mean():
    from transformer.model.dropout import Dropout, keep_mask

    for shape in ((400, 64), (400, 63)):
        x = jnp.ones(shape)
        y = Dropout(0.3).apply({}, x, False, rngs={"dropout": jax.random.key(0)})
        assert float((y == 0).mean()) == pytest.approx(0.3, abs=0.01)
        assert float(y.mean()) == pytest.approx(1.0, abs=0.02)
    rows = np.asarray(keep_mask(jax.random.key(0), 0.5, (200, 64)))
    assert np.abs(np.corrcoef(rows.T) - np.eye(64)).max() < 0.35


@pytest.mark.parametrize("field", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_only_in_training(field):
    config = small("encoder_decoder", **{field: 0.3})
    model, params = make(config)
    sides = inputs(config)
    base = model.apply(params, *sides)
    np.testing.assert_array_equal(base, build_model(small("encoder_decoder")).apply(params, *sides))
    dropped = model.apply(params, *sides, deterministic=False, rngs={"dropout": jax.random.key(0)})
    assert np.abs(np.asarray(dropped - base)).max() > 1e-3


def test_scanned_program_size_does_not_grow_with_depth():
    """The size of the scanned program does not depend on the depth."""

    def size(depth, scan):
        config = small("decoder", num_decoder_layers=depth, scan_layers=scan)
        model, (x,) = build_model(config), inputs(config)
        params = jax.eval_shape(model.init, jax.random.key(0), x)
        return len(
            jax.jit(jax.grad(lambda p: model.apply(p, x).sum()))
            .lower(params)
            .as_text()
            .splitlines()
        )

    assert size(12, True) < 1.05 * size(3, True)
    assert size(12, False) > 2 * size(3, False)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
def test_shapes_of_random_parameters_are_those_of_initialization(family):
    config = small(family, param_dtype="bfloat16", position="t5", qk_norm=True)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert shapes(make(config)[1]) == shapes(init_model(config)[1])
