"""Runs and sweeps in a bucket: real clients, and a server of our own."""

import dataclasses
import shutil

import numpy as np
import pytest
from exchange_models import gpt2
from fake_gcs import close_mirrors, gcs, machine  # two are fixtures
from safetensors.numpy import load_file
from studies import make_study
from test_processes import ROOT, TRAIN, launch

from transformer import buckets
from transformer.cli import main
from transformer.errors import UserError
from transformer.lab.study import load_study
from transformer.runs.loop import train
from transformer.runs.metrics import read_metrics


def _losses(folder):
    return [
        {name: x for name, x in line.items() if not name.startswith(("time/", "memory/"))}
        for line in read_metrics(folder)
    ]


def _shorter(config, **changes):
    train = dataclasses.replace(config.train, **changes)
    optimizer = dataclasses.replace(config.optimizer, schedule="constant")
    return dataclasses.replace(config, train=train, optimizer=optimizer)


def test_run_continues_on_another_machine(gcs, machine, run_config, tmp_path, capsys):
    """The log equals that of a local run; evaluate and generate work on a third machine."""
    machine("first")
    whole = _shorter(run_config, tensorboard=True)
    train(whole, tmp_path / "local")
    train(_shorter(run_config, steps=4, tensorboard=True), "gs://bucket/run")
    close_mirrors()
    assert {"checkpoints/4/commit_success.txt", "metrics.jsonl", "config.json"} <= gcs.names(
        "bucket", "run/"
    )
    assert "lock" not in gcs.names("bucket", "run/")
    machine("second")
    train(whole, "gs://bucket/run")
    close_mirrors()
    machine("third")
    mirror = buckets.open_folder("gs://bucket/run")
    assert [line for line in _losses(mirror) if line["step"] > 4] == [
        line for line in _losses(tmp_path / "local") if line["step"] > 4
    ]
    assert {x.name for x in (mirror / "checkpoints").iterdir()} == {"5", "10", "12"}
    assert not any((mirror / "checkpoints" / "12").iterdir())
    assert sum("events" in name for name in gcs.names("bucket", "run/tensorboard/")) == 2
    capsys.readouterr()
    assert main(["evaluate", "--workdir=gs://bucket/run"]) == 0
    assert "test.json" in gcs.names("bucket", "run/")
    (tmp_path / "prompts.txt").write_text("The function\n")
    prompts = f"--input={tmp_path / 'prompts.txt'}"
    length = "--config.decoding.max_extra=4"
    assert main(["generate", "--workdir=gs://bucket/run", prompts, length]) == 0
    assert str(buckets.root()) not in "".join(capsys.readouterr())


def test_damaged_checkpoint_is_set_aside(gcs, machine, run_config, capfd):
    machine("first")
    config = _shorter(run_config, steps=10)
    train(config, "gs://bucket/damaged_run")
    objects = gcs.buckets["bucket"]
    largest = max(
        (name for name in objects if name.startswith("damaged_run/checkpoints/10/params/d/")),
        key=lambda name: len(objects[name].content),
    )
    gcs.write("bucket", largest, objects[largest].content[:-7])
    train(_shorter(run_config, steps=11), "gs://bucket/damaged_run")
    error = capfd.readouterr().err
    assert "gs://bucket/damaged_run/checkpoints/10 is damaged" in error
    assert "it is now in gs://bucket/damaged_run/damaged" in error
    moved = gcs.names("bucket", "damaged_run/damaged/10/")
    assert largest.partition("/10/")[2] in moved
    close_mirrors()
    mirror = buckets.open_folder("gs://bucket/damaged_run")
    assert {x.name for x in (mirror / "checkpoints").iterdir()} == {"5", "10", "11"}
    assert [x.name for x in (mirror / "damaged").iterdir()] == ["reason.txt"]


def test_sweep_is_shared_by_machines(gcs, machine, tmp_path):
    """Each trains its share. Their claims and results are in the bucket."""
    machine("first", known=True)
    study = make_study(buckets.open_folder("gs://bucket/study"), seeds=1)
    study.write()
    close_mirrors()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    for name, shard in (("first", "1/2"), ("second", "2/2")):
        machine(name, known=True)
        sweep = ["sweep", "--workdir=gs://bucket/study", f"--shard={shard}", "--together=1"]
        assert main(sweep) == 0
    machine("third")
    runs = load_study(buckets.open_folder("gs://bucket/study")).runs
    assert [run.status().kind for run in runs] == ["done", "done"]
    assert main(["compare", "gs://bucket/study"]) == 0
    names = gcs.names("bucket", "study/")
    assert {"report/index.html", "logs/alibi.seed-0.log", "rotary/seed-0/test.json"} <= names
    assert not [name for name in names if name.startswith("claims/")]


def test_run_of_a_mounted_folder_is_refused(gcs, machine, run_config, tmp_path):
    """Its checkpoints lack the object that tells complete ones from others in a bucket."""
    machine("first")
    train(_shorter(run_config, steps=4), tmp_path / "mounted")
    for file in (tmp_path / "mounted").rglob("*"):
        if file.is_file():
            name = f"mounted/{file.relative_to(tmp_path / 'mounted')}"
            gcs.write("bucket", name, file.read_bytes())
    with pytest.raises(UserError, match="was written as a folder.*mount the bucket"):
        train(_shorter(run_config, steps=8), "gs://bucket/mounted")
    assert gcs.names("bucket", "mounted/checkpoints/") > {"4/_CHECKPOINT_METADATA"}


def test_sweep_of_a_pod_needs_no_shared_folder(gcs, machine, tmp_path):
    """Two processes, each with its own mirror, train two arms, of which one diverges."""
    machine("first", known=True)
    sweep = (
        "def sweep():\n"
        "    from transformer import Sweep, vary\n"
        "    return Sweep(vary('optimizer.learning_rate', 1e30, 1e-3), seeds=1)\n"
    )
    (tmp_path / "x.py").write_text((ROOT / "experiments" / "smoke.py").read_text() + sweep)
    command = ["sweep", f"--config={tmp_path / 'x.py'}", *TRAIN[2:], "--config.train.steps=3"]
    homes = [{"TRANSFORMER_DATA": str(tmp_path / f"host-{i}")} for i in range(2)]
    for process in launch(2, "gs://bucket/pod", command=command, variables=homes):
        out, _ = process.communicate(timeout=400)
        assert process.returncode == 0, out
    names = gcs.names("bucket", "pod/")
    arm = "learning_rate=0.001/seed-0/"
    assert {f"{arm}checkpoints/3/commit_success.txt", f"{arm}test.json", "sweep.json"} <= names
    machine("third")
    runs = load_study(buckets.open_folder("gs://bucket/pod")).runs
    assert [run.status().kind for run in runs] == ["diverged", "done"]


def test_init_from_and_convert_work_in_a_bucket(gcs, machine, gpt2, capsys):
    machine("first")
    assert main(["convert", f"--from={gpt2}", "--workdir=gs://bucket/converted"]) == 0
    assert "--workdir=gs://bucket/converted" in capsys.readouterr().err
    names = gcs.names("bucket", "converted/")
    assert {"config.json", "manifest.json", "checkpoints/0/commit_success.txt"} <= names
    machine("second")
    local = str(buckets.data_home() / "again")
    assert main(["convert", "--workdir=gs://bucket/converted", f"--to={local}"]) == 0
    again, tensors = (load_file(f"{folder}/model.safetensors") for folder in (local, gpt2))
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], tensors[name]) for name in again)
