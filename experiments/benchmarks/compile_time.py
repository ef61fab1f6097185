"""Measures the compile time of the train step against depth, for scanned and unrolled layers.

    python experiments/benchmarks/compile_time.py [--depths=6,48]

The model is a decoder of d_model 256 with 8 x 128 tokens. Each compilation runs in a fresh process,
without the persistent cache. Prints the best of three.
"""

import subprocess
import sys
import time


def measure_in_this_process(depth: int, scan: bool) -> None:
    """Compiles one train step in this process, and prints the seconds."""
    import jax
    import jax.numpy as jnp

    from transformer.config import Experiment
    from transformer.mapping import from_mapping
    from transformer.model.network import build_model
    from transformer.parallel.mesh import make_mesh, use
    from transformer.training.optimizer import build_optimizer
    from transformer.training.state import abstract_state
    from transformer.training.step import make_train_step

    model = {
        "family": "decoder",
        "vocab_size": 8192,
        "d_model": 256,
        "d_ff": 1024,
        "num_heads": 4,
        "num_decoder_layers": depth,
        "scan_layers": scan,
    }
    config = from_mapping(
        Experiment, {"model": model, "data": {"corpus": "pydoc", "length": 128, "batch_size": 8}}
    )
    with use(make_mesh(config.mesh)) as mesh:
        module, optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, 100, config.model),
        )
        abstract, sharding = abstract_state(config, module, optimizer, mesh)
        step = make_train_step(config, module, optimizer, mesh, sharding)
        shape = (8, 128)
        batch = {
            name: jax.ShapeDtypeStruct(shape, jnp.int32)
            for name in ("inputs", "targets", "segments", "positions")
        }
        batch["weights"] = jax.ShapeDtypeStruct(shape, jnp.float32)
        start = time.perf_counter()
        step.lower(abstract, batch).compile()
        print(time.perf_counter() - start)


def main() -> None:
    options = dict(a.removeprefix("--").partition("=")[::2] for a in sys.argv[1:])
    if "depth" in options:
        measure_in_this_process(int(options["depth"]), options["scan"] == "True")
        return
    depths = [int(d) for d in options.get("depths", "6,48").split(",")]
    for scan in (True, False):
        seconds = {}
        for depth in depths:
            command = [sys.executable, __file__, f"--depth={depth}", f"--scan={scan}"]
            seconds[depth] = min(
                float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
                for _ in range(3)
            )
        times = ", ".join(f"{depth} layers {s:.1f} s" for depth, s in seconds.items())
        print(
            f"{'scanned ' if scan else 'unrolled'}  {times}: "
            f"{seconds[depths[-1]] / seconds[depths[0]]:.2f}x"
        )


if __name__ == "__main__":
    main()
