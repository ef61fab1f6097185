"""Measures the training time that is lost to checkpoints, on a local disk and in a bucket.

    python experiments/benchmarks/saving.py [--bucket=gs://BUCKET/FOLDER] [--rounds=3]

Trains a decoder for 160 steps without checkpoints, with one every 40 steps on the local disk, and
with one every 40 steps in the bucket, in turn. Prints the size of a checkpoint and the medians of

    waited      seconds per checkpoint in which training waited for it (time/saving_seconds)
    slower      seconds per checkpoint by which the steps took longer while it was written
    lost        the share of both in the time of the run

Without --bucket, a server on this machine emulates one, whose answers take 0.05 s more. It shares
the cores with the training, so that `slower` is larger than with a real bucket.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

from transformer import buckets, train
from transformer.config import Experiment
from transformer.mapping import from_mapping
from transformer.runs.metrics import read_metrics

STEPS, EVERY = 160, 40


def experiment(every: int) -> Experiment:
    return from_mapping(
        Experiment,
        {
            "model": {
                "family": "decoder",
                "vocab_size": 2048,
                "num_decoder_layers": 6,
                "d_model": 256,
                "num_heads": 4,
                "max_length": 128,
                "position": "rotary",
            },
            "data": {"corpus": "pydoc", "objective": "causal_lm", "held_out": 20, "batch_size": 8},
            "train": {
                "steps": STEPS,
                "checkpoint_every": every,
                "log_every": 20,
                "tensorboard": False,
            },
        },
    )


def measure(workdir: str, every: int) -> tuple[float, float, int]:
    """Trains, and returns the seconds of training, those of waiting, and a checkpoint's bytes."""
    train(experiment(every), workdir)
    lines = read_metrics(buckets.local_path(workdir))
    line = [line for line in lines if "time/trained_seconds" in line][-1]  # before the last save
    folder = Path(workdir) / "checkpoints" / str(STEPS)
    files = [file for file in folder.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return line["time/trained_seconds"], line["time/saving_seconds"], size


def main(options: argparse.Namespace) -> None:
    bucket = options.bucket
    if not bucket:
        sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
        from fake_gcs import FakeGCS

        server = FakeGCS("bucket")
        server.delay = 0.05
        os.environ |= server.environment()
        bucket = "gs://bucket/saving"
    found: dict[str, list] = {"without": [], "disk": [], "bucket": []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.rounds):
            places = {"without": f"{folder}/no{i}", "disk": f"{folder}/{i}"}
            for name, workdir in (places | {"bucket": f"{bucket}/{i}"}).items():
                found[name].append(measure(workdir, 0 if name == "without" else EVERY))
    saves = STEPS // EVERY - 1
    print(f"{found['disk'][0][2] / 2**20:,.0f} MiB per checkpoint")
    for name in ("disk", "bucket"):
        pairs = list(zip(found[name], found["without"], strict=True))
        waited = statistics.median(own[1] for own, _ in pairs)
        slower = statistics.median(own[0] - other[0] for own, other in pairs)
        lost = statistics.median(1 - other[0] / (own[0] + own[1]) for own, other in pairs)
        each = f"waited {waited / saves:.2f} s, slower {slower / saves:.2f} s per checkpoint"
        print(f"{name:<7} {each}, lost {lost:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bucket", default="")
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args())
