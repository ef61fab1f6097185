"""The kernels of flash attention (Dao 2023) on GPUs, in Pallas for Triton.

Each program of a kernel computes one block of the results, and loops over the blocks of the other
side that the mask allows: `_forward` over keys, `_backward` over keys (for the gradient of queries)
or over queries. `_of_bias` loops over the tiles between which all distances are the same. All sums
have a fixed order, so repeated gradients are equal bit by bit. A tile reads its bias from the
vector of its head. Logits are in units of log 2, because GPUs have an instruction for exp2.

Shape suffixes: B batch (or 1), N query heads, K key/value heads, T query length, S key length, H
head size (of values: V), D distances, R rows and C columns of a tile, X diagonals of tiles."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from transformer.model.attention_backends.blockwise import LOWEST, MASKED
from transformer.model.attention_backends.flash.settings import NN, NT, Settings, product
from transformer.model.attention_backends.flash.tiles import EMPTY, FULL, Limits
from transformer.model.dropout import token_bits
from transformer.model.positions import Terms

LOG2_E = math.log2(math.e)


class Shape(NamedTuple):
    """The numbers of queries and of keys of a tile, and options of Triton's compiler."""

    t: int
    s: int
    warps: int
    stages: int


# By head size: the shapes of the tiles of the forward pass, without and with a bias, and of the
# gradients of queries, of keys and of the bias. The fastest of 3 to 9 candidates on an H200.
BFLOAT16 = {
    64: [(64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3), (32, 64, 4, 3), (64, 64, 4, 2)],
    128: [(64, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 2)],
    256: [(128, 64, 8, 2), (128, 64, 8, 2), (64, 32, 4, 1), (64, 64, 8, 1), (64, 64, 8, 1)],
}
FLOAT32 = {64: [(64, 64, 4, 1)] * 5, 128: [(32, 32, 4, 1)] * 5, 256: [(32, 32, 4, 1)] * 5}


def shapes(itemsize: int, size: int, bias: bool) -> list[Shape]:
    """Returns the shapes of tiles of the forward pass, and of the gradients of queries, of keys and
    of the bias, whose tiles are square. The numbers of tokens divide 128."""
    table = FLOAT32 if itemsize == 4 else BFLOAT16
    without, biased, *gradients = table[min(x for x in table if size <= x or x == max(table))]
    return [Shape(*x) for x in (biased if bias else without, *gradients)]


class Side(NamedTuple):
    """The queries or the keys: references to sequences, or the values of a block of tokens."""

    x: jax.Array  # the queries or keys
    y: jax.Array | None  # the gradients of outputs, or the values
    limits: tuple  # of the mask: those fields of `Limits` that belong to the side
    vectors: tuple = ()  # the log-sum-exp and delta of queries
    index: jax.Array | None = None  # of tokens in the sequence
    bits: jax.Array | None = None  # random, for dropout

    def read(self, block, size: int, axis: int, masked: bool = True, bits=None) -> "Side":
        """Returns the values of a block of tokens, which are along the axis of a tile."""
        at, along = pl.ds(block * size, size), lambda x: jnp.expand_dims(x, 1 - axis)
        read = lambda ref: along(ref[at])
        index = block * size + lax.iota(jnp.int32, size)
        limits = jax.tree.map(read, self.limits) if masked else ()
        bits = None if bits is None else along(bits(index))
        y, vectors = None if self.y is None else self.y[at, :], jax.tree.map(read, self.vectors)
        return Side(self.x[at, :], y, limits, vectors, along(index), bits)


