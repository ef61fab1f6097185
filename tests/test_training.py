"""Training steps on every mesh, gradient accumulation, schedules and optimizers."""

import ast
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import model_fields

from transformer.config import Experiment, MeshConfig, OptimizerConfig
from transformer.data.batching import assemble
from transformer.data.objectives.base import Segment
from transformer.mapping import from_mapping
from transformer.model.config import ModelConfig
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.training.optimizer import build_optimizer, schedule
from transformer.training.optimizers import OPTIMIZERS
from transformer.training.state import abstract_state, init_state
from transformer.training.step import make_eval_step, make_train_step

MODEL = ModelConfig(family="decoder", vocab_size=8)  # for parameters without multipliers


def experiment(family="encoder_decoder", mesh=None, model=(), **train):
    """Returns a small experiment with a large epsilon for Adam.

    The gradient of a key bias is only rounding. With a tiny epsilon, Adam would scale it up to a
    full step.
    """
    objective = {"encoder": "masked_lm", "decoder": "causal_lm", "encoder_decoder": "seq2seq"}[
        family
    ]
    return from_mapping(
        Experiment,
        {
            "model": model_fields(family, **dict(model)),
            "data": {"corpus": "pydoc", "objective": objective, "length": 12, "batch_size": 16},
            "optimizer": {
                "learning_rate": 0.01,
                "warmup_steps": 2,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
                "epsilon": 1e-4,
            },
            "train": {"steps": 10, "label_smoothing": 0.1, "z_loss": 1e-3, **train},
            "mesh": mesh or {"data": 1},
        },
    )


def random_batch(config, seed=0, rows=16):
    rng = np.random.default_rng(seed)
    ids = lambda n: rng.integers(4, 40, n).astype(np.int32)
    is_encoder_decoder = config.model.is_encoder_decoder
    make = lambda n: Segment(ids(n), ids(n), ids(12 - n) if is_encoder_decoder else None)
    return assemble(
        [[make(n), make(12 - n)][: 1 + r % 2] for r, n in enumerate(rng.integers(1, 11, rows))], 12
    )


def train_steps(config, steps=3, start=None):
    """Returns ((loss, gradient norm) of each step, parameters, evaluation loss, shardings, start).

    Checks that the training step is compiled once. `start` is the state before the first step.
    """
    with use(make_mesh(config.mesh)) as mesh:
        model, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, config.train.steps, config.model),
        )
        _, placed = abstract_state(config, model, optimizer, mesh)
        if start is None:
            start = jax.device_get(init_state(config, model, optimizer, placed))
        state = jax.device_put(start, placed)
        step, losses = make_train_step(config, model, optimizer, mesh, placed), []
        for i in range(steps):
            batch = random_batch(config, i)
            state, metrics = step(state, batch)
            read = np.count_nonzero(batch["inputs"]) + np.count_nonzero(batch.get("source", 0))
            assert metrics["inputs"] == read
            losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        assert step._cache_size() == 1
        evaluated = make_eval_step(config, model, mesh, placed.params)(
            state.params, random_batch(config, 9)
        )
        return (
            losses,
            jax.device_get(state.params),
            float(evaluated["tokens"].nll / evaluated["tokens"].weight),
            placed,
            start,
        )


@functools.cache
def reference(family: str, model: str = "{}"):
    """Returns the results of `train_steps` on one device."""
    return train_steps(experiment(family, model=ast.literal_eval(model)))


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("scan", [True, False])
def test_bfloat16_trains_like_float32(family, scan):
    """This platform supports every matrix product of a step, with its gradients, in bfloat16."""
    losses, params, evaluated, *_ = train_steps(
        experiment(family, model={"dtype": "bfloat16", "scan_layers": scan})
    )
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))
    assert losses != reference(family)[0]
    if scan:  # unrolled layers start from other random numbers
        losses_of = lambda curve: [loss for loss, _ in curve]
        np.testing.assert_allclose(losses_of(losses), losses_of(reference(family)[0]), rtol=0.01)
    assert losses[-1] < losses[0] and np.isfinite(evaluated)


