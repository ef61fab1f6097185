"""What keeping freed memory is worth on a CPU: the quickstart's step with and without it, in turn.

    python experiments/benchmarks/host_memory.py [--rounds=6]

Each side is a process of its own that takes 10 steps when told to. Printed: milliseconds a step (median), the ratio round by
round, page faults a step. See transformer/parallel/host.py.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 10


def side(keep: bool) -> None:
    if keep:
        from transformer.parallel.host import keep_freed_memory

        keep_freed_memory()
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
            build_optimizer(config.optimizer, config.train.steps),
        )
        _, placed = abstract_state(config, model, optimizer, mesh)
        state, step = (
            init_state(config, model, optimizer, placed),
            make_train_step(config, model, optimizer, mesh, placed),
        )
        batch = jax.device_put(open_data(config).batches("train")[0])
        for _ in range(3):
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        print("ready", flush=True)
        for _ in sys.stdin:
            began, faults = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            for _ in range(STEPS):
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            print(
                json.dumps([1e3 * (time.perf_counter() - began) / STEPS, faults / STEPS]),
                flush=True,
            )


def main() -> None:
    options = dict(a.removeprefix("--").partition("=")[::2] for a in sys.argv[1:])
    if "side" in options:
        side(options["side"] == "keep")
        return
    sides = {
        name: subprocess.Popen(
            [sys.executable, __file__, f"--side={name}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tempfile.gettempdir()
        )
        for name in ("plain", "keep")
    }  # fmt: skip
    for process in sides.values():
        process.stdout.readline()
    seen: dict[str, list[list[float]]] = {name: [] for name in sides}
    for _ in range(int(options.get("rounds", 6))):
        for name, process in sides.items():
            process.stdin.write("go\n")
            process.stdin.flush()
            seen[name].append(json.loads(process.stdout.readline()))
    for name, process in sides.items():
        process.stdin.close()
        process.wait()
        ms, faults = (statistics.median(column) for column in zip(*seen[name], strict=True))
        print(f"{name:<6} {ms:6.1f} ms a step, {faults:8,.0f} page faults a step")
    ratios = [a[0] / b[0] for a, b in zip(seen["plain"], seen["keep"], strict=True)]
    print(
        f"plain / keep: {statistics.median(ratios):.2f} (rounds: {min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
