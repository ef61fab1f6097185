"""The lines that a run prints before its first step."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from transformer.checks import plain
from transformer.config import Experiment
from transformer.data.batching import Stream
from transformer.data.pipeline import Data
from transformer.model.network import FAMILIES
from transformer.model.parametrizations.base import ROLES
from transformer.model.roles import parameter_rules
from transformer.output import count, event, human_tokens
from transformer.parallel.sharding import format_bytes, local_bytes, path_name


def summary(
    program, data: Data, batches: Stream, backends: Mapping[str, str], resumed: str, verbose: bool
) -> list[str]:
    """Returns at most five lines, and one per role of parameters that has multipliers; with
    `verbose`, also the largest parameters and other details. `backends` are the attention backends,
    each with the reason why it is used. `resumed` is where the run resumes, if it does."""
    config, mesh, params = program.config, program.mesh, program.abstract.params
    used = "; ".join(name + (f" ({why})" if why else "") for name, why in backends.items())
    attention = [f"attention {used}"] if backends and (any(backends.values()) or verbose) else []
    notes = "; ".join([*attention, *([] if resumed else _advice(config, data))])
    return [
        _model(config, mesh, params), *(_table(params) if verbose else ()), *_multipliers(config),
        _text(config, data, verbose), _batches(config, batches),
        *([f"resumed     {resumed}"] if resumed else ()),
        *([f"note        {notes}"] if notes else ()),
    ]  # fmt: skip


def _model(config: Experiment, mesh: Mesh, params: Any) -> str:
    number = sum(x.size for x in jax.tree.leaves(params))
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    devices = count(mesh.size, f"{mesh.devices.flat[0].device_kind} device")
    machine = f"mesh {axes}, {devices}" if axes else devices
    size = f"{count(number, 'parameter')} ({format_bytes(local_bytes(params))} per device)"
    return f"model       {config.model.family}, {size}, {machine}"


def _table(params: Any, shown: int = 6) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rows = [(path_name(path), x.shape, x.sharding.spec, local_bytes(x)) for path, x in leaves]
    rows.sort(key=lambda row: -math.prod(row[1]))
    lines = []
    for name, shape, spec, local in rows[:shown]:
        partition = ", ".join("·" if axis is None else str(axis) for axis in spec) or "replicated"
        cells = f"{name:<58} {'x'.join(map(str, shape)):>16}  {partition:<18}"
        lines.append(f"            {cells} {format_bytes(local):>9}")
    if len(rows) > shown:
        lines.append(f"            and {len(rows) - shown} more")
    return lines


def _multipliers(config: Experiment) -> list[str]:
    groups: dict[tuple, int] = {}
    for place, rule in parameter_rules(FAMILIES[config.model.family], config.model).values():
        key = (place.role, config.optimizer.rule.learning_rate(place, rule), *rule[1:])
        groups[key] = groups.get(key, 0) + 1
    names = ("learning rate", "weight decay", "epsilon", "init")
    lines = []
    for role, *values in sorted(groups, key=lambda group: ROLES.index(group[0])):
        parts = [f"{name} x {x:.3g}" for name, x in zip(names, values, strict=True) if x != 1.0]
        number = count(groups[role, *values], "array")
        lines.append(f"{'groups' * (not lines):<12}{role}, {number}: {', '.join(parts) or 'x 1'}")
    return lines


def _text(config: Experiment, data: Data, verbose: bool) -> str:
    meta, names = data.meta, {"train": "training", "valid": "validation", "test": "test"}
    counts = ", ".join(f"{meta[part]['examples']:,} {name}" for part, name in names.items())
    tokenizer = config.data.tokenizer.path or f"{config.data.tokenizer.kind} tokenizer"
    sha256 = f", sha256 {data.tokenizer.sha256[:12]}" if verbose else ""
    names = [source.corpus or source.train for source in config.data.sources.values()]
    tokens = f"{human_tokens(meta['train']['tokens'])} training tokens"
    pieces = f"{tokenizer}, {data.tokenizer.vocab_size:,} pieces{sha256}"
    return f"text        {' + '.join(names)}: {counts} examples; {tokens}; {pieces}"


def _batches(config: Experiment, batches: Stream) -> str:
    left_out = "".join(f"; {event(number, text)}" for text, number in batches.report.items())
    epochs = batches.epochs(config.train.steps).items()
    epochs = ", ".join(f"{number:.1f} epochs" + f" of {x}" * bool(x) for x, number in epochs)
    return f"batches     {config.data.batch_size * config.data.length:,} tokens, {epochs}{left_out}"


def _advice(config: Experiment, data: Data) -> list[str]:
    notes = [
        f"{count(number, 'example')} of the {part} split "
        f"share{'s' * (number == 1)} a sentence with the training data, so its scores are inflated"
        for part, number in data.meta["overlap"].items()
        if number
    ]
    hint = max(placement.warmup_hint for placement in config.model.placements)
    if config.optimizer.warmup_steps < hint:
        name = plain(config.model.norm_placement)
        notes.append(f"norm_placement {name!r} is known to need about {hint:,} warm-up steps")
    if not config.train.checkpoint_every:
        problem = "a checkpoint is saved only when the run ends or is stopped"
        notes.append(f"{problem}; to save more often, set train.checkpoint_every")
    return notes
