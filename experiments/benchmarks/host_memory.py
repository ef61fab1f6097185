"""Measures how much keeping freed memory speeds up the quickstart's training step on a CPU.

    python experiments/benchmarks/host_memory.py [--rounds=6]

One process keeps freed memory and one does not. They take 10 steps in turn. Prints the median
milliseconds and page faults per step, and the ratio of times over the rounds (median, min, max).
See transformer/parallel/host.py.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 10


def side(keep: bool) -> None:
    """Takes `STEPS` steps for each line of standard input, and prints time and page faults."""
    if not keep:
        os.environ["TRANSFORMER_ALLOCATOR"] = "system"
    import jax

    from transformer.config_io import load_experiment
    from transformer.data.pipeline import open_data
    from transformer.model.network import build_model
    from transformer.parallel.mesh import make_mesh, use
    from transformer.training.optimizer import build_optimizer
    from transformer.training.state import abstract_state, init_state
    from transformer.training.step import make_train_step

    config = load_experiment(str(Path(__file__).parents[1] / "quickstart.py"))
    with use(make_mesh(config.mesh)) as mesh:
        model, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, config.train.steps, config.model),
        )
        _, sharding = abstract_state(config, model, optimizer, mesh)
        state, step = (
            init_state(config, model, optimizer, sharding),
            make_train_step(config, model, optimizer, mesh, sharding),
        )
        batch = jax.device_put(open_data(config).batches("train")[0])
        for _ in range(3):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        print("ready", flush=True)
        for _ in sys.stdin:
            start, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(STEPS):
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            print(
                json.dumps([1e3 * (time.perf_counter() - start) / STEPS, faults / STEPS]),
                flush=True,
            )


def main() -> None:
    options = dict(a.removeprefix("--").partition("=")[::2] for a in sys.argv[1:])
    if "side" in options:
        side(options["side"] == "keep")
        return
    processes = {
        name: subprocess.Popen(
            [sys.executable, __file__, f"--side={name}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tempfile.gettempdir(),
        )
        for name in ("plain", "keep")
    }
    for process in processes.values():
        process.stdout.readline()
    measured: dict[str, list[list[float]]] = {name: [] for name in processes}
    for _ in range(int(options.get("rounds", 6))):
        for name, process in processes.items():
            process.stdin.write("go\n")
            process.stdin.flush()
            measured[name].append(json.loads(process.stdout.readline()))
    for name, process in processes.items():
        process.stdin.close()
        process.wait()
        ms, faults = (statistics.median(column) for column in zip(*measured[name], strict=True))
        print(f"{name:<6} {ms:6.1f} ms per step, {faults:8,.0f} page faults per step")
    ratios = [a[0] / b[0] for a, b in zip(measured["plain"], measured["keep"], strict=True)]
    print(
        f"plain / keep: {statistics.median(ratios):.2f} "
        f"(rounds: {min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
