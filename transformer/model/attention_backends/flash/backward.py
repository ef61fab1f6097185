"""The backward kernel of flash attention (Dao et al. 2022) on TPUs.

One kernel computes all gradients, with five products per tile: the logits are computed once. The
grid runs over heads, sequences and blocks of keys. The queries of a head and the gradients of its
outputs stay in on-chip memory, and a loop passes over those of their blocks that the mask allows.
The gradients of a head's queries and of its bias are summed in on-chip memory, in the order of the
loop, so repeated gradients are equal bit by bit.

The rows of a tile are keys and its lanes are queries, so that only one product needs a transposed
tile. With D = sum(dO * O), d logits = weights * (d weights - D).

Shape suffixes: B batch, N query heads, K key/value heads, T query length, S key length, H head size
(of values: V), D distances, t queries per block, s keys per block."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer.model.attention_backends.flash import content, settings as shared, tiles, toeplitz
from transformer.model.attention_backends.flash.bias import Bias
from transformer.model.attention_backends.flash.settings import NN, NT, TN, Settings, product
from transformer.model.attention_backends.flash.tiles import LANES, Limits, widen
from transformer.model.positions import Terms


def backward(
    settings: Settings, q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, limits: Limits, terms: Terms, seed,
    lse_BxNxT, delta_BxNxT, d_out_BxNxTxV, learned: bool,
) -> tuple:  # fmt: skip
    """Returns the gradients of queries, keys, values and, if `learned`, the terms. `delta_BxNxT` is
    D. The gradients of keys and values are per query head, [B, N, S, ...]."""
    (batch, heads, T, H), (_, kv_heads, S, V) = q_BxNxTxH.shape, v_BxKxSxV.shape
    t, s = settings.q_block, settings.k_block
    terms = shared.prepared(terms, k_BxKxSxH.dtype, reverse=True)
    d_terms = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), terms)
    d_terms = d_terms if learned else Terms(terms.scale)
    schedule = tiles.Schedule.of(jnp.swapaxes(limits.states(t, s), 1, 2))
    queries, keys = jax.tree.map(lambda x: x[:, None], (limits.queries, limits.keys))
    of_queries = shared.head_spec(T, lambda n, j: (n, 0))
    of_keys = shared.head_spec(s, lambda n, j: (lax.div(n, heads // kv_heads), j))
    of_results = shared.head_spec(s, lambda n, j: (n, j))
    row = pl.BlockSpec((None, None, 1, T), lambda n, b, j, *_: (b, n, 0, 0))
    call = settings.call(
        _kernel, name="flash_backward", grid=(heads, batch, S // s),
        in_specs=[
            *(of_queries(H), of_keys(H), of_keys(V)), jax.tree.map(shared.row_spec, queries),
            jax.tree.map(functools.partial(shared.row_spec, block=s), keys),
            shared.term_specs(terms, row),
            *(row, row, of_queries(V)),
        ],
        out_specs=[of_queries(H), of_results(H), of_results(V), shared.term_specs(d_terms, row)],
        out_shape=[
            settings.like(q_BxNxTxH, (batch, heads, T, H)),
            settings.like(k_BxKxSxH, (batch, heads, S, H)),
            settings.like(v_BxKxSxV, (batch, heads, S, V)), d_terms,
        ],
        scratch_shapes=[
            *(shared.f32(T, H), shared.f32(s, H), shared.f32(s, V)),
            *(toeplitz.table(terms.bias_NxD), toeplitz.table(d_terms.bias_NxD)),
            jax.tree.map(lambda x: pltpu.VMEM((s, LANES), x.dtype), keys),
            pltpu.VMEM((s, LANES), jnp.int32) if settings.dropout else None,
            [] if terms.lines is None else [shared.f32(s, t)] * 3,
        ],
    )  # fmt: skip
    qkv = q_BxNxTxH, k_BxKxSxH, v_BxKxSxV
    rows = lse_BxNxT[:, :, None], delta_BxNxT[:, :, None], d_out_BxNxTxV
    d_q, d_k, d_v, d_terms = call(schedule, seed, *qkv, queries, keys, terms, *rows)
    if d_terms.bias_NxD is not None:
        d_terms = d_terms.replace(bias_NxD=toeplitz.unpacked(d_terms.bias_NxD)[:, ::-1])
    in_rows = d_terms.lines, d_terms.rows_BxNxT
    d_lines, d_rows = jax.tree.map(lambda x: jnp.squeeze(x, -2), in_rows)
    d_terms = d_terms.replace(lines=d_lines, rows_BxNxT=d_rows)
    return d_q, d_k, d_v, *([d_terms] if learned else [])


def _kernel(settings: Settings, schedule: tiles.Schedule, seed_ref, *refs):
    q_ref, k_ref, v_ref, query_refs, key_refs, tables, lse_ref, delta_ref, d_out_ref = refs[:9]
    d_q_ref, d_k_ref, d_v_ref, d_tables, d_q_sum, d_k_sum, d_v_sum = refs[9:16]
    table_ref, d_table_ref, column_refs, bits_ref, bend_refs = refs[16:]
    t, s, T = settings.q_block, settings.k_block, q_ref.shape[0]
    sequence, block = pl.program_id(1), pl.program_id(2)
    is_last = lambda axis: pl.program_id(axis) == pl.num_programs(axis) - 1
    in_first = (sequence == 0) & (block == 0)
    if table_ref is not None:
        pl.when(in_first)(lambda: toeplitz.build(tables.bias_NxD, table_ref))
    _clear_if(in_first, (d_table_ref, d_tables.replace(lines=None, rows_BxNxT=None)))
    _clear_if(in_first, d_tables.lines, _clear_scalars)
    _clear_if(block == 0, (d_q_sum, d_tables.rows_BxNxT))
    _clear(d_k_sum)
    _clear(d_v_sum)
    jax.tree.map(tiles.write_column, column_refs, key_refs)
    if settings.dropout:
        bits = settings.token_bits(seed_ref)
        bits_ref[...] = bits(1, block, s, bits_ref.shape)

    def add_tile(other, masked: bool, kind: int):
        queries = pl.ds(pl.multiple_of(other * t, t), t)
        q, k, d_out = q_ref[queries, :], k_ref[...], d_out_ref[queries, :]
        windows = content.Windows.of(tables, other * t, block * s, settings.reach, kind, "keys")
        of_tile = lambda: Limits(
            *jax.tree.map(lambda ref: ref[:, queries], query_refs),
            *(widen(ref[...], t) for ref in column_refs),
        )
        start = toeplitz.first_row(block * s, other * t, T)
        products = windows.add_products(product(k, q, NT), q, k)
        rows_ref = jax.tree.map(lambda ref: ref.at[:, queries], tables.rows_BxNxT)
        bias = Bias.of(table_ref, start, tables.lines, rows_ref, bend_refs)
        logits = settings.logits(bias.add(products), of_tile() if masked else None)
        weights = dropped = jnp.exp(logits - lse_ref[:, queries])
        d_weights = product(v_ref[...], d_out, NT)
        if windows.values is not None:
            d_weights += windows.values.expand(d_out, (s, t))
        if settings.dropout:
            q_bits, k_bits = bits(0, other, t, (1, t)), widen(bits_ref[...], t)
            dropped, d_weights = (settings.drop(x, q_bits, k_bits) for x in (weights, d_weights))
        d_v_sum[...] += product(dropped.astype(d_out.dtype), d_out, NN)
        if windows.values is not None:
            windows.values.gradient(dropped, d_out, d_tables.values_NxDxV)
        d_logits = weights * (d_weights - delta_ref[:, queries])
        if settings.soft_cap:
            d_logits *= 1.0 - jnp.minimum(jnp.square(logits / settings.soft_cap), 1.0)
        bias.add_gradients(d_logits, d_table_ref, d_tables, rows_ref, queries)
        windows.add_gradients(d_logits, q, k, d_q_sum.at[queries, :], d_k_sum, d_tables)
        d_logits = d_logits.astype(q.dtype)
        d_k_sum[...] += product(d_logits, q, NN)
        d_q_sum[queries, :] += product(d_logits, k, TN)

    schedule.for_each_tile(add_tile, settings.kinds)
    _write(d_k_ref, d_k_sum)
    _write(d_v_ref, d_v_sum)
    pl.when(is_last(2))(lambda: _write(d_q_ref, d_q_sum))
    if d_table_ref is not None:
        collect = functools.partial(toeplitz.collect, d_table_ref, d_tables.bias_NxD)
        pl.when(is_last(1) & is_last(2))(collect)


def _clear(ref) -> None:
    ref[...] = jnp.zeros_like(ref)


def _clear_scalars(ref) -> None:
    def clear(i, _):
        ref[0, i] = 0.0

    lax.fori_loop(0, ref.shape[1], clear, None)


def _clear_if(condition, refs, clear: Callable = _clear) -> None:
    for ref in jax.tree.leaves(refs):
        pl.when(condition)(functools.partial(clear, ref))


def _write(ref, total_ref) -> None:
    ref[...] = total_ref[...].astype(ref.dtype)