class Tiles(NamedTuple):
    """What kernels compute tiles from. The rows of a tile are queries or keys."""

    settings: Settings
    shape: Shape
    rows_are_keys: bool
    queries: Side
    keys: Side
    bias_ref: jax.Array | None
    seed_ref: jax.Array
    work_ref: jax.Array  # of each block: see `_work`; for `_of_bias`, of each tile
    block: jax.Array | None = None  # the program's block, or diagonal
    stream: jax.Array | None = None  # of random bits: the program's head and sequence

    def side(self, is_keys: bool, block, masked: bool = True) -> Side:
        """Returns a block of the queries or of the keys."""
        seed, first = self.seed_ref[int(is_keys)], self.seed_ref[2 + is_keys]
        bits = lambda index: token_bits(seed, self.stream, first + index)
        side, size = (self.keys, self.shape.s) if is_keys else (self.queries, self.shape.t)
        axis = int(is_keys != self.rows_are_keys)
        return side.read(block, size, axis, masked, bits if self.settings.dropout else None)

    def for_each(self, add: Callable, carry):
        """Returns add(rows, columns, carry) of all tiles of this program's rows."""
        is_keys = self.rows_are_keys
        rows = self.side(is_keys, self.block)

        def step(masked: bool, other, carry):
            columns = self.side(not is_keys, other, masked)
            return add(rows if masked else rows._replace(limits=()), columns, carry)

        first, full, end_of_full, end = (self.work_ref[self.block, i] for i in range(4))
        carry = lax.fori_loop(first, full, functools.partial(step, True), carry)
        carry = lax.fori_loop(full, end_of_full, functools.partial(step, False), carry)
        return lax.fori_loop(end_of_full, end, functools.partial(step, True), carry)

    def logits(self, rows: Side, columns: Side) -> jax.Array:
        """Returns the logits of a tile over log 2."""
        queries, keys = (columns, rows) if self.rows_are_keys else (rows, columns)
        logits, cap = LOG2_E * product(rows.x, columns.x, NT), LOG2_E * self.settings.soft_cap
        if self.bias_ref is not None:
            first = queries.index + (self.settings.reach - 1)
            logits += triton.load(self.bias_ref.at[first - keys.index])
        if cap:
            logits = cap * jnp.tanh(logits / cap)
        if not queries.limits:
            return logits
        return jnp.where(Limits(*queries.limits, *keys.limits).allowed(), logits, MASKED)

    def gradients(self, rows: Side, columns: Side) -> tuple[jax.Array, jax.Array]:
        """Returns the weights of a tile after dropout, and the gradient of its logits."""
        lse, delta = (columns if self.rows_are_keys else rows).vectors
        logits, cap = self.logits(rows, columns), LOG2_E * self.settings.soft_cap
        weights = dropped = jnp.exp2(logits - LOG2_E * lse)
        d_weights = product(rows.y, columns.y, NT)
        if self.settings.dropout:
            drop = lambda x: self.settings.drop(x, rows.bits, columns.bits)
            dropped, d_weights = drop(weights), drop(d_weights)
        d_logits = weights * (d_weights - delta)
        if cap:
            d_logits *= 1.0 - jnp.minimum(jnp.square(logits / cap), 1.0)
        return dropped, d_logits


def _work(states_BxRxC: jax.Array) -> jax.Array:
    """Returns int32[B, 1, R, 4], for each block of rows: the first tile that is not empty, the
    first full one, the end of the full ones that follow, and the end of all that are not empty."""
    columns, last = jnp.arange(states_BxRxC.shape[2]), states_BxRxC.shape[2]
    used, is_full = states_BxRxC > EMPTY, states_BxRxC == FULL
    first = jnp.min(jnp.where(used, columns, last), axis=2)
    end = jnp.max(jnp.where(used, columns + 1, 0), axis=2)
    full = jnp.min(jnp.where(is_full, columns, end[..., None]), axis=2)
    after = ~is_full & (columns >= full[..., None])
    end_of_full = jnp.min(jnp.where(after, columns, end[..., None]), axis=2)
    return jnp.stack([first, full, end_of_full, end], axis=2)[:, None].astype(jnp.int32)


