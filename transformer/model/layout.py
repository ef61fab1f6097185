"""Where a layer's parameters stand: in a tree of its own (`layers_3`), or stacked with those of other layers (`layers`).

A path is the names of a parameter joined by `/`. Unrolled paths name every layer by its number, so they are the same for
every layout; converting between layouts, or from outside weights, goes through them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.model.config import ModelConfig

_LOOPED = re.compile(r"(encoder|decoder)/layers/(?:layer_(\d+)/)?(.+)")


def unrolled(config: ModelConfig, path: str) -> tuple[str, ...]:
    """The unrolled paths of what stands at `path` in this model: one, or those of the layers that are stacked there, in order."""
    looped = _LOOPED.fullmatch(path)
    if looped is None:
        return (path,)
    side, member, rest = looped.groups()
    layers = range(int(member or 0), config.num_layers(side), config.period(side))
    return tuple(f"{side}/layers_{i}/{rest}" for i in layers)


def where(config: ModelConfig, paths: Iterable[str]) -> dict[str, tuple[str, int | None]]:
    """Unrolled path -> (path in this model, place in its stack; None where layers are not stacked)."""
    return {
        name: (path, i if _LOOPED.fullmatch(path) else None)
        for path in paths
        for i, name in enumerate(unrolled(config, path))
    }


def part(x, index: int | None):
    """One layer's part of a parameter."""
    return x if index is None else x[index]


def join(config: ModelConfig, path: str, get: Callable[[str], Any], stack: Callable) -> Any:
    """The parameter at `path`, its layers' parts got by their unrolled names and stacked where this model loops over layers."""
    parts = [get(name) for name in unrolled(config, path)]
    return stack(parts) if _LOOPED.fullmatch(path) else parts[0]


def layer_shapes(config: ModelConfig, flat: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Unrolled path -> shape."""
    return {name: tuple(flat[path].shape[i is not None :]) for name, (path, i) in where(config, flat).items()}


def flatten(params) -> dict:
    """Path -> array."""
    return flatten_dict(params, sep="/")


def unflatten(flat: dict) -> dict:
    """The tree of a flat mapping."""
    return unflatten_dict(flat, sep="/")
