"""Fingerprints of arrays: 64 bits that depend on the values and their places, and not on the mesh.

With i the flat index of an element and b_i its bits as an unsigned integer,

    w_i = mix(b_i xor mix(i)),        fingerprint = (sum_i w_i mod 2^32, sum_i mix(w_i) mod 2^32).

Addition modulo 2^32 is exact and commutes. Each device therefore sums its own elements, the sums are added up on the hosts, and the
result is the same on every mesh. No array leaves its device. `mix` is a bijection, so a change of a single element always changes
the fingerprint; two different arrays agree by chance with a probability of about 2^-64.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from transformer.parallel.processes import everyones
from transformer.parallel.sharding import path_name


def fingerprints(tree: Any) -> dict[str, str]:
    """The fingerprint of each array of `tree`, as 16 hexadecimal digits, by the array's path.

    Each process must call this with the same tree, sharded over a mesh in any way, and gets the same result. Placeholders (`...`) are
    left out.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    leaves = [(path, jnp.asarray(x)) for path, x in leaves if x is not ...]
    sums = [_program(x.sharding)(x) for _, x in leaves]  # dispatches all before it waits for one
    mine = jax.device_get([[shard.data for shard in x.addressable_shards] for x in sums])
    mine_NxW = np.array([np.sum(blocks, axis=(0, 1), dtype=np.uint32) for blocks in mine])
    sums_NxW = np.sum(everyones(mine_NxW), axis=0, dtype=np.uint32)
    return {
        path_name(path): "".join(f"{word:08x}" for word in words)
        for (path, _), words in zip(leaves, sums_NxW, strict=True)
    }


def _program(sharding: jax.sharding.Sharding) -> Callable:
    """array of that sharding -> uint32[devices, 2], the sums of each device."""
    if isinstance(sharding, NamedSharding):
        return _sharded_program(sharding.mesh, sharding.spec)
    if not isinstance(sharding, SingleDeviceSharding):
        raise TypeError(f"fingerprints are of arrays on a mesh or on one device, not of {sharding}")
    return _local_program


@functools.cache
def _sharded_program(mesh: Mesh, spec: P) -> Callable:
    """Each device sums its block, unless another one has the same block and is before it. Devices exchange nothing."""
    axes = [(names,) if isinstance(names, str) else tuple(names or ()) for names in spec]
    replicas = [name for name in mesh.axis_names if not any(name in names for names in axes)]

    def block(x: jax.Array) -> jax.Array:
        dims = axes + [()] * (x.ndim - len(axes))
        parts = [math.prod(mesh.shape[name] for name in names) for names in dims]
        index = [jax.lax.axis_index(names) if names else 0 for names in dims]
        starts = [i * size for i, size in zip(index, x.shape, strict=True)]
        whole = [part * size for part, size in zip(parts, x.shape, strict=True)]
        first = jnp.array([jax.lax.axis_index(name) == 0 for name in replicas] + [True]).all()
        return jnp.where(first, _sums(x, starts, whole), 0)[None]

    return jax.jit(
        jax.shard_map(
            block, mesh=mesh, in_specs=spec, out_specs=P(mesh.axis_names), check_vma=False
        )
    )


@jax.jit
def _local_program(x: jax.Array) -> jax.Array:
    return _sums(x, [0] * x.ndim, x.shape)[None]


def _sums(x: jax.Array, starts, shape) -> jax.Array:
    """uint32[2]: both sums over a block that begins at `starts` in an array of that shape, in one pass."""
    word = _mix(_bits(x) ^ _mix(_flat_index(x.shape, starts, shape)))
    zero, add = jnp.uint32(0), lambda a, b: (a[0] + b[0], a[1] + b[1])
    return jnp.stack(jax.lax.reduce((word, _mix(word)), (zero, zero), add, tuple(range(x.ndim))))


def _bits(x: jax.Array) -> jax.Array:
    """What memory holds for each element, as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize > 4:
        raise TypeError(f"fingerprints are of numbers of at most 32 bits, not of {x.dtype}")
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)


def _flat_index(block, starts, shape) -> jax.Array:
    """uint32 of the block's shape: each element's place in the whole array in row-major order, modulo 2^32."""
    index = jnp.zeros(block, jnp.uint32)
    for axis, (start, size) in enumerate(zip(starts, shape, strict=True)):
        here = jax.lax.broadcasted_iota(jnp.uint32, block, axis) + jnp.uint32(start)
        index = index * jnp.uint32(size % 2**32) + here
    return index


def _mix(x: jax.Array) -> jax.Array:
    """A bijection on 32-bit words that lets each input bit affect each output bit: MurmurHash3's `fmix32` (Appleby 2011)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
