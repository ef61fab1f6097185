"""Whole runs: resuming, errors, divergence, averages of checkpoints."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer.config import MeshConfig, OptimizerConfig
from transformer.errors import UserError
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.training.optimizer import build_optimizer, schedule
from transformer.training.state import abstract_state


def logged_metrics(workdir):
    """Returns the lines of metrics.jsonl, without times and memory."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines
    ]


@pytest.mark.parametrize("stop_at", [5, 7])
def test_resumed_run_equals_uninterrupted_run_bitwise(run_config, tmp_path, monkeypatch, stop_at):
    """A signal stops the run within a logging interval, or (step 5) right after a checkpoint."""
    import os
    import signal

    from transformer.runs import loop
    from transformer.runs.checkpoint import Checkpoints

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
    assert logged_metrics(tmp_path / "parts") == logged_metrics(tmp_path / "whole")
    assert len(logged_metrics(tmp_path / "whole")) == 5
    states = []
    for name in ("whole", "parts"):
        with use(make_mesh(run_config.mesh)) as mesh:
            abstract, _ = abstract_state(
                run_config,
                build_model(run_config.model),
                build_optimizer(run_config.optimizer, 12, run_config.model),
                mesh,
            )
            states.append(
                jax.device_get(
                    Checkpoints(tmp_path / name, run_config.train).restore(
                        12, lambda layout, abstract=abstract: abstract
                    )[0]
                )
            )
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_the_end_of_each_decay_is_evaluated(run_config, tmp_path):
    from transformer.runs.loop import train

    fields = {"schedule": "wsd", "warmup_steps": 1, "decay_ends": (3,)}
    config = dataclasses.replace(
        run_config,
        optimizer=dataclasses.replace(run_config.optimizer, **fields),
        train=dataclasses.replace(run_config.train, steps=6, eval_every=0),
    )
    train(config, tmp_path / "run")
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [row["step"] for row in rows if "eval/loss" in row] == [3, 6]
    with pytest.raises(UserError, match=r"decay_ends: 6 must be less than train\.steps = 6"):
        dataclasses.replace(
            config, optimizer=dataclasses.replace(config.optimizer, decay_ends=(3, 6))
        )
    for ends in ((3, 3), (1, 4)):
        with pytest.raises(
            UserError, match=r"decay_ends: .* must increase, after warmup_steps = 1"
        ):
            dataclasses.replace(config.optimizer, decay_ends=ends)