def _call(kernel: Callable, tiles: Tiles, grid: tuple[int, int, int], results: list):
    """Calls kernel(tiles, *results). `grid`: blocks, heads and sequences. Kernels receive whole
    sequences, of which Triton reads nothing by itself: [B, N, ...] without the first two axes."""
    settings, shape, rows_are_keys, *arrays = tiles[:-2]

    def spec(x) -> pl.BlockSpec:
        (batch, heads), rest, first = x.shape[:2], x.shape[2:], [0] * (x.ndim - 2)
        index = lambda i, n, b: (b if batch > 1 else 0, lax.div(n * heads, grid[1]), *first)
        return pl.BlockSpec((None, None, *rest), index)

    def body(*refs):
        block, stream = pl.program_id(0), (pl.program_id(1), pl.program_id(2))
        inputs, outputs = refs[: len(arrays)], refs[len(arrays) :]
        if not rows_are_keys:  # in causal attention, the last queries take longest
            block = grid[0] - 1 - block
        seed_ref = inputs[3]
        stream = (seed_ref[4] + stream[1]) * settings.heads + seed_ref[5] + stream[0]
        kernel(Tiles(settings, shape, rows_are_keys, *inputs, block, stream), *outputs)

    params = triton.CompilerParams(num_warps=shape.warps, num_stages=shape.stages)
    return pl.pallas_call(
        body, name=f"flash{kernel.__name__}", grid=grid, in_specs=jax.tree.map(spec, tuple(arrays)),
        out_specs=jax.tree.map(spec, results), out_shape=results, compiler_params=params,
        interpret=settings.interpret,
    )(*arrays)  # fmt: skip


def _tiles(settings, shape: Shape, rows_are_keys: bool, q, k, v, limits, terms, seed, *of_queries):
    """Returns arrays for kernels, each with two leading axes, and head sizes padded to 2^n."""
    d_out = _pad(of_queries[2]) if of_queries else None
    queries, keys = jax.tree.map(lambda x: x[:, None], (limits.queries, limits.keys))
    bias = None if terms.bias_NxD is None else LOG2_E * terms.bias_NxD[None]
    states = limits.states(shape.t, shape.s)
    work = _work(jnp.swapaxes(states, 1, 2) if rows_are_keys else states)
    sides = Side(_pad(q), d_out, queries, of_queries[:2]), Side(_pad(k), _pad(v), keys)
    return Tiles(settings, shape, rows_are_keys, *sides, bias, seed[None, None], work)


def _pad(x: jax.Array) -> jax.Array:
    more = max(pl.next_power_of_2(x.shape[-1]), 16) - x.shape[-1]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, more)))


