"""Initialization from the trained parameters of a run or of a Hugging Face model.

Parameters are matched by their names in unrolled layers, so scanned and unrolled models can
initialize each other. A mismatch is an error unless the config lists it (init_new, init_drop)."""

import fnmatch
import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer import buckets
from transformer.config import Experiment, TrainConfig
from transformer.convert import open_hf
from transformer.data.tokenizer import find_tokenizer
from transformer.errors import UserError
from transformer.model.layout import flatten, join, layer_shapes, part, unflatten, where
from transformer.output import listed
from transformer.parallel.sharding import place
from transformer.runs.evaluate import load_trained
from transformer.runs.rundir import load_config
from transformer.training.state import TrainState


def start_from(config: Experiment, state: TrainState, shardings, mesh: Mesh) -> TrainState:
    """Returns `state` with parameters of `train.init_from`. Raises UserError with any mismatch."""
    train, model, targets = config.train, config.model, flatten(state.params)
    shapes, fetch = _source(buckets.open_folder(train.init_from), mesh)
    wanted, places = layer_shapes(model, targets), where(model, targets)
    if train.init_encoder == "decoder":
        shapes, fetch = _with_encoder(wanted, shapes, fetch)
    names = _match(train, wanted, shapes)

    def layer_part(name: str) -> jax.Array:
        path, i = places[name]
        initial = part(targets[path], i)
        if name not in names:
            return initial
        return _fit(train, name, fetch(name), initial).astype(initial.dtype)

    sharding_of = flatten(shardings.params)
    joined = lambda path: join(model, path, layer_part, jnp.stack)
    params = unflatten({path: jax.device_put(joined(path), sharding_of[path]) for path in targets})
    ema = None if state.ema is None else jax.tree.map(jnp.copy, params)
    return state.replace(params=params, ema=ema)


def check_source(directory: str) -> None:
    """Raises UserError if `train.init_from` is neither a run nor a Hugging Face directory."""
    path = buckets.open_folder(directory)
    if not ((path / "checkpoints").is_dir() or (path / "config.json").is_file()):
        kinds = "a run (checkpoints/) nor a Hugging Face directory (config.json)"
        raise UserError(f"train.init_from: {directory} is neither {kinds}")


def check_tokenizer(directory: str, sha256: str) -> None:
    """Raises UserError if a run has another tokenizer: its embeddings are of other tokens."""
    file = find_tokenizer(buckets.open_folder(directory))
    if file is not None and hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
        raise UserError(f"train.init_from: its tokenizer differs; set data.tokenizer.path={file}")


def _source(directory: Path, mesh: Mesh) -> tuple[Mapping, Callable[[str], jax.Array]]:
    """Returns the shapes of the source by unrolled name, and a function name -> parameter."""
    if (directory / "checkpoints").is_dir():
        run = load_trained(directory, load_config(directory), mesh, "train.init_from")
        flat = flatten(run.params)
        places = where(run.config.model, flat)
        fetch = lambda name: part(flat[places[name][0]], places[name][1])
        return layer_shapes(run.config.model, flat), fetch
    check_source(str(directory))
    shapes, read = open_hf(directory)
    return shapes, lambda name: place(read(name), NamedSharding(mesh, PartitionSpec()))


def _with_encoder(wanted: Mapping, shapes: Mapping, fetch: Callable):
    """Returns `shapes` and `fetch` of a decoder with the parameters that an encoder-decoder adds.
    Those of the encoder are the decoder's, and those of cross-attention are self-attention's."""

    def origin(name: str) -> str:
        ours = re.sub("^encoder/", "decoder/", name).replace("cross_attention", "self_attention")
        return name if name in shapes else ours

    added = {name: shapes[origin(name)] for name in wanted if origin(name) in shapes}
    return {**shapes, **added}, lambda name: fetch(origin(name))


def _is_kv(name: str) -> bool:
    """Whether a parameter has an axis of key/value heads, which is then the last but one."""
    return re.search("attention/(key|value)/(kernel|bias)$", name) is not None


def _match(train: TrainConfig, targets: Mapping, sources: Mapping) -> set[str]:
    """Returns the names of the parameters to take over. Raises UserError on a mismatch."""
    matches = lambda name, patterns: any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    new = {name for name in targets if matches(name, train.init_new)}
    dropped = {name for name in sources if matches(name, train.init_drop)}
    if missing := sorted(targets.keys() - sources.keys() - new):
        hint = "list these in train.init_new to initialize them anew"
        raise UserError(f"train.init_from: {train.init_from} has no {listed(missing, 4)}; {hint}")
    if surplus := sorted(sources.keys() - targets.keys() - dropped):
        problem = f"this model has no parameter {listed(surplus, 4)}"
        raise UserError(f"train.init_from: {problem}; list these in train.init_drop to ignore them")
    names = set(targets) - new - dropped
    if unset := sorted(dropped & targets.keys() - new):
        way_out = "name it in train.init_new too"
        raise UserError(f"train.init_drop: {listed(unset, 4)} would not be initialized; {way_out}")
    for name in sorted(names):
        here, there = list(targets[name]), list(sources[name])
        if name.split("/")[-1].startswith("position_embedding") and train.init_positions != "same":
            there[0] = here[0]
        can_pool = _is_kv(name) and there[-2] > here[-2] and there[-2] % here[-2] == 0
        if can_pool and train.init_kv_heads == "mean":
            there[-2] = here[-2]
        if here != there:
            format_shape = lambda shape: "x".join(map(str, shape))
            anew = "name it in train.init_new and train.init_drop to initialize it anew"
            way_out = "set train.init_positions" if "position_embedding" in name else anew
            way_out = "set train.init_kv_heads=mean" if can_pool else way_out
            there, here = format_shape(sources[name]), format_shape(targets[name])
            raise UserError(f"train.init_from: {name} is {there} there and {here} here; {way_out}")
    return names


def _fit(train: TrainConfig, name: str, x: jax.Array, initial: jax.Array) -> jax.Array:
    """Returns `x` in the shape of `initial`: means of groups of key/value heads, which query heads
    share, or a position table, interpolated or in the first rows (`train.init_positions`)."""
    if x.shape == initial.shape:
        return x
    if _is_kv(name):
        return jnp.mean(x.reshape(*initial.shape[:-1], -1, x.shape[-1]), axis=-2)
    if train.init_positions == "interpolate":
        return jax.image.resize(x, initial.shape, "linear")
    rows = min(len(x), len(initial))
    return initial.at[:rows].set(x[:rows].astype(initial.dtype))
