"""The lines that a run prints before its first step."""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from transformer.checks import plain
from transformer.config import Experiment
from transformer.data.batching import Batches
from transformer.data.pipeline import Data
from transformer.output import count, event, human_tokens
from transformer.parallel.sharding import format_bytes, path_name

LARGEST = 6
"""The number of parameters that the table of parameters shows."""


def summary(
    config: Experiment,
    mesh: Mesh,
    params: Any,
    shardings: Any,
    data: Data,
    batches: Batches,
    backends: Mapping[str, str],
    resumed: str,
    verbose: bool,
) -> list[str]:
    """Returns at most five lines; with `verbose`, also the largest parameters and other details.

    `params` and `shardings` are the shapes and shardings of the parameters. `backends` are the
    attention backends, each with the reason why it is used. `resumed` describes where the run
    resumes, if it does.
    """
    described = "; ".join(name + (f" ({why})" if why else "") for name, why in backends.items())
    is_fallback = any(backends.values())
    attention = [f"attention {described}"] if backends and (is_fallback or verbose) else []
    notes = "; ".join([*attention, *([] if resumed else _advice(config, data))])
    return [
        _model(config, mesh, params, shardings),
        *(_table(params, shardings) if verbose else ()),
        _text(config, data, verbose),
        _batches(config, batches),
        *([f"resumed     {resumed}"] if resumed else ()),
        *([f"note        {notes}"] if notes else ()),
    ]


def _model(config: Experiment, mesh: Mesh, params: Any, shardings: Any) -> str:
    number = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    local = sum(size for *_, size in _rows(params, shardings))
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    devices = count(mesh.size, f"{mesh.devices.flat[0].device_kind} device")
    return (
        f"model       {config.model.family}, {count(number, 'parameter')} "
        f"({format_bytes(local)} per device), {f'mesh {axes}, ' if axes else ''}{devices}"
    )


def _rows(params: Any, shardings: Any) -> list[tuple]:
    """Returns (path, shape, partition, bytes per device) of every parameter, largest first."""
    rows = []
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, leaf), sharding in zip(leaves, jax.tree.leaves(shardings), strict=True):
        local = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        rows.append((path_name(path), leaf.shape, sharding.spec, local))
    return sorted(rows, key=lambda row: -math.prod(row[1]))


def _table(params: Any, shardings: Any) -> list[str]:
    rows = _rows(params, shardings)
    lines = []
    for name, shape, spec, local in rows[:LARGEST]:
        partition = ", ".join("·" if axis is None else str(axis) for axis in spec) or "replicated"
        lines.append(
            f"            {name:<58} {'x'.join(map(str, shape)):>16}  {partition:<18} "
            f"{format_bytes(local):>9}"
        )
    if len(rows) > LARGEST:
        lines.append(f"            and {len(rows) - LARGEST} more")
    return lines


def _text(config: Experiment, data: Data, verbose: bool) -> str:
    meta = data.store.meta
    counts = ", ".join(
        f"{meta[part]['examples']:,} {name}"
        for part, name in (("train", "training"), ("valid", "validation"), ("test", "test"))
    )
    tokenizer = config.data.tokenizer.path or f"{config.data.tokenizer.kind} tokenizer"
    sha256 = f", sha256 {data.tokenizer.sha256[:12]}" if verbose else ""
    return (
        f"text        {config.data.corpus or config.data.train}: {counts} examples; "
        f"{human_tokens(meta['train']['tokens'])} training tokens; {tokenizer}, "
        f"{data.tokenizer.vocab_size:,} pieces{sha256}"
    )


def _batches(config: Experiment, batches: Batches) -> str:
    tokens = config.data.batch_size * config.data.length
    left_out = "".join(f"; {event(number, text)}" for text, number in batches.report.items())
    return (
        f"batches     {tokens:,} tokens, {batches.per_epoch:,} per epoch, "
        f"{config.train.steps / batches.per_epoch:.1f} epochs{left_out}"
    )


def _advice(config: Experiment, data: Data) -> list[str]:
    """Returns warnings about the configuration and the data."""
    notes = [
        f"{count(number, 'example')} of the {part} split "
        f"share{'s' * (number == 1)} a sentence with the training data, so its scores are inflated"
        for part, number in data.store.meta["overlap"].items()
        if number
    ]
    hint = max(placement.warmup_hint for placement in config.model.placements)
    if config.optimizer.warmup_steps < hint:
        notes.append(
            f"norm_placement {plain(config.model.norm_placement)!r} is known to need about "
            f"{hint:,} warm-up steps"
        )
    if not config.train.checkpoint_every:
        notes.append(
            "a checkpoint is saved only when the run ends or is stopped; to save more often, set "
            "train.checkpoint_every"
        )
    return notes
