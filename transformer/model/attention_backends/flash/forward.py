"""The forward kernel of flash attention (Dao et al. 2022) on TPUs. The grid runs over heads,
sequences and blocks of queries. The keys and values of a head stay in on-chip memory, and a loop
passes over those of their blocks that the mask allows. As in blockwise.py, m is the running maximum
of a query's logits, l the running sum of exp(logit - m). The rows of a tile are queries and its
lanes are keys. m and l are stored in all lanes of a row.
Shape suffixes: B batch, N query heads, K key/value heads, T query length, S key length, H head size
(of values: V), D distances, t queries per block, s keys per block."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from transformer.model.attention_backends.blockwise import LOWEST
from transformer.model.attention_backends.flash import content, settings as shared, tiles, toeplitz
from transformer.model.attention_backends.flash.bias import Bias
from transformer.model.attention_backends.flash.settings import NN, NT, Settings, product
from transformer.model.attention_backends.flash.tiles import LANES, Limits, widen
from transformer.model.positions import Terms


def forward(
    settings: Settings, q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, limits: Limits, terms: Terms, seed
) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs, [B, N, T, V], and the log-sum-exp of the logits, float32[B, N, T]: 0 and
    `LOWEST` for a query without keys. Queries are scaled. `terms` are those of `Call.of`."""
    (batch, heads, T, H), (_, kv_heads, S, V) = q_BxNxTxH.shape, v_BxKxSxV.shape
    t, s = settings.q_block, settings.k_block
    terms = shared.prepared(terms, k_BxKxSxH.dtype)
    schedule = tiles.Schedule.of(limits.states(t, s))
    queries, keys = jax.tree.map(lambda x: x[:, None], (limits.queries, limits.keys))
    of_queries = shared.head_spec(t, lambda n, i: (n, i))
    of_keys = shared.head_spec(S, lambda n, i: (lax.div(n, heads // kv_heads), 0))
    row = pl.BlockSpec((None, None, 1, t), lambda n, b, i, *_: (b, n, 0, i))
    call = settings.call(
        _kernel, name="flash_forward", grid=(heads, batch, T // t),
        in_specs=[
            *(of_queries(H), of_keys(H), of_keys(V)),
            jax.tree.map(functools.partial(shared.row_spec, block=t), queries),
            jax.tree.map(shared.row_spec, keys), shared.term_specs(terms, row),
        ],
        out_specs=[of_queries(V), row],
        out_shape=[
            settings.like(v_BxKxSxV, (batch, heads, T, V)),
            jax.ShapeDtypeStruct((batch, heads, 1, T), jnp.float32),
        ],
        scratch_shapes=[
            *[shared.f32(t, LANES)] * 2, shared.f32(t, V), toeplitz.table(terms.bias_NxD),
            jax.tree.map(lambda x: pltpu.VMEM((t, LANES), x.dtype), queries),
            pltpu.VMEM((t, LANES), jnp.int32) if settings.dropout else None,
            *((None, []) if terms.lines is None else (shared.f32(t, LANES), [shared.f32(t, s)])),
        ],
    )  # fmt: skip
    out, lse = call(schedule, seed, q_BxNxTxH, k_BxKxSxH, v_BxKxSxV, queries, keys, terms)
    return out, lse[:, :, 0]


def _kernel(settings: Settings, schedule: tiles.Schedule, seed_ref, *refs):
    q_ref, k_ref, v_ref, query_refs, key_refs, tables, out_ref, lse_ref = refs[:8]
    m_ref, l_ref, sum_ref, table_ref, column_refs, bits_ref, rows_ref, bend_refs = refs[8:]
    t, s = settings.q_block, settings.k_block
    block, V = pl.program_id(2), v_ref.shape[-1]
    if table_ref is not None:
        in_first = (pl.program_id(1) == 0) & (block == 0)
        pl.when(in_first)(lambda: toeplitz.build(tables.bias_NxD, table_ref))
    jax.tree.map(tiles.write_column, (column_refs, rows_ref), (query_refs, tables.rows_BxNxT))
    m_ref[...] = jnp.full_like(m_ref, LOWEST)
    l_ref[...] = jnp.zeros_like(l_ref)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    if settings.dropout:
        bits = settings.token_bits(seed_ref)
        bits_ref[...] = bits(0, block, t, bits_ref.shape)

    def add_tile(other, masked: bool, kind: int):
        keys = pl.ds(pl.multiple_of(other * s, s), s)
        of_tile = lambda: Limits(
            *jax.tree.map(lambda ref: widen(ref[...], s), column_refs),
            *(ref[:, keys] for ref in key_refs),
        )
        start = toeplitz.first_row(block * t, other * s, settings.reach)
        q, k = q_ref[...], k_ref[keys, :]
        windows = content.Windows.of(tables, block * t, other * s, settings.reach, kind, "queries")
        products = windows.add_products(product(q, k, NT), q, k)
        bias = Bias.of(table_ref, start, tables.lines, rows_ref, bend_refs)
        logits = settings.logits(bias.add(products), of_tile() if masked else None)
        old_m, old_l = m_ref[...], l_ref[...]
        m = jnp.maximum(old_m, jnp.max(logits, axis=1, keepdims=True))
        weights = jnp.exp(logits - widen(m, s))
        rescale = jnp.exp(old_m - m)
        m_ref[...] = m
        l_ref[...] = rescale * old_l + jnp.sum(weights, axis=1, keepdims=True)
        if settings.dropout:
            weights = settings.drop(weights, widen(bits_ref[...], s), bits(1, other, s, (1, s)))
        read = product(weights.astype(v_ref.dtype), v_ref[keys, :], NN)
        if windows.values is not None:
            read += windows.values.read(weights)
        sum_ref[...] = widen(rescale, V) * sum_ref[...] + read

    schedule.for_each_tile(add_tile, settings.kinds)
    total = jnp.where(l_ref[...] > 0, l_ref[...], 1.0)
    out_ref[...] = (sum_ref[...] / widen(total, V)).astype(out_ref.dtype)
    lse_ref[...] = (m_ref[...] + jnp.log(total)).T[:1]
