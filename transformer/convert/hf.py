"""Hugging Face directories: config.json and safetensors, whole or in shards.

Tensors are read where they lie, one at a time, and become ours one parameter at a time; nothing holds the model twice.
"""

import functools
import json
import os
import re
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.convert import bart, bert, bloom, gpt2, gpt_neox, llama, modernbert, opt, t5
from transformer.convert.family import Family
from transformer.errors import UserError, look_up
from transformer.files import read_json
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten, join, layer_shapes, part, unflatten, where
from transformer.model.network import build_model
from transformer.parallel.sharding import unbox

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        bert.FAMILY, modernbert.FAMILY, gpt2.FAMILY, bloom.FAMILY, t5.FAMILY, *bart.FAMILIES, opt.FAMILY, gpt_neox.FAMILY, *llama.FAMILIES,
    )
}  # fmt: skip

SHARD_BYTES = 5_000_000_000


def load_hf(
    directory: str | os.PathLike,
    place: Callable[[str, np.ndarray], jax.Array] | None = None,
    **fields,
) -> tuple[ModelConfig, Any]:
    """A Hugging Face directory as (config, params), for `build_model(config).apply(params, ...)`.

    `fields` of the ModelConfig are set on top (`scan_layers=False`, `dtype="bfloat16"`). `place(path, array)` puts a parameter
    on devices, by default on the first. Raises UserError for a family or a field that we cannot express, and for tensors that
    are missing or left over.
    """
    directory = Path(directory)
    family, theirs, tensors = open_directory(directory)
    config = family.our_config(theirs, frozenset(tensors.names), **fields)
    return config, {
        "params": read_params(family, config, tensors, place or (lambda path, x: jnp.asarray(x)))
    }


def open_directory(directory: Path) -> tuple[Family, dict, "Tensors"]:
    """The family of a directory, its config.json, its tensors."""
    file = directory / "config.json"
    if not file.is_file():
        raise UserError(
            f"{directory}: no config.json; name a folder in which a model was saved with save_pretrained"
        )
    theirs = read_json(file)
    family = look_up(FAMILIES, str(theirs.get("model_type", "")), f"{file}: model_type")
    return family, theirs, Tensors(directory, family)


class Tensors:
    """The tensors of a directory by name, read when asked for."""

    def __init__(self, directory: Path, family: Family):
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            table = read_json(index).get("weight_map")
            if not isinstance(table, dict) or not all(
                isinstance(name, str) for name in table.values()
            ):
                raise UserError(f"{index}: damaged (no table weight_map)")
            files = sorted(set(table.values()))
        else:
            files = ["model.safetensors"]
        self._where = {}
        for name in files:
            if not (directory / name).is_file():
                raise UserError(
                    f"{directory}: no {name}; save the model with save_pretrained(safe_serialization=True)"
                )
            opened = _open(directory / name)
            self._where |= {key: opened for key in opened.keys()}  # noqa: SIM118 (no dict)
        stripped = family.prefix and not any(key.startswith(family.prefix) for key in self._where)
        self._given = {
            (family.prefix + key if stripped and not _is_head(key) else key): key
            for key in self._where
        }
        self.names = frozenset(self._given)
        self.read = functools.lru_cache(maxsize=1)(
            self._read
        )  # a fused tensor is asked for three times in a row

    def _read(self, name: str) -> np.ndarray:
        key = self._given[name]
        return self._where[key].get_tensor(key)

    def shape(self, name: str) -> tuple[int, ...]:
        key = self._given[name]
        return tuple(self._where[key].get_slice(key).get_shape())


def _is_head(key: str) -> bool:
    return key.startswith(
        ("lm_head.", "cls.", "classifier.", "head.", "decoder.weight", "decoder.bias")
    )


def _open(file: Path):
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UserError(
            "Hugging Face directories need the extra [hf]: pip install -e '.[hf]'"
        ) from None
    try:
        return safe_open(file, framework="np")
    except SafetensorError as e:
        raise UserError(f"{file}: damaged ({e})") from None


