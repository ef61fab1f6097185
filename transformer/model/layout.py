"""Where a layer's parameters stand: in a tree of its own (`layers_3`), or stacked with those of other layers (`layers`), in one axis or,
for a circular pipeline, in two: [rounds, layers / rounds].

A path is the names of a parameter joined by `/`. Unrolled paths name every layer by its number, so they are the same for
every layout; converting between layouts, or from outside weights, goes through them.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from transformer.model.config import ModelConfig

_LOOPED = re.compile(r"(encoder|decoder)/layers/(?:layer_(\d+)/)?(.+)")
_UNROLLED = re.compile(r"(encoder|decoder)/layers_(\d+)/(.+)")


def unrolled(config: ModelConfig, path: str) -> tuple[str, ...]:
    """The unrolled paths of what stands at `path` in this model: one, or those of the layers that are stacked there, in order."""
    looped = _LOOPED.fullmatch(path)
    if looped is None:
        return (path,)
    side, member, rest = looped.groups()
    layers = range(int(member or 0), config.num_layers(side), config.period(side))
    return tuple(f"{side}/layers_{i}/{rest}" for i in layers)


def in_layer(name: str) -> tuple[str, int, str] | None:
    """(side, layer, what is inside of it) of an unrolled path: ("decoder", 3, "self_attention/query/kernel"); None of what is in no layer."""
    found = _UNROLLED.fullmatch(name)
    return (found[1], int(found[2]), found[3]) if found else None


def where(config: ModelConfig, paths: Iterable[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Unrolled path -> (path in this model, place in its stack: empty where layers are not stacked)."""
    return {name: (path, place) for path in paths for name, place in _places(config, path)}


def part(x, place: tuple[int, ...]):
    """One layer's part of a parameter."""
    return x[place] if place else x


def join(config: ModelConfig, path: str, get: Callable[[str], Any], stack: Callable) -> Any:
    """The parameter at `path`, its layers' parts got by their unrolled names and stacked where this model loops over layers."""
    parts = [get(name) for name in unrolled(config, path)]
    if not _LOOPED.fullmatch(path):
        return parts[0]
    x = stack(parts)
    return x.reshape(config.pipeline_rounds, -1, *x.shape[1:]) if config.pipeline_rounds > 1 else x


def layer_shapes(config: ModelConfig, flat: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Unrolled path -> shape."""
    return {
        name: tuple(flat[path].shape[len(place) :])
        for name, (path, place) in where(config, flat).items()
    }


def _places(config: ModelConfig, path: str) -> list[tuple[str, tuple[int, ...]]]:
    names = unrolled(config, path)
    if not _LOOPED.fullmatch(path):
        return [(path, ())]
    if config.pipeline_rounds == 1:
        return [(name, (i,)) for i, name in enumerate(names)]
    return [(name, divmod(i, len(names) // config.pipeline_rounds)) for i, name in enumerate(names)]


def flatten(params) -> dict:
    """Path -> array."""
    return flatten_dict(params, sep="/")


def unflatten(flat: dict) -> dict:
    """The tree of a flat mapping."""
    return unflatten_dict(flat, sep="/")
