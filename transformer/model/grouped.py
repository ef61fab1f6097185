"""Rows that are sorted into groups, each group times a matrix of its own.

Shape suffixes: n rows, I and O the sizes that a matrix maps, G groups.

`jax.lax.ragged_dot` says it, and computes it where there is nothing better. On TPUs its gradient by the matrices is a product of all rows
with every group, most of it masked to zero (seen in what libtpu 0.0.42.1 compiles); so there it is the kernels of "MegaBlocks" (Gale et
al. 2023) that JAX brings, which go over each group's own rows alone.
"""

import jax
import jax.numpy as jnp

from transformer.model.sharding import platform

TILE = (512, 1024, 1024)
"""Rows, what is summed over, and columns that a kernel takes at a time: at most."""

SUBLANES = 16
"""A kernel takes a multiple of so many rows."""


def grouped_product(x_nxI: jax.Array, w_GxIxO: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """y_n = x_n W_g, g the group of row n: the first sizes_0 rows are group 0's, and so on. Rows behind the last group's are zero."""
    if platform() == "tpu":
        return with_kernels(x_nxI, w_GxIxO, sizes_G)
    return jax.lax.ragged_dot(x_nxI, w_GxIxO, sizes_G)


def with_kernels(
    x_nxI: jax.Array, w_GxIxO: jax.Array, sizes_G: jax.Array, interpret: bool = False
) -> jax.Array:
    """The same by TPUs' kernels; `interpret`ed elsewhere, for tests."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    n = len(x_nxI)
    rows = min(TILE[0], -(-n // SUBLANES) * SUBLANES)
    padding = -n % rows
    rest = (
        n + padding - jnp.sum(sizes_G)
    )  # one group more, which has no matrix: its rows are not visited, and made zero
    sizes_G = jnp.concatenate([sizes_G, rest[None]]).astype(jnp.int32)
    tile = lambda n, inner, outer: (
        rows,
        min(TILE[1], inner),
        min(TILE[2], outer),
    )  # of each product, the gradients' too
    x_nxI = jnp.pad(x_nxI, ((0, padding), (0, 0)))
    return gmm(x_nxI, w_GxIxO, sizes_G, x_nxI.dtype, tile, interpret=interpret)[:n]
