"""Fused attention on TPUs and GPUs: flash attention in Pallas, with schemes of distances.

No array over queries and keys is stored, so memory is linear in length. The kernels for TPUs
(forward.py, backward.py) compute whole sequences if the on-chip memory allows. Longer sequences,
and those that are sharded, are combined from pairs of blocks of queries and keys (blockwise.py,
ring.py). GPUs have their own kernels (gpu.py).

The kernels know no position scheme by name. A scheme's `terms` (positions/base.py) are a vector of
biases by distance (toeplitz.py) and, on TPUs, tables of vectors by distance, whose products with
queries, keys and weights the kernels add (content.py, terms.py).

Supported are all plain masks (tiles.py), packed documents, padding, soft caps, sinks, dropout,
grouped-query attention, and any head size and length. On CPUs, kernels are interpreted, for tests.

Shape suffixes: B batch, T queries, S keys, N query heads, K key/value heads, H size (values: V)."""

import jax
import jax.numpy as jnp

from transformer.model.attention_backends.base import Inputs, by_head
from transformer.model.attention_backends.blockwise import blockwise
from transformer.model.attention_backends.flash import call
from transformer.model.attention_backends.flash.call import Call, block_size
from transformer.model.attention_backends.flash.terms import shapes
from transformer.model.attention_backends.ring import ring, why_not as why_no_ring
from transformer.model.sharding import axis_of


def why_not(q, k, v, inputs: Inputs) -> str | None:
    """Returns why the backend does not support these inputs, in a few words, or None."""
    position, mask = inputs.logits_position, inputs.mask
    by_distance = position is not None and position.has_terms
    in_order = inputs.q_tokens.order == inputs.k_tokens.order in ("contiguous", "zigzag")
    terms = shapes(position if by_distance else None)
    lines, has_tables = terms.lines, terms.tables or terms.lines is not None
    problems = {
        "on GPUs, the position scheme may depend on distance alone": has_tables and call.on_gpu(),
        "on GPUs, it supports head sizes up to 256": max(q.shape[-1], v.shape[-1]) > 256
        and call.on_gpu(),
        f"it does not support the mask {mask}": not (mask.plain and mask.within),
        "the position scheme is not a function of distance": position and not by_distance,
        "distances differ from those in the sequence": by_distance and not in_order,
        # In the backward kernel, each knot takes 48 bytes of the memory for scalars.
        "it supports lines with up to 5,000 knots, without `ends`": lines
        and (terms.ends or lines.knots_NxJ.shape[-1] > 5000),
    }
    reason = next((reason for reason, holds in problems.items() if holds), None)
    return reason or (why_no_ring(q, k, v, inputs) if _is_sharded(q) else None)


def flash(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs: Inputs) -> jax.Array:
    """Returns what `reference` returns."""
    inputs = inputs.by_index(with_starts=True)
    terms = shapes(inputs.logits_position)
    sizes = q_BxTxNxH.shape[-1], v_BxSxKxV.shape[-1], len(terms.tables), terms.lines is not None
    size = block_size(q_BxTxNxH.dtype.itemsize, *sizes)
    if _is_sharded(q_BxTxNxH):
        return ring(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs, BlockPair(size))
    tokens = max(q_BxTxNxH.shape[1], k_BxSxKxH.shape[1])
    if tokens > size:
        pair = BlockPair(-(-tokens // -(-tokens // size)))  # blocks of equal length
        return blockwise(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs, pair)
    return _whole(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs)


def _is_sharded(q_BxTxNxH) -> bool:
    return axis_of("length")[1] > 1 and q_BxTxNxH.shape[1] > 1


def _whole(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs: Inputs) -> jax.Array:
    """Attention in which one kernel computes the whole sequence, with a custom gradient."""
    call, args = Call.of(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs, whole=True)

    def forward(sink_N, *args):
        out_BxNxTxV, lse_BxNxT = call.forward(*args)
        if sink_N is not None:  # a key whose logit is its own and whose value is zero
            without, lse_BxNxT = lse_BxNxT, jnp.logaddexp(lse_BxNxT, sink_N[:, None])
            share = jnp.exp(without - lse_BxNxT)[..., None]
            out_BxNxTxV = (out_BxNxTxV * share).astype(out_BxNxTxV.dtype)
        return out_BxNxTxV, (sink_N, args, out_BxNxTxV, lse_BxNxT)

    def backward(residuals, d_out_BxNxTxV):
        sink_N, args, out_BxNxTxV, lse_BxNxT = residuals
        product = d_out_BxNxTxV.astype(jnp.float32) * out_BxNxTxV.astype(jnp.float32)
        delta_BxNxT = jnp.sum(product, axis=-1)
        d_sink_N = None
        if sink_N is not None:
            d_sink_N = -jnp.sum(jnp.exp(sink_N[:, None] - lse_BxNxT) * delta_BxNxT, axis=(0, 2))
        return d_sink_N, *call.backward(*args, lse_BxNxT, delta_BxNxT, d_out_BxNxTxV), None, None

    attention = jax.custom_vjp(lambda *args: forward(*args)[0])
    attention.defvjp(forward, backward)
    sink_N = None if inputs.sink_N is None else inputs.sink_N.astype(jnp.float32)
    return by_head(attention(sink_N, *args))[:, : q_BxTxNxH.shape[1]]


class BlockPair:
    """Computes a pair of blocks of at most `block` queries and keys each (see blockwise.py)."""

    def __init__(self, block: int):
        self.block = block

    def forward(self, q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs: Inputs):
        """Returns (float32[B, T, N, V], log-sum-exp of the logits, float32[B, N, T])."""
        call, args = Call.of(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs, whole=False)
        (out_BxNxTxV, lse_BxNxT), T = call.forward(*args), q_BxTxNxH.shape[1]
        return by_head(out_BxNxTxV)[:, :T], lse_BxNxT[..., :T]

    def backward(self, q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs: Inputs, lse, delta, d_out):
        """Returns the gradients of q, k, v and the position scheme."""
        with_scheme = lambda position: inputs.replace(position=position)
        prepare = lambda q, k, v, position: Call.of(q, k, v, with_scheme(position), whole=False)
        learned = q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs.position
        call, args = prepare(*learned)
        _, pull = jax.vjp(lambda *learned: prepare(*learned)[1][:4], *learned)
        more = ((0, 0), (0, 0), (0, args[0].shape[2] - q_BxTxNxH.shape[1]))
        d_out = jnp.pad(by_head(d_out), (*more, (0, 0))).astype(v_BxSxKxV.dtype)
        lse, delta = (jnp.pad(x, more) for x in (lse, delta))
        grads = call.backward(*args, lse, delta, d_out)
        return pull(jax.tree.map(lambda d, x: d.astype(x.dtype), grads, args[:4]))
