"""What evaluators and pages that look inside a model share.

Shape suffixes: B batch, T length, D d_model.
"""

from collections.abc import Callable, Iterator

import jax

from transformer.evaluation.subject import Subject
from transformer.model.layout import flatten, part, where

OF_ONE_SIDE = ("distance", "previous")
"""What means nothing between the tokens of two sides."""


def streams(subject: Subject, params, told: dict) -> Iterator[tuple[jax.Array, Callable]]:
    """(what the head is applied to, the head) of the stream behind each layer of the last stack, as if the stack ended there."""
    config, flat = subject.config.model, flatten(told)
    side = config.sides[-1]
    norm = config.norm_module(parent=None)
    places = where(config, flat)
    for layer in range(config.num_layers(side)):
        path, place = places[f"{side}/layers_{layer}/after"]
        h_BxTxD = part(flat[path][0], place)
        if config.has_final_norm(side):
            h_BxTxD = norm.apply({"params": params[side].get("final_norm", {})}, h_BxTxD)
        yield subject.model.apply({"params": params}, h_BxTxD, method="read")


def residual_of(rest: str) -> str:
    """Which sublayer a residual is of, by its path in the layer: self_attention_residual/sizes; "all" where a layer has one for both."""
    return rest.partition("/")[0].removesuffix("residual").rstrip("_") or "all"
