"""Helpers for evaluators and reports that show the internals of a model.

Shape suffixes: B batch, T length, D d_model.
"""

import functools
from collections.abc import Callable, Iterator

import jax

from transformer.evaluation.subject import Subject
from transformer.model.layout import flatten, part, where
from transformer.model.placements.base import Parts

SELF_ATTENTION_ONLY = ("distance", "previous")
"""Attention statistics that compare positions, which has no meaning in cross-attention."""


def streams(subject: Subject, params, recorded: dict) -> Iterator[tuple[jax.Array, Callable]]:
    """Yields (input of the head, head) after each layer of the last stack, as if it ended there.

    `recorded` holds the residual streams after the layers (the collection "streams" of
    model/watch.py). Each is ended as the stack ends.
    """
    config, flat = subject.config.model, flatten(recorded)
    side = config.sides[-1]
    module, of_stack, done = config.norm_module(parent=None), params[side], 0
    norm = lambda name: lambda x: module.apply({"params": of_stack.get(name, {})}, x)
    parts, end = Parts(norm, lambda name, *_: of_stack[name]), config.last_placement(side).end
    locations = where(config, flat)
    for layer, of_layer in enumerate(config.layers(side)):
        path, index = locations[f"{side}/layers_{layer}/after"]
        after = jax.tree.map(functools.partial(part, place=index), flat[path][0])
        done += of_layer.residuals_of_layer(side)
        yield subject.model.apply(params, end(parts, after, done), method="read")


def sublayer_of(rest: str) -> str:
    """Returns the sublayer of a residual, given a path in its layer.

    Returns "self_attention" for "self_attention_residual/sizes", and "all" where the sublayers of a
    layer share one residual.
    """
    return rest.partition("/")[0].removesuffix("residual").rstrip("_") or "all"
