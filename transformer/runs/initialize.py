"""Starting from parameters that another run, or another code, has trained: pre-train, then fine-tune.

Parameters are matched by name, in the names of unrolled layers, so that looped and unrolled models start from each other. What
does not match is an error, unless the config says by name what is to start anew and what is to be left out.
"""

import dataclasses
import fnmatch
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer.config import Experiment, TrainConfig
from transformer.convert import open_hf
from transformer.data.tokenizer import find_tokenizer
from transformer.errors import UserError
from transformer.model.layout import flatten, join, layer_shapes, part, unflatten, where
from transformer.model.network import build_model
from transformer.runs.checkpoint import Checkpoints
from transformer.training.optimizer import build_optimizer
from transformer.runs.rundir import load_config
from transformer.training.state import TrainState, abstract_state


def start_from(config: Experiment, state: TrainState, placed: TrainState, mesh: Mesh) -> TrainState:
    """`state`, newly initialised, with the parameters of `train.init_from` in place of its own. Raises UserError, listing names."""
    train, model, ours = config.train, config.model, flatten(state.params)
    shapes, fetch = _source(Path(train.init_from), mesh)
    taken, place = _match(train, layer_shapes(model, ours), shapes), where(model, ours)

    def get(name: str) -> jax.Array:
        path, i = place[name]
        own = part(ours[path], i)
        return _fit(train, fetch(name), own).astype(own.dtype) if name in taken else own

    shardings = flatten(placed.params)
    params = unflatten(
        {path: jax.device_put(join(model, path, get, jnp.stack), shardings[path]) for path in ours}
    )
    return state.replace(
        params=params, ema=None if state.ema is None else jax.tree.map(jnp.copy, params)
    )


def check_source(directory: str) -> None:
    """Raises UserError if `train.init_from` is no directory that parameters can be read from."""
    path = Path(directory)
    if not ((path / "checkpoints").is_dir() or (path / "config.json").is_file()):
        raise UserError(
            f"train.init_from: {directory} is neither a run (checkpoints/) nor a Hugging Face directory (config.json)"
        )


def check_tokenizer(directory: str, sha256: str) -> None:
    """Raises UserError if a run was trained on other pieces than these: its embeddings would mean nothing here."""
    file = find_tokenizer(directory)
    if file is not None and hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
        raise UserError(
            f"train.init_from: {directory} was trained with another tokenizer; set data.tokenizer.path={file} to use it here"
        )


def _source(
    directory: Path, mesh: Mesh
) -> tuple[Mapping[str, tuple[int, ...]], Callable[[str], Any]]:
    """Shapes by unrolled name, and what fetches one."""
    if (directory / "checkpoints").is_dir():
        config = load_config(directory)
        checkpoints = Checkpoints(directory, config.train)
        if not checkpoints.steps:
            raise UserError(f"train.init_from: {directory} has no checkpoint yet")
        config = dataclasses.replace(config, model=checkpoints.layout(config.model))
        abstract, _ = abstract_state(
            config,
            build_model(config.model),
            build_optimizer(config.optimizer, config.train.steps),
            mesh,
        )
        item, mean_of = (
            ("ema", 1) if config.train.ema_decay else ("params", config.train.average_checkpoints)
        )
        flat = flatten(checkpoints.restore_params(abstract.params, item=item, mean_of=mean_of))
        place = where(config.model, flat)
        return layer_shapes(config.model, flat), lambda name: part(
            flat[place[name][0]], place[name][1]
        )
    check_source(str(directory))
    shapes, read = open_hf(directory)
    everywhere = NamedSharding(mesh, PartitionSpec())
    return shapes, lambda name: _place(read(name), everywhere)


def _place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def _match(train: TrainConfig, ours: Mapping, theirs: Mapping) -> set[str]:
    """The names that are taken over."""
    named = lambda name, patterns: any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    new = {name for name in ours if named(name, train.init_new)}
    left = {name for name in theirs if named(name, train.init_drop)}
    source = train.init_from
    if missing := sorted(ours.keys() - theirs.keys() - new):
        raise UserError(
            f"train.init_from: {source} has no {_some(missing)}; name in train.init_new what starts anew"
        )
    if over := sorted(theirs.keys() - ours.keys() - left):
        raise UserError(
            f"train.init_from: this model has no place for {_some(over)}; name in train.init_drop what is left out"
        )
    taken = set(ours) - new - left
    if lost := sorted(left & ours.keys() - new):
        raise UserError(
            f"train.init_drop: {_some(lost)} would be left empty; name it in train.init_new too"
        )
    for name in sorted(taken):
        longer = (
            name.split("/")[-1].startswith("position_embedding") and train.init_positions != "same"
        )
        if tuple(ours[name][longer:]) != tuple(theirs[name][longer:]):
            spell = lambda shape: "x".join(map(str, shape))
            way_out = (
                "; set train.init_positions"
                if "position_embedding" in name
                else "; name it in train.init_new and train.init_drop to start it anew"
            )
            raise UserError(
                f"train.init_from: {name} is {spell(theirs[name])} in {source} and {spell(ours[name])} here{way_out}"
            )
    return taken


def _fit(train: TrainConfig, x: jax.Array, own: jax.Array) -> jax.Array:
    """x, or for a table of positions of another length its first rows and new ones behind them, or a stretched one."""
    if x.shape == own.shape:
        return x
    if train.init_positions == "interpolate":
        return jax.image.resize(x, own.shape, "linear")
    rows = min(len(x), len(own))
    return own.at[:rows].set(x[:rows].astype(own.dtype))


def _some(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