def test_resumes_on_another_mesh(run_config, tmp_path):
    from transformer.runs.loop import train

    shorter = dataclasses.replace(
        run_config, optimizer=dataclasses.replace(run_config.optimizer, schedule="constant")
    )
    train(
        dataclasses.replace(shorter, train=dataclasses.replace(shorter.train, steps=6)),
        tmp_path / "run",
    )
    assert (
        train(
            dataclasses.replace(shorter, mesh=MeshConfig(data=2, fsdp=2, tensor=2)),
            tmp_path / "run",
        )
        == 12
    )
    assert train(shorter, tmp_path / "one") == 12
    losses = [
        [
            line["train/loss"]
            for line in logged_metrics(tmp_path / name)
            if "train/loss" in line and line["step"] in (4, 12)
        ]
        for name in ("run", "one")
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_resumes_in_another_layout(run_config, tmp_path):
    """Trains with scanned layers, then unrolled in two micro-batches, then in pipeline stages.

    Each start restores the parameters, the optimizer state and the moving average.
    """
    from transformer.runs.evaluate import load_trained
    from transformer.runs.loop import train

    model = dataclasses.replace(run_config.model, dropout=0.0, num_decoder_layers=4)
    base = dataclasses.replace(
        run_config,
        model=model,
        optimizer=dataclasses.replace(run_config.optimizer, schedule="constant"),
    )

    def train_until(steps, mesh=None, accumulate=1, **layout):
        changed = dataclasses.replace(
            base,
            train=dataclasses.replace(base.train, accumulate=accumulate),
            model=dataclasses.replace(model, **layout),
            mesh=MeshConfig(**(mesh or {"data": 1})),
        )
        assert (
            train(
                dataclasses.replace(changed, train=dataclasses.replace(changed.train, steps=steps)),
                workdir,
            )
            == steps
        )
        return changed

    workdir = tmp_path / "one"
    train_until(12)
    workdir = tmp_path / "parts"
    train_until(4)
    train_until(8, accumulate=2, scan_layers=False)
    config = train_until(12, {"data": 2, "stage": 2}, pipeline_rounds=2)
    losses = [
        [line["train/loss"] for line in logged_metrics(tmp_path / name) if "train/loss" in line]
        for name in ("parts", "one")
    ]
    assert len(losses[0]) == 3
    np.testing.assert_allclose(*losses, rtol=1e-5)
    # The layout of the config differs from that of the checkpoint.
    with use(make_mesh(MeshConfig(data=1))) as mesh:
        trained = load_trained(tmp_path / "parts", dataclasses.replace(config, model=model), mesh)
    assert trained.config.model.pipeline_rounds == 2


def test_step_functions_compile_once_per_run(run_config, tmp_path, monkeypatch):
    from transformer.runs import loop, run

    jax.clear_caches()  # JAX keeps 8,192 programs; earlier tests of a process may have filled that
    steps = []
    for name in ("make_train_step", "make_eval_step"):
        original = getattr(run, name)
        monkeypatch.setattr(
            run, name, lambda *a, original=original: steps.append(original(*a)) or steps[-1]
        )
    profiled = dataclasses.replace(run_config.train, profile=5)
    loop.train(dataclasses.replace(run_config, train=profiled), tmp_path / "run")
    assert [step._cache_size() for step in steps] == [1, 1]
    rate = schedule(run_config.optimizer, 12)
    lines = [line for line in logged_metrics(tmp_path / "run") if "train/loss" in line]
    expected = [(step, pytest.approx(float(rate(step - 1)))) for step in (4, 8, 12)]
    assert [(line["step"], line["train/learning_rate"]) for line in lines] == expected
    # The run has 12 steps and ends before the trace of steps 11 to 15, which is saved anyway.
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_workdir_of_another_experiment_raises(run_config, tmp_path):
    from transformer.mapping import to_mapping
    from transformer.runs.rundir import check

    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps(to_mapping(run_config)))
    check(tmp_path / "run", run_config)
    check(tmp_path / "run", dataclasses.replace(run_config, mesh=MeshConfig(data=1)))
    other = dataclasses.replace(
        run_config, seed=3, model=dataclasses.replace(run_config.model, d_ff=64)
    )
    with pytest.raises(UserError, match=r"model.d_ff was 32, is 64; seed was 0, is 3"):
        check(tmp_path / "run", other)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "checkpoints").write_text("x")
    for workdir, message in [
        (tmp_path / "other", "not empty and not a run"),
        (tmp_path / "other" / "thesis.tex", "is a file"),
        (tmp_path / "odd", "checkpoints is a file"),
        ("s3://bucket/run", "not a folder; use a local one, or gs://BUCKET/FOLDER"),
    ]:
        with pytest.raises(UserError, match=message):
            check(Path(workdir), run_config)
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json: damaged"):
        check(tmp_path / "run", run_config)


def test_changed_text_raises_and_leaves_the_run_unchanged(run_config, tmp_path):
    from transformer.runs.evaluate import evaluate, load_trained
    from transformer.runs.loop import train

    file = tmp_path / "text.txt"
    file.write_text("".join(f"line {i} says {i * i} and {i % 7}\n" for i in range(400)))
    data = dataclasses.replace(
        run_config.data, corpus="", train=str(file), format="text", held_out=20
    )
    config = dataclasses.replace(
        run_config, data=data, model=dataclasses.replace(run_config.model, vocab_size=300)
    )
    assert train(config, tmp_path / "run") == 12
    files = {f.name: f.read_bytes() for f in (tmp_path / "run").iterdir() if f.is_file()}
    file.write_text("".join(f"row {i} tells {i * i} or {i % 7}\n" for i in range(400)))
    with pytest.raises(UserError, match="the training text has changed"):
        train(config, tmp_path / "run")
    with (
        use(make_mesh(MeshConfig(data=1))) as mesh,
        pytest.raises(UserError, match="the test text has changed"),
    ):
        evaluate(load_trained(tmp_path / "run", config, mesh), mesh)
    assert files == {f.name: f.read_bytes() for f in (tmp_path / "run").iterdir() if f.is_file()}


def test_killed_run_resumes_from_its_last_checkpoint(run_config, tmp_path, monkeypatch):
    """Metrics that were written after the last checkpoint are dropped and written again."""
    from transformer.runs import loop

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
    assert [line["step"] for line in logged_metrics(tmp_path / "parts")][-1] > 5
    assert loop.train(run_config, tmp_path / "parts") == 12
    assert logged_metrics(tmp_path / "parts") == logged_metrics(tmp_path / "whole")