EXPERTS = {"name": "experts", "num_experts": 4, "top_k": 2}

FAMILIES = ("encoder", "decoder", "encoder_decoder")

# (mesh, model fields, train fields, families). Meshes are combined with options that change the
# program: unrolled layers, rematerialization, accumulation.
MESHES = [
    ({"data": 8}, {}, {}, FAMILIES),
    ({"data": 2, "fsdp": 4}, {"remat": "full"}, {}, FAMILIES),
    ({"tensor": 4}, {}, {}, FAMILIES),
    ({"data": 2, "fsdp": 2, "tensor": 2}, {"remat": "dots"}, {"accumulate": 2}, FAMILIES),
    ({"fsdp": -1, "tensor": 2}, {"scan_layers": False}, {}, ("decoder",)),
    ({"context": 3, "data": 2}, {}, {}, ("decoder", "encoder_decoder")),
    ({"context": 2, "fsdp": 2, "tensor": 2}, {"remat": "full"}, {}, FAMILIES),
    ({"stage": 2, "data": 2, "tensor": 2}, {}, {}, FAMILIES),
    (
        {"stage": 2, "fsdp": 2},
        {"pipeline_rounds": 2, "pipeline_microbatches": 4, "num_decoder_layers": 8,
         "num_encoder_layers": 4},
        {}, ("encoder", "encoder_decoder"),
    ),
    (
        {"stage": 2, "fsdp": 2},
        {"pipeline_rounds": 2, "num_decoder_layers": 8, "norm_placement": "siamese_norm"},
        {}, ("decoder",),
    ),
    ({"context": 2, "fsdp": 2, "tensor": 2}, {"norm_placement": "mhc"}, {}, ("decoder",)),
    ({"stage": 2, "context": 2}, {"remat": "full"}, {"accumulate": 2}, ("decoder",)),
    ({"expert": 2, "fsdp": 2}, {"feed_forward": EXPERTS}, {}, FAMILIES),
    (
        {"expert": 4, "tensor": 2},
        {"feed_forward": EXPERTS | {"capacity_factor": 1.0, "bias_rate": 0.01}, "glu": True},
        {}, ("decoder",),
    ),
    # Router losses are off: pipelines compute them per micro-batch, one device over the batch.
    (
        {"stage": 2, "expert": 2},
        {"feed_forward": EXPERTS | {"load_balance": 0.0, "router_z_loss": 0.0}},
        {}, ("decoder",),
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("mesh", "model", "train", "family"),
    [
        (mesh, model, train, family)
        for mesh, model, train, families in MESHES
        for family in families
    ],
    ids=lambda x: "-".join(f"{k}{v}" for k, v in x.items())[:40] if isinstance(x, dict) else x,
)
def test_every_mesh_matches_one_device(mesh, model, train, family):
    """Compares losses, gradient norms, parameters after three steps, and evaluation losses."""
    absent = [side for side in ("encoder", "decoder") if side not in family]
    model = {n: value for n, value in model.items() if n not in [f"num_{s}_layers" for s in absent]}
    one_device_fields = {
        name: value
        for name, value in model.items()
        if name not in ("remat", "pipeline_microbatches")
    }
    expected_losses, expected_params, expected_eval, _, start = reference(
        family, repr(one_device_fields)
    )
    # Initial values are computed on the mesh for decoders.
    start = None if family == "decoder" else start
    config = experiment(family, {"data": 1, **mesh}, model, **train)
    losses, params, evaluated, placed, _ = train_steps(config, start=start)
    assert any(len(x.device_set) > 1 for x in jax.tree.leaves(placed))
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    assert evaluated == pytest.approx(expected_eval, rel=2e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-4), params, expected_params)
    specs = str([x.spec for x in jax.tree.leaves(placed.params)])
    assert all(
        (axis in specs) == (axis in mesh) for axis in ("fsdp", "tensor", "stage", "expert")
    ), specs


