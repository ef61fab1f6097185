"""Muon: which parameters it updates, with what, and on how many devices."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import model_fields

from transformer.config import Experiment, MeshConfig, ModelConfig, OptimizerConfig
from transformer.errors import UserError
from transformer.mapping import from_mapping
from transformer.model.layout import flatten, unroll
from transformer.model.network import build_model
from transformer.model.roles import Axes
from transformer.parallel.mesh import make_mesh, use
from transformer.parallel.sharding import shardings, unbox
from transformer.planning.hlo import HloProgram
from transformer.planning.work import collectives
from transformer.training.optimizer import build_optimizer
from transformer.training.optimizers.muon import COEFFICIENTS, orthogonalized
from transformer.training.state import abstract_state, init_state, relayout

RATE = dict(schedule="constant", warmup_steps=0, learning_rate=1.0)


def optimizer(**options):
    fields = {key: options.pop(key) for key in ("momentum", "weight_decay") if key in options}
    config = OptimizerConfig(name={"name": "muon", **options}, **RATE, **fields)
    return build_optimizer(config, 10, ModelConfig(**model_fields("decoder")))


def boxed_params(family="decoder", seed=0, **fields):
    """Returns (config, random parameters with logical axes)."""
    config = ModelConfig(**model_fields(family, **fields))
    inputs = [jnp.ones((1, 4), jnp.int32)] * len(config.sides)
    return config, build_model(config).init_with_axes(jax.random.key(seed), *inputs)


def gradients(params, seed=1):
    """Returns random arrays like the parameters, without logical axes."""
    leaves, tree = jax.tree.flatten(unbox(params))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten(
        [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    )


def textbook(matrix, rms=0.2):
    """Returns the update of one matrix [inputs, outputs], in float64."""
    x = np.asarray(matrix, np.float64)
    x, (a, b, c) = x / np.linalg.norm(x), COEFFICIENTS
    for _ in range(5):
        gram = x @ x.T
        x = a * x + b * gram @ x + c * gram @ gram @ x
    return rms * max(x.shape) ** 0.5 * x


def updates_of(params, grads, steps=1, **options):
    rule = optimizer(**options)
    state = unbox(rule.init(params))
    for _ in range(steps):
        updates, state = jax.jit(rule.update)(grads, state, unbox(params))
    return updates, state


EVERY_KIND = {
    "glu": True, "qk_norm": True, "num_kv_heads": 2, "logit_bias": True, "tie_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("scan_layers", [True, False])
def test_each_matrix_of_each_layer_is_orthogonalized(scan_layers):
    config, params = boxed_params(scan_layers=scan_layers, **EVERY_KIND)
    grads = gradients(params)
    updates, _ = updates_of(params, grads)
    flat_updates, flat_grads = (flatten(unroll(config, x)[1]) for x in (updates, grads))
    checked = 0
    for path, g in flat_grads.items():
        name = re.search(r"layers_\d+/(?:self_attention|feed_forward)/(\w+)/kernel", path)
        if name is None:
            np.testing.assert_allclose(jnp.abs(flat_updates[path]), 1.0, rtol=1e-3, err_msg=path)
            continue
        inputs = 2 if path.endswith("self_attention/out/kernel") else 1
        matrix = g.reshape(int(np.prod(g.shape[:inputs])), -1)
        expected = -textbook(matrix).reshape(g.shape)
        np.testing.assert_allclose(flat_updates[path], expected, atol=2e-5, err_msg=path)
        # The singular values lie in the range that the five iterations reach.
        assert 0.1 < np.sqrt(np.mean(np.square(flat_updates[path]))) < 0.24
        checked += 1
    assert checked == 7 * config.num_decoder_layers


def test_heads_may_be_orthogonalized_separately():
    _, params = boxed_params()
    grads = gradients(params)
    joint, separate = (updates_of(params, grads, per_head=x)[0] for x in (False, True))
    query = lambda tree: tree["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    out = lambda tree: tree["decoder"]["layers"]["self_attention"]["out"]["kernel"]
    assert np.abs(query(joint) - query(separate)).max() > 0.01
    for n in range(query(grads).shape[2]):
        expected = -textbook(query(grads)[0, :, n])
        np.testing.assert_allclose(query(separate)[0, :, n], expected, atol=2e-5)
        np.testing.assert_allclose(out(separate)[1, n], -textbook(out(grads)[1, n]), atol=2e-5)


def test_momentum_is_a_running_mean_with_a_look_ahead():
    _, params = boxed_params()
    first, second = gradients(params, 1), gradients(params, 2)
    rule = optimizer(momentum=0.75)
    state = unbox(rule.init(params))
    for grads in (first, second):
        updates, state = rule.update(grads, state, unbox(params))
    kernel = lambda tree: tree["decoder"]["layers"]["feed_forward"]["in"]["kernel"][0]
    mean = 0.75 * 0.25 * kernel(first) + 0.25 * kernel(second)
    expected = -textbook(0.75 * mean + 0.25 * kernel(second))
    np.testing.assert_allclose(kernel(updates), expected, atol=2e-5)


ADAM = {
    "attention": r".*(bias|gain|offset|embedding)",
    "mla": r".*(bias|gain|offset|embedding)",
    "gated_delta": r".*(bias|gain|offset|embedding|convolution|dt|log_rate|(decay|write)/kernel)",
    "lstm": r".*(bias|gain|offset|embedding)",
    "gru": r".*(bias|gain|offset|embedding)",
    "rnn": r".*(bias|gain|offset|embedding)",
}


@pytest.mark.parametrize("mixer", ADAM)
def test_adamw_updates_all_parameters_but_the_matrices_of_layers(mixer):
    fields = {"mixer": mixer, "position": "none"} if mixer != "attention" else {}
    if mixer in ("lstm", "gru", "rnn"):
        fields |= {"num_heads": ModelConfig.num_heads}
    _, params = boxed_params(**fields)
    axes = optimizer().init(params)[0].axes
    names = flatten(unbox(params))
    is_adam = [a is None for a in axes]
    assert is_adam == [bool(re.fullmatch(ADAM[mixer], name)) for name in names], names.keys()
    assert any(is_adam) and not all(is_adam)


def test_routers_are_updated_by_adamw_and_experts_separately():
    _, params = boxed_params(feed_forward="experts")
    grads = gradients(params)
    updates, _ = updates_of(params, grads)
    part = lambda tree, name: tree["decoder"]["layers"]["feed_forward"][name]["kernel"]
    np.testing.assert_allclose(jnp.abs(part(updates, "router")), 1.0, rtol=1e-3)
    expected = -textbook(part(grads, "out")[1, 2])
    np.testing.assert_allclose(part(updates, "out")[1, 2], expected, atol=2e-5)


def test_no_gradient_means_no_update():
    _, params = boxed_params()
    updates, _ = updates_of(params, jax.tree.map(jnp.zeros_like, gradients(params)))
    assert not any(np.any(x) for x in jax.tree.leaves(updates))


def test_parameters_without_logical_axes_raise():
    _, params = boxed_params()
    with pytest.raises(UserError, match=r"optimizer\.name: 'muon' needs the logical axes of deco"):
        optimizer().init(unbox(params))


def test_state_converts_between_layouts():
    fields = {"data": {"corpus": "pydoc", "length": 8, "batch_size": 8}, "mesh": {"data": 1}}
    fields |= {"model": model_fields("decoder"), "optimizer": {"name": "muon"}}
    config = from_mapping(Experiment, fields)
    unrolled = dataclasses.replace(config.model, scan_layers=False)
    rule = build_optimizer(config.optimizer, 10, config.model)
    with use(make_mesh(config.mesh)) as mesh:
        _, placed = abstract_state(config, build_model(config.model), rule, mesh)
        other = dataclasses.replace(config, model=unrolled)
        target, _ = abstract_state(other, build_model(unrolled), rule, mesh)
        state = init_state(config, build_model(config.model), rule, placed)
        _, opt_state = rule.update(gradients(state.params), state.opt_state, state.params)
        state = dataclasses.replace(state, opt_state=opt_state)
        new = relayout(state, config.model, unrolled, target)
    fill = lambda m, x: jnp.zeros_like(x) if m is None else m
    momentum = lambda state: jax.tree.map(
        fill, state.opt_state[0].momentum, state.params, is_leaf=lambda m: m is None
    )
    _, expected = unroll(config.model, momentum(state))
    assert "layers_0" in momentum(new)["decoder"] and "layers" in momentum(state)["decoder"]
    assert np.any(expected["decoder"]["layers_1"]["feed_forward"]["in"]["kernel"])
    jax.tree.map(np.testing.assert_array_equal, momentum(new), expected)
    assert len(new.opt_state[0].axes) > len(state.opt_state[0].axes)
    rule.update(gradients(new.params), new.opt_state, new.params)


@pytest.mark.parametrize("mesh", [MeshConfig(data=2, fsdp=4), MeshConfig(fsdp=4, tensor=2)])
def test_devices_share_the_work_and_return_the_same_updates(mesh):
    """Each device orthogonalizes some of the matrices: it needs no collective in an iteration."""
    _, params = boxed_params(num_decoder_layers=4, d_ff=16)
    grads, rule = gradients(params), optimizer()
    expected, _ = updates_of(params, grads)
    text = {}
    with use(make_mesh(mesh)) as devices:
        state = rule.init(params)
        placed = shardings(jax.eval_shape(lambda: state), devices)
        of_params = shardings(params, devices)
        put = lambda tree, places: jax.tree.map(jax.device_put, unbox(tree), places)
        arguments = put(grads, of_params), put(state, placed), put(params, of_params)
        run = jax.jit(rule.update, out_shardings=(of_params, placed))
        updates, _ = run(*arguments)
        for steps in (1, 5):
            rule = optimizer(steps=steps)
            compiled = jax.jit(rule.update, out_shardings=(of_params, placed)).lower(*arguments)
            text[steps] = compiled.compile()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), updates, expected)
    moved = {n: collectives(HloProgram.read(x.as_text())) for n, x in text.items()}
    assert len(moved[1]) == len(moved[5]) > 0
    flops = {n: x.cost_analysis()["flops"] for n, x in text.items()}
    one = jax.jit(optimizer().update).lower(grads, unbox(state), unbox(params))
    assert flops[5] < 0.2 * one.compile().cost_analysis()["flops"]


@pytest.mark.parametrize(("number", "used"), [(1, 1), (3, 2), (4, 4), (9, 8)])
def test_devices_without_a_matrix_are_reported(number, used):
    x, axes = jax.ShapeDtypeStruct((number, 5, 4), jnp.float32), Axes((0,), (1,), (2,))
    with use(make_mesh(MeshConfig(data=2, fsdp=4))), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        jax.eval_shape(lambda x: orthogonalized([x], [axes], 0.2, 5), x)
    report = f"muon: {number} matrices of 4 x 5 occupy {used} of 8 devices; the others"
    assert [str(x.message).startswith(report) for x in seen] == [True] * (used < 8)