def test_checkpoint_of_another_architecture_raises(run_config, tmp_path):
    from transformer.runs.evaluate import load_trained
    from transformer.runs.loop import train

    train(run_config, tmp_path / "run")
    for fields, message in [
        ({"d_ff": 64}, r"feed_forward/in/bias is 2x32 in the checkpoint, 2x64 in the model"),
        ({"position": "learned"}, "position_embedding is absent in the checkpoint"),
    ]:
        other = dataclasses.replace(
            run_config, model=dataclasses.replace(run_config.model, **fields)
        )
        with use(make_mesh(run_config.mesh)) as mesh, pytest.raises(UserError, match=message):
            load_trained(tmp_path / "run", other, mesh)


def test_damaged_checkpoint_raises_in_one_line(run_config, tmp_path):
    import shutil

    from transformer.runs.evaluate import load_trained
    from transformer.runs.loop import train

    train(run_config, tmp_path / "whole")
    step = Path("checkpoints") / "12"

    def cut(file):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    for i, damage in enumerate(
        [
            lambda run: [shutil.rmtree(x) for x in (run / step).iterdir() if x.is_dir()],
            lambda run: shutil.rmtree(run / step / "ema"),
            lambda run: cut(run / step / "ema" / "_METADATA"),
            lambda run: [cut(x) for x in (run / step / "ema").rglob("d/*")],
        ]
    ):
        run = tmp_path / str(i)
        shutil.copytree(tmp_path / "whole", run)
        damage(run)
        with (
            use(make_mesh(run_config.mesh)) as mesh,
            pytest.raises(
                UserError, match="12 is damaged .*; restore it from a copy, or move that folder"
            ) as error,
        ):
            load_trained(run, run_config, mesh)
        assert "\n" not in str(error.value)


def test_untrained_workdir_accepts_another_experiment(run_config, tmp_path):
    from transformer.runs import rundir

    with use(make_mesh(run_config.mesh)) as mesh:
        from transformer.data.pipeline import open_data

        data = open_data(run_config)
        origin = {"data": data.meta}
        rundir.record_start(tmp_path / "run", run_config, mesh, data.tokenizer, origin)
    other = dataclasses.replace(run_config, seed=7)
    rundir.check(tmp_path / "run", other)
    (tmp_path / "run" / "checkpoints" / "5").mkdir(parents=True)
    with pytest.raises(UserError, match="seed was 0, is 7"):
        rundir.check(tmp_path / "run", other)


def test_average_of_checkpoints(run_config, tmp_path):
    from transformer.runs.checkpoint import Checkpoints
    from transformer.runs.evaluate import load_trained
    from transformer.runs.loop import train

    config = dataclasses.replace(
        run_config,
        train=dataclasses.replace(run_config.train, ema_decay=0.0, average_checkpoints=2),
    )
    train(config, tmp_path / "run")
    with use(make_mesh(config.mesh)) as mesh:
        abstract, _ = abstract_state(
            config,
            build_model(config.model),
            build_optimizer(config.optimizer, 12, config.model),
            mesh,
        )
        folder = Checkpoints(tmp_path / "run", config.train)
        assert folder.steps == [5, 10, 12]
        a, b = (folder.restore(step, lambda layout: abstract)[0].params for step in (10, 12))
        mean = load_trained(tmp_path / "run", config, mesh).params
        assert any(
            np.abs(np.asarray(x - y)).max() > 0
            for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
        )
        jax.tree.map(
            lambda m, x, y: np.testing.assert_allclose(m, (x + y) / 2, atol=1e-7), mean, a, b
        )


def test_divergence_stops_the_run_and_is_recorded(run_config, tmp_path):
    from transformer.runs.loop import train

    diverging = dataclasses.replace(
        run_config,
        optimizer=OptimizerConfig(
            name="sgd", learning_rate=1e30, schedule="constant", warmup_steps=0
        ),
    )
    with pytest.raises(UserError, match="training diverged: the loss is (nan|inf) at step"):
        train(diverging, tmp_path / "run")
    assert logged_metrics(tmp_path / "run")[-1]["train/diverged"] is True


def test_restart_removes_the_previous_tokenizer(run_config, tmp_path):
    from transformer.data.pipeline import open_data
    from transformer.runs import rundir

    (tmp_path / "tokenizer.json").write_text("{}")
    with use(make_mesh(run_config.mesh)) as mesh:
        rundir.record_start(tmp_path, run_config, mesh, open_data(run_config).tokenizer, {})
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "config.json",
        "manifest.json",
        "tokenizer.model",
    ]
