"""Tiles of the logits: which of them a mask allows, and the mask within one of them.

A tile is the part of the logits with the queries of one block and the keys of one block. Every
mask that is plain (see model/masks.py) allows a query the keys of its document in a range of
positions. A tile is empty if the ranges of its queries and the positions of its keys are disjoint,
and full if they include all of them. Only tiles in between need a mask of their own. The state of
each tile is computed from the tokens, so tokens in any order are masked correctly, and packed
documents, padding, windows and prefixes skip the tiles that they exclude.

Shape suffixes: B batch (or 1), T queries, S keys, I blocks of t queries, J blocks of s keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.experimental import pallas as pl

from transformer.model.attention_backends.base import Inputs

EMPTY, PARTIAL, FULL = 0, 1, 2

EACH, ONE, NONE = 0, 2, 4
"""The kind of a tile, which is added to its state: whether a position scheme has a vector for each
distance in it, one for all, or none. Tiles of the first kind are not FULL if there are others."""

LANES = 128  # the number of elements in a row of a TPU's vector registers


@struct.dataclass
class Limits:
    """What a mask allows each query: the keys of its segment at positions first..last. A mask
    without a window has no `first`; a bidirectional one without a window has no `last`. Padding has
    the segments -1 among the queries and -2 among the keys, which match nothing. `kinds` are those
    of all tiles; None if all tiles are of the kind EACH."""

    q_segments: jax.Array
    q_first: jax.Array | None
    q_last: jax.Array | None
    k_segments: jax.Array
    k_positions: jax.Array
    kinds_1xIxJ: jax.Array | None = None

    @staticmethod
    def of(inputs: Inputs) -> "Limits":
        """Returns int32[B, T] for queries and int32[B, S] for keys."""
        mask, q, k = inputs.mask, inputs.q_tokens, inputs.k_tokens
        first = last = None
        if mask.window:
            first, last = q.positions_BxT - mask.window + 1, q.positions_BxT + mask.window - 1
        if mask.causal:
            until = q.positions_BxT if q.until_BxT is None else q.until_BxT
            last = until if last is None else jnp.minimum(last, until)
        segments = lambda x, padding: jnp.where(x.segments_BxT > 0, x.segments_BxT, padding)
        limits = Limits(segments(q, -1), first, last, segments(k, -2), k.positions_BxT)
        return jax.tree.map(lambda x: x.astype(jnp.int32), limits)

    def pad(self, queries: int, keys: int) -> "Limits":
        """Appends padding to the queries and to the keys. It repeats the last positions."""
        edge = lambda size: lambda x: jnp.pad(x, ((0, 0), (0, size)), mode="edge")
        segments = lambda x, size, value: jnp.pad(x, ((0, 0), (0, size)), constant_values=value)
        padded = Limits(*jax.tree.map(edge(queries), self.queries), *map(edge(keys), self.keys))
        q_segments = segments(self.q_segments, queries, -1)
        return padded.replace(q_segments=q_segments, k_segments=segments(self.k_segments, keys, -2))

    @property
    def queries(self) -> tuple[jax.Array | None, ...]:
        return self.q_segments, self.q_first, self.q_last

    @property
    def keys(self) -> tuple[jax.Array, ...]:
        return self.k_segments, self.k_positions

    def allowed(self) -> jax.Array:
        """Returns whether each query may attend to each key, where all arrays broadcast."""
        allowed = self.q_segments == self.k_segments
        if self.q_first is not None:
            allowed &= self.k_positions >= self.q_first
        if self.q_last is not None:
            allowed &= self.k_positions <= self.q_last
        return allowed

    def states(self, t: int, s: int) -> jax.Array:
        """Returns int32[B, I, J]: whether each tile is EMPTY, PARTIAL or FULL, plus its kind. A
        tile may be PARTIAL although its mask is empty or full."""
        blocks = lambda x, size: x.reshape(len(x), -1, size)
        ends = lambda x, size: [f(blocks(x, size), axis=-1) for f in (jnp.min, jnp.max)]
        of_queries = lambda x: tuple(y[:, :, None] for y in ends(x, t))
        of_keys = lambda x: tuple(y[:, None, :] for y in ends(x, s))
        (q_low, q_high), (k_low, k_high) = of_queries(self.q_segments), of_keys(self.k_segments)
        (near, far) = of_keys(self.k_positions)
        empty = (q_high < k_low) | (k_high < q_low)
        full = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        if self.q_first is not None:
            lowest, highest = of_queries(self.q_first)
            empty, full = empty | (far < lowest), full & (near >= highest)
        if self.q_last is not None:
            lowest, highest = of_queries(self.q_last)
            empty, full = empty | (near > highest), full & (far <= lowest)
        used = jnp.where(full, FULL, PARTIAL)
        if self.kinds_1xIxJ is not None:
            used = jnp.where(self.kinds_1xIxJ == EACH, PARTIAL, used + self.kinds_1xIxJ)
        return jnp.where(empty, EMPTY, used).astype(jnp.int32)


def write_column(column_ref, row_ref) -> None:
    """Copies [1, t] to [t, LANES]: element t to all lanes of row t."""
    column_ref[...] = jnp.broadcast_to(row_ref[...], (LANES, row_ref.shape[1])).T


def widen(x_txL: jax.Array, width: int) -> jax.Array:
    """Returns [t, width], the first lanes of `x_txL` repeated. All lanes of a row are equal."""
    return jnp.tile(x_txL, (1, -(-width // LANES)))[:, :width]


@struct.dataclass
class Schedule:
    """The tiles of each block of rows, int32, flat."""

    first: jax.Array  # [B * I]: the first tile of a block that is not empty
    end: jax.Array  # [B * I]: after the last one
    states: jax.Array  # [B * I * J]
    blocks: tuple[int, int] = struct.field(pytree_node=False)  # (I, J)
    batched: bool = struct.field(pytree_node=False)  # B > 1; else, all sequences have equal tiles

    @staticmethod
    def of(states_BxIxJ: jax.Array) -> "Schedule":
        batch, *blocks = states_BxIxJ.shape
        used, j = states_BxIxJ > EMPTY, np.arange(blocks[1], dtype=np.int32)
        first = jnp.min(jnp.where(used, j, blocks[1]), axis=-1).reshape(-1)
        end = jnp.max(jnp.where(used, j + 1, 0), axis=-1).reshape(-1)
        return Schedule(first, end, states_BxIxJ.reshape(-1), tuple(blocks), batch > 1)

    def for_each_tile(self, process: Callable, kinds: tuple[int, ...]) -> None:
        """Calls process(j, masked, kind) for the tiles of a kernel's current block."""
        rows, columns = self.blocks
        block = pl.program_id(2) + (pl.program_id(1) * rows if self.batched else 0)

        def step(j, _):
            state = self.states[block * columns + j]
            for kind in kinds:
                pl.when(state == PARTIAL + kind)(lambda kind=kind: process(j, True, kind))
                if kind != EACH or len(kinds) == 1:
                    pl.when(state == FULL + kind)(lambda kind=kind: process(j, False, kind))

        lax.fori_loop(self.first[block], self.end[block], step, None)
