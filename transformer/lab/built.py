"""What is built of an arm: the programs that initialize and train it, and the fields that no program shows.

Two arms of which both are equal would give runs that are equal bit for bit, whatever their configs
say. Programs are lowered on shapes; nothing is compiled.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import optax

from transformer.config import Experiment, MeshConfig, OptimizerConfig
from transformer.evaluation.evaluators import EVALUATORS
from transformer.mapping import to_mapping
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.planning.sample import batch_shapes
from transformer.runs.rundir import WRITTEN_BESIDE, flat
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state, state_maker
from transformer.training.step import training_step

IN_PROGRAMS = (
    "model",
    "optimizer",
    "train.label_smoothing",
    "train.z_loss",
    "train.accumulate",
    "train.ema_decay",
)
"""Sections and fields that the lowered programs show."""

ELSEWHERE = ("max_length", "pipeline_microbatches", "pipeline_rounds", "_id")
"""Endings of model fields that no program shows: decoding, evaluation or another mesh reads
them."""

COMPUTES_NOTHING = (*WRITTEN_BESIDE, "train.checkpoint_every")
"""What a run writes beside its result, and how often."""


def twins(configs: Mapping[str, Experiment], alike: Mapping[str, object]) -> dict[str, str]:
    """Arm -> the first arm of which the same is built, for every arm that is not itself the first.

    `alike`: something cheap of each arm that differs only where what is built differs; programs are
    lowered only for arms in which this and all fields beside the programs are equal.
    """
    groups: dict[tuple, list[str]] = {}
    for arm, config in configs.items():
        groups.setdefault((beside_programs(config), alike[arm]), []).append(arm)
    found = {}
    for arms in groups.values():
        first: dict[str, str] = {}
        for arm in arms if len(arms) > 1 else ():
            if (other := first.setdefault(programs(configs[arm]), arm)) != arm:
                found[arm] = other
    return found


def beside_programs(config: Experiment) -> tuple[tuple[str, str], ...]:
    """The fields that the programs do not show, in one spelling."""
    fields = flat(to_mapping(config))
    shown = (*IN_PROGRAMS, *COMPUTES_NOTHING, "data.objective", "train.evaluators")
    kept = {
        field: value
        for field, value in fields.items()
        if not any(field == one or field.startswith(one + ".") for one in shown)
    }
    kept["data.objective"] = config.objective
    kept["data.target_length"] = config.data.decoder_length
    kept["train.evaluators"] = sorted(
        repr(EVALUATORS.build(one)) for one in config.train.evaluators
    )
    if config.train.average_checkpoints:
        kept["train.checkpoint_every"] = config.train.checkpoint_every
    for field, value in fields.items():
        if field.startswith("model.") and field.endswith(ELSEWHERE):
            kept[field] = value
    return tuple(sorted((field, repr(value)) for field, value in kept.items()))


def programs(config: Experiment) -> str:
    """A hash of the lowered programs: initialization, loss and gradients, update."""
    config = config.on(MeshConfig(data=1))
    of_model, params = _of_model(dataclasses.replace(config, optimizer=OptimizerConfig(), seed=0))
    optimizer = build_optimizer(config.optimizer, config.train.steps)
    state = jax.eval_shape(optimizer.init, params)
    return of_model + _hash(jax.jit(optimizer.update).lower(params, state, params))


@functools.lru_cache(maxsize=64)
def _of_model(config: Experiment) -> tuple[str, Any]:
    """The hash of all but the update, and the shapes of the parameters. Cached: arms often share a model."""
    model, no_update = build_model(config.model), optax.identity()
    with use(make_mesh(config.mesh, jax.local_devices()[:1])) as mesh:
        state, _ = abstract_state(config, model, no_update, mesh)
        key = jax.eval_shape(lambda: jax.random.key(0))
        start = jax.jit(state_maker(config, model, no_update)).lower(key)
        step = jax.jit(training_step(config, model, no_update, mesh))
        return _hash(start, step.lower(state, batch_shapes(config, mesh))), state.params


def _hash(*lowered) -> str:
    text = "\n".join(one.as_text() for one in lowered)
    return hashlib.sha256(text.encode()).hexdigest()
