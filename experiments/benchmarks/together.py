"""What do runs save that are trained as one program? Steps of R seeds together against R steps of one, interleaved, on this machine.

    python experiments/benchmarks/together.py [--devices=8] [--d_model=64]

A decoder of four layers, 16 rows of 64 tokens a run. `--devices` simulates so many CPU devices, over which runs are spread, and over which a lone run
spreads its rows. The ratio is time of R runs one after another over that of R together; compiling, which is done once instead of R times, is left
out.

Seen (two cores of an AMD EPYC 9005):

    one device       runs     1     2     4     8        eight simulated devices     1     2     4     8
                    ratio  1.01  1.17  1.08  1.01                                 1.51  1.66  1.81  2.38

So two cores, which one small run keeps busy, win nothing but the compiling; where a run would spread its rows over devices that talk to each other, runs
side by side win. What an accelerator wins, which a small run leaves idle, was not measured: none was at hand.
"""

import argparse
import os
import time

ROWS, LENGTH, VOCABULARY = 16, 64, 2048


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--devices", type=int, default=0, help="simulated CPU devices")
    parser.add_argument("--d_model", type=int, default=64)
    parser.add_argument("--trials", type=int, default=10)
    options = parser.parse_args()
    if options.devices:
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.devices}"
        )

    import jax

    from transformer.config import Experiment, MeshConfig
    from transformer.mapping import from_mapping
    from transformer.parallel.mesh import start

    config = from_mapping(Experiment, {
        "model": {"family": "decoder", "vocab_size": VOCABULARY, "num_decoder_layers": 4, "d_model": options.d_model, "d_ff": 4 * options.d_model, "num_heads": 4,
                  "max_length": LENGTH, "position": "rotary", "attention_backend": "reference"},
        "data": {"corpus": "pydoc", "length": LENGTH, "batch_size": ROWS}, "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
    })  # fmt: skip
    mesh = start("auto", MeshConfig())
    print(
        f"{mesh.size} x {jax.devices()[0].device_kind}, d_model {options.d_model}\n{'runs':>5}  {'alone ms':>9}  {'together ms':>12}  {'ratio':>6}"
    )
    for runs in (1, 2, 4, 8):
        alone, together = measure(config, mesh, runs, options.trials)
        print(f"{runs:>5}  {alone:>9.1f}  {together:>12.1f}  {alone / together:>6.2f}", flush=True)


def random_batch() -> dict:
    """Full rows of random tokens."""
    import numpy as np

    ids = np.random.default_rng(0).integers(4, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    ones = np.ones((ROWS, LENGTH), np.int32)
    return {
        "inputs": ids[:, :-1],
        "targets": ids[:, 1:],
        "weights": ones.astype(np.float32),
        "segments": ones,
        "positions": (np.cumsum(ones, axis=1) - 1).astype(np.int32),
    }


def measure(config, whole, runs: int, trials: int) -> tuple[float, float]:
    """Milliseconds of a step of so many runs: one after another, and together."""
    import jax
    import numpy as np
    from flax import linen as nn
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from transformer.config import MeshConfig
    from transformer.lab.together import make_step, runs_mesh
    from transformer.model.network import build_model
    from transformer.parallel.mesh import make_mesh, use
    from transformer.training.optimizer import build_optimizer
    from transformer.training.state import abstract_state, init_state
    from transformer.training.step import make_train_step

    model, batch = build_model(config.model), random_batch()
    optimizer = build_optimizer(config.optimizer, config.train.steps)
    with use(whole):
        _, placed = abstract_state(config, model, optimizer, whole)
        alone = make_train_step(config, model, optimizer, whole, placed)
        states = [init_state(config, model, optimizer, placed) for _ in range(runs)]
    one, over = make_mesh(MeshConfig(data=1)), runs_mesh(runs)
    place = lambda tree: jax.device_put(tree, NamedSharding(over, P("runs")))
    numbers = {
        "seed": place(np.arange(runs, dtype=np.int32)),
        "optimizer.learning_rate": place(np.full(runs, 1e-3, np.float32)),
    }
    together = make_step(config, one, over)
    repeated = lambda x: np.stack([np.asarray(x)] * runs)
    stacked = place(jax.tree.map(repeated, jax.device_get(states[0])))
    batches, seconds = place(jax.tree.map(repeated, batch)), {"alone": [], "together": []}
    for trial in range(trials + 2):
        began = time.perf_counter()
        with use(whole):
            for n in range(runs):
                states[n], _ = alone(states[n], batch)
        jax.block_until_ready(states)
        between = time.perf_counter()
        with jax.set_mesh(over), nn.logical_axis_rules(()):
            stacked, _ = together(numbers, stacked, batches)
        jax.block_until_ready(stacked)
        if trial > 1:
            seconds["alone"].append(between - began)
            seconds["together"].append(time.perf_counter() - between)
    return 1e3 * min(seconds["alone"]), 1e3 * min(seconds["together"])


if __name__ == "__main__":
    main()
