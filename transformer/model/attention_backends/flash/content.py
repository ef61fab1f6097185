"""Terms that depend on distance and content, without an array over queries and keys.

A tile whose rows are the tokens with the content a consists of products with a table:

    tile[r, c] = a_r . table[start + c - r]

In a block of 128 x 128, c - r has 255 values. Its row r is row r of p = a table^T for 128 rows of
the table, rolled by r. Elements that wrap around are those of the 128 rows before:

    block[r, c] = p_x[r, c - r] if c >= r, else p_(x-1)[r, c - r + 128]

Rolling back sorts a tile by distance: g_x[r, y] is the element of row r that belongs to row 128 x +
y of the table. Products of g with the table and with a are the gradients of a and of the table.
Where the table is constant over the distances of a tile, 128 rows of it stand for all.

Shape suffixes: R rows, C lanes, H size of a vector, L = 128 lanes, D distances."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer.model.attention_backends.flash.settings import NN, NT, TN, product
from transformer.model.attention_backends.flash.tiles import LANES, NONE, ONE
from transformer.model.positions import Terms
from transformer.model.sharding import platform


class Window(NamedTuple):
    """The part of a table, float[D, H], that a tile needs."""

    table: jax.Array
    start: jax.Array  # the row of the tile's first element
    constant: bool  # whether the table is constant over the tile
    transposed: bool  # the lanes of the tile are the tokens with content, instead of its rows

    def expand(self, a_RxH: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """Returns a tile of this shape: the products of `a` with the vectors of the distances."""
        if self.constant:
            tile = product(a_RxH, self.table[self._rows(0), :], NT)
        else:
            tile = self._aligned(a_RxH, shape[0 if self.transposed else 1] // LANES)
        tile = tile.T if self.transposed else tile
        return jnp.tile(tile, (shape[0] // tile.shape[0], shape[1] // tile.shape[1]))

    def read(self, tile: jax.Array) -> jax.Array:
        """Returns the transpose of `expand`, float32[R, H]: sums of vectors, weighted by a tile."""
        return self._read(self._sort(tile))

    def gradient(self, d_tile: jax.Array, a_RxH: jax.Array, d_table_ref) -> jax.Array:
        """Returns the gradient of `a`, and adds that of the table, if it has one."""
        by_row = self._sort(d_tile)
        d_a_RxH = self._read(by_row)
        for x in sorted(set().union(*by_row)) if d_table_ref is not None else ():
            used = [i for i, blocks in enumerate(by_row) if x in blocks]
            g = jnp.concatenate([by_row[i][x] for i in used]).astype(a_RxH.dtype)
            a = a_RxH[used[0] * LANES : (used[-1] + 1) * LANES]
            d_table_ref[self._rows(x), :] += product(g, a, TN)
        return d_a_RxH

    def _rows(self, x: int, count: int = 1):
        """Returns the index of `count` blocks of 128 rows of the table, from block x."""
        return pl.ds(pl.multiple_of(self.start + x * LANES, LANES), count * LANES)

    def _aligned(self, a_RxH: jax.Array, columns: int) -> jax.Array:
        rows, rolled = len(a_RxH) // LANES, {}
        for x in range(-rows, columns):
            first, end = max(0, -x - 1), min(rows, columns - x)  # the blocks of rows that need x
            p = product(a_RxH[first * LANES : end * LANES], self.table[self._rows(x), :], NT)
            rolled |= {(first + i, x): _roll(block) for i, block in enumerate(_cut(p, 0))}
        block = lambda i, j: jnp.where(_iota(1) >= _iota(0), rolled[i, j - i], rolled[i, j - i - 1])
        row = lambda i: jnp.concatenate([block(i, j) for j in range(columns)], axis=1)
        return jnp.concatenate([row(i) for i in range(rows)])

    def _sort(self, tile: jax.Array) -> list[dict[int, jax.Array]]:
        """Returns g, for each 128 rows of the tile: blocks [L, L] by x."""
        if self.constant:
            tile = sum(_cut(tile, 0 if self.transposed else 1))
        rows = _cut(tile.T if self.transposed else tile, 0)
        return [{0: row} if self.constant else _sorted(row, i) for i, row in enumerate(rows)]

    def _read(self, by_row: list[dict[int, jax.Array]]) -> jax.Array:
        def of_row(blocks):
            g = jnp.concatenate(list(blocks.values()), axis=1).astype(self.table.dtype)
            return product(g, self.table[self._rows(min(blocks), len(blocks)), :], NN)

        return jnp.concatenate(list(map(of_row, by_row)))


class Windows(NamedTuple):
    """What a tile needs of a scheme's tables (`Terms`)."""

    keys: Window | None
    queries: Window | None
    values: Window | None

    @staticmethod
    def of(tables: Terms, query, key, reach: int, kind: int, rows: str) -> "Windows":
        """`query` and `key` are the tile's first tokens, its `rows` are "queries" or "keys"."""

        def window(table, start, of: str) -> Window | None:
            if table is None or kind == NONE:
                return None
            return Window(table, start(table.shape[0]), kind == ONE, rows != of)

        by_query, by_key = lambda D: key - query + D - reach, lambda D: query - key + reach
        keys = window(tables.keys_NxDxH, by_query, "queries")
        queries = window(tables.queries_NxDxH, by_key, "keys")
        return Windows(keys, queries, window(tables.values_NxDxV, by_query, "queries"))

    def add_products(self, tile: jax.Array, q_txH: jax.Array, k_sxH: jax.Array) -> jax.Array:
        """Returns the products of queries and keys plus those with the tables."""
        for window, a_RxH in ((self.keys, q_txH), (self.queries, k_sxH)):
            tile = tile if window is None else tile + window.expand(a_RxH, tile.shape)
        return tile

    def add_gradients(self, d_tile: jax.Array, q_txH, k_sxH, d_q_ref, d_k_ref, d_tables) -> None:
        """Adds the gradients of queries, keys and tables. `d_tile` is that of the products."""
        if self.keys is not None:
            d_q_ref[...] += self.keys.gradient(d_tile, q_txH, d_tables.keys_NxDxH)
        if self.queries is not None:
            d_k_ref[...] += self.queries.gradient(d_tile, k_sxH, d_tables.queries_NxDxH)


def _cut(x: jax.Array, axis: int) -> list[jax.Array]:
    return jnp.split(x, x.shape[axis] // LANES, axis=axis)


def _sorted(row_LxC: jax.Array, i: int) -> dict[int, jax.Array]:
    """Returns the blocks of g for the block i of rows."""
    back, zero = [_roll_back(block) for block in _cut(row_LxC, 1)], jnp.zeros((LANES, LANES))
    pairs = zip([zero, *back], [*back, zero], strict=True)  # table blocks x and x + 1
    in_first = _iota(0) + _iota(1) < LANES
    return {j - i - 1: jnp.where(in_first, *pair) for j, pair in enumerate(pairs)}


def _iota(axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis)


def _roll(block_LxL: jax.Array) -> jax.Array:
    """Rolls row r by r. The interpreter, on CPUs, would unroll `pltpu.roll` row by row."""
    if platform() == "cpu":
        return jnp.take_along_axis(block_LxL, (_iota(1) - _iota(0)) % LANES, axis=1)
    return pltpu.roll(block_LxL, 0, 1, stride=1, stride_axis=0)


def _roll_back(block_LxL: jax.Array) -> jax.Array:
    """Rolls row r by -r. `pltpu.roll` only rolls by more from row to row."""
    return jnp.take_along_axis(block_LxL, (_iota(0) + _iota(1)) % LANES, axis=1)
