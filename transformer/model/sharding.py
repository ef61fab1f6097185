"""What the model knows of devices: logical names for the axes of its activations, which a table of rules maps to mesh axes.

Without rules and a mesh in force (parallel/mesh.py, `use`), nothing here does anything.
"""

import math

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec as P


def constrain(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """`x` laid out as the rules say of its axes' names. An axis that does not divide over its devices stays whole: a single step
    of decoding has one token. Raises ValueError for a name that the rules do not know."""
    found = [_axes(name) for name in names]
    if not any(found):
        return x
    sizes = jax.sharding.get_abstract_mesh().shape
    fits = lambda size, axes: axes and size % math.prod(sizes[a] for a in axes) == 0
    spec = P(*(axes if fits(size, axes) else None for size, axes in zip(x.shape, found, strict=True)))
    return jax.lax.with_sharding_constraint(x, spec)


def axis_of(name: str) -> tuple[str, int]:
    """(mesh axis, devices along it) of a logical name that is spread over one axis; ("", 1) if it is spread over none."""
    axes = _axes(name)
    return (axes[0], jax.sharding.get_abstract_mesh().shape[axes[0]]) if axes else ("", 1)


def _axes(name: str) -> tuple[str, ...]:
    """The mesh axes of more than one device that a name is spread over."""
    rules, mesh = dict(nn.get_logical_axis_rules()), jax.sharding.get_abstract_mesh()
    if not rules or mesh.empty:
        return ()
    if name not in rules:
        raise ValueError(f"the sharding table has no logical name {name!r}")
    axes = rules[name]
    axes = (axes,) if isinstance(axes, str) else axes or ()
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)
