"""The layout of layer parameters: a subtree per layer (`layers_3`), or stacked layers (`layers`).

Stacked parameters have one axis for layers or, in a circular pipeline, [rounds, layers / rounds]. A
path is the names of a parameter joined by `/`. Unrolled paths contain the number of the layer, so
they are the same for every layout. Layouts and external weights are converted by them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.model.config import ModelConfig

flatten = functools.partial(flatten_dict, sep="/")  # tree -> mapping from path to array
unflatten = functools.partial(unflatten_dict, sep="/")  # the inverse

_SCANNED = re.compile(r"(encoder|decoder)/layers/(?:layer_(\d+)/)?(.+)")
_UNROLLED = re.compile(r"(encoder|decoder)/layers_(\d+)/(.+)")


def unrolled(config: ModelConfig, path: str) -> tuple[str, ...]:
    """Returns the unrolled paths of the parameter at `path`, one per stacked layer, in order."""
    match = _SCANNED.fullmatch(path)
    if match is None:
        return (path,)
    side, member, inner_path = match.groups()
    layers = range(int(member or 0), config.num_layers(side), config.period(side))
    return tuple(f"{side}/layers_{i}/{inner_path}" for i in layers)


def split_layer_path(name: str) -> tuple[str, int, str] | None:
    """Splits "decoder/layers_3/PATH" into ("decoder", 3, PATH). None outside of the layers."""
    match = _UNROLLED.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match else None


def sublayer_of(rest: str) -> str:
    """Returns the sublayer of a residual, or "all" where the sublayers of a layer share one."""
    return rest.partition("/")[0].removesuffix("residual").rstrip("_") or "all"


def where(config: ModelConfig, paths: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Maps each unrolled path to (path in this model, index in its stack), () if not stacked."""
    places = {}
    for path in paths:
        names, stack, rounds = unrolled(config, path), (), config.pipeline_rounds
        if _SCANNED.fullmatch(path):
            stack = (rounds, len(names) // rounds) if rounds > 1 else (len(names),)
        places |= {name: (path, i) for name, i in zip(names, np.ndindex(stack), strict=True)}
    return places


def part(x, place: tuple[int, ...]):
    """Returns one layer's part of a parameter, given its index from `where`."""
    return x[place] if place else x


def join(config: ModelConfig, path: str, get: Callable[[str], Any], stack: Callable) -> Any:
    """Builds the parameter at `path` from parts, `get(unrolled path)`, with `stack` if scanned."""
    parts = [get(name) for name in unrolled(config, path)]
    if not _SCANNED.fullmatch(path):
        return parts[0]
    x = stack(parts)
    return x.reshape(config.pipeline_rounds, -1, *x.shape[1:]) if config.pipeline_rounds > 1 else x


def unroll(config: ModelConfig, params: Any) -> tuple[ModelConfig, Any]:
    """Returns the same model with a subtree per layer: its config and its parameters."""
    flat = flatten(params)
    layers = {name: part(flat[path], index) for name, (path, index) in where(config, flat).items()}
    return dataclasses.replace(config, scan_layers=False, pipeline_rounds=1), unflatten(layers)


def by_layer(config: ModelConfig, recorded: Any) -> Iterator[tuple[str, int, str, Any]]:
    """Yields (stack, layer, name in it, value) of what the layers recorded, in order."""
    flat = flatten(recorded)
    places = {split_layer_path(name): place for name, place in where(config, flat).items()}
    for location, (path, index) in sorted(places.items()):
        yield *location, jax.tree.map(functools.partial(part, place=index), flat[path][0])


def layer_shapes(config: ModelConfig, flat: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Maps each unrolled path to the shape of one layer's parameter."""
    places = where(config, flat).items()
    return {name: tuple(flat[path].shape[len(index) :]) for name, (path, index) in places}