def forward(settings, q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, limits: Limits, terms: Terms, seed):
    """Returns what forward.py does."""
    (batch, heads, T, H), V = q_BxNxTxH.shape, v_BxKxSxV.shape[-1]
    shape = shapes(q_BxNxTxH.dtype.itemsize, max(H, V), terms.bias_NxD is not None)[0]
    tiles = _tiles(settings, shape, False, q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, limits, terms, seed)
    out = settings.like(v_BxKxSxV, (batch, heads, T, tiles.keys.y.shape[-1]))
    lse = jax.ShapeDtypeStruct((batch, heads, T), jnp.float32)
    out, lse = _call(_forward, tiles, (T // shape.t, heads, batch), [out, lse])
    return out[..., :V], lse


def _forward(tiles: Tiles, out_ref, lse_ref) -> None:
    t = tiles.shape.t

    def add(rows: Side, columns: Side, carry):
        old_m, old_sum, out = carry
        logits = tiles.logits(rows, columns)
        m = jnp.maximum(old_m, jnp.max(logits, axis=1))
        weights, rescale = jnp.exp2(logits - m[:, None]), jnp.exp2(old_m - m)
        total = rescale * old_sum + jnp.sum(weights, axis=1)
        if tiles.settings.dropout:
            weights = tiles.settings.drop(weights, rows.bits, columns.bits)
        read = product(weights.astype(columns.y.dtype), columns.y, NN)
        return m, total, rescale[:, None] * out + read

    zero = jnp.zeros((t, out_ref.shape[-1]), jnp.float32)
    carry = jnp.full(t, LOG2_E * LOWEST, jnp.float32), jnp.zeros(t, jnp.float32), zero
    m, total, out = tiles.for_each(add, carry)
    at, total = pl.ds(tiles.block * t, t), jnp.where(total > 0, total, 1.0)
    out_ref[at, :] = (out / total[:, None]).astype(out_ref.dtype)
    lse_ref[at] = (m + jnp.log2(total)) / LOG2_E


def backward(
    settings: Settings, q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, limits: Limits, terms: Terms, seed,
    lse_BxNxT, delta_BxNxT, d_out_BxNxTxV, learned: bool,
) -> tuple:  # fmt: skip
    """Returns what backward.py does."""
    (batch, heads, T, H), (S, V) = q_BxNxTxH.shape, v_BxKxSxV.shape[2:]
    arrays = q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, limits, terms, seed, lse_BxNxT, delta_BxNxT
    _, for_q, for_kv, for_bias = shapes(q_BxNxTxH.dtype.itemsize, max(H, V), bias=False)
    tiles = _tiles(settings, for_q, False, *arrays, d_out_BxNxTxV)
    like = lambda x, side, length: settings.like(x, (batch, heads, length, side.shape[-1]))
    d_q = [like(q_BxNxTxH, tiles.queries.x, T)]
    (d_q,) = _call(_backward, tiles, (T // for_q.t, heads, batch), d_q)
    tiles = _tiles(settings, for_kv, True, *arrays, d_out_BxNxTxV)
    d_kv = [like(k_BxKxSxH, tiles.keys.x, S), like(v_BxKxSxV, tiles.keys.y, S)]
    d_k, d_v = _call(_backward, tiles, (S // for_kv.s, heads, batch), d_kv)
    if not learned:
        return d_q[..., :H], d_k[..., :H], d_v[..., :V]
    d_bias = None
    if terms.bias_NxD is not None:
        tiles = _tiles(settings, for_bias, False, *arrays, d_out_BxNxTxV)
        tiles = tiles._replace(work_ref=limits.states(for_bias.t, for_bias.s)[:, None])
        size, diagonals = for_bias.t, (T + settings.reach) // for_bias.t - 1
        of_tiles = jax.ShapeDtypeStruct((batch, heads, diagonals, size, size), jnp.float32)
        (of_tiles,) = _call(_of_bias, tiles, (diagonals, heads, batch), [of_tiles])
        d_bias = _of_distances(jnp.sum(of_tiles, axis=0))[:, : terms.bias_NxD.shape[1]]
    return d_q[..., :H], d_k[..., :H], d_v[..., :V], Terms(terms.scale, d_bias)


def _backward(tiles: Tiles, *results) -> None:
    size = tiles.shape.s if tiles.rows_are_keys else tiles.shape.t

    def add(rows: Side, columns: Side, sums):
        dropped, d_logits = tiles.gradients(rows, columns)
        values = zip((d_logits, dropped), (columns.x, columns.y), sums, strict=False)
        return tuple(total + product(a.astype(b.dtype), b, NN) for a, b, total in values)

    zeros = tuple(jnp.zeros((size, ref.shape[-1]), jnp.float32) for ref in results)
    sums = tiles.for_each(add, zeros)
    for ref, total in zip(results, sums, strict=True):
        ref[pl.ds(tiles.block * size, size), :] = total.astype(ref.dtype)


def _of_bias(tiles: Tiles, total_ref) -> None:
    """Sums the gradients of the tiles of one diagonal."""
    size, states = tiles.shape.t, tiles.work_ref
    (blocks, others), reach = states.shape, tiles.settings.reach
    diagonal = tiles.block + 1 - reach // size  # of queries' minus keys' blocks

    def step(i, total):
        sides = lambda: (tiles.side(False, i), tiles.side(True, i - diagonal))
        add = lambda total: total + tiles.gradients(*sides())[1]
        return lax.cond(states[i, i - diagonal] > EMPTY, add, lambda total: total, total)

    first, end = jnp.maximum(diagonal, 0), jnp.minimum(others + diagonal, blocks)
    zero = jnp.zeros((size, size), jnp.float32)
    total_ref[tiles.block, :, :] = lax.fori_loop(first, end, step, zero)


def _of_distances(tiles_NxXxRxC: jax.Array) -> jax.Array:
    """Sums square tiles over their diagonals, from the least distance on. Returns [N, D]."""
    heads, count, size, _ = tiles_NxXxRxC.shape
    more = jnp.pad(tiles_NxXxRxC[..., ::-1], ((0, 0), (0, 0), (0, 0), (0, size)))
    # Rows that are one shorter than what they contain move to the right, each by one more
    skewed = more.reshape(heads, count, -1)[..., :-size].reshape(heads, count, size, -1)
    sums = jnp.pad(jnp.sum(skewed, axis=2), ((0, 0), (0, 0), (0, 1)))
    pad = lambda x, *more: jnp.pad(x, ((0, 0), more, (0, 0)))
    return (pad(sums[..., :size], 0, 1) + pad(sums[..., size:], 1, 0)).reshape(heads, -1)
