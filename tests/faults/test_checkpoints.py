"""Checkpoints: fingerprints, detection of damage, fallback and deletion of old checkpoints."""

import dataclasses
import itertools
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import model_fields
from faults.checkpoints import CheckpointSubject, harms
from jax.sharding import NamedSharding, PartitionSpec as P

from transformer.config import Experiment, MeshConfig
from transformer.errors import UserError
from transformer.mapping import from_mapping
from transformer.parallel.mesh import make_mesh
from transformer.runs import checkpoint, checkpoint_record
from transformer.runs.checkpoint import Checkpoints
from transformer.runs.checkpoint_record import Damaged, Record, fingerprints
from transformer.runs.loop import train
from transformer.runs.metrics import read_metrics
from transformer.training.state import layout


def fingerprint(x: np.ndarray) -> str:
    """Computes the equation in the docstring of `fingerprints` with Python integers."""
    words = np.ravel(x).view(f"uint{8 * x.dtype.itemsize}") if x.dtype != bool else np.ravel(x)

    def mix(w: int) -> int:
        w = ((w ^ w >> 16) * 0x85EBCA6B) % 2**32
        w = ((w ^ w >> 13) * 0xC2B2AE35) % 2**32
        return w ^ w >> 16

    w = [mix(int(bits) ^ mix(i)) for i, bits in enumerate(words)]
    return f"{sum(w) % 2**32:08x}{sum(map(mix, w)) % 2**32:08x}"


X = np.random.default_rng(0).standard_normal((4, 8, 2)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "uint8"])
def test_fingerprint_matches_its_definition(dtype):
    x = jnp.asarray(X * 100).astype(dtype)
    assert fingerprints({"x": x}) == {"x": fingerprint(np.asarray(x))}


def test_fingerprint_depends_on_values_and_indices_not_on_mesh():
    expected = fingerprints([X])["0"]
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    for spec in (P("data"), P("fsdp", "tensor"), P(None, ("data", "tensor"), "fsdp"), P()):
        assert fingerprints([jax.device_put(X, NamedSharding(mesh, spec))])["0"] == expected, spec
    changed = X.copy()
    changed.view(np.uint32)[3, 1, 0] ^= 1
    swapped = X[::-1].copy()
    assert sorted(swapped.ravel()) == sorted(X.ravel())
    other_fingerprints = [
        fingerprints([x])["0"] for x in (changed, swapped, -X, X.reshape(8, 8)[:, :4])
    ]
    assert len({expected, *other_fingerprints}) == 5


def test_fingerprint_gathers_sums_only():
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))
    x = jax.device_put(np.tile(X, (8, 8, 8)), NamedSharding(mesh, P("fsdp", "data")))
    program = checkpoint_record._sums.lower(x).compile().as_text()
    gathered = re.findall(r"= [a-z0-9]+\[([0-9,]*)\]\S* (?:all-|reduce-|collective-)\S*\(", program)
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in gathered]
    assert sizes and max(sizes) <= mesh.size, "each device sums its own elements"


@pytest.fixture(scope="module")
def config():
    return from_mapping(
        Experiment,
        {
            "model": model_fields("decoder", vocab_size=400, d_ff=16),
            "data": {
                "corpus": "pydoc",
                "length": 16,
                "batch_size": 4,
                "held_out": 4,
                "tokenizer": {"kind": "bpe"},
            },
            "optimizer": {"warmup_steps": 5, "schedule": "constant"},
            "mesh": {"data": 1},
            "train": {
                "steps": 6,
                "log_every": 1,
                "eval_batches": 1,
                "checkpoint_every": 2,
                "keep_checkpoints": 3,
                "tensorboard": False,
                "ema_decay": 0.9,
            },
        },
    )


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """A run with checkpoints at steps 2, 4 and 6."""
    monkeypatch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("checkpoints")
    monkeypatch.setenv("TRANSFORMER_DATA", str(folder / "data"))
    train(config, folder / "run")
    yield CheckpointSubject(folder / "run", config)
    monkeypatch.undo()


def test_damage_is_detected_and_the_previous_checkpoint_is_used(trained, tmp_path, capfd):
    assert trained.steps == [2, 4, 6]
    all_harms = list(itertools.islice(harms(trained.newest, seed=1), 40))
    outcomes = [trained.check(harm, tmp_path) for harm in all_harms]
    assert outcomes.count("damaged") > 10, "most harms are harmless"
    array_harms = [
        harm
        for harm, outcome in zip(all_harms, outcomes, strict=True)
        if "/d/" in harm.file and outcome == "damaged"
    ]
    assert array_harms, "no harm damaged an array"
    assert "Traceback" not in capfd.readouterr().err


def flip_array_bits(folder) -> None:
    """Flips one bit in the middle of each file with parameter values."""
    for file in sorted(folder.rglob("params/**/d/*")):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 8
        file.write_bytes(data)


