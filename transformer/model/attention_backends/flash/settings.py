"""What the forward and the backward kernel share: settings, and the logits of a tile."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer.model.attention_backends.blockwise import MASKED
from transformer.model.attention_backends.flash import toeplitz
from transformer.model.attention_backends.flash.tiles import EACH, Limits
from transformer.model.dropout import keep_pairs, token_bits
from transformer.model.positions import Terms

NT, NN, TN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))
"""Dimension numbers of products with both operands as they are (NN) or with one transposed."""

product = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)


class Settings(NamedTuple):
    """The static part of attention."""

    q_block: int  # queries per tile
    k_block: int  # keys per tile
    reach: int = 0  # the bias is given for the distances from 1 - reach to T - 1
    soft_cap: float = 0.0
    dropout: float = 0.0
    heads: int = 1  # query heads on all devices
    exact: bool = False  # results are float32, not of the type of what they belong to
    vmem: int = 96 * 2**20  # bytes of on-chip memory that a kernel may use
    interpret: bool = False
    kinds: tuple[int, ...] = (EACH,)  # of tiles that may occur (tiles.py)

    def like(self, x: jax.Array, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Returns the shape and type of a result that belongs to `x`."""
        return jax.ShapeDtypeStruct(shape, jnp.float32 if self.exact else x.dtype)

    def call(self, kernel: Callable, name: str, out_shape: list, **grid) -> Callable:
        """Returns `pallas_call` of kernel(settings, schedule, seed, ...) over a grid. The grid is
        (heads, sequences, blocks). Heads may run on several cores."""
        semantics = ("parallel", "arbitrary", "arbitrary")
        params = pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=self.vmem)
        options = {"name": name, "compiler_params": params, "interpret": self.interpret}
        spec = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=2, **grid)
        return pl.pallas_call(functools.partial(kernel, self), out_shape, grid_spec=spec, **options)

    def logits(self, logits: jax.Array, limits: Limits | None) -> jax.Array:
        """Returns the logits of a tile with soft cap and mask. `limits` is None for a tile without
        masked pairs."""
        if self.soft_cap:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return logits if limits is None else jnp.where(limits.allowed(), logits, MASKED)

    def token_bits(self, seed_ref) -> Callable:
        """Returns a function that returns the random bits of a block's tokens. bits(side, block,
        size, shape): `side` is 0 for queries and 1 for keys; the tokens are along the axis of
        `shape` that has their number, `size`. The seed has the seeds of both sides, the indices of
        the first query and key, and those of the device's first sequence and head."""
        stream = (seed_ref[4] + pl.program_id(1)) * self.heads + seed_ref[5] + pl.program_id(0)

        def bits(side: int, block, size: int, shape: tuple[int, int]) -> jax.Array:
            first = seed_ref[2 + side] + block * size
            tokens = first + lax.broadcasted_iota(jnp.int32, shape, 0 if shape[0] == size else 1)
            return token_bits(seed_ref[side], stream, tokens)

        return bits

    def drop(self, weights: jax.Array, q_bits: jax.Array, k_bits: jax.Array) -> jax.Array:
        """Returns the weights after dropout."""
        keep = keep_pairs(self.dropout, q_bits, k_bits)
        return jnp.where(keep, weights / (1.0 - self.dropout), 0.0)


def row_spec(x_Bx1xT: jax.Array, block: int = 0) -> pl.BlockSpec:
    """A sequence of [B, 1, T], or one block of it. B may be 1, for all sequences."""
    (batch, _, T), is_block = x_Bx1xT.shape, block > 0
    index = lambda n, b, i, *_: (b if batch > 1 else 0, 0, i if is_block else 0)
    return pl.BlockSpec((None, 1, block or T), index)


def head_spec(size: int, index: Callable) -> Callable[[int], pl.BlockSpec]:
    """Returns the function of H that returns a block of [B, N, T, H], `size` tokens of a head.
    `index(n, i)` returns the head and the block, where n and i are those of the results."""
    return lambda H: pl.BlockSpec((None, None, size, H), lambda n, b, i, *_: (b, *index(n, i), 0))


def f32(*shape: int):
    """Scratch memory for float32 numbers."""
    return pltpu.VMEM(shape, jnp.float32)


def prepared(terms: Terms, dtype, reverse: bool = False) -> Terms:
    """Returns the terms as the kernels need them: a packed bias, tables of this type, and lines and
    rows with an axis of 1. The bias is reversed for tiles whose lanes are queries."""
    bias_NxD = terms.bias_NxD[:, ::-1] if reverse and terms.bias_NxD is not None else terms.bias_NxD
    rest = terms.replace(bias_NxD=None, lines=None, rows_BxNxT=None)
    tables = jax.tree.map(lambda x: x.astype(dtype), rest)
    lines, rows = jax.tree.map(lambda x: x[..., None, :], (terms.lines, terms.rows_BxNxT))
    more = {"lines": lines, "rows_BxNxT": rows}
    return tables.replace(bias_NxD=toeplitz.packed(bias_NxD), **more)


def term_specs(terms: Terms, row: pl.BlockSpec) -> Terms:
    """The blocks of a head: of [N, 8, D], of [N, D, H], of lines, in the memory of scalars, and the
    block `row` of its rows."""
    of_head = lambda x, **memory: pl.BlockSpec(
        (None, *x.shape[1:]), lambda n, *_: (n, 0, 0), **memory
    )
    specs = jax.tree.map(of_head, terms)
    lines = jax.tree.map(functools.partial(of_head, memory_space=pltpu.SMEM), terms.lines)
    return specs.replace(lines=lines, rows_BxNxT=None if terms.rows_BxNxT is None else row)
