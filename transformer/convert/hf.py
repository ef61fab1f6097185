"""Loads and saves Hugging Face directories: config.json, and safetensors in one file or in shards.

Parameters are converted one at a time. The model is never in memory twice."""

import importlib
import os
import pkgutil
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.convert import families
from transformer.convert.family import Family
from transformer.convert.fields import printable, shown
from transformer.convert.special_tokens import read_both
from transformer.convert.tensors import Tensors, check, require_safetensors
from transformer.convert.weights import Shape, by_expert, expert
from transformer.errors import UserError, look_up
from transformer.files import new_folder, read_json, write_json
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten, join, layer_shapes, part, unflatten, where
from transformer.model.network import abstract_params
from transformer.parallel.sharding import unbox

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for info in pkgutil.iter_modules(families.__path__, f"{families.__name__}.")
    for family in importlib.import_module(info.name).FAMILIES
}
"""`model_type` -> family. Each file in families/ adds its families."""

SHARD_BYTES = 5_000_000_000


def load_hf(
    directory: str | os.PathLike, place: Callable[[str, np.ndarray], jax.Array] | None = None,
    **fields,
) -> tuple[ModelConfig, Any]:  # fmt: skip
    """Loads a Hugging Face directory. Returns (config, params) for `build_model(config).apply`.
    `fields` override fields of the ModelConfig (`scan_layers=False`, `dtype="bfloat16"`).
    `place(path, array)` puts a parameter on devices, by default on the first. Raises UserError for
    a family or a field that a ModelConfig cannot express, and for tensors that do not fit."""
    family, theirs, tensors = open_directory(Path(directory))
    config = family.our_config(theirs, frozenset(tensors.names), **fields)
    place = place or (lambda path, x: jnp.asarray(x))
    return config, read_params(family, config, tensors, place)


def open_directory(directory: Path) -> tuple[Family, dict, Tensors]:
    """Returns the family of a directory, its config.json and its tensors. For models that generate,
    special tokens in generation_config.json override those in config.json."""
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(f"{directory}: no config.json; choose a folder written by save_pretrained")
    theirs = read_json(file)
    kind = theirs.get("model_type", "")
    name = printable(kind) if isinstance(kind, str) else shown(kind)
    family = look_up(FAMILIES, name, f"{file}: model_type")
    if family.ours != "encoder":
        theirs |= read_both(directory, theirs)
    return family, theirs, Tensors(directory, family)


def open_hf(directory: str | os.PathLike) -> tuple[dict[str, Shape], Callable[[str], np.ndarray]]:
    """Returns the shapes of our parameters by unrolled path, and a function to read one."""
    family, theirs, tensors = open_directory(Path(directory))
    return _by_layer(family, family.our_config(theirs, frozenset(tensors.names)), tensors)


def read_params(family: Family, config: ModelConfig, tensors: Tensors, place: Callable) -> Any:
    """Returns our parameters, each of which is converted and passed to `place(path, array)`."""
    _, fetch = _by_layer(family, config, tensors)
    read = lambda path, dtype: np.asarray(join(config, path, fetch, np.stack)).astype(dtype)
    shapes = flatten(abstract_params(config))
    return unflatten({path: place(path, read(path, x.dtype)) for path, x in shapes.items()})


def _by_layer(family: Family, config: ModelConfig, tensors: Tensors):
    """Returns unrolled path -> shape, and a function that reads the parameter at an unrolled path.
    Raises UserError unless tensors and parameters correspond, with the right shapes."""
    weights = list(family.all_weights(config))
    holder = {ours: (weight, i) for weight in weights for i, ours in enumerate(weight.ours)}
    whole = layer_shapes(config, flatten(abstract_params(config)))
    shapes = by_expert(whole, holder)
    check(family, config, tensors, holder, shapes)

    def fetch(ours: str) -> np.ndarray:
        if ours not in holder:
            return np.stack([fetch(expert(ours, i)) for i in range(whole[ours][0])])
        weight, i = holder[ours]
        return weight.read(tensors.read(weight.theirs), [shapes[name] for name in weight.ours])[i]

    return whole, fetch


def save_hf(
    directory: str | os.PathLike, config: ModelConfig, params: Any, family: str | None = None,
    fields: Mapping[str, Any] = types.MappingProxyType({}),
    files: Mapping[str, bytes] = types.MappingProxyType({}),
) -> None:  # fmt: skip
    """Writes config.json and safetensors that Transformers can load. `params` are as returned by
    `model.init` and `load_hf`. `fields` override fields of config.json; `files` are written beside
    it. Without `family` (a `model_type`), the first family that can express this config is used.
    Raises UserError if `family`, or without it every family, cannot, and then leaves no files."""
    require_safetensors()
    chosen, theirs = _choose(config, family)
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: exists and is not an empty directory; choose another")
    with new_folder(directory) as target:
        _write_tensors(target, _tensors(chosen, config, unbox(params)))
        write_json(target / "config.json", theirs | {"dtype": config.param_dtype} | dict(fields))
        for name, content in files.items():
            (target / name).write_bytes(content)


def _choose(config: ModelConfig, family: str | None) -> tuple[Family, dict]:
    if family is not None:
        chosen = look_up(FAMILIES, family, "family")
        return chosen, chosen.their_config(config)
    for candidate in FAMILIES.values():
        try:
            return candidate, candidate.their_config(config)
        except UserError:
            continue
    problem = f"no family of Transformers can express this model ({', '.join(FAMILIES)})"
    raise UserError(f"{problem}; name one (family=, --family=) to get the reason")


def _tensors(family: Family, config: ModelConfig, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    flat = flatten(params)
    locations = where(config, flat)
    copies = [copy for copy in family.all_copies(config) if copy.written]

    def ours(name: str) -> np.ndarray:
        name, _, number = name.partition("#")  # of an expert
        path, index = locations[name]
        x = np.asarray(part(flat[path], index))
        return x[int(number)] if number else x

    for weight in family.all_weights(config):
        x = np.ascontiguousarray(weight.write([ours(name) for name in weight.ours]))
        yield weight.theirs, x
        yield from ((copy.theirs, x) for copy in copies if copy.of == weight.theirs)


def _write_tensors(target: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    from safetensors.numpy import save_file

    shard: dict[str, np.ndarray] = {}
    names: list[list[str]] = []

    def flush():
        names.append(sorted(shard))
        save_file(shard, target / f"{len(names)}.safetensors", metadata={"format": "pt"})
        shard.clear()

    total = 0
    for name, x in tensors:
        if shard and sum(y.nbytes for y in shard.values()) + x.nbytes > SHARD_BYTES:
            flush()
        shard[name], total = x, total + x.nbytes
    flush()
    if len(names) == 1:
        (target / "1.safetensors").rename(target / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, keys in enumerate(names, 1):
        file = f"model-{i:05d}-of-{len(names):05d}.safetensors"
        (target / f"{i}.safetensors").rename(target / file)
        weight_map |= dict.fromkeys(keys, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(target / "model.safetensors.index.json", index)
