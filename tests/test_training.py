"""One step on every mesh, accumulation, schedules, optimizers; and whole runs: resume, refusal, divergence."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.config import Experiment, MeshConfig, ModelConfig, OptimizerConfig
from transformer.config_io import from_mapping
from transformer.data.batching import assemble
from transformer.data.objectives import Segment
from transformer.errors import UserError
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.parallel.sharding import RULES, describe, shardings, unbox
from transformer.training.optimizer import build_optimizer, schedule
from transformer.training.state import abstract_state, init_state
from transformer.training.step import make_eval_step, make_train_step

SMALL = {
    "vocab_size": 40, "d_model": 16, "d_ff": 32, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2, "max_length": 16,
}  # fmt: skip


def experiment(family="encoder_decoder", mesh=None, model=(), **train):
    """A key's bias has no gradient but rounding, which Adam would blow up to whole steps with a tiny epsilon."""
    objective = "seq2seq" if family == "encoder_decoder" else "causal_lm"
    return from_mapping(Experiment, {
        "model": {"family": family, **SMALL, **dict(model)}, "data": {"corpus": "pydoc", "objective": objective, "length": 12, "batch_size": 16},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 2, "weight_decay": 0.1, "clip_norm": 1.0, "epsilon": 1e-4},
        "train": {"steps": 10, "label_smoothing": 0.1, "z_loss": 1e-3, **train}, "mesh": mesh or {"data": 1},
    })  # fmt: skip


def batch_of(config, seed=0, rows=16):
    rng = np.random.default_rng(seed)
    ids = lambda n: rng.integers(4, 40, n).astype(np.int32)
    two_sides = config.model.family == "encoder_decoder"
    make = lambda n: Segment(ids(n), ids(n), ids(12 - n) if two_sides else None)
    return assemble([[make(n), make(12 - n)][: 1 + r % 2] for r, n in enumerate(rng.integers(1, 11, rows))], 12)


def train_steps(config, steps=3):
    """Losses of a few steps, and the parameters after them, with one compile."""
    with use(make_mesh(config.mesh)) as mesh:
        model, optimizer = build_model(config.model), build_optimizer(config.optimizer, config.train.steps)
        _, placed = abstract_state(config, model, optimizer, mesh)
        state = init_state(config, model, optimizer, placed)
        step, losses = make_train_step(config, model, optimizer, mesh, placed), []
        for i in range(steps):
            state, metrics = step(state, batch_of(config, i))
            losses.append(float(metrics["loss"]))
        assert step._cache_size() == 1
        evaluated = make_eval_step(config, model, mesh, placed.params)(state.params, batch_of(config, 9))
        return losses, jax.device_get(state.params), float(evaluated.nll / evaluated.weight), placed


@pytest.fixture(scope="module")
def one_device():
    return {family: train_steps(experiment(family)) for family in ("decoder", "encoder_decoder")}


MESHES = [
    {"data": 2},
    {"data": 8},
    {"fsdp": 8, "data": 1},
    {"tensor": 4, "data": 1},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": -1, "tensor": 2},
]


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: "-".join(f"{k}{v}" for k, v in m.items()))
def test_every_mesh_gives_the_losses_of_one_device(one_device, family, mesh):
    losses, params, evaluated, placed = train_steps(experiment(family, mesh))
    expected_losses, expected_params, expected_eval, _ = one_device[family]
    assert any(len(x.device_set) > 1 for x in jax.tree.leaves(placed))
    np.testing.assert_allclose(losses, expected_losses, rtol=2e-5)
    assert evaluated == pytest.approx(expected_eval, rel=2e-4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-4), params, expected_params)
    if "fsdp" in mesh or "tensor" in mesh:
        spec = placed.params["embedding"]["embedding"].spec
        assert spec and (("fsdp" in mesh) == ("fsdp" in str(spec))) and (("tensor" in mesh) == ("tensor" in str(spec)))


