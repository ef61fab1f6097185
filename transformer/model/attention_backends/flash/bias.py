"""The bias of a tile: a function of distance (toeplitz.py), or a function f of a row times it.

A scheme such as FIRE adds f(x) to the logit of the query t and the key s, where x = rows[t] r[t -
s], and f is linear between knots (`Lines`). In a tile, x lies between few of them. A loop over
these knots selects the line of each element, with a comparison and two selections. It runs for a
few rows of the tile at a time, so that the line of each element stays in registers.

With g the gradient of f(x), those of a line's a and b are the sums of g and g x over its elements.
They are computed as differences of sums over all elements after a knot.

Shape suffixes: N heads, J knots, I = J - 1 lines."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from transformer.model.attention_backends.flash import toeplitz
from transformer.model.attention_backends.flash.tiles import LANES, widen
from transformer.model.positions.base import Lines, Terms

ELEMENTS = 2**14  # of a tile at a time: 16 vector registers


class Bend(NamedTuple):
    """The function f of the elements of a tile."""

    lines: Lines
    first: jax.Array  # the line of the smallest x
    last: jax.Array  # the line of the largest x
    f_ref: Any  # f(x)
    x_ref: Any = None  # with gradients
    slope_ref: Any = None  # with gradients: the slope of each element's line

    @staticmethod
    def of(table_ref, start, rows_ref, lines: Lines, refs: list) -> "Bend":
        """Computes f(x). `rows_ref` has a column [t, LANES], or a row [1, lanes] of the tile."""
        (size, lanes), knots = refs[0].shape, lines.knots_NxJ
        rows = rows_ref[...]
        window = table_ref[pl.ds(start - lanes + LANES, size + lanes - LANES), :]
        bounds = [(jnp.min(x), jnp.max(x)) for x in (window, rows)]
        ends = [x * y for x, y in itertools.product(*bounds)]
        low, high = (functools.reduce(f, ends) for f in (jnp.minimum, jnp.maximum))
        bend = Bend(lines, _line(knots, low), _line(knots, high), *refs)

        def compute(at):
            r = toeplitz.expand(table_ref, start + at.start, (at.size, lanes))
            bend._select(r * (widen(rows_ref[at, :], lanes) if len(rows) > 1 else rows), at)

        bend._for_each_part(compute)
        return bend

    def _select(self, x: jax.Array, at) -> None:
        """Writes f(x) and the slopes of these rows of the tile."""
        knots, refs = self.lines.knots_NxJ, (self.lines.a_NxI, self.lines.b_NxI)

        def after_knot(i, ab):
            after = x >= knots[0, i]
            return tuple(jnp.where(after, ref[0, i], y) for ref, y in zip(refs, ab, strict=True))

        start = tuple(jnp.full_like(x, ref[0, self.first]) for ref in refs)
        a, b = lax.fori_loop(self.first + 1, self.last + 1, after_knot, start)
        self.f_ref[at, :] = a + b * x
        if self.x_ref is not None:
            self.x_ref[at, :], self.slope_ref[at, :] = x, b

    def add_gradients(self, d_tile: jax.Array, d_lines: Lines) -> jax.Array:
        """Adds the gradients of the lines, and returns that of x."""
        d_ref, knots = self.f_ref, self.lines.knots_NxJ  # f is not needed again
        d_ref[...] = d_tile
        sums = d_lines.a_NxI, d_lines.b_NxI
        few = toeplitz.SUBLANES
        fold = lambda y: sum(y[i : i + few] for i in range(0, len(y), few))

        def add(i, _):
            def add_part(at, d_ab):
                x = self.x_ref[at, :]
                d = jnp.where((x >= knots[0, i]) | (i == self.first), d_ref[at, :], 0.0)
                return d_ab[0] + fold(d), d_ab[1] + fold(d * x)

            start = (jnp.zeros((few, d_ref.shape[1]), jnp.float32),) * 2
            for ref, d in zip(sums, self._for_each_part(add_part, start), strict=True):
                after = jnp.sum(d)
                ref[0, i] += after
                ref[0, jnp.maximum(i - 1, 0)] -= jnp.where(i > self.first, after, 0.0)

        lax.fori_loop(self.first, self.last + 1, add, None)
        return d_tile * self.slope_ref[...]

    def _for_each_part(self, process: Callable, start=None):
        """Calls process(index of some rows) or, with a start, process(index of rows, result)."""
        rows = ELEMENTS // self.f_ref.shape[1]
        at = lambda i: pl.ds(pl.multiple_of(i * rows, rows), rows)
        step = lambda i, x: process(at(i)) if start is None else process(at(i), x)
        return lax.fori_loop(0, self.f_ref.shape[0] // rows, step, start)


def _line(knots_1xJ, x: jax.Array) -> jax.Array:
    """Returns the index of the line that x is on, by a binary search."""
    last, line = knots_1xJ.shape[1] - 2, jnp.int32(0)
    for bit in reversed(range(last.bit_length())):
        other = jnp.minimum(line + 2**bit, last)
        line = jnp.where(knots_1xJ[0, other] <= x, other, line)
    return line


class Bias(NamedTuple):
    """The bias of one tile."""

    table_ref: Any  # of toeplitz.py; None without a bias
    start: jax.Array  # its row in the table
    bend: Bend | None

    @staticmethod
    def of(table_ref, start, lines: Lines | None, rows_ref, refs: list) -> "Bias":
        """`refs`: memory for the tile, of f(x) and, with gradients, of x and slopes."""
        return Bias(table_ref, start, lines and Bend.of(table_ref, start, rows_ref, lines, refs))

    def add(self, tile: jax.Array) -> jax.Array:
        """Returns the tile plus its bias."""
        if self.bend is not None:
            return tile + self.bend.f_ref[...]
        return tile if self.table_ref is None else toeplitz.add(tile, self.table_ref, self.start)

    def add_gradients(self, d_tile: jax.Array, d_table_ref, d_terms: Terms, rows_ref, queries):
        """Adds the gradients of a tile whose lanes are `queries`, if the bias is learned."""
        if d_table_ref is not None and self.bend is not None:
            d_x, rows = self.bend.add_gradients(d_tile, d_terms.lines), rows_ref[...]
            d_rows = jnp.sum(d_x * self.bend.x_ref[...], axis=0, keepdims=True) / rows
            d_terms.rows_BxNxT[:, queries] += d_rows
            d_tile = d_x * rows
        if d_table_ref is not None:
            toeplitz.accumulate(d_tile, d_table_ref, self.start)
