"""Attention in blocks of queries and keys, in plain JAX: memory linear in length.

The output o_j of a query over block j of keys, and the log-sum-exp of its logits (lse_j), suffice
to combine it with other blocks: o = sum_j exp(lse_j - lse) o_j, where exp(lse) = sum_j exp(lse_j)
(Milakov & Gimelshein 2018; Rabe & Staats 2021). The backward pass recomputes the weights of each
block from lse (Dao et al. 2022): with D = sum(dO * O), d logits = weights * (d weights - D).

A pair of blocks is computed by an inner object: `Einsum`, or a fused kernel (flash/). The logits of
`Einsum` and the product of its weights and values come from base.py, as do their gradients. So it
supports all its inputs, except position schemes whose logits depend on more than one pair.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H size
(of values: V), I blocks of queries, J blocks of keys, t queries per block, s keys per block."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer.model.attention_backends.base import Inputs, logits, read
from transformer.model.masks import REAL

BLOCK = 256  # the number of queries, and of keys, per block
LOWEST = -1e30  # the log-sum-exp before the first key: below that of all logits, above `MASKED`
MASKED = -2e38  # the logit of a masked pair: exp(MASKED - x) is 0 for every x from `LOWEST` on


def blockwise(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, inputs: Inputs, inner=None) -> jax.Array:
    """Returns what `reference` returns."""
    T, S, inner = q_BxTxNxH.shape[1], k_BxSxKxH.shape[1], inner or Einsum()
    sizes = (min(inner.block, T), min(inner.block, S))
    q_Ixs, q_tokens = cut((q_BxTxNxH, inputs.q_tokens), sizes[0])
    kv_Jxs, k_tokens = cut(((k_BxSxKxH, v_BxSxKxH), inputs.k_tokens), sizes[1])
    if S % sizes[1]:
        inputs = inputs.replace(mask=inputs.mask & REAL)
    inputs = inputs.replace(q_tokens=q_tokens, k_tokens=k_tokens, position=inputs.logits_position)
    return join(attend(q_Ixs, *kv_Jxs, inputs, needed(inputs, T, S, sizes), inner))[:, :T]


def why_not(q, k, v, inputs: Inputs) -> str | None:
    """Returns why the backend does not support these inputs, in a few words, or None."""
    position = inputs.logits_position
    pairwise = position is None or position.pairwise
    return None if pairwise else "the position scheme needs all keys of a query at once"


def needed(inputs: Inputs, T: int, S: int, sizes: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Returns the pairs (query block, key block) in which the mask may be true. Where tokens are in
    the order of positions, omits keys that a causal mask or a window excludes entirely."""
    t, s = sizes
    pairs = [(i, j) for i in range(-(-T // t)) for j in range(-(-S // s))]
    is_sorted = inputs.q_tokens.order == inputs.k_tokens.order in ("contiguous", "increasing")
    if not (inputs.mask.within and is_sorted and T == S):
        return tuple(pairs)
    past = lambda i, j: i * t - (j + 1) * s + 1  # from the last key to the first query
    future = lambda i, j: j * s - (i + 1) * t + 1  # from the last query to the first key
    if inputs.mask.causal and inputs.q_tokens.until_BxT is None:
        pairs = [pair for pair in pairs if future(*pair) <= 0]
    if w := inputs.mask.window:
        pairs = [pair for pair in pairs if past(*pair) < w and future(*pair) < w]
    return tuple(pairs)


def cut(tree, size: int):
    """Reshapes arrays [B, T, ...] to [T / size, B, size, ...], padded with tokens of segment 0."""
    pad = lambda x: jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2))
    split = lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)
    return jax.tree.map(lambda x: split(pad(x)), tree)


def join(x_IxBxt: jax.Array) -> jax.Array:
    """Reshapes [I, B, t, ...] to [B, I * t, ...]."""
    x_BxIxt = jnp.moveaxis(x_IxBxt, 0, 1)
    return x_BxIxt.reshape(x_BxIxt.shape[0], -1, *x_BxIxt.shape[3:])


