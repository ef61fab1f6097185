"""How much faster do R runs train as one program than one after another?

    python experiments/benchmarks/together.py [--devices=8] [--d_model=64]

The model is a decoder of four layers, with 16 sequences of 64 tokens per run. `--devices` simulates
that many CPU devices: runs that train together are spread over them, and a run that trains alone
spreads its sequences over them. The ratio is the time of one step of R runs, one after another,
divided by the time of one step of R runs together. The two are measured in turn on this machine.
The ratio excludes compilation, which takes place once instead of R times.

Measured (two cores of an AMD EPYC 9005):

    runs                           1     2     4     8
    ratio on one device         1.01  1.17  1.08  1.01
    on 8 simulated devices      1.51  1.66  1.81  2.38

One small run keeps two cores busy, so training together saves only compilation there. It is faster
where a lone run would spread its sequences over devices that communicate. The speedup on an
accelerator, which a small run leaves idle, was not measured, for lack of one.
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
            f"{os.environ.get('XLA_FLAGS', '')} "
            f"--xla_force_host_platform_device_count={options.devices}"
        )

    import jax

    from transformer.config import Experiment, MeshConfig
    from transformer.mapping import from_mapping
    from transformer.parallel.mesh import start

    config = from_mapping(
        Experiment,
        {
            "model": {
                "family": "decoder",
                "vocab_size": VOCABULARY,
                "num_decoder_layers": 4,
                "d_model": options.d_model,
                "d_ff": 4 * options.d_model,
                "num_heads": 4,
                "max_length": LENGTH,
                "position": "rotary",
                "attention_backend": "reference",
            },
            "data": {"corpus": "pydoc", "length": LENGTH, "batch_size": ROWS},
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
        },
    )
    mesh = start("auto", MeshConfig())
    print(
        f"{mesh.size} x {jax.devices()[0].device_kind}, d_model {options.d_model}\n"
        f"{'runs':>5}  {'alone ms':>9}  {'together ms':>12}  {'ratio':>6}"
    )
    for runs in (1, 2, 4, 8):
        alone, together = measure(config, mesh, runs, options.trials)
        print(f"{runs:>5}  {alone:>9.1f}  {together:>12.1f}  {alone / together:>6.2f}", flush=True)


def random_batch() -> dict:
    """Returns a batch of full sequences of random tokens."""
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
    """Returns milliseconds for one step of `runs` runs: one after another, and together."""
    import jax
    import numpy as np
    from flax import linen as nn
    from jax.sharding import NamedSharding, PartitionSpec as P

    from transformer.config import MeshConfig
    from transformer.lab.together import make_step, runs_mesh
    from transformer.model.network import build_model
    from transformer.parallel.mesh import make_mesh, use
    from transformer.training.optimizer import build_optimizer
    from transformer.training.state import abstract_state, init_state
    from transformer.training.step import make_train_step

    model, batch = build_model(config.model), random_batch()
    optimizer = build_optimizer(config.optimizer, config.train.steps, config.model)
    with use(whole):
        _, sharding = abstract_state(config, model, optimizer, whole)
        alone = make_train_step(config, model, optimizer, whole, sharding)
        states = [init_state(config, model, optimizer, sharding) for _ in range(runs)]
    run_mesh, mesh_of_runs = make_mesh(MeshConfig(data=1)), runs_mesh(runs)
    place = lambda tree: jax.device_put(tree, NamedSharding(mesh_of_runs, P("runs")))
    numbers = {
        "seed": place(np.arange(runs, dtype=np.int32)),
        "optimizer.learning_rate": place(np.full(runs, 1e-3, np.float32)),
    }
    together = make_step(config, run_mesh, mesh_of_runs)
    repeated = lambda x: np.stack([np.asarray(x)] * runs)
    stacked = place(jax.tree.map(repeated, jax.device_get(states[0])))
    batches, seconds = place(jax.tree.map(repeated, batch)), {"alone": [], "together": []}
    for trial in range(trials + 2):
        start = time.perf_counter()
        with use(whole):
            for n in range(runs):
                states[n], _ = alone(states[n], batch)
        jax.block_until_ready(states)
        middle = time.perf_counter()
        with jax.set_mesh(mesh_of_runs), nn.logical_axis_rules(()):
            stacked, _ = together(numbers, stacked, batches)
        jax.block_until_ready(stacked)
        if trial > 1:
            seconds["alone"].append(middle - start)
            seconds["together"].append(time.perf_counter() - middle)
    return 1e3 * min(seconds["alone"]), 1e3 * min(seconds["together"])


if __name__ == "__main__":
    main()
