"""The multiplications and additions that a model is made of: what its matrix products take, nothing computed twice.

Counted in the traced forward pass, on the plain path of attention, for every family and option alike; training takes three times as
much. Of a pair of query and key that the mask never allows nothing counts (of a causal mask half of all, as MaxText counts; documents
that share a row are not told apart), though the plain path computes it.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from flax.core import FrozenDict

from transformer.checks import Choice
from transformer.config import Experiment, MeshConfig
from transformer.model.attention_backends.base import PAIRS
from transformer.model.config import ModelConfig
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.training.step import batch_sums


def model_flops(config: Experiment, batch: dict, params) -> float:
    """Of a training step on a batch of these shapes, all devices together."""
    config = dataclasses.replace(config, model=_plain(config.model))
    alone = make_mesh(MeshConfig(data=1), jax.local_devices(backend="cpu")[:1])  # no chip's kernels
    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    model = build_model(config.model)
    with use(alone):
        forward = lambda params, batch: batch_sums(model, params, batch, config, alone)
        traced = jax.make_jaxpr(forward)(shapes(params), shapes(batch))
    lengths = {
        "encoder": config.data.length,
        "decoder": config.data.decoder_length if config.model.two_sides else config.data.length,
    }
    allowed = {
        side: allowed_pairs(config.model, side, lengths[side]) for side in config.model.sides
    }
    total = 0.0
    for flops, where in products(traced.jaxpr):
        side = "encoder" if "/encoder/" in where else "decoder"
        path = where.split("/")
        masked = PAIRS in path and "cross_attention" not in path
        total += flops * allowed[side] if masked else flops
    return 3 * total


def allowed_pairs(model: ModelConfig, side: str, length: int, block: int = 1) -> float:
    """The share of all pairs of two tokens that self-attention's mask can allow, on average over layers that attend; or of all pairs of blocks of
    tokens between which it can allow something."""
    length //= block
    at = np.arange(length)

    def share(window: int) -> float:
        window = -(-(window - 1) // block) + 1 if window else 0
        first = np.maximum(at - window + 1, 0) if window else np.zeros_like(at)
        causal = side == "decoder" and model.causal and not model.prefix_lm
        last = (
            at
            if causal
            else np.minimum(at + window - 1, length - 1)
            if window
            else np.full_like(at, length - 1)
        )
        return float(np.sum(last - first + 1)) / length**2

    layers = [layer for layer in model.layers(side) if layer.token_mixer.pairs]
    return float(np.mean([share(layer.window) for layer in layers])) if layers else 1.0


def products(jaxpr, times: float = 1.0, prefix: str = "") -> Iterator[tuple[float, str]]:
    """(multiplications and additions, where in the model) of every matrix product and triangular solve, as often as it is
    computed."""
    for equation in jaxpr.eqns:
        where, name = f"{prefix}/{equation.source_info.name_stack}", equation.primitive.name
        if name == "dot_general":
            ((contracted, _), _) = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            yield (
                2.0
                * times
                * equation.outvars[0].aval.size
                * math.prod(left[i] for i in contracted),
                _module(where),
            )
        elif name == "ragged_dot_general":  # each row by the matrix of its group
            (((contracted,), _), _) = equation.params[
                "ragged_dot_dimension_numbers"
            ].dot_dimension_numbers
            yield (
                2.0
                * times
                * equation.outvars[0].aval.size
                * equation.invars[0].aval.shape[contracted],
                _module(where),
            )
        elif name == "triangular_solve":  # row i of n from the i rows before it
            size, side = equation.outvars[0].aval, equation.params["left_side"]
            yield times * size.size * size.shape[-2 if side else -1], _module(where)
        again = times * equation.params.get("length", 1) if name == "scan" else times
        for inner in jax.tree.leaves(
            tuple(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from products(inner, again, where)


def _module(where: str) -> str:
    """The path of modules, without what einsum calls itself."""
    return "/".join(part for part in where.split("/") if "->" not in part)


def _plain(model: ModelConfig) -> ModelConfig:
    """The same mathematics on the plain path: nothing in blocks, again, or padded to a capacity."""

    def dropless(spec: Choice) -> Choice:
        return (
            FrozenDict({k: v for k, v in spec.items() if k != "capacity_factor"})
            if isinstance(spec, Mapping)
            else spec
        )

    pattern = [
        {k: dropless(v) if k == "feed_forward" else v for k, v in layer.items()}
        for layer in model.layer_pattern
    ]
    return model.part(
        attention_backend="reference", pipeline_microbatches=0, remat="none",
        feed_forward=dropless(model.feed_forward), layer_pattern=tuple(map(FrozenDict, pattern)),
    )  # fmt: skip
