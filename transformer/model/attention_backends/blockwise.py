"""Attention in blocks of queries and keys: memory linear in length, in plain JAX, on all platforms.

The softmax of a query is accumulated over blocks of keys, with a running maximum m, a running sum l
of exp(logit - m), and a running sum of exp(logit - m) v (Milakov & Gimelshein 2018; Rabe & Staats
2021). The backward pass recomputes the weights of each block from the query's log-sum-exp (Dao et
al. 2022): with D = sum(dO * O), d logits = weights * (d weights - D).

The logits of a block and the product of its weights and values come from base.py, and so do their
gradients. Therefore all masks, soft caps, sinks and dropout are supported, and all position schemes
whose logits depend on one pair of a query and a key at a time.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head
size, I blocks of queries, J blocks of keys, t queries per block, s keys per block.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer.model.attention_backends.base import Inputs, logits, read
from transformer.model.masks import REAL

BLOCK = 256
"""The number of queries, and of keys, per block."""


def blockwise(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, inputs: Inputs
) -> jax.Array:
    """Returns what `reference` returns. Dropout draws a separate mask for each block."""
    T, S = q_BxTxNxH.shape[1], k_BxSxKxH.shape[1]
    sizes = (min(BLOCK, T), min(BLOCK, S))
    q_Ixs, q_tokens = cut((q_BxTxNxH, inputs.q_tokens), sizes[0])
    kv_Jxs, k_tokens = cut(((k_BxSxKxH, v_BxSxKxH), inputs.k_tokens), sizes[1])
    if S % sizes[1]:
        inputs = inputs.replace(mask=inputs.mask & REAL)
    inputs = inputs.replace(q_tokens=q_tokens, k_tokens=k_tokens, position=inputs.logits_position)
    out_IxBxtxNxH = attend(q_Ixs, *kv_Jxs, inputs, needed(inputs, T, S, sizes))
    return join(out_IxBxtxNxH)[:, :T]


def why_not(q, k, v, inputs: Inputs) -> str | None:
    """Returns why the backend does not support these inputs, in a few words, or None."""
    position = inputs.logits_position
    if position is not None and not position.pairwise:
        return "the position scheme needs all keys of a query at once"
    return None


def needed(inputs: Inputs, T: int, S: int, sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (query block, key block) in which the mask may be true.

    Where tokens are known to be in the order of their positions, this omits blocks of keys that are
    entirely after the queries of a causal mask, or entirely outside a window.
    """
    t, s = sizes
    pairs = [(i, j) for i in range(-(-T // t)) for j in range(-(-S // s))]
    if not (
        inputs.mask.within
        and inputs.q_tokens.order == inputs.k_tokens.order in ("rows", "growing")
        and T == S
    ):
        return tuple(pairs)
    first, last = (lambda n, size: n * size), (lambda n, size: (n + 1) * size - 1)
    if inputs.mask.causal and inputs.q_tokens.until_BxT is None:
        pairs = [(i, j) for i, j in pairs if first(j, s) <= last(i, t)]
    if w := inputs.mask.window:
        pairs = [
            (i, j)
            for i, j in pairs
            if first(i, t) - last(j, s) < w and first(j, s) - last(i, t) < w
        ]
    return tuple(pairs)


def cut(tree, size: int):
    """Reshapes arrays [B, T, ...] to [T / size, B, size, ...], padded with tokens of segment 0."""

    def cut_leaf(x):
        x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut_leaf, tree)


def join(x_IxBxt: jax.Array) -> jax.Array:
    """Reshapes [I, B, t, ...] to [B, I * t, ...]."""
    x_BxIxt = jnp.moveaxis(x_IxBxt, 0, 1)
    return x_BxIxt.reshape(x_BxIxt.shape[0], -1, *x_BxIxt.shape[3:])


@struct.dataclass
class Running:
    """Statistics of each query over the keys so far, in float32.

    These are the maximum m of the logits, the sum l of exp(logit - m), and the sum `read` of
    exp(logit - m) v.
    """

    m_IxBxNxt: jax.Array
    l_IxBxNxt: jax.Array
    read_IxBxtxNxH: jax.Array

    @staticmethod
    def nothing(q_IxBxtxNxH: jax.Array, d_value: int, sink_N: jax.Array | None) -> "Running":
        blocks, batch, size, heads, _ = q_IxBxtxNxH.shape
        shape = (blocks, batch, heads, size)
        m = (
            jnp.full(shape, jnp.finfo(jnp.float32).min)
            if sink_N is None
            else jnp.broadcast_to(sink_N.astype(jnp.float32)[:, None], shape)
        )
        return Running(
            m,
            jnp.full(shape, float(sink_N is not None)),
            jnp.zeros((blocks, batch, size, heads, d_value)),
        )

    def finish(self, dtype) -> tuple[jax.Array, jax.Array]:
        """Returns (out_IxBxtxNxH, log-sum-exp of the logits IxBxNxt).

        The output of a query without keys is zero.
        """
        l_IxBxNxt = jnp.where(self.l_IxBxNxt > 0, self.l_IxBxNxt, 1.0)
        out = self.read_IxBxtxNxH / jnp.swapaxes(l_IxBxNxt, 2, 3)[..., None]
        return out.astype(dtype), self.m_IxBxNxt + jnp.log(l_IxBxNxt)


def accumulate(running: Running, q_Ixs, k_Jxs, v_Jxs, inputs: Inputs, pairs) -> Running:
    """Returns `running` after these pairs of blocks. The tokens of `inputs` are in blocks, too."""

    def add(running: Running, pair):
        i, j = pair
        (q, k, v), block = _block(i, j, q_Ixs, k_Jxs, v_Jxs, inputs)
        logits_BxNxtxs, mask_Bxtxs = logits(q, k, block)
        mask = mask_Bxtxs[:, None]
        statistics = (running.m_IxBxNxt, running.l_IxBxNxt, running.read_IxBxtxNxH)
        m, total, total_read = (x[i] for x in statistics)
        new_m = jnp.maximum(
            m, jnp.max(jnp.where(mask, logits_BxNxtxs, jnp.finfo(jnp.float32).min), axis=-1)
        )
        weights = jnp.where(
            mask, jnp.exp(jnp.where(mask, logits_BxNxtxs, 0.0) - new_m[..., None]), 0.0
        )
        rescale = jnp.exp(m - new_m)
        total_read = total_read * jnp.swapaxes(rescale, 1, 2)[..., None] + read(
            weights, v, block, mask_Bxtxs, jnp.float32
        )
        new = (new_m, total * rescale + jnp.sum(weights, axis=-1), total_read)
        return Running(*(old.at[i].set(x) for old, x in zip(statistics, new, strict=True))), None

    return jax.lax.scan(add, running, _arrays(pairs))[0]


def accumulate_gradients(
    q_Ixs,
    k_Jxs,
    v_Jxs,
    inputs: Inputs,
    pairs,
    lse_IxBxNxt,
    d_out_Ixs,
    delta_IxBxNxt,
    grads: "Gradients",
) -> "Gradients":
    """Returns `grads` plus the gradients of these pairs of blocks."""

    def add(grads: Gradients, pair):
        i, j = pair
        (q, k, v), block = _block(i, j, q_Ixs, k_Jxs, v_Jxs, inputs)
        score = lambda q, k, position: logits(q, k, block.replace(position=position))
        logits_BxNxtxs, pull_logits, mask_Bxtxs = jax.vjp(score, q, k, block.position, has_aux=True)
        mask = mask_Bxtxs[:, None]
        weights = jnp.where(
            mask, jnp.exp(jnp.where(mask, logits_BxNxtxs - lse_IxBxNxt[i][..., None], 0.0)), 0.0
        )
        apply_weights = lambda w, v, position: read(
            w, v, block.replace(position=position), mask_Bxtxs, jnp.float32
        )
        _, pull_read = jax.vjp(apply_weights, weights, v, block.position)
        d_weights, d_v, d_position_of_read = pull_read(d_out_Ixs[i].astype(jnp.float32))
        d_logits = weights * (d_weights - delta_IxBxNxt[i][..., None])
        d_q, d_k, d_position_of_logits = pull_logits(d_logits)
        add_at = lambda total, index, x: total.at[index].add(x.astype(total.dtype))
        sum_of = lambda total, *parts: sum(part.astype(total.dtype) for part in parts) + total
        return Gradients(
            add_at(grads.q_Ixs, i, d_q), add_at(grads.k_Jxs, j, d_k), add_at(grads.v_Jxs, j, d_v),
            jax.tree.map(sum_of, grads.position, d_position_of_read, d_position_of_logits),
        ), None  # fmt: skip

    return jax.lax.scan(add, grads, _arrays(pairs))[0]


@struct.dataclass
class Gradients:
    """The gradients of queries, keys, values and the position scheme, accumulated in float32."""

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
    """Returns the two arrays of block indices, for a scan."""
    pairs = pairs if isinstance(pairs, jax.Array) else np.asarray(pairs, np.int32).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def _block(i, j, q_Ixs, k_Jxs, v_Jxs, inputs: Inputs) -> tuple[tuple[jax.Array, ...], Inputs]:
    """Returns the queries of block i, the keys and values of block j, and their inputs."""
    pick = lambda tokens, n: jax.tree.map(lambda x: x[n], tokens)
    block = inputs.replace(q_tokens=pick(inputs.q_tokens, i), k_tokens=pick(inputs.k_tokens, j))
    if inputs.dropout_key is not None:
        block = block.replace(
            dropout_key=jax.random.fold_in(jax.random.fold_in(inputs.dropout_key, i), j)
        )
    return (q_Ixs[i], k_Jxs[j], v_Jxs[j]), block


def attend(q_Ixs, k_Jxs, v_Jxs, inputs: Inputs, pairs) -> jax.Array:
    """Returns out_IxBxtxNxH over all `pairs`, with a custom gradient."""
    learned, fixed, merge = inputs.split()

    def forward(q, k, v, learned, fixed):
        running = accumulate(
            Running.nothing(q, v.shape[-1], learned[1]), q, k, v, merge(learned, fixed), pairs
        )
        out, lse = running.finish(v.dtype)
        return out, (q, k, v, learned, fixed, out, lse)

    def backward(residuals, d_out):
        q, k, v, learned, fixed, out, lse = residuals
        delta_IxBxNxt = row_products(d_out, out)
        zero = Gradients.zero(q, k, v, learned[0])
        grads = accumulate_gradients(
            q, k, v, merge(learned, fixed), pairs, lse, d_out, delta_IxBxNxt, zero
        )
        d_sink = None if learned[1] is None else sink_gradient(learned[1], lse, delta_IxBxNxt)
        cast_like = lambda d, x: d.astype(x.dtype)
        d_q, d_k, d_v = map(cast_like, (grads.q_Ixs, grads.k_Jxs, grads.v_Jxs), (q, k, v))
        return d_q, d_k, d_v, (jax.tree.map(cast_like, grads.position, learned[0]), d_sink), None

    attention = jax.custom_vjp(lambda *args: forward(*args)[0])
    attention.defvjp(forward, backward)
    return attention(q_Ixs, k_Jxs, v_Jxs, learned, fixed)


def row_products(d_out_IxBxtxNxH, out_IxBxtxNxH) -> jax.Array:
    """Returns D = sum over H of dO * O, float32[I, B, N, t] (see the module's docstring)."""
    product = d_out_IxBxtxNxH.astype(jnp.float32) * out_IxBxtxNxH.astype(jnp.float32)
    return jnp.swapaxes(jnp.sum(product, axis=-1), 2, 3)


def sink_gradient(sink_N, lse_IxBxNxt, delta_IxBxNxt) -> jax.Array:
    """Returns the gradient of the sink, the logit of a key whose value is zero."""
    weight = jnp.exp(sink_N.astype(jnp.float32)[:, None] - lse_IxBxNxt)
    return -jnp.sum(weight * delta_IxBxNxt, axis=(0, 1, 3)).astype(sink_N.dtype)
