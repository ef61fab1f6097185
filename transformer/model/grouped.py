"""Grouped matrix products: rows sorted by group, one matrix per group. `jax.lax.ragged_dot`
computes this product. On TPUs its gradient by the matrices multiplies all rows by every group and
masks most of the result to zero (as libtpu 0.0.42.1 compiles it). So TPUs use JAX's "MegaBlocks"
kernels (Gale et al. 2023), which process only the rows of each group.
Shape suffixes: n rows, I and O input and output size of a matrix, G groups."""

import jax
import jax.numpy as jnp

from transformer.model.sharding import platform

TILE = (512, 1024, 1024)  # the largest tile of a kernel: rows, contracted elements, columns
SUBLANES = 16  # the number of rows of a kernel's tile is a multiple of this


def grouped_product(x_nxI: jax.Array, w_GxIxO: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Computes y_n = x_n W_g, where g is the group of row n. The first sizes_0 rows belong to group
    0, the next sizes_1 to group 1, and so on. Output rows after the last group are zero."""
    if platform() == "tpu":
        return megablox_product(x_nxI, w_GxIxO, sizes_G)
    return jax.lax.ragged_dot(x_nxI, w_GxIxO, sizes_G)


def megablox_product(x_nxI, w_GxIxO, sizes_G, interpret: bool = False) -> jax.Array:
    """Computes `grouped_product` with TPU kernels. `interpret=True` emulates them for tests."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    n = len(x_nxI)
    rows = min(TILE[0], -(-n // SUBLANES) * SUBLANES)
    padding = -n % rows
    # The remaining rows form a group without a matrix, for which the kernel returns zeros.
    sizes_G = jnp.concatenate([sizes_G, (n + padding - jnp.sum(sizes_G))[None]]).astype(jnp.int32)
    # The tile of every product, including those of the gradients.
    tile = lambda n, inner, outer: (rows, min(TILE[1], inner), min(TILE[2], outer))
    x_nxI = jnp.pad(x_nxI, ((0, padding), (0, 0)))
    return gmm(x_nxI, w_GxIxO, sizes_G, x_nxI.dtype, tile, interpret=interpret)[:n]