def test_dropout_is_the_same_on_every_mesh():
    """Random bits belong to positions in the global array, not to devices."""
    losses = [
        train_steps(experiment(mesh=mesh, model={"dropout": 0.3, "attention_dropout": 0.2}))[0]
        for mesh in ({"data": 1}, {"data": 4, "tensor": 2})
    ]
    assert losses[0] != train_steps(experiment())[0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-5)


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 4, "fsdp": 2}])
def test_gradient_accumulation_equals_one_batch(mesh):
    config = experiment(mesh=mesh, accumulate=2)
    weights = random_batch(config)["weights"].reshape(8, 2, 12).sum((0, 2))
    assert weights[0] != weights[1], (
        "with equal weights of micro-batches, a mean of means would pass"
    )
    losses, params, *_ = train_steps(config)
    np.testing.assert_allclose(losses, reference("encoder_decoder")[0], rtol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-4),
        params,
        reference("encoder_decoder")[1],
    )


def test_training_is_deterministic():
    a, b = (train_steps(experiment(model={"dropout": 0.1})) for _ in range(2))
    assert a[0] == b[0]
    jax.tree.map(np.testing.assert_array_equal, a[1], b[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_learns_and_shards(name):
    base = experiment("decoder", {"data": 2, "fsdp": 4})
    config = dataclasses.replace(
        base,
        optimizer=dataclasses.replace(
            base.optimizer,
            name=name,
            learning_rate={"sgd": 0.5, "lion": 3e-3}.get(name, 0.02),
            epsilon=base.optimizer.epsilon if name == "adamw" else OptimizerConfig.epsilon,
        ),
    )
    with use(make_mesh(config.mesh)) as mesh:
        model, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, 10, config.model),
        )
        _, placed = abstract_state(config, model, optimizer, mesh)
        state, batch = init_state(config, model, optimizer, placed), random_batch(config)
        step, losses = make_train_step(config, model, optimizer, mesh, placed), []
        for _ in range(8):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize(
    "fields", [{"num_kv_heads": 1}, {"scan_layers": False, "logit_bias": True}]
)
def test_adafactor_and_multi_query_attention_on_a_tensor_mesh(fields):
    """The only KV head, and statistics that are not shaped like their parameter, are replicated."""
    base = experiment("decoder", {"data": 2, "tensor": 4}, fields)
    adafactor = dataclasses.replace(
        base.optimizer, name="adafactor", epsilon=OptimizerConfig.epsilon
    )
    losses = [
        train_steps(
            dataclasses.replace(config, optimizer=adafactor),
            2,
        )[0]
        for config in (base, dataclasses.replace(base, mesh=MeshConfig(data=1)))
    ]
    np.testing.assert_allclose(*losses, rtol=2e-5)


def test_optimizers_may_have_options():
    """With a larger exponent, Adafactor remembers the large first gradient for longer."""
    grads = [{"kernel": jnp.full((2, 2), x)} for x in (9.0, 1.0)]
    updates = []
    for rate in (0.5, 0.9):
        name = {"name": "adafactor", "decay_rate": rate, "clip_threshold": 9.0}
        optimizer = build_optimizer(OptimizerConfig(name=name, warmup_steps=0), 10, MODEL)
        state = optimizer.init(grads[0])
        for grad in grads:
            update, state = optimizer.update(grad, state, grads[0])
        updates.append(abs(float(update["kernel"][0, 0])))
    assert updates[0] > 1.1 * updates[1]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weight_decay_is_decoupled_in_every_optimizer(name):
    """Without a gradient, a matrix shrinks by rate * decay per step, and a bias stays the same."""
    config = OptimizerConfig(
        name=name, schedule="constant", learning_rate=0.1, warmup_steps=0, weight_decay=0.5
    )
    optimizer = build_optimizer(config, 10, MODEL)
    params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    state = optimizer.init(params)
    for step in range(1, 4):
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        np.testing.assert_allclose(params["kernel"], 0.95**step, rtol=1e-5)
        np.testing.assert_array_equal(params["bias"], 1)


