"""Mixtures of experts: router losses, capacity slots, padding and dropout.

test_oracle.py compares the outputs with a slow reference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import make, small, tokens
from flax.core import meta

from transformer import UserError
from transformer.config import MeshConfig, OptimizerConfig
from transformer.model.feed_forwards.experts import Experts, Matrix, dropless, with_capacity
from transformer.model.masks import Tokens
from transformer.model.mixers.base import Context
from transformer.parallel.mesh import make_mesh, use
from transformer.training.optimizer import build_optimizer

EXPERTS = {"name": "experts", "num_experts": 4, "top_k": 2}


def logits_and_costs(config, x, params, **kwargs):
    """(logits, costs of the routers by name)."""
    model, _ = make(config)
    logits, sown_values = jax.jit(lambda p: model.apply(p, x, mutable=["losses"], **kwargs))(params)
    (costs,) = sown_values["losses"]["decoder"]["layers"]["feed_forward"]["costs"]
    return np.asarray(logits), {name: np.asarray(value) for name, value in costs.items()}


def test_router_losses_match_their_equations():
    """Compares with the equations of the papers, one token at a time, without padding."""
    config = small("decoder", feed_forward=EXPERTS | {"load_balance": 0.3, "router_z_loss": 0.2})
    real, x = (
        np.array([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]),
        jax.random.normal(jax.random.key(0), (2, 5, config.d_model)),
    )
    module, where = Experts(config, 1.0, 1.0), Tokens(jnp.arange(5)[None], jnp.asarray(real))
    info = Context(where, where)
    params = meta.unbox(module.init(jax.random.key(1), x, info, True))["params"]
    _, sown_values = module.apply({"params": params}, x, info, True, mutable=["losses"])
    (costs,) = sown_values["losses"]["costs"]
    logits = np.asarray(x, np.float64) @ np.asarray(params["router"]["kernel"], np.float64)
    share, mean, z = np.zeros(4), np.zeros(4), 0.0
    for p in np.exp(logits[real > 0]):
        z += np.log(p.sum()) ** 2 / real.sum()
        mean += p / p.sum() / real.sum()
        share[np.argsort(-p)[:2]] += 1 / 2 / real.sum()
    assert share.max() > 0.3
    np.testing.assert_allclose(costs["balance"], 4 * share @ mean, rtol=1e-5)
    np.testing.assert_allclose(costs["z"], z, rtol=1e-5)
    np.testing.assert_allclose(costs["loss"], 0.3 * 4 * share @ mean + 0.2 * z, rtol=1e-5)


def test_uniform_router_has_balance_loss_one():
    config = small("decoder", feed_forward=EXPERTS)
    _, params = make(config)
    router = params["decoder"]["layers"]["feed_forward"]["router"]
    router["kernel"] = jnp.zeros_like(router["kernel"])
    np.testing.assert_allclose(
        logits_and_costs(config, tokens(0, 2, 6), params)[1]["balance"], 1.0, rtol=1e-5
    )


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_biases_balance_loads_without_a_loss(score):
    """Each step moves a bias by `bias_rate` against its expert's excess load, whatever the clip."""
    options = {"bias_rate": 0.01, "load_balance": 0.0, "router_z_loss": 0.0, "score": score}
    config = small("decoder", feed_forward=EXPERTS | options)
    x = jax.random.normal(jax.random.key(0), (2, 50, config.d_model)) + 2.0
    real = np.ones((2, 50), int)
    real[1, 40:] = 0
    module, where = Experts(config, 1.0, 1.0), Tokens(jnp.arange(50)[None], jnp.asarray(real))
    info = Context(where, where)
    params = meta.unbox(module.init(jax.random.key(1), x, info, True))["params"]
    optimizer = build_optimizer(OptimizerConfig(learning_rate=1e-9, clip_norm=1e-3), 10, config)

    def loads(params):
        logits = np.asarray(x[real > 0] @ params["router"]["kernel"], np.float64)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        p = 1 / (1 + np.exp(-logits)) if score == "sigmoid" else p
        best = np.argsort(-p - params["router_bias"], axis=-1)[:, :2]
        return np.bincount(best.ravel(), minlength=4) / best.size

    def loss(params):
        y, sown_values = module.apply({"params": params}, x, info, True, mutable=["losses"])
        return jnp.mean(y**2) + sown_values["losses"]["costs"][0]["loss"]

    @jax.jit
    def step(params, state):
        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads["router_bias"]

    before, state = loads(params), optimizer.init(params)
    params, state, gradient = step(params, state)
    np.testing.assert_allclose(params["router_bias"], -0.01 * np.sign(before - 0.25), rtol=1e-6)
    assert 0 < np.abs(gradient).max() < 1e-9
    for _ in range(100):
        params, state, _ = step(params, state)
    assert before.max() > 0.4 and loads(params).max() < 0.3


def route_tokens(how, experts, x=None):
    """(outputs, dropped choices) for inputs of 1. Expert e multiplies its inputs by e + 1."""
    experts = jnp.asarray(experts)[None, :, None]
    x = jnp.ones((1, experts.shape[1], 1)) if x is None else x
    matrices = {"in": Matrix(jnp.arange(1.0, 5.0)[:, None, None], None)}
    apply = lambda x, matrices, product, key: product(x, matrices["in"])
    y, lost = how(
        x,
        experts,
        jnp.ones(experts.shape),
        jnp.ones(experts.shape[:2], bool),
        matrices,
        apply,
        None,
    )
    return np.asarray(y)[0, :, 0].tolist(), float(lost)


