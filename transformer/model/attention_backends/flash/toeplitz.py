"""Biases that depend on distance alone, without an array over queries and keys.

A tile of such a bias is a Toeplitz matrix: the element of query t and key s is r[t - s]. It has
only as many different rows of 128 lanes as it has diagonals, so a table holds each of them once:

    table[x, c] = r[x - c],    c = 0..127

128 copies of the vector r, each shifted by one. Every tile consists of slices of the table: its
lanes 128 b..128 b + 127 are rows x = t - 128 b. Slices begin at multiples of 128, so that adding
one to a tile takes one load and one addition per register. The gradient of r is collected in the
same way: the gradients of all tiles are added to a table, whose diagonals are summed once.

The table of a head stays in the on-chip memory: 512 bytes per distance.

Shape suffixes: N heads, X rows of a table, L = 128 lanes, t rows and s lanes of a tile."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer.model.attention_backends.flash.tiles import LANES

SUBLANES = 8  # the number of rows of a vector register


def packed(r_NxD: jax.Array | None) -> jax.Array | None:
    """Returns the vectors as `build` needs them, float32[N, 8, D + 1], or None for None. `r_NxD[:,
    y]` is the bias where (index of the row) - (index of the lane) + lanes - 1 = y, so D is rows +
    lanes - 1. The result has eight copies in reverse order; copy b is rolled by b + 1."""
    if r_NxD is None:
        return None
    reverse = jnp.pad(r_NxD.astype(jnp.float32)[:, ::-1], ((0, 0), (0, 1)))
    return jnp.stack([jnp.roll(reverse, b + 1, axis=1) for b in range(SUBLANES)], axis=1)


def unpacked(vectors_Nx8xD: jax.Array) -> jax.Array:
    """Returns float32[N, D], the transpose of `packed`."""
    return sum(jnp.roll(vectors_Nx8xD[:, b], -b - 1, axis=1) for b in range(SUBLANES))[:, -2::-1]


def build(vectors_ref, table_ref) -> None:
    """Writes table[x, c] = r[x + 127 - c], from vectors that `packed` returns."""

    def write(chunk, window):
        vectors = vectors_ref[:, window]
        for row in range(0, LANES, SUBLANES):  # row + b is the window of copy b rolled by row
            at = pl.ds(pl.multiple_of(chunk * LANES + row, SUBLANES), SUBLANES)
            table_ref[at, :] = pltpu.roll(vectors, row, 1)[:, LANES:]

    _for_each_chunk(write, table_ref)


def collect(table_ref, vectors_ref) -> None:
    """Sums a table over its diagonals: the transpose of `build`."""
    vectors_ref[...] = jnp.zeros_like(vectors_ref)

    def read(chunk, window):
        total = jnp.zeros((SUBLANES, 2 * LANES), jnp.float32)
        for row in range(0, LANES, SUBLANES):
            at = pl.ds(pl.multiple_of(chunk * LANES + row, SUBLANES), SUBLANES)
            rows = jnp.concatenate([jnp.zeros((SUBLANES, LANES)), table_ref[at, :]], axis=1)
            total += pltpu.roll(rows, (2 * LANES - row) % (2 * LANES), 1)
        vectors_ref[:, window] += total

    _for_each_chunk(read, table_ref)


def _for_each_chunk(process, table_ref) -> None:
    """Calls process(chunk, window) for each 128 rows of a table and their window of the vectors."""
    chunks = table_ref.shape[0] // LANES

    def step(chunk, _):
        process(chunk, pl.ds(pl.multiple_of((chunks - 1 - chunk) * LANES, LANES), 2 * LANES))

    lax.fori_loop(0, chunks, step, None)


def table(vectors_Nx8xD: jax.Array | None):
    """Returns the scratch memory of a head's table, or None."""
    memory = lambda x: pltpu.VMEM((x.shape[-1] - LANES, LANES), jnp.float32)
    return jax.tree.map(memory, vectors_Nx8xD)


def first_row(row, lane, lanes: int):
    """Returns the table row of the first 128 lanes of a tile at (row, lane) of `lanes` in all."""
    return pl.multiple_of(row - lane + lanes - LANES, LANES)


def add(tile_txs: jax.Array, table_ref, start) -> jax.Array:
    """Returns the tile plus its bias. `start` is the tile's `first_row`."""
    return tile_txs + expand(table_ref, start, tile_txs.shape)


def expand(table_ref, start, shape: tuple[int, int]) -> jax.Array:
    """Returns the bias of a tile of this shape."""
    at = lambda lane: table_ref[pl.ds(start - lane, shape[0]), :]
    return jnp.concatenate([at(lane) for lane in range(0, shape[1], LANES)], axis=1)


def accumulate(tile_txs: jax.Array, table_ref, start) -> None:
    """Adds a tile to the table, the transpose of `add`."""
    rows, lanes = (size // LANES for size in tile_txs.shape)
    part = lambda i: slice(i * LANES, (i + 1) * LANES)
    block = lambda row, lane: tile_txs[part(row), part(lane)]
    # The blocks of 128 x 128 on one block diagonal go to the same rows.
    for diagonal in range(1 - lanes, rows):
        blocks = [block(row, row - diagonal) for row in range(rows) if 0 <= row - diagonal < lanes]
        table_ref[pl.ds(start + diagonal * LANES, LANES), :] += sum(blocks[1:], blocks[0])
