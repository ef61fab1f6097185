"""Measures how much faster the input pipeline yields batches than the model trains on them.

    python experiments/benchmarks/input_pipeline.py [experiments/quickstart.py ...]

Prints for each experiment: batches per second of the pipeline alone, steps per second of the model
with batches in memory, and their ratio.
"""

import sys
import time
from pathlib import Path


def measure(file: str) -> None:
    """Prints the rates of the pipeline and the model for one experiment file."""
    import jax

    from transformer.config_io import load_experiment
    from transformer.data.pipeline import open_data
    from transformer.model.network import build_model
    from transformer.parallel.mesh import make_mesh, use
    from transformer.training.optimizer import build_optimizer
    from transformer.training.state import abstract_state, init_state
    from transformer.training.step import make_train_step

    config = load_experiment(file)
    batches = open_data(config).batches("train")
    next(batches.stream(0, 1))
    count = 400
    start = time.perf_counter()
    assert sum(1 for _ in batches.stream(0, count)) == count
    pipeline_rate = count / (time.perf_counter() - start)
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
        ready = [jax.device_put(batches[i]) for i in range(10)]
        state, metrics = step(state, ready[0])
        jax.block_until_ready(metrics)
        start = time.perf_counter()
        for batch in ready:
            state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        model_rate = len(ready) / (time.perf_counter() - start)
    print(
        f"{Path(file).stem:<12} pipeline {pipeline_rate:7.1f} batches/s, "
        f"model {model_rate:6.1f} steps/s: {pipeline_rate / model_rate:.0f}x"
    )


if __name__ == "__main__":
    here = Path(__file__).parents[1]
    for name in sys.argv[1:] or [str(here / "quickstart.py"), str(here / "lm_small.py")]:
        measure(name)
