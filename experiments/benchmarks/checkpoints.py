"""Measures the cost of verified checkpoints: computing checksums (fingerprints), saving, reading.

    python experiments/benchmarks/checkpoints.py [--parameters=50e6] [--rounds=5]

The state is Adam's, 12 bytes per parameter, on one device. Prints the median seconds of each,
and the share of the fingerprints in the time of a save.

Measured on two cores of a busy machine (AMD EPYC 9005), for 576 MiB: fingerprints 0.35 s, save
8.67 s, read and verify 12.75 s; fingerprints take 4.0 % of a save.
"""

import argparse
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp

from transformer.config import TrainConfig
from transformer.runs.checkpoint import Checkpoints, size
from transformer.runs.checkpoint_record import describe
from transformer.training.state import TrainState


def main(options: argparse.Namespace) -> None:
    layers = max(1, round(options.parameters / 2**20))
    normal = lambda seed: {"kernel": jax.random.normal(jax.random.key(seed), (layers, 1024, 1024))}
    state = TrainState(jnp.int32(0), normal(0), {"mu": normal(1), "nu": normal(2)})
    items = {"params": state.params, "rest": {"step": state.step, "opt_state": state.opt_state}}
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    describe(items)  # compiles
    seconds: dict[str, list[float]] = {"fingerprints": [], "save": [], "read and verify": []}

    def timed(name: str, call) -> None:
        start = time.perf_counter()
        call()
        seconds[name].append(time.perf_counter() - start)

    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            checkpoints = Checkpoints(folder, TrainConfig())
            timed("fingerprints", lambda: describe(items))

            def save(checkpoints=checkpoints):
                checkpoints.save(state, 1, {}, {})
                checkpoints.close()

            timed("save", save)
            again = Checkpoints(folder, TrainConfig())
            timed("read and verify", lambda again=again: again.restore(1, lambda _: abstract))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(
        f"{size(state) / 2**20:,.0f} MiB: "
        + ", ".join(f"{k} {v:.2f} s" for k, v in medians.items())
    )
    print(f"fingerprints take {medians['fingerprints'] / medians['save']:.1%} of a save")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=float, default=50e6)
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args())
