"""Runs that differ in numbers alone, trained as one program: their states stand side by side, [R, ...], and one step takes all of them on.

What differs is an argument of the program and no constant in it, so it is compiled once; small models leave most of a chip idle, which is
then filled. Where there are several devices each takes some of the runs and nothing is sent between them. Every run has its own directory,
text order, logs and checkpoints, as if it had been trained alone, and the same numbers but for the rounding of sums.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from transformer.config import Experiment, MeshConfig
from transformer.files import disk_faults
from transformer.mapping import to_mapping
from transformer.model.network import build_model
from transformer.parallel.mesh import start, use
from transformer.runs.loop import stop_signals
from transformer.runs.recorder import Diverged
from transformer.runs.run import Run, begin
from transformer.runs.rundir import alone, flat
from transformer.training.optimizer import build_optimizer
from transformer.training.step import training_step

NUMBERS = ("seed", "optimizer.learning_rate", "optimizer.weight_decay", "model.dropout")
"""The fields that may differ."""


def alike(config: Experiment) -> str | None:
    """Runs of which this is the same can be trained together; None: this one is trained alone."""
    mesh = config.mesh
    if (
        any(size not in (1, -1) for size in mesh.sizes.values())
        or config.train.init_from
        or config.train.profile
        or config.train.wandb
    ):
        return None
    fields = flat(to_mapping(config))
    for field in NUMBERS[1:]:
        fields[field] = fields[field] > 0  # nothing of it is another program than some
    if not config.data.buckets:  # else rows of other seeds come in other widths at a step
        del fields["seed"]
    return json.dumps(fields, sort_keys=True)


def train_together(configs: Sequence[Experiment], workdirs: Sequence[Path]) -> list[int]:
    """Trains each run in its directory, or goes on with it, as `runs.loop.train` does; returns the steps that each has done. One that
    diverges ends, as it would alone, and the others go on. All must stand at one step."""
    config = configs[0]
    if len({alike(c) for c in configs}) > 1 or alike(config) is None:
        raise ValueError("these runs differ in more than numbers")
    with (
        disk_faults(workdirs[0].parent),
        use(start(config.platform, MeshConfig(data=1))) as mesh,
        alone(workdirs),
    ):
        runs = [
            begin(c, w, mesh, together=len(configs), speaks=n == 0)
            for n, (c, w) in enumerate(zip(configs, workdirs, strict=True))
        ]
        if len({run.step for run in runs}) > 1:
            raise ValueError("these runs stand at different steps")
        for run in runs:
            run.eval_step = runs[0].eval_step  # no number is in it
        with _Group(runs) as group, stop_signals() as stopped:
            _loop(group, mesh, stopped)
    return [run.step for run in runs]


class _Group:
    """Runs that begin together, and end together or, where one diverges, before the others."""

    def __init__(self, runs: list[Run]):
        self.runs, self.going = runs, list(range(len(runs)))

    def __enter__(self) -> "_Group":
        for run in self.runs:
            run.__enter__()
        return self

    def __exit__(self, kind, error, trace) -> None:
        for n in self.going:
            self.runs[n].__exit__(kind, error, trace)

    def each(self, act: Callable[[int, Run], None]) -> None:
        """`act` on every run that is not over; those that are found to have diverged are."""
        for n in list(self.going):
            try:
                act(n, self.runs[n])
            except Diverged as e:
                self.going.remove(n)
                self.runs[0].progress.note(f"{self.runs[n].workdir}: {e}")
                self.runs[n].__exit__(type(e), e, None)


def _loop(group: _Group, mesh: Mesh, stopped: Callable[[int], bool]) -> None:
    runs, config = group.runs, group.runs[0].config
    over = over_devices(len(runs))
    step_all = make_step(config, mesh, over)
    place = lambda tree: jax.device_put(tree, NamedSharding(over, P("runs")))
    numbers = place(_numbers([run.config for run in runs]))
    states = place(
        jax.tree.map(lambda *x: np.stack(x), *(jax.device_get(run.state) for run in runs))
    )
    for run in runs:
        run.state = None  # it stands among the others
    streams = [run.batches.stream(run.step, config.train.steps) for run in runs]
    step, late = runs[0].step, None

    def take_in() -> None:
        nonlocal late
        if late is not None:
            (at, metrics), late = late, None
            metrics = jax.device_get(metrics)
            group.each(
                lambda n, run: run.recorder.push(at, {name: x[n] for name, x in metrics.items()})
            )

    def stand(n: int, run: Run) -> None:
        """The run as if it had been alone, to be evaluated or saved."""
        run.recorder.flush()
        run.state = jax.device_put(
            jax.tree.map(lambda x: np.array(x[n]), host), NamedSharding(mesh, P())
        )
        if run.evaluation_due() and not stop:
            run.evaluate()
        if run.saving_due() or stop:
            run.save()

    for batches in zip(*streams, strict=True):
        with jax.set_mesh(over), nn.logical_axis_rules(()):  # a run is on one device
            states, metrics = step_all(
                numbers, states, place(jax.tree.map(lambda *x: np.stack(x), *batches))
            )
        step += 1
        take_in()  # of the step before, which is over by now
        late = step, metrics
        for n in group.going:
            runs[n].step = step
        stop = step < config.train.steps and stopped(step)
        if stop or any(runs[n].evaluation_due() or runs[n].saving_due() for n in group.going):
            take_in()
            host = jax.device_get(states)
            group.each(lambda n, run: run.recorder.flush())
            with (
                contextlib.ExitStack() as aside
            ):  # one is evaluated after the other, and no one's training is slower for it
                for n in group.going:
                    aside.enter_context(runs[n].recorder.aside())
                group.each(stand)
        if stop or not group.going:
            break


def _numbers(configs: Sequence[Experiment]) -> dict[str, np.ndarray]:
    """In what the runs differ, [R] each: NUMBERS, but for those that are 0 in all."""
    given = {field: [_get(config, field) for config in configs] for field in NUMBERS}
    return {
        field: np.array(x, np.int32 if field == "seed" else np.float32)
        for field, x in given.items()
        if field == "seed" or x[0]
    }


def make_step(config: Experiment, mesh: Mesh, over: Mesh):
    """jit(numbers, states, batches) -> (states, metrics), all [R, ...]."""

    def one(numbers, state, batch):
        optimizer = build_optimizer(
            config.optimizer, config.train.steps,
            learning_rate=numbers.get("optimizer.learning_rate"), weight_decay=numbers.get("optimizer.weight_decay"),
        )  # fmt: skip
        step = training_step(
            config, build_model(config.model), optimizer, mesh,
            seed=numbers["seed"], dropout_rate=numbers.get("model.dropout"),
        )  # fmt: skip
        return step(state, batch)

    step = jax.vmap(one)
    if over.size > 1:
        step = jax.shard_map(
            step, mesh=over, in_specs=P("runs"), out_specs=P("runs"), check_vma=False
        )
    return jax.jit(step, donate_argnums=1)


def over_devices(runs: int) -> Mesh:
    """As many devices as the runs can be spread over evenly."""
    devices = jax.local_devices()
    count = max(n for n in range(1, min(runs, len(devices)) + 1) if runs % n == 0)
    return Mesh(np.array(devices[:count]), ("runs",), axis_types=(AxisType.Auto,))


def _get(config: Experiment, field: str):
    for key in field.split("."):
        config = getattr(config, key)
    return config
