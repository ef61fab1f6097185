"""Model FLOPs: multiplications and additions of a model's matrix products, without recomputation.

They are counted in the traced forward pass, on the plain path of attention, for every family and
option. Training takes three times as many. A pair of query and key that the mask never allows does
not count, although the plain path computes it: a causal mask leaves half of all pairs, as in
MaxText. Documents that share a sequence count as one."""

import dataclasses
import math
import re
from collections.abc import Iterator

import jax
import numpy as np
from flax.core import FrozenDict

from transformer.config import Experiment, MeshConfig
from transformer.model.config import ModelConfig
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.training.step import batch_sums


def model_flops(config: Experiment, batch: dict, params) -> float:
    """Returns the model FLOPs of a training step on a batch of these shapes, on all devices."""
    config = dataclasses.replace(config, model=_plain(config.model))
    # A CPU has no fused kernels, so every product is traced.
    cpu_mesh = make_mesh(MeshConfig(data=1), jax.local_devices(backend="cpu")[:1])
    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    model = build_model(config.model)
    with use(cpu_mesh):
        forward = lambda params, batch: batch_sums(model, params, batch, config, cpu_mesh)
        traced = jax.make_jaxpr(forward)(shapes(params), shapes(batch))
    return 3 * sum(flops * allowed_share(scope) for flops, scope in products(traced.jaxpr))


def allowed_share(scope: str) -> float:
    """Returns the share of pairs of queries and keys that the mask of a product can allow. `scope`
    is the product's path of name scopes. Outside `masks.pairs`, the share is 1."""
    queries, keys, causal, window = mask_of(scope)
    if not causal and not window:
        return 1.0
    window = window or max(queries, keys)
    positions = np.arange(queries) + keys - queries  # those of the queries are the last ones
    first = np.maximum(positions - window + 1, 0)
    last = positions if causal else np.minimum(positions + window - 1, keys - 1)
    return float(np.sum(last - first + 1)) / (queries * keys)


def tile_counts(scope: str) -> tuple[int, int]:
    """Returns how many tiles of a kernel the mask allows in part, and how many completely."""
    T, S, causal, window, t, s = mask_of(scope)
    first_Tx1 = np.arange(0, T, t)[:, None] + S - T  # the first query of a tile
    least, most = (first_Tx1 - np.arange(0, S, s) + end for end in (1 - s, t - 1))  # distances
    low = 0 if causal else 1 - window if window else -T - S
    high = window - 1 if window else T + S
    some, full = (most >= low) & (least <= high), (least >= low) & (most <= high)
    return int(np.sum(some & ~full)), int(np.sum(full))


def mask_of(scope: str) -> tuple[int, ...]:
    """Returns queries, keys, causal (0 or 1), window (0: none) and, in kernels, those per tile."""
    match = re.search(r"/pairs\.([\d.]+)(?=/|$)", scope)
    return tuple(map(int, match.group(1).split("."))) if match else (1, 1, 0, 0)


def products(jaxpr) -> Iterator[tuple[float, str]]:
    """Yields (FLOPs in all, module path) of each matrix product and triangular solve."""
    for equation, times, scope in equations(jaxpr):
        name, params = equation.primitive.name, equation.params
        module = "/".join(part for part in scope.split("/") if "->" not in part)  # einsum's scopes
        if name in ("dot_general", "ragged_dot_general"):
            ragged = params.get("ragged_dot_dimension_numbers")  # each row times its group's matrix
            numbers = ragged.dot_dimension_numbers if ragged else params["dimension_numbers"]
            ((contracted, _), _) = numbers
            terms = math.prod(equation.invars[0].aval.shape[i] for i in contracted)
            yield 2.0 * times * equation.outvars[0].aval.size * terms, module
        elif name == "triangular_solve":  # row i of n from the i rows before it
            out = equation.outvars[0].aval
            yield times * out.size * out.shape[-2 if params["left_side"] else -1], module


def equations(jaxpr, times: float = 1.0, prefix: str = "") -> Iterator[tuple]:
    """Yields (equation, how often it is computed, scope) of a traced program and all inner ones."""
    for equation in jaxpr.eqns:
        scope, name = f"{prefix}/{equation.source_info.name_stack}", equation.primitive.name
        yield equation, times, scope
        inner_times = times * equation.params.get("length", 1) if name == "scan" else times
        is_program = lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=is_program):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner, inner_times, scope)


def _plain(model: ModelConfig) -> ModelConfig:
    """Returns the model without blockwise attention, recomputation, capacity and micro-batches."""
    without = lambda x: FrozenDict({k: dropless(v) for k, v in x.items() if k != "capacity_factor"})
    dropless = lambda value: without(value) if isinstance(value, FrozenDict) else value
    pattern = tuple(map(dropless, model.layer_pattern))
    plain = {"attention_backend": "reference", "pipeline_microbatches": 0, "remat": "none"}
    return model.part(**plain, feed_forward=dropless(model.feed_forward), layer_pattern=pattern)
