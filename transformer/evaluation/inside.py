"""Helpers for evaluators and reports that show the internals of a model.

Shape suffixes: B batch, T length, D d_model.
"""

from collections.abc import Callable, Iterator

import jax

from transformer.evaluation.subject import Subject
from transformer.model.layout import flatten, part, where

SELF_ATTENTION_ONLY = ("distance", "previous")
"""Attention statistics that compare positions, which has no meaning in cross-attention."""


def streams(subject: Subject, params, recorded: dict) -> Iterator[tuple[jax.Array, Callable]]:
    """Yields (input of the head, head) after each layer of the last stack, as if it ended there.

    `recorded` holds the residual streams after the layers (the collection "streams" of
    model/watch.py). The stack's final norm is applied to each.
    """
    config, flat = subject.config.model, flatten(recorded)
    side = config.sides[-1]
    norm = config.norm_module(parent=None)
    locations = where(config, flat)
    for layer in range(config.num_layers(side)):
        path, index = locations[f"{side}/layers_{layer}/after"]
        h_BxTxD = part(flat[path][0], index)
        if config.has_final_norm(side):
            h_BxTxD = norm.apply({"params": params[side].get("final_norm", {})}, h_BxTxD)
        yield subject.model.apply(params, h_BxTxD, method="read")


def sublayer_of(rest: str) -> str:
    """Returns the sublayer of a residual, given a path in its layer.

    Returns "self_attention" for "self_attention_residual/sizes", and "all" where the sublayers of a
    layer share one residual.
    """
    return rest.partition("/")[0].removesuffix("residual").rstrip("_") or "all"
