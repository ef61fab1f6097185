"""Where a layer's parameters stand: in a tree of its own (`layers_3`), or stacked with those of other layers (`layers`).

A path is the names of a parameter joined by `/`. Unrolled paths name every layer by its number, so they are the same for
every layout; converting between layouts, or from outside weights, goes through them.
"""

import re

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


def flatten(params) -> dict:
    """Path -> array."""
    return flatten_dict(params, sep="/")


def unflatten(flat: dict) -> dict:
    """The tree of a flat mapping."""
    return unflatten_dict(flat, sep="/")