def test_adamw_matches_the_textbook_update():
    """Three steps of one parameter, by hand. Only matrices decay."""
    config = OptimizerConfig(
        schedule="constant",
        learning_rate=0.1,
        warmup_steps=0,
        b1=0.9,
        b2=0.99,
        epsilon=1e-8,
        weight_decay=0.5,
    )
    optimizer = build_optimizer(config, 10, MODEL)
    params = {"kernel": jnp.array([[2.0]]), "bias": jnp.array([2.0])}
    state, m, v, expected = optimizer.init(params), 0.0, 0.0, {"kernel": 2.0, "bias": 2.0}
    for t, g in enumerate([1.0, -0.5, 0.25], 1):
        updates, state = optimizer.update(
            {"kernel": jnp.array([[g]]), "bias": jnp.array([g])}, state, params
        )
        params = jax.tree.map(jnp.add, params, updates)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        direction = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        for name, decay in {"kernel": 0.5, "bias": 0.0}.items():
            expected[name] -= 0.1 * (direction + decay * expected[name])
            assert float(params[name].ravel()[0]) == pytest.approx(expected[name], rel=1e-5)


def test_schedules_match_their_formulas():
    make = lambda name, **kw: schedule(
        OptimizerConfig(schedule=name, learning_rate=0.5, warmup_steps=10, **kw), 100
    )
    paper = make("inverse_sqrt")
    for n in (1, 5, 10, 40, 90):
        assert float(paper(n - 1)) == pytest.approx(
            0.5 * 10**0.5 * min(n**-0.5, n * 10**-1.5), rel=1e-5
        )
    final = {"final_fraction": 0.1}
    fields = {"cosine": final, "linear": final, "wsd": final | {"decay_fraction": 0.3}}
    for name in ("cosine", "linear", "wsd", "constant"):
        rate = make(name, **fields.get(name, {}))
        assert float(rate(4)) == pytest.approx(0.25)
        assert float(rate(9)) == pytest.approx(0.5)
        assert float(rate(10)) == pytest.approx(0.5)
    assert float(make("cosine")(55)) == pytest.approx(0.25)
    assert float(make("linear")(55)) == pytest.approx(0.25)
    assert float(make("linear", final_fraction=0.1)(100)) == pytest.approx(0.05)
    wsd = make("wsd", decay_fraction=0.3)
    assert [float(wsd(n)) for n in (69, 85, 100)] == [
        pytest.approx(0.5),
        pytest.approx(0.25),
        pytest.approx(0.0),
    ]


def test_wsd_may_decay_several_times():
    """Up to its end, each period is a WSD schedule of its own (WSD-S)."""
    fields = {"schedule": "wsd", "learning_rate": 0.5, "warmup_steps": 10, "decay_fraction": 0.25}
    rate = schedule(OptimizerConfig(**fields, decay_ends=(40,)), 100)
    short = schedule(OptimizerConfig(**fields), 40)
    assert [float(rate(n)) for n in range(40)] == [float(short(n)) for n in range(40)]
    assert float(short(40)) == 0.0
    seen = {n: float(rate(n)) for n in (4, 9, 30, 35, 39, 40, 85, 90, 100)}
    expected = {4: 0.25, 9: 0.5, 30: 0.5, 35: 0.25, 39: 0.05, 40: 0.5, 85: 0.5, 90: 1 / 3, 100: 0.0}
    assert seen == pytest.approx(expected)


def test_ema_follows_the_parameters():
    config = experiment("decoder", ema_decay=0.5)
    with use(make_mesh(config.mesh)) as mesh:
        model, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, 10, config.model),
        )
        _, placed = abstract_state(config, model, optimizer, mesh)
        state = init_state(config, model, optimizer, placed)
        step, average = (
            make_train_step(config, model, optimizer, mesh, placed),
            jax.device_get(state.params),
        )
        for n in range(3):
            state, _ = step(state, random_batch(config, n))
            decay = min(0.5, (1 + n) / (10 + n))
            average = jax.tree.map(
                lambda a, p, d=decay: d * a + (1 - d) * p, average, jax.device_get(state.params)
            )
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
            jax.device_get(state.ema),
            average,
        )
        assert state.eval_params is state.ema
