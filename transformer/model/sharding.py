"""Sharding constraints by logical axis names, which a table of rules maps to mesh axes. Without
active rules and a mesh (parallel/mesh.py, `use`), the functions here change nothing."""

import math

import jax
from flax import linen as nn
from jax.sharding import PartitionSpec as P


def constrain(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    """Constrains the axes of `x` to be sharded as the rules define for their names; those without a
    mesh axis are unsharded. An axis that does not divide over its devices is sharded over fewer, or
    not at all: a decoding step has one token. Raises ValueError for a name without a rule."""
    return _place(x, _spec(x, names))


def gathered(x: jax.Array, names: tuple[str | None, ...]) -> jax.Array:
    """Returns a parameter gathered along d_model, over which it is stored in shards (ZeRO-3). Its
    gradient is constrained to the stored sharding, so that it is summed in shards."""
    used_names = ["activation_embed" if name == "embed" else name for name in names]
    stored, used = _spec(x, names), _spec(x, used_names)
    if stored == used:
        return _place(x, used)
    gather = jax.custom_vjp(lambda x: _place(x, used))
    gather.defvjp(lambda x: (_place(x, used), None), lambda _, d: (_place(d, stored),))
    return gather(x)


def _spec(x: jax.Array, names) -> P:
    axes = [name and fitting(name, size) for name, size in zip(names, x.shape, strict=True)]
    return P(*(axis or None for axis in axes))


def _place(x: jax.Array, spec: P) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    is_sharded = any(size > 1 for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)
    has_rules = is_sharded and nn.get_logical_axis_rules()
    return jax.lax.with_sharding_constraint(x, spec) if has_rules else x


def fitting(name: str, size: int) -> tuple[str, ...]:
    """Returns the mesh axes that an axis with this name and size is sharded over. They are the
    longest prefix of the name's mesh axes whose number of devices divides the size."""
    axes, sizes = _axes(name), jax.sharding.get_abstract_mesh().shape
    while axes and size % math.prod(sizes[axis] for axis in axes):
        axes = axes[:-1]
    return axes


def axis_of(name: str) -> tuple[str, int]:
    """Returns (mesh axis, devices) of a logical name with one mesh axis; ("", 1) if unsharded."""
    axes = _axes(name)
    return (axes[0], jax.sharding.get_abstract_mesh().shape[axes[0]]) if axes else ("", 1)


def _axes(name: str) -> tuple[str, ...]:
    """Returns a name's mesh axes, but for those of one device and a shard_map's manual ones."""
    rules, mesh = dict(nn.get_logical_axis_rules()), jax.sharding.get_abstract_mesh()
    if not rules or mesh.empty:
        return ()
    if name not in rules:
        raise ValueError(f"the sharding table has no logical name {name!r}")
    axes = rules[name]
    axes = (axes,) if isinstance(axes, str) else axes or ()
    return tuple(axis for axis in axes if mesh.shape[axis] > 1 and axis not in mesh.manual_axes)


def platform() -> str:
    """Returns the platform that the current program is traced for: cpu, gpu or tpu."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = device.platform if device is not None else jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name
