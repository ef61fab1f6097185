"""TPUs' fused attention: the splash kernel of JAX (Pallas), each device for its rows and heads. On a CPU it is interpreted, for tests.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head size, F features.

The kernel knows masks by place in the row, documents by their ids, a cap and sinks, and no bias. ALiBi under a causal mask needs none:
-m (t - s) = m s - m t, and m t is the same for all keys of a query, so that softmax does not see it; m s is a product of a number of the
head and one of the key, and so it becomes more of the product that the kernel computes anyway. Positions and slopes are split into parts
that bfloat16 holds exactly (256 a + b; three times eight bits), so each product is exact and they are added up in float32.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer.model.attention_backends.base import Inputs
from transformer.model.sharding import axis_of, fitting, platform

LANES = 128
"""Tokens come in blocks of a multiple of this."""

FARTHEST = 2**16
"""Positions below this are two numbers of eight bits."""


def block_size(tokens: int) -> int:
    """Of queries, and of keys, at a time."""
    return next(size for size in (512, 384, 256, 128) if tokens % size == 0)


def why_not(q, k, v, given: Inputs) -> str | None:
    """What it cannot do, in a few words."""
    T, S, mask, position = q.shape[1], k.shape[1], given.mask, given.logits_position
    known = ("rows",) if mask.window else ("rows", "growing")
    by_place = (
        given.q_tokens.order == given.k_tokens.order in known
        and T == S
        and given.q_tokens.until_BxT is None
    )
    problems = {
        "it is a TPU's": platform() == "gpu",
        "tokens are spread over devices": axis_of("length")[1] > 1 and T > 1,
        f"{T} and {S} tokens are no multiples of {LANES}": T % LANES or S % LANES,
        "it has no dropout on attention weights": given.dropout_key is not None,
        "the position scheme changes logits": position is not None and (position.past_slopes_N is None or not mask.causal or given.soft_cap),
        f"positions may be {FARTHEST:,} or more": position is not None and too_far(given, S),
        f"it does not know the mask {mask}": not (mask.plain and mask.within),
        "where tokens stand in their rows is not known": (mask.causal or mask.window) and not by_place,
    }  # fmt: skip
    return next((words for words, holds in problems.items() if holds), None)


def too_far(given: Inputs, keys: int) -> bool:
    """Whether a key may stand where `with_slopes` is not exact any more."""
    return keys > FARTHEST or "growing" in (given.q_tokens.order, given.k_tokens.order)


def splash(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, given: Inputs
) -> jax.Array:
    """What `reference` computes."""
    heads, position = q_BxTxNxH.shape[2], given.logits_position
    q_BxTxNxH = (q_BxTxNxH * given.scale).astype(v_BxSxKxH.dtype)
    if position is not None:
        q_BxTxNxH, k_BxSxKxH = with_slopes(
            q_BxTxNxH, k_BxSxKxH, position.past_slopes_N, given.k_tokens.positions_BxT
        )
    rows, over = fitting("batch", len(q_BxTxNxH)), fitting("activation_heads", heads)
    if over != fitting("activation_heads", k_BxSxKxH.shape[2]):  # fewer key heads than devices
        k_BxSxKxH, v_BxSxKxH = (
            jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k_BxSxKxH, v_BxSxKxH)
        )
    segments = [
        jnp.broadcast_to(tokens.segments_BxT, x.shape[:2])
        for tokens, x in ((given.q_tokens, q_BxTxNxH), (given.k_tokens, k_BxSxKxH))
    ]
    here = lambda q, k, v, q_segments, k_segments, sink_N: _on_one_device(
        q, k, v, q_segments, k_segments, sink_N, given
    )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and (axes := set(mesh.axis_names) - set(mesh.manual_axes)):
        by_heads = P(rows or None, None, over or None)
        specs = (by_heads, by_heads, by_heads, P(rows or None), P(rows or None), P(over or None))
        here = jax.shard_map(
            here, in_specs=specs, out_specs=by_heads, axis_names=axes, check_vma=False
        )
    return here(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, *segments, given.sink_N)


def with_slopes(q_BxTxNxH, k_BxSxKxH, slopes_N, positions_BxS) -> tuple[jax.Array, jax.Array]:
    """q and k with features more, so that their product is q k + slope_n * position_s, in any type as wide as bfloat16."""
    dtype, rest, parts = q_BxTxNxH.dtype, slopes_N.astype(jnp.float32), []
    for _ in range(3):
        parts.append(jax.lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7))
        rest = rest - parts[-1]
    slopes_NxF = jnp.stack([part for part in parts for _ in range(2)], axis=-1)
    low_BxS = positions_BxS % 256
    places_BxSxF = jnp.stack([positions_BxS - low_BxS, low_BxS] * 3, axis=-1)
    more = lambda x, features: jnp.concatenate(
        [x, jnp.broadcast_to(features, (*x.shape[:3], 6)).astype(dtype)], axis=-1
    )
    return more(q_BxTxNxH, slopes_NxF), more(k_BxSxKxH, places_BxSxF[:, :, None])


def _on_one_device(
    q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, q_segments_BxT, k_segments_BxS, sink_N, given: Inputs
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, S, N = q_BxTxNxH.shape[1], k_BxSxKxH.shape[1], q_BxTxNxH.shape[2]
    mask, window = given.mask, given.mask.window
    near = (window - 1 if window else None, 0 if mask.causal else window - 1 if window else None)
    one = (
        masks.FullMask((T, S))
        if near == (None, None)
        else masks.LocalMask((T, S), near, 0)
        if window
        else masks.CausalMask((T, S))
    )
    q_block, k_block = block_size(T), block_size(S)
    sizes = kernels.BlockSizes(
        block_q=q_block, block_kv=k_block, block_kv_compute=k_block, block_q_dkv=q_block, block_kv_dkv=k_block, block_kv_dkv_compute=k_block,
        block_q_dq=q_block, block_kv_dq=k_block,
    )  # fmt: skip
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([one] * N), block_sizes=sizes, head_shards=1, q_seq_shards=1, attn_logits_soft_cap=given.soft_cap or None,
        interpret=platform() == "cpu",
    )  # fmt: skip
    by_heads = lambda x: jnp.swapaxes(x, 1, 2)
    attend = lambda q, k, v, segments: kernel(q, k, v, segments, sink_N)
    segments = kernels.SegmentIds(q_segments_BxT, k_segments_BxS)
    out_BxTxNxH = by_heads(
        jax.vmap(attend)(by_heads(q_BxTxNxH), by_heads(k_BxSxKxH), by_heads(v_BxSxKxH), segments)
    )
    # Padding, which is a document to the kernel, reads nothing; nor does a document that has no key.
    if mask.causal:
        reads_BxT = q_segments_BxT > 0
    else:
        reads_BxT = jnp.any(
            (q_segments_BxT[:, :, None] == k_segments_BxS[:, None]) & (k_segments_BxS > 0)[:, None],
            axis=2,
        )
    return jnp.where(reads_BxT[..., None, None], out_BxTxNxH, 0)