class Einsum:
    """Computes pairs of blocks for `attend` and ring.py. Any object with these methods can."""

    block = BLOCK  # the largest number of queries, and of keys, per block

    def forward(self, q, k, v, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        """Returns the output over one block of keys, [B, t, N, V], and the log-sum-exp of the
        logits, float32[B, N, t]. They are 0 and `LOWEST` for a query without keys."""
        logits_BxNxtxs, mask_Bxtxs = logits(q, k, inputs)
        logits_BxNxtxs = jnp.where(mask_Bxtxs[:, None], logits_BxNxtxs, MASKED)
        m = jnp.maximum(jnp.max(logits_BxNxtxs, axis=-1), LOWEST)
        weights = jnp.exp(logits_BxNxtxs - m[..., None])
        total = jnp.sum(weights, axis=-1)
        total = jnp.where(total > 0, total, 1.0)
        out = read(weights, v, inputs, mask_Bxtxs, jnp.float32)
        return out / jnp.swapaxes(total, 1, 2)[..., None], m + jnp.log(total)

    def backward(self, q, k, v, inputs: Inputs, lse, delta, d_out):
        """Returns the gradients of q, k, v and the scheme. lse, delta: [B, N, t], of all keys."""
        with_scheme, position = lambda position: inputs.replace(position=position), inputs.position
        score = lambda q, k, position: logits(q, k, with_scheme(position))
        logits_BxNxtxs, pull_logits, mask_Bxtxs = jax.vjp(score, q, k, position, has_aux=True)
        mask = mask_Bxtxs[:, None]
        log_weights = jnp.where(mask, logits_BxNxtxs - lse[..., None], 0.0)
        weights = jnp.where(mask, jnp.exp(log_weights), 0.0)
        apply = lambda w, v, position: read(w, v, with_scheme(position), mask_Bxtxs, jnp.float32)
        _, pull_read = jax.vjp(apply, weights, v, position)
        d_weights, d_v, d_position_of_read = pull_read(d_out.astype(jnp.float32))
        d_q, d_k, d_position_of_logits = pull_logits(weights * (d_weights - delta[..., None]))
        add = lambda a, b: a.astype(jnp.float32) + b.astype(jnp.float32)
        return d_q, d_k, d_v, jax.tree.map(add, d_position_of_read, d_position_of_logits)


@struct.dataclass
class Running:
    """The outputs of all queries over the keys so far, and the log-sum-exp of their logits."""

    out_IxBxtxNxV: jax.Array
    lse_IxBxNxt: jax.Array

    @staticmethod
    def nothing(q_IxBxtxNxH: jax.Array, d_value: int, sink_N: jax.Array | None) -> "Running":
        """Before the first key. A sink is a key whose logit is its own and whose value is zero."""
        blocks, batch, size, heads, _ = q_IxBxtxNxH.shape
        first = LOWEST if sink_N is None else sink_N.astype(jnp.float32)[:, None]
        lse = jnp.full((blocks, batch, heads, size), first)
        return Running(jnp.zeros((blocks, batch, size, heads, d_value)), lse)

    def add(self, i, out_BxtxNxV: jax.Array, lse_BxNxt: jax.Array) -> "Running":
        """Adds the output of block i over further keys."""
        old, new = self.lse_IxBxNxt[i], jnp.logaddexp(self.lse_IxBxNxt[i], lse_BxNxt)
        share = lambda lse: jnp.swapaxes(jnp.exp(lse - new), 1, 2)[..., None]
        out = share(old) * self.out_IxBxtxNxV[i] + share(lse_BxNxt) * out_BxtxNxV
        return Running(self.out_IxBxtxNxV.at[i].set(out), self.lse_IxBxNxt.at[i].set(new))


def accumulate(running: Running, q_Ixs, k_Jxs, v_Jxs, inputs: Inputs, pairs, inner) -> Running:
    """Returns `running` after these pairs of blocks. The tokens of `inputs` are in blocks, too."""

    def add(running: Running, pair):
        qkv, block = _block(*pair, q_Ixs, k_Jxs, v_Jxs, inputs)
        return running.add(pair[0], *inner.forward(*qkv, block)), None

    return _scan(add, running, pairs)


def accumulate_gradients(
    grads: "Gradients", q_Ixs, k_Jxs, v_Jxs, inputs: Inputs, pairs, inner, *of_queries
) -> "Gradients":
    """Returns `grads` plus those of these pairs. `of_queries`: lse, delta, d_out in blocks."""

    def add(grads: Gradients, pair):
        i, j = pair
        qkv, block = _block(i, j, q_Ixs, k_Jxs, v_Jxs, inputs)
        d_q, d_k, d_v, d_position = inner.backward(*qkv, block, *(x[i] for x in of_queries))
        add_at = lambda total, index, x: total.at[index].add(x.astype(total.dtype))
        sums = add_at(grads.q_Ixs, i, d_q), add_at(grads.k_Jxs, j, d_k), add_at(grads.v_Jxs, j, d_v)
        position = jax.tree.map(lambda total, x: total + x, grads.position, d_position)
        return Gradients(*sums, position), None

    return _scan(add, grads, pairs)


def _scan(add, carry, pairs):
    pairs = pairs if isinstance(pairs, jax.Array) else np.asarray(pairs, np.int32).reshape(-1, 2)
    return jax.lax.scan(add, carry, (pairs[:, 0], pairs[:, 1]))[0]


@struct.dataclass
class Gradients:
    """The gradients of queries, keys, values and the position scheme, accumulated in float32."""

    q_Ixs: jax.Array
    k_Jxs: jax.Array
    v_Jxs: jax.Array
    position: Any

    @staticmethod
    def zero(q_Ixs, k_Jxs, v_Jxs, position) -> "Gradients":
        zeros = lambda x: jnp.zeros(x.shape, jnp.float32)
        return jax.tree.map(zeros, Gradients(q_Ixs, k_Jxs, v_Jxs, position))


def _block(i, j, q_Ixs, k_Jxs, v_Jxs, inputs: Inputs) -> tuple[tuple[jax.Array, ...], Inputs]:
    pick = lambda tokens, n: jax.tree.map(lambda x: x[n], tokens)
    block = inputs.replace(q_tokens=pick(inputs.q_tokens, i), k_tokens=pick(inputs.k_tokens, j))
    if inputs.dropout_key is not None:
        first = jnp.stack([i * q_Ixs.shape[2], j * k_Jxs.shape[2]]).astype(jnp.int32)
        block = block.replace(first=first if inputs.first is None else inputs.first + first)
    return (q_Ixs[i], k_Jxs[j], v_Jxs[j]), block


def attend(q_Ixs, k_Jxs, v_Jxs, inputs: Inputs, pairs, inner) -> jax.Array:
    """Returns out_IxBxtxNxH over all `pairs`, with a custom gradient."""
    learned, fixed, merge = inputs.split()

    def forward(q, k, v, learned, fixed):
        # Otherwise, JAX would compute the masks and biases of all pairs before a loop over layers.
        q, learned, fixed = jax.lax.optimization_barrier((q, learned, fixed))
        running = Running.nothing(q, v.shape[-1], learned[1])
        running = accumulate(running, q, k, v, merge(learned, fixed), pairs, inner)
        out, lse = running.out_IxBxtxNxV.astype(v.dtype), running.lse_IxBxNxt
        return out, (q, k, v, learned, fixed, out, lse)

    def backward(residuals, d_out):
        q, k, v, learned, fixed, out, lse = residuals
        delta_IxBxNxt = row_products(d_out, out)
        zero = Gradients.zero(q, k, v, learned[0])
        inputs, of_queries = merge(learned, fixed), (lse, delta_IxBxNxt, d_out)
        grads = accumulate_gradients(zero, q, k, v, inputs, pairs, inner, *of_queries)
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
