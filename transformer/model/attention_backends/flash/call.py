"""Calls of the kernels: padding to whole tiles, the bias of all distances, and sharding. Each
device computes its own sequences and heads. Shape suffixes: B batch, T query length, S key length,
N query heads, K key/value heads, H head size (of values: V), D distances."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer.model.attention_backends.base import Inputs, by_head
from transformer.model.attention_backends.flash import gpu
from transformer.model.attention_backends.flash.backward import backward
from transformer.model.attention_backends.flash.forward import forward
from transformer.model.attention_backends.flash.settings import Settings
from transformer.model.attention_backends.flash.terms import kinds_of_tiles, prepare, shapes
from transformer.model.attention_backends.flash.tiles import EACH, LANES, NONE, ONE, Limits
from transformer.model.dropout import seeds
from transformer.model.masks import REAL, pairs
from transformer.model.positions import Terms
from transformer.model.sharding import fitting, platform

MEMORY = {"": 128, "TPU v4": 16, "TPU v5": 64, "TPU v5p": 64, "TPU7x": 64}
"""MiB of on-chip vector memory of a core, by kind of device ("" for others)."""

COST = {
    "": {512: 1.0, 256: 1.4, 128: 2.7},
    "TPU v6 lite": {1024: 0.9, 512: 1.0, 256: 2.0, 128: 2.9},
}
"""Time per pair of tokens by kind of device and number of tokens per tile, relative to 512, from
experiments/benchmarks/tile_sizes.py."""


def bytes_per_pair(lines: bool) -> int:
    """Returns the on-chip memory for the tiles that a kernel works on, per pair of tokens."""
    return 40 if lines else 24


def bytes_per_token(itemsize: int, H: int, V: int, tables: int, lines: bool) -> int:
    """Returns the on-chip memory that the backward pass needs per token. It holds queries, the
    gradients of outputs and of queries (float32), and five rows of numbers (seven with lines), each
    in two buffers; and the sum of the gradients of queries. A sequence has two rows of the bias
    table and of its gradient per token, and the 8 copies that they are built from in two buffers.
    So have the position scheme's tables of vectors and their gradients."""
    lanes = lambda size: -(-size // LANES) * LANES
    of_queries = 2 * itemsize * (lanes(H) + lanes(V)) + (2 + 1) * 4 * lanes(H)
    of_rows = 2 * 4 * (7 if lines else 5)
    of_bias = 2 * 2 * 4 * (LANES + 2 * 8)
    return of_queries + of_rows + of_bias + tables * 2 * 2 * (itemsize + 4) * lanes(max(H, V))


def on_gpu() -> bool:
    """Returns whether the kernels are those for GPUs."""
    return platform() == "gpu"


def of_device(table: dict):
    """Returns the entry of `MEMORY` or `COST` for the device that the program is traced for."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return table.get(device.device_kind, table[""])


def block_size(itemsize: int, H: int, V: int, tables: int, lines: bool) -> int:
    """Returns the largest number of tokens that fits into on-chip memory, whole tiles if possible.
    GPUs read keys and values from their main memory."""
    if on_gpu():
        return 2**30
    memory, tile = of_device(MEMORY) * 2**20, max(of_device(COST))
    free = int(0.9 * memory) - bytes_per_pair(lines) * tile**2
    most = free // bytes_per_token(itemsize, H, V, tables, lines)
    return most // tile * tile or max(most // LANES * LANES, LANES)


def tile_size(tokens: int, causal: bool, ends: bool) -> int:
    """Returns the number of tokens per tile for as many queries as keys. Smaller tiles need less
    padding, and with a causal mask, they have fewer pairs that it forbids. If the tables of a
    scheme are constant from a distance on (`ends`), large tiles would need them more often."""
    blocks = {tile: -(-tokens // tile) for tile in of_device(COST) if tile <= 512 or not ends}
    pairs = {tile: tile**2 * n * (n + 1 if causal else 2 * n) for tile, n in blocks.items()}
    return min(pairs, key=lambda tile: pairs[tile] * of_device(COST)[tile])


class Call(NamedTuple):
    """The static part of a call."""

    settings: Settings  # of the kernels
    scope: jax.named_scope  # by which the planner counts FLOPs (model/masks.py)
    learned: bool  # whether the terms have parameters

    @staticmethod
    def of(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs: Inputs, whole: bool) -> tuple["Call", tuple]:
        """Returns (call, (q, k, v, terms, limits, seed)), padded to whole tiles and by head.
        `whole`: there are no other queries and keys. Otherwise, results are float32."""
        T, S, N = q_BxTxNxH.shape[1], k_BxSxKxH.shape[1], q_BxTxNxH.shape[2]
        # If queries and keys start together, causal tiles end less than a tile after their queries.
        causal = inputs.mask.causal and inputs.q_tokens.until_BxT is None
        together = causal and whole and inputs.first is None
        position, seed = inputs.logits_position, jnp.zeros(4, jnp.int32)
        t, s = (tile_size(n, together, bool(shapes(position).ends)) for n in (T, S))
        more_T, more_S = -T % t, -S % s
        reach = min(t + s - LANES, S + more_S) if together else S + more_S
        dropout = inputs.dropout if inputs.dropout_key is not None else 0.0
        if dropout:
            first = seed[:2] if inputs.first is None else inputs.first
            seed = jnp.concatenate([seeds(inputs.dropout_key), first])
        terms, kinds = Terms(inputs.scale), None
        if position is not None:
            q_start, k_start = (x.positions_BxT[0, 0] for x in (inputs.q_tokens, inputs.k_tokens))
            offset = q_start - k_start
            distances_D = offset + jnp.arange(-reach, T + more_T + 1, dtype=jnp.int32)
            args = q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, position, inputs.scale, distances_D
            q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, terms = prepare(*args)
            if terms.lines is not None:
                rows_BxT = position.rows(inputs.q_tokens.positions_in_document)
                rows_BxT = jnp.pad(rows_BxT, ((0, 0), (0, more_T)), mode="edge")
                shape = len(q_BxTxNxH), N, T + more_T
                terms = terms.replace(rows_BxNxT=jnp.broadcast_to(rows_BxT[:, None], shape))
            kinds = kinds_of_tiles(offset, (T + more_T, S + more_S), (t, s), terms.ends)
        pad = lambda x, size: jnp.pad(by_head(x), ((0, 0), (0, 0), (0, size), (0, 0)))
        scaled = (q_BxTxNxH * terms.scale).astype(k_BxSxKxH.dtype)
        has_lines = terms.lines is not None
        # XLA keeps arrays between kernels in the remaining memory.
        head_sizes = q_BxTxNxH.shape[-1], v_BxSxKxV.shape[-1]
        sizes = k_BxSxKxH.dtype.itemsize, *head_sizes, len(terms.tables)
        of_tokens = max(T + more_T, S + more_S) * bytes_per_token(*sizes, has_lines)
        vmem = of_tokens + bytes_per_pair(has_lines) * max(t * s, 512**2)
        numbers = t, s, reach, inputs.soft_cap, dropout, N, not whole, vmem, platform() == "cpu"
        tiles = (EACH,) if terms.ends is None else (EACH, NONE) if causal else (EACH, ONE, NONE)
        # The share of pairs that a causal mask allows differs between pairs of blocks.
        lengths = T + more_T, S + more_S
        scope = pairs(inputs.mask if whole else REAL, inputs.q_tokens, *lengths, t, s)
        call = Call(Settings(*numbers, tiles), scope, bool(jax.tree.leaves(position)))
        limits = Limits.of(inputs).pad(more_T, more_S).replace(kinds_1xIxJ=kinds)
        q, k, v = pad(scaled, more_T), pad(k_BxSxKxH, more_S), pad(v_BxSxKxV, more_S)
        return call, (q, k, v, terms, limits, seed)

    def forward(self, q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, terms: Terms, limits: Limits, seed):
        """Returns (out [B, N, T, V], log-sum-exp float32[B, N, T])."""
        kernel, qkv = gpu.forward if on_gpu() else forward, (q_BxNxTxH, k_BxKxSxH, v_BxKxSxV)
        return self._on_each_device(kernel, 2, *qkv, terms, limits, seed)

    def backward(self, q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, terms, limits, seed, *of_queries):
        """Returns the gradients of q, k, v and the terms. `of_queries`: lse, delta, d_out."""
        kernel = functools.partial(gpu.backward if on_gpu() else backward, learned=self.learned)
        args = (q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, terms, limits, seed, *of_queries)
        d_q, d_k, d_v, *d_terms = self._on_each_device(kernel, 3, *args, learned=self.learned)
        kv_heads = k_BxKxSxH.shape[1]
        of_group = lambda x: jnp.sum(x.reshape(len(x), kv_heads, -1, *x.shape[2:]), axis=2)
        d_terms = d_terms[0] if self.learned else jax.tree.map(jnp.zeros_like, terms)
        return d_q, of_group(d_k), of_group(d_v), d_terms

    def _on_each_device(
        self, kernel, results: int, q, k, v, terms, limits, seed, *more, learned: bool = False
    ):
        """Calls kernel(settings, q, k, v, limits, terms, seed, *more) on every device. `more` and
        the `results` results are [B, N, ...]. If `learned`, the gradient of the terms follows."""
        batch, heads = q.shape[:2]
        batch_axes, head_axes = fitting("batch", batch), fitting("activation_heads", heads)
        if head_axes != fitting("activation_heads", k.shape[1]):  # fewer key heads than devices
            k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))

        def local(q, k, v, limits, terms, seed, *more):
            index = lambda axes: jax.lax.axis_index(axes) if axes else 0
            seed = jnp.stack([*seed, index(batch_axes) * len(q), index(head_axes) * q.shape[1]])
            out = kernel(self.settings, q, k, v, limits, terms, seed, *more)
            if learned and batch_axes:
                rows = out[-1].rows_BxNxT  # of each sequence, unlike the other terms
                d_terms = jax.lax.psum(out[-1].replace(rows_BxNxT=None), batch_axes)
                out = (*out[:-1], d_terms.replace(rows_BxNxT=rows))
            return out

        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and (axes := set(mesh.axis_names) - set(mesh.manual_axes)):
            of_heads, by_sequence = P(batch_axes or None, head_axes or None), P(batch_axes or None)
            of_limits = jax.tree.map(lambda x: by_sequence if len(x) > 1 else P(), limits)
            of_terms = jax.tree.map(lambda _: P(head_axes or None), terms)
            of_rows = None if terms.rows_BxNxT is None else of_heads
            of_terms = of_terms.replace(rows_BxNxT=of_rows)
            in_specs = (*[of_heads] * 3, of_limits, of_terms, P(), *[of_heads] * len(more))
            out_specs = (*[of_heads] * results, *[of_terms] * learned)
            specs = {"in_specs": in_specs, "out_specs": out_specs}
            local = jax.shard_map(local, **specs, axis_names=axes, check_vma=False)
        with self.scope:
            return local(q, k, v, limits, terms, seed, *more)