def test_dropout_is_the_same_on_every_mesh():
    """Random bits belong to positions in the global array, not to devices."""
    losses = [
        train_steps(experiment(mesh=mesh, model={"dropout": 0.3, "attention_dropout": 0.2}))[0]
        for mesh in ({"data": 1}, {"data": 4, "tensor": 2})
    ]
    assert losses[0] != train_steps(experiment())[0]
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-5)


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 4, "fsdp": 2}])
def test_accumulation_of_k_equals_one(one_device, mesh):
    config = experiment(mesh=mesh, accumulate=2)
    weights = batch_of(config)["weights"].reshape(8, 2, 12).sum((0, 2))
    assert weights[0] != weights[1], "micro-batches of unequal weight, or a mean of means would pass"
    losses, params, _, _ = train_steps(config)
    np.testing.assert_allclose(losses, one_device["encoder_decoder"][0], rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-4), params, one_device["encoder_decoder"][1])


def test_training_is_deterministic():
    a, b = (train_steps(experiment(model={"dropout": 0.1})) for _ in range(2))
    assert a[0] == b[0]
    jax.tree.map(np.testing.assert_array_equal, a[1], b[1])


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd"])
def test_every_optimizer_learns_and_shards(name):
    base = experiment("decoder", {"data": 2, "fsdp": 4})
    config = dataclasses.replace(
        base,
        optimizer=dataclasses.replace(
            base.optimizer, name=name, learning_rate={"sgd": 0.5, "lion": 3e-3}.get(name, 0.02)
        ),
    )
    with use(make_mesh(config.mesh)) as mesh:
        model, optimizer = build_model(config.model), build_optimizer(config.optimizer, 10)
        _, placed = abstract_state(config, model, optimizer, mesh)
        state, batch = init_state(config, model, optimizer, placed), batch_of(config)
        step, losses = make_train_step(config, model, optimizer, mesh, placed), []
        for _ in range(8):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("fields", [{"num_kv_heads": 1}, {"scan_layers": False, "logit_bias": True}])
def test_adafactor_and_multi_query_attention_live_on_a_tensor_mesh(fields):
    """Statistics of other shapes than their parameter, and the one key/value head, are replicated."""
    base = experiment("decoder", {"data": 2, "tensor": 4}, fields)
    losses = [
        train_steps(dataclasses.replace(c, optimizer=dataclasses.replace(base.optimizer, name="adafactor")), 2)[0]
        for c in (base, dataclasses.replace(base, mesh=MeshConfig(data=1)))
    ]
    np.testing.assert_allclose(*losses, rtol=2e-5)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "sgd"])
def test_weight_decay_is_decoupled_in_every_rule(name):
    """Without a gradient, a matrix shrinks by rate * decay a step and nothing else moves."""
    config = OptimizerConfig(name=name, schedule="constant", learning_rate=0.1, warmup_steps=0, weight_decay=0.5)
    optimizer = build_optimizer(config, 10)
    params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    state = optimizer.init(params)
    for step in range(1, 4):
        updates, state = optimizer.update(jax.tree.map(jnp.zeros_like, params), state, params)
        params = jax.tree.map(jnp.add, params, updates)
        np.testing.assert_allclose(params["kernel"], 0.95**step, rtol=1e-5)
        np.testing.assert_array_equal(params["bias"], 1)


def test_adamw_is_the_textbooks_update():
    """One parameter, three steps, by hand; decay on matrices alone."""
    config = OptimizerConfig(
        schedule="constant", learning_rate=0.1, warmup_steps=0, b1=0.9, b2=0.99, epsilon=1e-8, weight_decay=0.5
    )
    optimizer = build_optimizer(config, 10)
    params = {"kernel": jnp.array([[2.0]]), "bias": jnp.array([2.0])}
    state, m, v, expected = optimizer.init(params), 0.0, 0.0, {"kernel": 2.0, "bias": 2.0}
    for t, g in enumerate([1.0, -0.5, 0.25], 1):
        updates, state = optimizer.update({"kernel": jnp.array([[g]]), "bias": jnp.array([g])}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        direction = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8)
        for name, decay in {"kernel": 0.5, "bias": 0.0}.items():
            expected[name] -= 0.1 * (direction + decay * expected[name])
            assert float(params[name].ravel()[0]) == pytest.approx(expected[name], rel=1e-5)


