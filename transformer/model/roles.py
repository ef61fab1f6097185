"""The roles of parameters, and the multipliers that the parametrization of a model gives them."""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.config import ModelConfig
from transformer.model.layout import flatten, unflatten
from transformer.model.parametrizations.base import PARAMETRIZATIONS, Place, Rule

Rules = Mapping[str, tuple[Place, Rule]]  # by the path of the parameter
STACKED = {"layers", "rounds", "expert"}
"""The logical names of axes along which a parameter holds several matrices."""


class Axes(NamedTuple):
    """The axes of a stack of matrices. Each matrix maps its input axes to its output axes."""

    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def role(path: str, names: tuple[str | None, ...]) -> str:
    """Returns the role of a parameter (the fields of `Parametrization`), from its logical names."""
    names = tuple(name for name in names if name not in STACKED)
    in_layers = re.match(r"(encoder|decoder)/layers", path)
    if path == "unembedding/kernel":
        return "unembedding"
    by_name = in_layers and "embed" in names and "positions" not in names
    if len(names) > 1 and (path.endswith("/kernel") or by_name):
        is_gate = names == ("embed", "heads") or "streams" in names
        return "matrix" if in_layers and any(names) and not is_gate else "readout"
    if "embedding" in path.split("/")[0] or names == ("positions", "embed"):
        return "embedding"
    declared = r"(encoder|decoder)/(\w+|.*/cross_attention/position_\w+)"
    is_table = re.fullmatch(declared, path) or {"positions", "buckets"} & {*names}
    return "position" if is_table else "vector"


def matrix_axes(names: tuple[str | None, ...], stacked: set[str] = STACKED) -> Axes:
    """Returns the axes of a matrix: all its axes are inputs but the last, or but "embed"'s. The
    matrix maps d_model to several output axes, or several input axes to d_model."""
    stack = tuple(i for i, name in enumerate(names) if name in stacked)
    rest = tuple(i for i in range(len(names)) if i not in stack)
    inputs = len(rest) - 1 if names[-1] == "embed" else 1
    return Axes(stack, rest[:inputs], rest[inputs:])


@functools.cache
def parameter_rules(family: type[nn.Module], config: ModelConfig) -> Rules:
    """Returns the place and the multipliers of each parameter of a model, by path. It is empty
    without multipliers, that is, in the standard parametrization. The fan-ins of the base are those
    of its parameters' shapes, so that every mixer and feed-forward has a rule."""
    if config.parametrization == "standard":
        return {}
    chosen, base = PARAMETRIZATIONS.build(config.parametrization), config.base
    depths = {f"num_{side}_layers": config.num_layers(side) for side in config.sides}
    tokens = (jax.ShapeDtypeStruct((1, 1), jnp.int32),) * len(config.sides)

    def shapes(c: ModelConfig) -> dict:
        model = family(c.part(parametrization="standard"))
        return flatten(jax.eval_shape(model.init_with_axes, jax.random.key(0), *tokens))

    params, base_params = shapes(config), shapes(base.part(**depths))

    def rule(path: str) -> tuple[Place, Rule]:
        x, base_x = (getattr(tree[path], "value", tree[path]) for tree in (params, base_params))
        names = getattr(params[path], "names", (None,) * x.ndim)
        kind, m_D, ratio = role(path, names), config.d_model / base.d_model, 1.0
        m_N, side = m_D, path.split("/")[0]
        if kind in ("matrix", "readout", "unembedding"):
            axes = matrix_axes(names)
            size = lambda x, part: math.prod(x.shape[i] for i in part)
            m_N = size(x, axes.inputs) / size(base_x, axes.inputs)
            fan_sum, base_sum = (size(y, axes.inputs) + size(y, axes.outputs) for y in (x, base_x))
            named = config.initializer if path.endswith("/kernel") else "lecun_normal"
            variances = {"normal": 1.0, "lecun_normal": m_N, "xavier_uniform": fan_sum / base_sum}
            ratio = variances[named] ** 0.5
        in_layer = kind == "position" or (f"{side}/layers" in path and kind != "embedding")
        on_stream = re.search("_residual/(out_)?norm/", path)  # a norm of the stream itself
        part = "stream" if on_stream else "branch" if in_layer else "once"
        m_L = config.m_L(side) if side in config.sides else 1.0
        place = Place(kind, part, m_N, m_D, m_L, ratio)
        return place, chosen.multipliers(place)

    return {path: rule(path) for path in params}


def initialized(params: Any, rules: Rules) -> Any:
    """Returns the initial values of parameters, multiplied as their rules say."""

    def scaled(path, x):
        init = rules[path][1].init
        return x if init == 1.0 else jax.tree.map(lambda x: x * jnp.asarray(init, x.dtype), x)

    return unflatten({path: scaled(path, x) for path, x in flatten(params).items()})
