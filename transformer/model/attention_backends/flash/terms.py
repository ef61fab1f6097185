"""The terms of a position scheme (positions/base.py) as the kernels need them.

If the tables of a scheme are constant from a distance on, with the vectors K, Q and V, these are
added to all keys, queries and values. Then the tables are zero there, and most tiles need none:

    q' = q + Q,   k' = k + K,   v' = v + V,   keys' = keys - K,   queries' = queries - Q
    q.k + q.keys + k.queries = q'.k' + q'.keys' + k'.queries' - (Q.keys' + K.queries' + Q.K)

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head size
(of values: V), D distances, I blocks of queries, J blocks of keys."""

import jax
import jax.numpy as jnp

from transformer.model.attention_backends.flash.tiles import EACH, NONE, ONE
from transformer.model.positions import Position, Terms


def shapes(position: Position | None) -> Terms:
    """Returns the shapes of the terms at one distance."""
    terms_of = lambda distances_D: position.terms(distances_D, 1.0) if position else Terms(1.0)
    return jax.eval_shape(terms_of, jax.ShapeDtypeStruct((1,), jnp.int32))


def prepare(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, position: Position, scale: float, distances_D):
    """Returns q, k, v, and the other terms of all heads, float32. `distances_D` are -reach..T, plus
    an offset. The bias is returned at distances 1 - reach..T - 1. The tables for queries begin at
    distance T, and that for keys at -reach, so that tiles read them in the order of their lanes."""
    f32 = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    terms, heads = f32(position.terms(distances_D, scale)), q_BxTxNxH.shape[2]
    q, k, v = _add(terms.u_NxH, q_BxTxNxH), k_BxSxKxH, v_BxSxKxV
    if terms.ends:
        far = f32(position.terms(jnp.asarray(terms.ends[1:], jnp.int32), scale))
        q, k, v, terms = _centered(q, k, v, terms, far)
    by_head = lambda x: jnp.broadcast_to(x, (heads, *x.shape[1:]))
    terms = jax.tree.map(by_head, terms.replace(u_NxH=None))
    part = lambda x, *steps: None if x is None else x[:, slice(*steps)]
    scaled = jax.tree.map(lambda x: terms.scale * x, terms.queries_NxDxH)  # as queries are
    bias_NxD, keys = part(terms.bias_NxD, 1, -1), part(terms.keys_NxDxH, None, 0, -1)
    queries, values = part(scaled, 0, -1), part(terms.values_NxDxV, None, 0, -1)
    tables = {"keys_NxDxH": keys, "queries_NxDxH": queries, "values_NxDxV": values}
    return q, k, v, terms.replace(bias_NxD=bias_NxD, **tables)


def _add(y_NxH: jax.Array | None, x_BxTxNxH: jax.Array) -> jax.Array:
    return x_BxTxNxH if y_NxH is None else (x_BxTxNxH + y_NxH).astype(x_BxTxNxH.dtype)


def _centered(q, k, v, terms: Terms, far: Terms):
    """Returns q, k, v and the terms, with tables that are zero at far distances."""
    vector = lambda table: jax.tree.map(lambda x: x[:, 0], table)
    Q, K, V = vector(far.queries_NxDxH), vector(far.keys_NxDxH), vector(far.values_NxDxV)
    minus = lambda table, x: jax.tree.map(lambda table, x: table - x[:, None], table, x)
    keys, queries = minus(terms.keys_NxDxH, K), minus(terms.queries_NxDxH, Q)
    bias_NxD = terms.bias_NxD
    if K is not None and Q is not None:
        dot = lambda x, table: jnp.einsum("NH,NDH->ND", x, table)
        more_NxD = terms.scale * (dot(Q, keys) + dot(K, queries) + dot(Q, K[:, None]))
        bias_NxD = -more_NxD if bias_NxD is None else bias_NxD - more_NxD
    kv_heads = max(k.shape[2], *(1 if x is None else len(x) for x in (K, V)))
    k, v = (jnp.repeat(x, kv_heads // x.shape[2], axis=2) for x in (k, v))
    values = minus(terms.values_NxDxV, V)
    tables = {"keys_NxDxH": keys, "queries_NxDxH": queries, "values_NxDxV": values}
    return _add(Q, q), _add(K, k), _add(V, v), terms.replace(bias_NxD=bias_NxD, **tables)


def kinds_of_tiles(offset, lengths, sizes, ends: tuple[int, int] | None) -> jax.Array | None:
    """Returns int32[1, I, J]: the kind of each tile (tiles.py). None if the tables have no ends.
    `lengths` and `sizes` are the numbers of queries and keys, and those in a tile. `offset` is the
    distance of the first query and the first key."""
    if ends is None:
        return None
    (T, S), (t, s) = lengths, sizes
    nearest_IxJ = offset + t * jnp.arange(T // t)[:, None] - s * jnp.arange(1, S // s + 1) + 1
    is_first_IxJ = nearest_IxJ + t + s - 2 <= ends[0]
    kinds_IxJ = jnp.where(nearest_IxJ >= ends[1], NONE, jnp.where(is_first_IxJ, ONE, EACH))
    return kinds_IxJ[None].astype(jnp.int32)