def test_schedules():
    make = lambda name, **kw: schedule(OptimizerConfig(schedule=name, learning_rate=0.5, warmup_steps=10, **kw), 100)
    paper = make("inverse_sqrt")
    for n in (1, 5, 10, 40, 90):
        assert float(paper(n - 1)) == pytest.approx(0.5 * 10**0.5 * min(n**-0.5, n * 10**-1.5), rel=1e-5)
    for name in ("cosine", "linear", "wsd", "constant"):
        rate = make(name, final_fraction=0.1, decay_fraction=0.3)
        assert float(rate(4)) == pytest.approx(0.25)
        assert float(rate(9)) == pytest.approx(0.5)
        assert float(rate(10)) == pytest.approx(0.5)
    assert float(make("cosine")(55)) == pytest.approx(0.25)
    assert float(make("linear")(55)) == pytest.approx(0.25)
    assert float(make("linear", final_fraction=0.1)(100)) == pytest.approx(0.05)
    wsd = make("wsd", decay_fraction=0.3)
    assert [float(wsd(n)) for n in (69, 85, 100)] == [pytest.approx(0.5), pytest.approx(0.25), pytest.approx(0.0)]


def test_the_moving_average_follows_the_parameters():
    config = experiment("decoder", ema_decay=0.5)
    with use(make_mesh(config.mesh)) as mesh:
        model, optimizer = build_model(config.model), build_optimizer(config.optimizer, 10)
        _, placed = abstract_state(config, model, optimizer, mesh)
        state = init_state(config, model, optimizer, placed)
        step, average = make_train_step(config, model, optimizer, mesh, placed), jax.device_get(state.params)
        for n in range(3):
            state, _ = step(state, batch_of(config, n))
            decay = min(0.5, (1 + n) / (10 + n))
            average = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, average, jax.device_get(state.params))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), jax.device_get(state.ema), average)
        assert state.eval_params is state.ema


# ---------------------------------------------------------------------------------------------------------------------
# The table


def boxed(names, shape):
    from flax.linen import LogicallyPartitioned

    return {"layer": {"kernel": LogicallyPartitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)}}


@pytest.mark.parametrize(
    ("names", "shape", "message"),
    [
        (
            ("embed", "hedas"),
            (16, 4),
            "layer/kernel: the sharding table has no logical name 'hedas'; did you mean 'heads'",
        ),
        (("heads", "ff"), (16, 4), "layer/kernel: two of its dimensions"),
        (("embed", "heads"), (16, 3), "layer/kernel: dimension 'heads' of 3 does not divide over 2 devices"),
    ],
)
def test_the_table_is_checked_and_names_the_parameter(names, shape, message):
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    with pytest.raises(UserError, match=message):
        shardings(boxed(names, shape), mesh)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
@pytest.mark.parametrize(
    "fields",
    [
        {"position": "learned", "tie_embeddings": False, "logit_bias": True, "glu": True, "embedding_norm": True},
        {"position": "t5", "norm_placement": "rezero", "scan_layers": False},
    ],
)
def test_every_matrix_of_every_family_is_sharded(family, fields):
    model = build_model(ModelConfig(family=family, **SMALL, **fields))
    args = (jnp.ones((1, 4), jnp.int32),) * (2 if family == "encoder_decoder" else 1)
    boxed_params = jax.eval_shape(model.init, jax.random.key(0), *args)["params"]
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    placed = shardings(boxed_params, mesh)
    for path, sharding in jax.tree_util.tree_leaves_with_path(placed):
        if path[-1].key in ("kernel", "embedding"):
            assert {"fsdp", "tensor"} <= set(sharding.spec), path
    text = describe(unbox(boxed_params), placed, mesh)
    assert "data 2 x fsdp 2 x tensor 2" in text
    assert len({name for name, _ in RULES}) == len(RULES)


def test_a_mesh_larger_than_the_machine_is_refused():
    for sizes, message in [
        ({"data": 16}, "needs 16 devices, but there are 8"),
        ({"data": -1, "tensor": 3}, "take 3 devices, which does not divide the 8"),
    ]:
        with pytest.raises(UserError, match=message):
            make_mesh(MeshConfig(**sizes))


# ---------------------------------------------------------------------------------------------------------------------
# Whole runs