def open_hf(
    directory: str | os.PathLike,
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """A Hugging Face directory as the shape of each of our parameters, by the names of unrolled layers, and what reads one."""
    family, theirs, tensors = open_directory(Path(directory))
    return _by_layer(family, family.our_config(theirs, frozenset(tensors.names)), tensors)


def read_params(
    family: Family,
    config: ModelConfig,
    tensors: Tensors,
    place: Callable[[str, np.ndarray], jax.Array],
) -> Any:
    """Our parameters from their tensors, one at a time."""
    _, fetch = _by_layer(family, config, tensors)
    put = lambda path, x: place(
        path, np.asarray(join(config, path, fetch, np.stack)).astype(x.dtype)
    )
    return unflatten({path: put(path, x) for path, x in abstract_shapes(config).items()})


def _by_layer(family: Family, config: ModelConfig, tensors: Tensors):
    """Shapes by unrolled name, and what reads one; every tensor has its place, every parameter its tensor, of the right size."""
    holder = {
        ours: (weight, i) for weight in family.weights(config) for i, ours in enumerate(weight.ours)
    }
    shapes = layer_shapes(config, abstract_shapes(config))
    _check(family, config, tensors, holder, shapes)

    def fetch(ours: str) -> np.ndarray:
        weight, i = holder[ours]
        return weight.read(tensors.read(weight.theirs), [shapes[name] for name in weight.ours])[i]

    return shapes, fetch


def abstract_shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Path -> shape and type of every parameter of a model."""
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),) * (1 + (config.two_sides))
    return flatten(
        unbox(jax.eval_shape(build_model(config).init, jax.random.key(0), *tokens))["params"]
    )


def _check(
    family: Family, config: ModelConfig, tensors: Tensors, holder: Mapping, shapes: Mapping
) -> None:
    """Every tensor has its place and every parameter its tensor, of the right size."""
    if unnamed := sorted(shapes.keys() - holder.keys()):
        raise UserError(f"{family.model_type} has no tensor for {_list(unnamed)}")
    wanted = {weight.theirs for weight in family.weights(config)}
    if missing := sorted(wanted - tensors.names):
        raise UserError(
            f"tensors of a {family.model_type} model that are missing: {_list(missing)}"
        )
    known = lambda name: any(re.fullmatch(pattern, name) for pattern in family.ignored)
    if left := sorted(name for name in tensors.names - wanted if not known(name)):
        raise UserError(
            f"tensors left over, for which a {family.model_type} model as its config.json tells has no place: {_list(left)}"
        )
    for weight, _ in holder.values():
        needed = sum(int(np.prod(shapes[ours])) for ours in weight.ours)
        found = int(np.prod(tensors.shape(weight.theirs)))
        if needed != found:
            raise UserError(
                f"{weight.theirs}: {found:,} numbers, but config.json tells of {needed:,}"
            )


def _list(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def save_hf(
    directory: str | os.PathLike,
    config: ModelConfig,
    params: Any,
    family: str | None = None,
    fields: Mapping[str, Any] = types.MappingProxyType({}),
    files: Mapping[str, bytes] = types.MappingProxyType({}),
) -> None:
    """Writes config.json and safetensors that Transformers loads; `params` as `model.init` and `load_hf` return them. `fields` are set
    in config.json on top, `files` written beside it.

    Without `family` (a `model_type`), the first that can express this config. Raises UserError, with the field's name, if none
    can. Nothing is left in `directory` if it fails.
    """
    chosen, theirs = _choose(config, family)
    directory = Path(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory}: already there, and not an empty folder; name another")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=directory.parent, prefix=directory.name + "."
    ) as unfinished:
        target = Path(unfinished) / "whole"
        target.mkdir()
        _write_tensors(target, _tensors(chosen, config, unbox(params)["params"]))
        (target / "config.json").write_text(
            json.dumps(theirs | {"dtype": config.param_dtype} | dict(fields), indent=2) + "\n",
            encoding="utf-8",
        )
        for name, content in files.items():
            (target / name).write_bytes(content)
        if directory.exists():
            directory.rmdir()
        target.rename(directory)


def _choose(config: ModelConfig, family: str | None) -> tuple[Family, dict]:
    if family is not None:
        chosen = look_up(FAMILIES, family, "family")
        return chosen, chosen.their_config(config)
    for one in FAMILIES.values():
        try:
            return one, one.their_config(config)
        except UserError:
            continue
    raise UserError(
        f"no family of Transformers can express this model ({', '.join(FAMILIES)}); name one (family=, --family=) to hear why"
    )


def _tensors(family: Family, config: ModelConfig, params: Any) -> Iterator[tuple[str, np.ndarray]]:
    flat = flatten(params)
    place = where(config, flat)

    def ours(name: str) -> np.ndarray:
        path, i = place[name]
        return np.asarray(part(flat[path], i))

    for weight in family.weights(config):
        yield (
            weight.theirs,
            np.ascontiguousarray(weight.write([ours(name) for name in weight.ours])),
        )


def _write_tensors(target: Path, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
    """One file, or shards and an index."""
    from safetensors.numpy import save_file

    shard, size, names = {}, 0, []

    def flush():
        names.append(sorted(shard))
        save_file(shard, target / f"{len(names)}.safetensors", metadata={"format": "pt"})
        shard.clear()

    total = 0
    for name, x in tensors:
        if shard and size + x.nbytes > SHARD_BYTES:
            flush()
            size = 0
        shard[name], size, total = x, size + x.nbytes, total + x.nbytes
    flush()
    if len(names) == 1:
        (target / "1.safetensors").rename(target / "model.safetensors")
        return
    weight_map = {}
    for i, keys in enumerate(names, 1):
        file = f"model-{i:05d}-of-{len(names):05d}.safetensors"
        (target / f"{i}.safetensors").rename(target / file)
        weight_map |= dict.fromkeys(keys, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=2) + "\n", encoding="utf-8"
    )
