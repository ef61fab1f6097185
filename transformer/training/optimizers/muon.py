"""Muon: momentum whose matrices are orthogonalized (Jordan et al. 2024).
Shape suffixes: G matrices of equal shape, n rows and m columns with n <= m."""

import functools
import math
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import PartitionSpec as P

from transformer.errors import UserError
from transformer.limits import Positive, Size
from transformer.model.roles import STACKED, Axes, matrix_axes, role
from transformer.parallel.sharding import is_box, path_name
from transformer.training.optimizers.base import OPTIMIZERS, Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial that moves singular values towards 1, to between about 0.7 and 1.2."""


@OPTIMIZERS.register("muon")
class Muon(Optimizer):
    """Muon for the matrices of layers, and AdamW for all other parameters.

        M <- momentum M + (1 - momentum) G
        update = rms sqrt(max(inputs, outputs)) orthogonalize(momentum M + (1 - momentum) G)

    where orthogonalize(U S V^T) is about U V^T, computed by Newton-Schulz iteration. The update has
    the root mean square `rms` whatever its shape, so that learning rate and weight decay carry over
    from AdamW (Liu et al. 2025, "Muon is Scalable for LLM Training"). AdamW updates embeddings, the
    unembedding, norms, biases, gates, routers and position tables. On several devices, matrices of
    equal shape are stacked and spread: each is orthogonalized once."""

    fields = frozenset({"b1", "b2", "epsilon", "momentum"})
    moments = 2
    scales_with_size = True

    rms: Positive = 0.2  # root mean square of an update, before the learning rate
    steps: Size = 5  # Newton-Schulz iterations
    per_head: bool = False  # orthogonalize the matrix of each head, not that of all heads

    def learning_rate(self, place, rule):
        return rule.learning_rate * (place.m_N**0.5 if place.role == "matrix" else 1.0)

    def direction(self, config):
        beta, adam = config.momentum, optax.scale_by_adam(config.b1, config.b2, config.epsilon)
        mix = lambda m, g: beta * m + (1.0 - beta) * g

        def init(params):
            leaves, tree = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_box)
            axes = tuple(_axes(path_name(path), x, self.per_head) for path, x in leaves)
            matrices, others = _split(tree, [x for _, x in leaves], axes)
            return MuonState(jax.tree.map(jnp.zeros_like, matrices), adam.init(others), axes)

        def update(grads, state, params=None):
            leaves, tree = jax.tree.flatten(grads)
            matrices, others = _split(tree, leaves, state.axes)
            momentum = jax.tree.map(mix, state.momentum, matrices)
            mixed = jax.tree.leaves(jax.tree.map(mix, momentum, matrices))
            axes = [a for a in state.axes if a is not None]
            updates = iter(orthogonalized(mixed, axes, self.rms, self.steps))
            others, adam_state = adam.update(others, state.adam)
            rest = iter(jax.tree.leaves(others))
            merged = [next(rest if a is None else updates) for a in state.axes]
            return tree.unflatten(merged), MuonState(momentum, adam_state, state.axes)

        return optax.GradientTransformation(init, update)


@struct.dataclass
class MuonState:
    """The momentum of matrices and the AdamW state of other parameters."""

    momentum: Any
    adam: optax.ScaleByAdamState
    axes: tuple[Axes | None, ...] = struct.field(pytree_node=False)  # in leaf order; None: AdamW


def _axes(path: str, x: Any, per_head: bool) -> Axes | None:
    """Returns the axes of a parameter that Muon updates, or None. Raises UserError if unnamed."""
    if not is_box(x):
        if not re.match(r"(encoder|decoder)/layers", path):
            return None
        way_out = "initialize its state with the parameters that model.init_with_axes returns"
        raise UserError(f"optimizer.name: 'muon' needs the logical axes of {path}; {way_out}")
    if role(path, x.names) != "matrix":
        return None
    return matrix_axes(x.names, STACKED | ({"heads", "kv_heads"} if per_head else set()))


def orthogonalized(xs: list, axes: list[Axes], rms: float, steps: int) -> list[jax.Array]:
    """Returns rms sqrt(max(inputs, outputs)) orthogonalize(x) for each matrix x of each array."""
    groups: dict[tuple[int, int], list[int]] = {}
    results, matrices, back = {}, [], []
    for i, (x, a) in enumerate(zip(xs, axes, strict=True)):
        matrices.append(_matrices(a, x))
        # The inverse of a permutation of elements is its transpose.
        back.append(jax.linear_transpose(functools.partial(_matrices, a), x))
        groups.setdefault(matrices[i].shape[1:], []).append(i)
    for (_, m), members in groups.items():
        x_Gxnxm = jnp.concatenate([matrices[i] for i in members])
        y_Gxnxm = rms * m**0.5 * _spread(x_Gxnxm, lambda x: newton_schulz(x, steps))
        ends = [sum(len(matrices[i]) for i in members[:n]) for n in range(1, len(members))]
        results |= dict(zip(members, jnp.split(y_Gxnxm, ends), strict=True))
    return [back[i](results[i])[0] for i in range(len(xs))]


def _matrices(a: Axes, x: jax.Array) -> jax.Array:
    """Returns the matrices in an array, [G, n, m]. A matrix with n > m is transposed."""
    shape = [math.prod(x.shape[axis] for axis in part) for part in a]
    x_GxIxO = x.transpose(*a.stack, *a.inputs, *a.outputs).reshape(shape)
    return x_GxIxO if shape[1] <= shape[2] else x_GxIxO.mT


def _spread(x_Gxnxm: jax.Array, function) -> jax.Array:
    """Applies a function of independent matrices, spread over as many devices as there are."""
    mesh, axes, count = jax.sharding.get_abstract_mesh(), [], 1
    sizes = {axis: n for axis, n in mesh.shape.items() if axis not in mesh.manual_axes}
    for axis, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if 1 < size <= len(x_Gxnxm) // count:
            axes, count = [*axes, axis], count * size
    if count < (total := math.prod(sizes.values())):
        idle = "muon: {} matrices of {} x {} occupy {} of {} devices; the others repeat the work"
        warnings.warn(idle.format(*x_Gxnxm.shape, count, total), stacklevel=2)
    if not axes:
        return function(x_Gxnxm)
    place = lambda x: jax.lax.with_sharding_constraint(x, P(tuple(axes)))
    padded = jnp.pad(x_Gxnxm, ((0, -len(x_Gxnxm) % count), (0, 0), (0, 0)))
    return place(function(place(padded)))[: len(x_Gxnxm)]


def newton_schulz(x_Gxnxm: jax.Array, steps: int) -> jax.Array:
    """Returns about U V^T for each matrix U S V^T: X <- a X + (b A + c A^2) X with A = X X^T."""
    a, b, c = COEFFICIENTS
    x = x_Gxnxm / (jnp.linalg.norm(x_Gxnxm, axis=(1, 2), keepdims=True) + 1e-7)
    for _ in range(steps):
        product = x @ x.mT
        x = a * x + (b * product + c * product @ product) @ x
    return x


def _split(tree, leaves: list, axes: tuple[Axes | None, ...]) -> tuple[Any, Any]:
    """Returns the tree of matrices and that of other parameters. Each has None for the others."""
    matrices = [None if a is None else x for x, a in zip(leaves, axes, strict=True)]
    others = [x if a is None else None for x, a in zip(leaves, axes, strict=True)]
    return tree.unflatten(matrices), tree.unflatten(others)