@pytest.fixture
def run_config():
    return from_mapping(Experiment, {
        "model": {"family": "decoder", **SMALL, "vocab_size": 512, "dropout": 0.1, "max_length": 32},
        "data": {"corpus": "pydoc", "length": 32, "batch_size": 8, "held_out": 4, "tokenizer": {"kind": "bpe"}},
        "optimizer": {"warmup_steps": 5}, "mesh": {"data": 2},
        "train": {"steps": 12, "log_every": 4, "eval_every": 6, "eval_batches": 3, "checkpoint_every": 5, "keep_checkpoints": 4, "tensorboard": False, "ema_decay": 0.9},
    })  # fmt: skip


def curve(workdir):
    """The lines of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.mark.parametrize("stop_at", [5, 7])
def test_resuming_equals_no_interruption_bitwise(run_config, tmp_path, monkeypatch, stop_at):
    """Stopped by a signal inside a logging interval, or (step 5) right after a checkpoint."""
    import os
    import signal

    from transformer.training import loop
    from transformer.training.checkpoint import Checkpoints

    assert loop.train(run_config, tmp_path / "whole") == 12
    device_put, calls = jax.device_put, []

    def kill(x, *args, **kwargs):
        if isinstance(x, dict) and len(x["inputs"]) == 8:
            calls.append(1)
            if len(calls) == stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
        return device_put(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", kill)
    assert loop.train(run_config, tmp_path / "parts") == stop_at
    assert Checkpoints(tmp_path / "parts", run_config.train).steps[-1] == stop_at
    monkeypatch.setattr(jax, "device_put", device_put)
    assert loop.train(run_config, tmp_path / "parts") == 12
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "whole")) == 5
    states = []
    for name in ("whole", "parts"):
        with use(make_mesh(run_config.mesh)) as mesh:
            abstract, _ = abstract_state(
                run_config, build_model(run_config.model), build_optimizer(run_config.optimizer, 12), mesh
            )
            states.append(jax.device_get(Checkpoints(tmp_path / name, run_config.train).restore(abstract, 12)[0]))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_run_goes_on_on_another_mesh(run_config, tmp_path):
    from transformer.training.loop import train

    shorter = dataclasses.replace(run_config, optimizer=dataclasses.replace(run_config.optimizer, schedule="constant"))
    train(dataclasses.replace(shorter, train=dataclasses.replace(shorter.train, steps=6)), tmp_path / "run")
    assert train(dataclasses.replace(shorter, mesh=MeshConfig(data=2, fsdp=2, tensor=2)), tmp_path / "run") == 12
    assert train(shorter, tmp_path / "one") == 12
    losses = [
        [line["train/loss"] for line in curve(tmp_path / name) if "train/loss" in line and line["step"] in (4, 12)]
        for name in ("run", "one")
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_one_compile_per_step_function_per_run(run_config, tmp_path, monkeypatch):
    from transformer.training import loop

    made = []
    for name in ("make_train_step", "make_eval_step"):
        original = getattr(loop, name)
        monkeypatch.setattr(loop, name, lambda *a, original=original: made.append(original(*a)) or made[-1])
    loop.train(run_config, tmp_path / "run")
    assert [step._cache_size() for step in made] == [1, 1]


def test_a_workdir_of_another_experiment_is_refused_with_what_differs(run_config, tmp_path):
    from transformer.config_io import to_mapping
    from transformer.training.rundir import check

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(to_mapping(run_config)))
    check(tmp_path / "run", run_config)
    check(tmp_path / "run", dataclasses.replace(run_config, mesh=MeshConfig(data=1)))
    other = dataclasses.replace(run_config, seed=3, model=dataclasses.replace(run_config.model, d_ff=64))
    with pytest.raises(UserError, match=r"model.d_ff was 32, is 64; seed was 0, is 3"):
        check(tmp_path / "run", other)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    for workdir, message in [
        (tmp_path / "other", "no run of ours"),
        (tmp_path / "other" / "thesis.tex", "is a file"),
        ("gs://bucket/run", "no local folder"),
    ]:
        with pytest.raises(UserError, match=message):
            check(Path(workdir), run_config)
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: damaged"):
        check(tmp_path / "run", run_config)


def test_changed_text_is_refused_and_the_run_left_as_it_was(run_config, tmp_path):
    from transformer.evaluation.evaluate import evaluate, load_trained
    from transformer.training.loop import train

    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i} says {i * i} and {i % 7}\n" for i in range(400)))
    data = dataclasses.replace(run_config.data, corpus="", train=str(file), format="text", held_out=20)
    config = dataclasses.replace(run_config, data=data, model=dataclasses.replace(run_config.model, vocab_size=300))
    assert train(config, tmp_path / "run") == 12
    files = {f.name: f.read_bytes() for f in (tmp_path / "run").iterdir() if f.is_file()}
    file.write_text("".join(f"row {i} tells {i * i} or {i % 7}\n" for i in range(400)))
    with pytest.raises(UserError, match="the training text has changed"):
        train(config, tmp_path / "run")
    with use(make_mesh(MeshConfig(data=1))) as mesh, pytest.raises(UserError, match="the test text has changed"):
        evaluate(load_trained(tmp_path / "run", config, mesh), mesh)
    assert files == {f.name: f.read_bytes() for f in (tmp_path / "run").iterdir() if f.is_file()}


def test_a_killed_run_goes_on_from_its_last_checkpoint(run_config, tmp_path, monkeypatch):
    """No signal, no goodbye: the metrics written after the checkpoint are dropped and written again."""
    from transformer.training import loop

    loop.train(run_config, tmp_path / "whole")
    device_put, calls = jax.device_put, []

    def die(x, *args, **kwargs):
        calls.append(isinstance(x, dict) and len(x["inputs"]) == 8)
        if sum(calls) == 13:  # step 10; three batches were evaluated at step 6
            raise SystemExit("power cut")
        return device_put(x, *args, **kwargs)

    monkeypatch.setattr(jax, "device_put", die)
    with pytest.raises(SystemExit):
        loop.train(run_config, tmp_path / "parts")
    monkeypatch.setattr(jax, "device_put", device_put)
    assert [line["step"] for line in curve(tmp_path / "parts")][-1] > 5
    assert loop.train(run_config, tmp_path / "parts") == 12
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_a_checkpoint_of_another_architecture_is_refused_by_name(run_config, tmp_path):
    from transformer.evaluation.evaluate import load_trained
    from transformer.training.loop import train

    train(run_config, tmp_path / "run")
    for fields, message in [
        ({"d_ff": 64}, r"feed_forward/in/bias is 2x32 there, 2x64 here"),
        ({"position": "learned"}, "position_embedding is absent there"),
    ]:
        other = dataclasses.replace(run_config, model=dataclasses.replace(run_config.model, **fields))
        with use(make_mesh(run_config.mesh)) as mesh, pytest.raises(UserError, match=message):
            load_trained(tmp_path / "run", other, mesh)


def test_the_mean_of_checkpoints(run_config, tmp_path):
    from transformer.evaluation.evaluate import load_trained
    from transformer.training.checkpoint import Checkpoints
    from transformer.training.loop import train

    config = dataclasses.replace(
        run_config, train=dataclasses.replace(run_config.train, ema_decay=0.0, average_checkpoints=2)
    )
    train(config, tmp_path / "run")
    with use(make_mesh(config.mesh)) as mesh:
        abstract, _ = abstract_state(config, build_model(config.model), build_optimizer(config.optimizer, 12), mesh)
        folder = Checkpoints(tmp_path / "run", config.train)
        assert folder.steps == [5, 10, 12]
        a, b = (folder.restore(abstract, step)[0].params for step in (10, 12))
        mean = load_trained(tmp_path / "run", config, mesh).params
        assert any(
            np.abs(np.asarray(x - y)).max() > 0 for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
        jax.tree.map(lambda m, x, y: np.testing.assert_allclose(m, (x + y) / 2, atol=1e-7), mean, a, b)


def test_divergence_stops_the_run_and_is_recorded(run_config, tmp_path):
    from transformer.training.loop import train

    wild = dataclasses.replace(
        run_config, optimizer=OptimizerConfig(name="sgd", learning_rate=1e30, schedule="constant", warmup_steps=0)
    )
    with pytest.raises(UserError, match="training diverged: the loss is (nan|inf) at step"):
        train(wild, tmp_path / "run")
    assert curve(tmp_path / "run")[-1]["train/diverged"] is True


def test_a_full_disk_is_one_line(tmp_path):
    import errno

    from transformer.training.checkpoint import disk_faults

    with pytest.raises(UserError, match="the disk is full"), disk_faults("x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ValueError, match="another"), disk_faults("x"):
        raise ValueError("another")
