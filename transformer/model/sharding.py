"""What the model knows of devices: logical names for the axes of its activations, which a table of rules maps to mesh axes.

Without rules and a mesh in force (parallel/mesh.py, `use`), nothing here does anything.
"""

import math

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec as P


def constrain(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """`x` laid out as the rules say of its axes' names, and whole along all others. An axis that does not divide over its devices goes
    over fewer, or stays whole: a single step of decoding has one token. Raises ValueError for a name that the rules do not know."""
    return _place(x, _spec(x, names))


def gathered(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """A parameter as it is used: whole along d_model, over which it is kept in parts (ZeRO-3). Its gradient is added up in parts."""
    kept, used = (
        _spec(x, names),
        _spec(x, ["activation_embed" if name == "embed" else name for name in names]),
    )
    if kept == used:
        return _place(x, used)
    gather = jax.custom_vjp(lambda x: _place(x, used))
    gather.defvjp(lambda x: (_place(x, used), None), lambda _, d: (_place(d, kept),))
    return gather(x)


def _spec(x: jax.Array, names) -> P:
    return P(
        *((name and fitting(name, size)) or None for name, size in zip(names, x.shape, strict=True))
    )


def _place(x: jax.Array, spec: P) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    spread = any(size > 1 for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)
    return (
        jax.lax.with_sharding_constraint(x, spec) if spread and nn.get_logical_axis_rules() else x
    )


def fitting(name: str, size: int) -> tuple[str, ...]:
    """The mesh axes that a dimension of this name and size is spread over: as many of those in the table as divide it."""
    axes, sizes = _axes(name), jax.sharding.get_abstract_mesh().shape
    while axes and size % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def axis_of(name: str) -> tuple[str, int]:
    """(mesh axis, devices along it) of a logical name that is spread over one axis; ("", 1) if it is spread over none."""
    axes = _axes(name)
    return (axes[0], jax.sharding.get_abstract_mesh().shape[axes[0]]) if axes else ("", 1)


def _axes(name: str) -> tuple[str, ...]:
    """The mesh axes of more than one device that a name is spread over, less those that a surrounding shard_map has taken in hand."""
    rules, mesh = dict(nn.get_logical_axis_rules()), jax.sharding.get_abstract_mesh()
    if not rules or mesh.empty:
        return ()
    if name not in rules:
        raise ValueError(f"the sharding table has no logical name {name!r}")
    axes = rules[name]
    axes = (axes,) if isinstance(axes, str) else axes or ()
    return tuple(axis for axis in axes if mesh.shape[axis] > 1 and axis not in mesh.manual_axes)


def platform() -> str:
    """cpu, gpu or tpu: what the program that is being traced is for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name