def test_training_resumes_before_a_damaged_checkpoint(trained, config, tmp_path, capfd):
    run, longer = tmp_path / "run", dataclasses.replace(config.train, steps=7)
    shutil.copytree(trained.run, run)
    losses = lambda folder: {
        line["step"]: line["train/loss"] for line in read_metrics(folder) if "train/loss" in line
    }
    expected = losses(run)
    flip_array_bits(run / "checkpoints" / "6")
    strict = dataclasses.replace(config, train=dataclasses.replace(longer, strict_checkpoints=True))
    with pytest.raises(
        Damaged, match=r"6 is damaged .*set train.strict_checkpoints=False to skip it"
    ):
        train(strict, run)
    assert losses(run) == expected and not (run / "damaged").exists(), (
        "strict_checkpoints must not change the run"
    )
    assert train(dataclasses.replace(config, train=longer), run) == 7
    output = capfd.readouterr().err
    assert "6 is damaged" in output and "continuing from step 4" in output
    assert "Traceback" not in output
    continued = losses(run)
    assert continued.pop(7) and continued == expected, "the repeated steps must be logged once"
    assert (run / "damaged" / "6").is_dir()
    assert Checkpoints(run, longer).steps == [4, 6, 7]


def test_without_an_intact_checkpoint_raises_and_changes_nothing(trained, config, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.run, run)
    flip_array_bits(run / "checkpoints")
    before = sorted(run.rglob("*"))
    with pytest.raises(Damaged, match="no other checkpoint is intact") as error:
        train(config, run)
    assert "\n" not in str(error.value) and sorted(run.rglob("*")) == before


def test_checkpoint_under_another_step_is_damaged(trained, config, tmp_path):
    shutil.copytree(trained.newest, tmp_path / "checkpoints" / "9")
    with pytest.raises(Damaged, match="it is the checkpoint of step 6"):
        trained.read(tmp_path, 9)


def test_pruning_counts_only_intact_checkpoints(trained, config, tmp_path):
    """Saving step 8 deletes steps 2 and 4. If step 6 is damaged, step 4 is kept."""
    run = tmp_path / "run"
    train_config = dataclasses.replace(config.train, steps=100, keep_checkpoints=2)
    for is_harmed, remaining_steps in ((False, [6, 8]), (True, [4, 8])):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(trained.run, run)
        lines: list[str] = []
        checkpoints = Checkpoints(run, train_config, lines.append)
        if is_harmed:
            flip_array_bits(run / "checkpoints" / "6")
        with jax.set_mesh(make_mesh(config.mesh)):
            state = jax.tree.map(jnp.asarray, trained.states[6])
            checkpoints.save(state, 8, {}, layout(config.model))
            checkpoints.close()
        assert Checkpoints(run, train_config).steps == remaining_steps
        assert len(lines) == is_harmed and all("6 is damaged" in line for line in lines)


def save_into_copy(trained, config, run, **fields) -> Checkpoints:
    """Saves step 8 into a copy of the run, so that old checkpoints are due for deletion."""
    shutil.copytree(trained.run, run)
    train_config = dataclasses.replace(config.train, steps=100, keep_checkpoints=2, **fields)
    checkpoints = Checkpoints(run, train_config, lambda line: None)
    with jax.set_mesh(make_mesh(config.mesh)):
        state = jax.tree.map(jnp.asarray, trained.states[6])
        checkpoints.save(state, 8, {}, layout(config.model))
        checkpoints._finish()
    return checkpoints


@pytest.mark.parametrize(
    ("strict", "message"),
    [(True, "strict_checkpoints=False"), (False, "same train command continues")],
)
def test_pruning_raises_if_the_newest_checkpoint_is_damaged(
    trained, config, tmp_path, strict, message
):
    checkpoints = save_into_copy(trained, config, tmp_path / "run", strict_checkpoints=strict)
    flip_array_bits(tmp_path / "run" / "checkpoints" / "8")
    before = checkpoints.steps
    with (
        jax.set_mesh(make_mesh(config.mesh)),
        pytest.raises(Damaged, match=f"8 is damaged .*{message}"),
    ):
        checkpoints.close()
    assert checkpoints.steps == before and not (tmp_path / "run" / "damaged").exists()


def test_run_that_ends_with_an_error_deletes_no_checkpoint(trained, config, tmp_path):
    checkpoints = save_into_copy(trained, config, tmp_path / "run")
    before = checkpoints.steps
    checkpoints.close(prune=False)
    assert Checkpoints(tmp_path / "run", config.train).steps == before == [4, 6, 8]


def test_checkpoint_of_version_0_1_raises():
    with pytest.raises(UserError, match=r"version 0\.1 .* step 7") as error:
        Record.from_json({"data_step": 7, "window": {}}, 7)
    assert not isinstance(error.value, Damaged)


def test_verification_bounds_the_bytes_read_at_a_time(trained):
    items = checkpoint._items(trained.abstract)
    total = len(jax.tree.leaves(items))
    for limit in (1, 3000, 2**40):
        parts = list(checkpoint._parts(items, limit))
        arrays_of_parts = [[x for x in jax.tree.leaves(part) if x is not ...] for part in parts]
        assert sum(map(len, arrays_of_parts)) == total and len(parts) == {1: total, 2**40: 1}.get(
            limit, len(parts)
        )
        assert all(checkpoint.size(x) <= limit or len(x) == 1 for x in arrays_of_parts)
