"""Attention a block of queries and keys at a time: memory linear in length, in plain JAX, on every machine.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head size; I blocks of queries, J blocks
of keys, t and s positions in one.

The softmax of a row is built up over blocks of keys with a running maximum m, a running sum l of exp(logit - m) and a running
sum of exp(logit - m) v (Milakov & Gimelshein 2018; Rabe & Staats 2021). The backward pass makes each block's weights again from
the row's log-sum-exp (Dao et al. 2022): with D = sum(dO * O), d logits = weights * (d weights - D). A block's logits and what is
read with its weights are those of the plain path (base.py), and their gradients come from there, so that every position scheme,
mask, cap, sink and dropout is served whose logits depend on the pair alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer.model.attention_backends.base import Inputs, logits, read
from transformer.model.masks import REAL

BLOCK = 256
"""Queries, and keys, at a time."""


def blockwise(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, given: Inputs
) -> jax.Array:
    """What `reference` computes. Dropout draws another mask for each block."""
    T, S = q_BxTxNxH.shape[1], k_BxSxKxH.shape[1]
    sizes = (min(BLOCK, T), min(BLOCK, S))
    q_Ixs, q_tokens = cut((q_BxTxNxH, given.q_tokens), sizes[0])
    kv_Jxs, k_tokens = cut(((k_BxSxKxH, v_BxSxKxH), given.k_tokens), sizes[1])
    if S % sizes[1]:
        given = given.replace(mask=given.mask & REAL)
    given = given.replace(q_tokens=q_tokens, k_tokens=k_tokens, position=given.logits_position)
    out_IxBxtxNxH = attend(q_Ixs, *kv_Jxs, given, needed(given, T, S, sizes))
    return join(out_IxBxtxNxH)[:, :T]


def why_not(q, k, v, given: Inputs) -> str | None:
    """What it cannot do, in a few words."""
    position = given.logits_position
    if position is not None and not position.pairwise:
        return "the position scheme looks at all keys of a query at once"
    return None


def needed(given: Inputs, T: int, S: int, sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Pairs of a block of queries and one of keys between which the mask may allow something. Where tokens are known to stand in the
    order of their positions, keys wholly behind or outside a window need not be looked at."""
    t, s = sizes
    pairs = [(i, j) for i in range(-(-T // t)) for j in range(-(-S // s))]
    if not (
        given.mask.within
        and given.q_tokens.order == given.k_tokens.order in ("rows", "growing")
        and T == S
    ):
        return tuple(pairs)
    first, last = (lambda n, size: n * size), (lambda n, size: (n + 1) * size - 1)
    if given.mask.causal and given.q_tokens.until_BxT is None:
        pairs = [(i, j) for i, j in pairs if first(j, s) <= last(i, t)]
    if w := given.mask.window:
        pairs = [
            (i, j)
            for i, j in pairs
            if first(i, t) - last(j, s) < w and first(j, s) - last(i, t) < w
        ]
    return tuple(pairs)


def cut(tree, size: int):
    """Arrays [B, T, ...] as [T / size, B, size, ...], filled up with tokens of segment 0."""

    def one(x):
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(one, tree)


def join(x_IxBxt: jax.Array) -> jax.Array:
    """[I, B, t, ...] -> [B, I * t, ...]."""
    x_BxIxt = jnp.moveaxis(x_IxBxt, 0, 1)
    return x_BxIxt.reshape(x_BxIxt.shape[0], -1, *x_BxIxt.shape[3:])


@struct.dataclass
class Running:
    """What is known of every row so far: the maximum m, the sum l of exp(logit - m), and that of exp(logit - m) v. float32."""

    m_IxBxNxt: jax.Array
    l_IxBxNxt: jax.Array
    read_IxBxtxNxH: jax.Array

    @staticmethod
    def nothing(q_IxBxtxNxH: jax.Array, d_value: int, sink_N: jax.Array | None) -> "Running":
        blocks, batch, size, heads, _ = q_IxBxtxNxH.shape
        row = (blocks, batch, heads, size)
        m = (
            jnp.full(row, jnp.finfo(jnp.float32).min)
            if sink_N is None
            else jnp.broadcast_to(sink_N.astype(jnp.float32)[:, None], row)
        )
        return Running(
            m,
            jnp.full(row, float(sink_N is not None)),
            jnp.zeros((blocks, batch, size, heads, d_value)),
        )

    def finish(self, dtype) -> tuple[jax.Array, jax.Array]:
        """(out_IxBxtxNxH, log-sum-exp of the logits, IxBxNxt). A row without a key gives zeros."""
        l_IxBxNxt = jnp.where(self.l_IxBxNxt > 0, self.l_IxBxNxt, 1.0)
        out = self.read_IxBxtxNxH / jnp.swapaxes(l_IxBxNxt, 2, 3)[..., None]
        return out.astype(dtype), self.m_IxBxNxt + jnp.log(l_IxBxNxt)


def accumulate(running: Running, q_Ixs, k_Jxs, v_Jxs, given: Inputs, pairs) -> Running:
    """With these pairs of blocks looked at. `given`'s tokens are in blocks too."""

    def add(running: Running, pair):
        i, j = pair
        (q, k, v), here = _block(i, j, q_Ixs, k_Jxs, v_Jxs, given)
        logits_BxNxtxs, mask_Bxtxs = logits(q, k, here)
        mask = mask_Bxtxs[:, None]
        rows = (running.m_IxBxNxt, running.l_IxBxNxt, running.read_IxBxtxNxH)
        m, total, got = (x[i] for x in rows)
        high = jnp.maximum(
            m, jnp.max(jnp.where(mask, logits_BxNxtxs, jnp.finfo(jnp.float32).min), axis=-1)
        )
        weights = jnp.where(
            mask, jnp.exp(jnp.where(mask, logits_BxNxtxs, 0.0) - high[..., None]), 0.0
        )
        shrink = jnp.exp(m - high)
        got = got * jnp.swapaxes(shrink, 1, 2)[..., None] + read(
            weights, v, here, mask_Bxtxs, jnp.float32
        )
        new = (high, total * shrink + jnp.sum(weights, axis=-1), got)
        return Running(*(old.at[i].set(x) for old, x in zip(rows, new, strict=True))), None

    return jax.lax.scan(add, running, _arrays(pairs))[0]


def pull_back(
    q_Ixs,
    k_Jxs,
    v_Jxs,
    given: Inputs,
    pairs,
    lse_IxBxNxt,
    d_out_Ixs,
    delta_IxBxNxt,
    grads: "Gradients",
) -> "Gradients":
    """`grads` with what these pairs of blocks add to them."""

    def add(grads: Gradients, pair):
        i, j = pair
        (q, k, v), here = _block(i, j, q_Ixs, k_Jxs, v_Jxs, given)
        score = lambda q, k, position: logits(q, k, here.replace(position=position))
        logits_BxNxtxs, pull_logits, mask_Bxtxs = jax.vjp(score, q, k, here.position, has_aux=True)
        mask = mask_Bxtxs[:, None]
        weights = jnp.where(
            mask, jnp.exp(jnp.where(mask, logits_BxNxtxs - lse_IxBxNxt[i][..., None], 0.0)), 0.0
        )
        gather = lambda w, v, position: read(
            w, v, here.replace(position=position), mask_Bxtxs, jnp.float32
        )
        _, pull_read = jax.vjp(gather, weights, v, here.position)
        d_weights, d_v, d_position = pull_read(d_out_Ixs[i].astype(jnp.float32))
        d_logits = weights * (d_weights - delta_IxBxNxt[i][..., None])
        d_q, d_k, d_position_too = pull_logits(d_logits)
        plus = lambda total, at, x: total.at[at].add(x.astype(total.dtype))
        add_up = lambda total, *parts: sum(part.astype(total.dtype) for part in parts) + total
        return Gradients(
            plus(grads.q_Ixs, i, d_q), plus(grads.k_Jxs, j, d_k), plus(grads.v_Jxs, j, d_v),
            jax.tree.map(add_up, grads.position, d_position, d_position_too),
        ), None  # fmt: skip

    return jax.lax.scan(add, grads, _arrays(pairs))[0]


@struct.dataclass
class Gradients:
    """By queries, keys, values and the position scheme's parameters, added up in float32."""

    q_Ixs: jax.Array
    k_Jxs: jax.Array
    v_Jxs: jax.Array
    position: Any

    @staticmethod
    def zero(q_Ixs, k_Jxs, v_Jxs, position) -> "Gradients":
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, jnp.float32), Gradients(q_Ixs, k_Jxs, v_Jxs, position)
        )


def _arrays(pairs):
    """The pairs as what a loop goes over."""
    pairs = pairs if isinstance(pairs, jax.Array) else np.asarray(pairs, np.int32).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _block(i, j, q_Ixs, k_Jxs, v_Jxs, given: Inputs) -> tuple[tuple[jax.Array, ...], Inputs]:
    """Queries of block i, keys and values of block j, and what belongs to them."""
    at = lambda tokens, n: jax.tree.map(lambda x: x[n], tokens)
    here = given.replace(q_tokens=at(given.q_tokens, i), k_tokens=at(given.k_tokens, j))
    if given.dropout_key is not None:
        here = here.replace(
            dropout_key=jax.random.fold_in(jax.random.fold_in(given.dropout_key, i), j)
        )
    return (q_Ixs[i], k_Jxs[j], v_Jxs[j]), here


def attend(q_Ixs, k_Jxs, v_Jxs, given: Inputs, pairs) -> jax.Array:
    """out_IxBxtxNxH over all pairs, with its own gradient."""
    learned, fixed, whole = given.split()

    def forward(q, k, v, learned, fixed):
        running = accumulate(
            Running.nothing(q, v.shape[-1], learned[1]), q, k, v, whole(learned, fixed), pairs
        )
        out, lse = running.finish(v.dtype)
        return out, (q, k, v, learned, fixed, out, lse)

    def backward(kept, d_out):
        q, k, v, learned, fixed, out, lse = kept
        delta_IxBxNxt = row_products(d_out, out)
        zero = Gradients.zero(q, k, v, learned[0])
        grads = pull_back(q, k, v, whole(learned, fixed), pairs, lse, d_out, delta_IxBxNxt, zero)
        d_sink = None if learned[1] is None else sink_gradient(learned[1], lse, delta_IxBxNxt)
        given_back = lambda d, x: d.astype(x.dtype)
        d_q, d_k, d_v = map(given_back, (grads.q_Ixs, grads.k_Jxs, grads.v_Jxs), (q, k, v))
        return d_q, d_k, d_v, (jax.tree.map(given_back, grads.position, learned[0]), d_sink), None

    attention = jax.custom_vjp(lambda *args: forward(*args)[0])
    attention.defvjp(forward, backward)
    return attention(q_Ixs, k_Jxs, v_Jxs, learned, fixed)


def row_products(d_out_IxBxtxNxH, out_IxBxtxNxH) -> jax.Array:
    """sum over H of dO * O, float32[I, B, N, t]: what a softmax's gradient takes off every weight's."""
    product = d_out_IxBxtxNxH.astype(jnp.float32) * out_IxBxtxNxH.astype(jnp.float32)
    return jnp.swapaxes(jnp.sum(product, axis=-1), 2, 3)


def sink_gradient(sink_N, lse_IxBxNxt, delta_IxBxNxt) -> jax.Array:
    """The sink is a key whose value is zero: its gradient is that of its logit."""
    weight = jnp.exp(sink_N.astype(jnp.float32)[:, None] - lse_IxBxNxt)
    return -jnp.sum(weight * delta_IxBxNxt, axis=(0, 1, 3)).astype(sink_N.dtype)
