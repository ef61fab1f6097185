"""Detects arms that would train identically, although their configs differ.

Two arms are twins if their lowered programs (initialization, loss and gradients, update) are equal,
and so are the config fields that do not appear in the programs. The runs of twins are bitwise
identical. Programs are lowered on shapes; nothing is compiled."""

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
from transformer.parallel.mesh import use
from transformer.planning.programs import Programs
from transformer.runs.rundir import OUTPUT_FIELDS, flatten_fields
from transformer.training.state import abstract_state, state_maker
from transformer.training.step import training_step

IN_PROGRAMS = (
    "model", "optimizer", "train.label_smoothing", "train.z_loss", "train.accumulate",
    "train.ema_decay",
)  # fmt: skip
"""Config sections and fields whose effect appears in the lowered programs."""

NOT_IN_PROGRAMS = ("max_length", "pipeline_microbatches", "pipeline_rounds", "_id")
"""Suffixes of model fields outside programs: of decoding, evaluation or runs on other meshes."""


def twins(configs: Mapping[str, Experiment], alike: Mapping[str, object]) -> dict[str, str]:
    """Returns arm -> the first arm that it is a twin of, except for first arms. Programs are
    lowered only where `fields_outside_programs` and the cheap values `alike` are equal."""
    groups: dict[tuple, list[str]] = {}
    for arm, config in configs.items():
        groups.setdefault((fields_outside_programs(config), alike[arm]), []).append(arm)
    same_as = {}
    for arms in groups.values():
        first: dict[str, str] = {}
        for arm in arms if len(arms) > 1 else ():
            if (twin := first.setdefault(programs(configs[arm]), arm)) != arm:
                same_as[arm] = twin
    return same_as


def fields_outside_programs(config: Experiment) -> tuple[tuple[str, str], ...]:
    """Returns the fields that do not appear in the programs, in a canonical form."""
    fields = flatten_fields(to_mapping(config))
    others = (*IN_PROGRAMS, *OUTPUT_FIELDS, "data.objective", "train.evaluators")
    is_other = lambda field: any(field == x or field.startswith(x + ".") for x in others)
    is_unseen = lambda field: field.startswith("model.") and field.endswith(NOT_IN_PROGRAMS)
    compared = {k: x for k, x in fields.items() if not is_other(k) or is_unseen(k)}
    compared["data.objective"] = config.objective
    compared["data.target_length"] = config.data.decoder_length
    compared["train.evaluators"] = sorted(map(repr, map(EVALUATORS.build, config.train.evaluators)))
    if config.train.average_checkpoints:
        compared["train.checkpoint_every"] = config.train.checkpoint_every
    return tuple(sorted((field, repr(value)) for field, value in compared.items()))


def programs(config: Experiment) -> str:
    """Returns a hash of the lowered programs: initialization, loss and gradients, update."""
    config = _without_wide_windows(config.on(MeshConfig(data=1)))
    model_hash, params = _of_model(dataclasses.replace(config, optimizer=OptimizerConfig(), seed=0))
    built = Programs(config, jax.local_devices()[:1])
    with use(built.mesh):
        update = jax.jit(built.optimizer.update).lower(params, built.state.opt_state, params)
    return model_hash + _hash(update)


def _without_wide_windows(config: Experiment) -> Experiment:
    """Sets windows that hide no token of the longest sequence to 0, their equivalent. Generated
    text has up to `max_length` tokens, and the evaluator `extrapolation` reads sequences of `times`
    training lengths. Random positions are further apart than tokens."""
    model, evaluators = config.model, map(EVALUATORS.build, config.train.evaluators)
    if model.random_positions:
        return config
    times = [getattr(evaluator, "times", 1) for evaluator in evaluators]
    longest = max(model.max_length, config.data.length * max(times, default=1))
    narrow = lambda window: window if window < longest else 0
    narrowed = lambda entry: {k: narrow(x) if k == "window" else x for k, x in entry.items()}
    pattern = tuple(map(narrowed, model.layer_pattern))
    model = dataclasses.replace(model, window=narrow(model.window), layer_pattern=pattern)
    return dataclasses.replace(config, model=model)


@functools.lru_cache(maxsize=64)
def _of_model(config: Experiment) -> tuple[str, Any]:
    """Returns a hash of all programs but the update, and parameter shapes. Arms may share both."""
    built, no_update = Programs(config, jax.local_devices()[:1]), optax.identity()
    with use(built.mesh):
        state, _ = abstract_state(config, built.model, no_update, built.mesh)
        key = jax.eval_shape(lambda: jax.random.key(0))
        start = jax.jit(state_maker(config, built.model, no_update)).lower(key)
        step = jax.jit(training_step(config, built.model, no_update, built.mesh))
        return _hash(start, step.lower(state, built.batch)), state.params


def _hash(*lowered) -> str:
    return hashlib.sha256("\n".join(program.as_text() for program in lowered).encode()).hexdigest()
