"""Trains runs that differ only in numbers as one program, vectorized over the runs.

The states of R runs are stacked to [R, ...], and one step advances all of them. The numbers are
arguments of the program, which is therefore compiled once. A small model leaves most of a chip
idle; several use it better. The runs are split over the local devices, without communication. Each
has its own directory, text order, logs and checkpoints, and results as alone, up to rounding."""

import contextlib
import copy
import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from transformer.config import Experiment, MeshConfig
from transformer.files import disk_errors
from transformer.mapping import to_mapping
from transformer.model.network import build_model
from transformer.parallel.mesh import start, use
from transformer.runs.loop import stop_signals
from transformer.runs.metrics import Diverged
from transformer.runs.run import Run, begin
from transformer.runs.rundir import flatten_fields, locked
from transformer.training.optimizer import build_optimizer
from transformer.training.step import training_step

NUMBERS = (
    "seed", "model.dropout", "optimizer.learning_rate", "optimizer.weight_decay",
    "optimizer.warmup_steps", "optimizer.b2",
)  # fmt: skip
"""The fields in which runs of one program may differ."""


def program_key(config: Experiment) -> str | None:
    """Returns a key that is equal for runs that can be trained together, None for other runs."""
    train, sizes = config.train, set(config.mesh.sizes.values())
    if not sizes <= {1, -1} or train.init_from or train.profile or train.wandb:
        return None
    fields = flatten_fields(to_mapping(config))
    for field in NUMBERS[1:]:
        fields[field] = fields[field] > 0  # zero and nonzero values give different programs
    if not config.data.buckets:  # with buckets, batch shapes depend on the seed
        del fields["seed"]
    return json.dumps(fields, sort_keys=True)


def train_together(configs: Sequence[Experiment], workdirs: Sequence[Path]) -> list[int]:
    """Trains or resumes each run, at the same step, in its directory, as `runs.loop.train` does. A
    run that diverges ends, and the others continue. Returns the steps that each has done."""
    config, one = configs[0], MeshConfig(data=1)
    if len({program_key(c) for c in configs}) > 1 or program_key(config) is None:
        raise ValueError("these runs differ in more than numbers")
    folder = workdirs[0].parent
    with disk_errors(folder), use(start(config.platform, one)) as mesh, locked(workdirs):
        pairs, count = zip(configs, workdirs, strict=True), len(configs)
        runs = [begin(c, w, mesh, together=count, prints=w == workdirs[0]) for c, w in pairs]
        if len({run.step for run in runs}) > 1:
            raise ValueError("these runs are at different steps")
        for run in runs:
            run.eval_step = runs[0].eval_step  # independent of NUMBERS, so compiled once
        with contextlib.ExitStack() as at_end, stop_signals() as stopped:
            _loop(_Group(runs, at_end), mesh, stopped)
    return [run.step for run in runs]


class _Group:
    """Runs that start together, and end `at_end`. A run that diverges ends before the others."""

    def __init__(self, runs: list[Run], at_end: contextlib.ExitStack):
        self.runs, self.going = runs, {}
        for n, run in enumerate(runs):
            self.going[n] = at_end.enter_context(contextlib.ExitStack())
            self.going[n].enter_context(run)

    def each(self, act: Callable[[int, Run], None]) -> None:
        """Calls `act` on every active run, and ends the runs for which it raises Diverged."""
        for n in list(self.going):
            try:
                act(n, self.runs[n])
            except Diverged as e:
                self.runs[0].progress.note(f"{self.runs[n].workdir}: {e}")
                self.going.pop(n).__exit__(type(e), e, None)


def _loop(group: _Group, mesh: Mesh, stopped: Callable[[int], bool]) -> None:
    runs, config = group.runs, group.runs[0].config
    over = runs_mesh(len(runs))
    step_all = make_step(config, mesh, over)
    put = lambda tree: jax.device_put(tree, NamedSharding(over, P("runs")))
    numbers = put(_numbers([run.config for run in runs]))
    states = put(jax.tree.map(lambda *x: np.stack(x), *(jax.device_get(run.state) for run in runs)))
    for run in runs:
        run.state = None  # now part of `states`
    streams = [run.train.stream(run.step, config.train.steps) for run in runs]
    step, pending = runs[0].step, None

    def log_metrics() -> None:
        nonlocal pending
        if pending is not None:
            (pushed_step, metrics), pending = pending, None
            metrics = jax.device_get(metrics)
            metrics_of = lambda n: {name: x[n] for name, x in metrics.items()}
            group.each(lambda n, run: run.recorder.push(pushed_step, metrics_of(n)))

    def finish_step(n: int, run: Run) -> None:
        """Gives the run its own state, and evaluates or saves it if that is due."""
        state = jax.tree.map(lambda x: np.array(x[n]), host)
        run.state = jax.device_put(state, NamedSharding(mesh, P()))
        if run.evaluation_due() and not stop:
            run.evaluate()
        if run.saving_due() or stop:
            run.save()

    for batches in zip(*streams, strict=True):
        with jax.set_mesh(over), nn.logical_axis_rules(()):  # each run is on one device
            batch = put(jax.tree.map(lambda *x: np.stack(x), *batches))
            states, metrics = step_all(numbers, states, batch)
        step += 1
        log_metrics()  # of the previous step, which has finished by now
        pending = step, metrics
        for n in group.going:
            runs[n].step = step
        stop = step < config.train.steps and stopped(step)
        if stop or any(runs[n].evaluation_due() or runs[n].saving_due() for n in group.going):
            log_metrics()
            host = jax.device_get(states)
            group.each(lambda n, run: run.recorder.flush())
            with contextlib.ExitStack() as paused:  # not counted as training time of any run
                for n in group.going:
                    paused.enter_context(runs[n].recorder.untimed())
                group.each(finish_step)
        if stop or not group.going:
            break


def _numbers(configs: Sequence[Experiment]) -> dict[str, np.ndarray]:
    """Returns the seeds, and those of NUMBERS that differ between the runs, [R] each."""
    numbers = {"seed": np.array([config.seed for config in configs], np.int32)}
    for field in NUMBERS[1:]:
        values = list(map(operator.attrgetter(field), configs))
        if len(set(values)) > 1:
            numbers[field] = np.array(values, np.float32)
    return numbers


def make_step(config: Experiment, mesh: Mesh, over: Mesh):
    """Returns jit(numbers, states, batches) -> (states, metrics), all [R, ...]."""

    def step_one(numbers, state, batch):
        traced = copy.copy(config.optimizer)  # unchecked: the checks cannot read traced numbers
        for field in (x for x in numbers if x.startswith("optimizer.")):
            object.__setattr__(traced, field.partition(".")[2], numbers[field])
        optimizer = build_optimizer(traced, config.train.steps, config.model)
        others = {"seed": numbers["seed"], "dropout_rate": numbers.get("model.dropout")}
        step = training_step(config, build_model(config.model), optimizer, mesh, **others)
        return step(state, batch)

    step = jax.vmap(step_one)
    if over.size > 1:
        specs = {"in_specs": P("runs"), "out_specs": P("runs")}
        step = jax.shard_map(step, mesh=over, **specs, check_vma=False)
    return jax.jit(step, donate_argnums=1)


def runs_mesh(runs: int) -> Mesh:
    """Returns a mesh of the most local devices that divide the runs evenly."""
    devices = jax.local_devices()
    count = max(n for n in range(1, min(runs, len(devices)) + 1) if runs % n == 0)
    return Mesh(np.array(devices[:count]), ("runs",), axis_types=(AxisType.Auto,))