def test_tokens_beyond_capacity_are_dropped():
    # With 8 tokens and 4 experts, each expert has 2 capacity slots, times the factor.
    experts = [0, 1, 0, 0, 3, 0, 1, 2]
    assert route_tokens(dropless, experts) == ([1, 2, 1, 1, 4, 1, 2, 3], 0)
    assert route_tokens(with_capacity(2.0), experts) == ([1, 2, 1, 1, 4, 1, 2, 3], 0)
    assert route_tokens(with_capacity(1.0), experts) == ([1, 2, 1, 0, 4, 0, 2, 3], 2)
    assert route_tokens(with_capacity(0.5), experts) == ([1, 2, 0, 0, 4, 0, 0, 3], 4)


@pytest.mark.parametrize("factor", [0.0, 0.5])
def test_experts_are_causal(factor):
    config = small("decoder", feed_forward=EXPERTS | {"capacity_factor": factor})
    model, params = make(config)
    x, apply = tokens(0, 2, 8), jax.jit(model.apply)
    before, after = apply(params, x), apply(params, x.at[:, 5].set(7))
    moved = np.abs(np.asarray(before - after)).max((0, 2))
    np.testing.assert_array_equal(moved > 0, np.arange(8) >= 5)


def test_dropped_choices_are_reported():
    config = small("decoder", feed_forward=EXPERTS | {"capacity_factor": 0.5})
    _, params = make(config)
    _, costs = logits_and_costs(config, tokens(0, 2, 8), params)
    # There are capacity slots for at most half of the choices.
    assert (costs["lost"] >= 0.5).all() and (costs["lost"] < 1).all()
    assert not logits_and_costs(small("decoder", feed_forward=EXPERTS), tokens(0, 2, 8), params)[1][
        "lost"
    ].any()


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_padding_takes_no_capacity_slot(factor):
    """Padding does not change real tokens: it takes none of their capacity slots."""
    config = small("decoder", feed_forward=EXPERTS | {"capacity_factor": factor}, max_length=32)
    model, params = make(config)
    x = tokens(0, 1, 8)
    inputs = {
        "segment_ids": jnp.array([[0] * 4 + [1] * 8]),
        "positions": jnp.array([[0] * 4 + list(range(8))]),
    }
    padded = jax.jit(model.apply)(params, jnp.pad(x, ((0, 0), (4, 0))), **inputs)[:, 4:]
    if factor:  # 6 slots per expert, as many as in the padded sequence of 12 tokens
        config = small("decoder", feed_forward=EXPERTS | {"capacity_factor": 1.5}, max_length=32)
        model, _ = make(config)
    np.testing.assert_allclose(padded, jax.jit(model.apply)(params, x), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "model.feed_forward.top_k: 9 is more than num_experts = 4"),
        ({"num_experts": 0}, "model.feed_forward.num_experts: 0 is too small"),
        (
            {"capacity": 1.0},
            "model.feed_forward: 'experts' has no option 'capacity'; "
            "did you mean 'capacity_factor'",
        ),
        ({"capacity_factor": -1.0}, "model.feed_forward.capacity_factor"),
        ({"score": "tanh"}, "model.feed_forward.score"),
        ({"bias_rate": -1.0}, "model.feed_forward.bias_rate"),
    ],
)
def test_invalid_expert_options_raise(options, message):
    with pytest.raises(UserError, match=message):
        small("decoder", feed_forward=EXPERTS | options)


def test_layers_cannot_differ_in_the_step_of_biases():
    specs = [{"feed_forward": EXPERTS | {"bias_rate": rate}} for rate in (0.1, 0.2)]
    config = small("decoder", layer_pattern=tuple(specs))
    with pytest.raises(UserError, match="model.layer_pattern: .* different values of bias_rate"):
        build_optimizer(OptimizerConfig(), 10, config)


def test_every_other_layer_may_have_experts():
    config = small("decoder", layer_pattern=({}, {"feed_forward": EXPERTS}), num_decoder_layers=4)
    _, params = make(config)
    layers = params["decoder"]["layers"]
    assert (
        "router" in layers["layer_1"]["feed_forward"]
        and "router" not in layers["layer_0"]["feed_forward"]
    )


@pytest.mark.parametrize(
    "mesh", [{"expert": 2, "data": 2, "tensor": 2}, {"stage": 2, "expert": 2, "data": 2}]
)
def test_expert_dropout_differs_by_sequence_on_every_mesh(mesh):
    config = small("decoder", feed_forward=EXPERTS, activation_dropout=0.3, num_kv_heads=4)
    model, params = make(config)
    x, key = jnp.concatenate([tokens(0, 1, 8)] * 8), {"dropout": jax.random.key(0)}
    with use(make_mesh(MeshConfig(**{"data": 1, **mesh}))):
        run = jax.jit(lambda p, x: model.apply(p, x, deterministic=False, rngs=key))
        logits = np.asarray(run(params, x))
    assert len({row.tobytes() for row in logits}) == 8, (
        "each row must have a different dropout mask"
    )
