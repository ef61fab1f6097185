"""TPUs' fused attention: JAX's splash attention kernel (Pallas).

Each device computes its own sequences and heads. The kernel supports masks by index in the
sequence, document ids, soft caps and sinks, but no bias. On CPUs it is interpreted, for tests.

ALiBi with a causal mask needs no bias: -m (t - s) = m s - m t, and m t is the same for all keys of
a query, so the softmax does not depend on it. m s is the product of a number per head and a number
per key, and is computed by additional features of queries and keys. Each position is split into
256 a + b, and each slope into three parts of eight bits. bfloat16 represents all of these exactly,
so each product is exact, and the products are summed in float32.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head
size, F additional features.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer.model.attention_backends.base import Inputs
from transformer.model.masks import pairs
from transformer.model.sharding import axis_of, fitting, platform

LANES = 128
"""Block sizes, and thus sequence lengths, are multiples of this."""

FARTHEST = 2**16
"""Positions below this are exact as two numbers of eight bits."""


def block_size(tokens: int) -> int:
    """Returns the largest supported block size that divides `tokens`."""
    return next(size for size in (512, 384, 256, 128) if tokens % size == 0)


def why_not(q, k, v, inputs: Inputs) -> str | None:
    """Returns why the backend does not support these inputs, in a few words, or None."""
    T, S, mask, position = q.shape[1], k.shape[1], inputs.mask, inputs.logits_position
    orders = ("rows",) if mask.window else ("rows", "growing")
    in_order = (
        inputs.q_tokens.order == inputs.k_tokens.order in orders
        and T == S
        and inputs.q_tokens.until_BxT is None
    )
    problems = {
        "it does not run on GPUs": platform() == "gpu",
        "sequences are sharded over devices": axis_of("length")[1] > 1 and T > 1,
        f"lengths {T} and {S} are not multiples of {LANES}": T % LANES or S % LANES,
        "it does not support dropout on attention weights": inputs.dropout_key is not None,
        "the position scheme changes logits": (
            position is not None
            and (position.past_slopes_N is None or not mask.causal or inputs.soft_cap)
        ),
        f"positions may be {FARTHEST:,} or more": position is not None and too_far(inputs, S),
        f"it does not support the mask {mask}": not (mask.plain and mask.within),
        "the order of tokens is unknown": (mask.causal or mask.window) and not in_order,
    }
    return next((reason for reason, holds in problems.items() if holds), None)


def too_far(inputs: Inputs, keys: int) -> bool:
    """Whether keys may have positions for which `with_slopes` is not exact."""
    return keys > FARTHEST or "growing" in (inputs.q_tokens.order, inputs.k_tokens.order)


def splash(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, inputs: Inputs
) -> jax.Array:
    """Returns what `reference` returns."""
    heads, position = q_BxTxNxH.shape[2], inputs.logits_position
    q_BxTxNxH = (q_BxTxNxH * inputs.scale).astype(v_BxSxKxH.dtype)
    if position is not None:
        q_BxTxNxH, k_BxSxKxH = with_slopes(
            q_BxTxNxH, k_BxSxKxH, position.past_slopes_N, inputs.k_tokens.positions_BxT
        )
    batch_axes, head_axes = fitting("batch", len(q_BxTxNxH)), fitting("activation_heads", heads)
    if head_axes != fitting("activation_heads", k_BxSxKxH.shape[2]):  # fewer key heads than devices
        k_BxSxKxH, v_BxSxKxH = (
            jnp.repeat(x, heads // x.shape[2], axis=2) for x in (k_BxSxKxH, v_BxSxKxH)
        )
    segments = [
        jnp.broadcast_to(tokens.segments_BxT, x.shape[:2])
        for tokens, x in ((inputs.q_tokens, q_BxTxNxH), (inputs.k_tokens, k_BxSxKxH))
    ]
    local = lambda q, k, v, q_segments, k_segments, sink_N: _on_one_device(
        q, k, v, q_segments, k_segments, sink_N, inputs
    )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and (axes := set(mesh.axis_names) - set(mesh.manual_axes)):
        by_heads = P(batch_axes or None, None, head_axes or None)
        specs = (
            by_heads,
            by_heads,
            by_heads,
            P(batch_axes or None),
            P(batch_axes or None),
            P(head_axes or None),
        )
        local = jax.shard_map(
            local, in_specs=specs, out_specs=by_heads, axis_names=axes, check_vma=False
        )
    with pairs(inputs.mask, inputs.q_tokens, q_BxTxNxH.shape[1], k_BxSxKxH.shape[1]):
        return local(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, *segments, inputs.sink_N)


def with_slopes(q_BxTxNxH, k_BxSxKxH, slopes_N, positions_BxS) -> tuple[jax.Array, jax.Array]:
    """Appends six features to q and k, so that their product is q k + slope_n * position_s.

    The added term is exact in any dtype that is at least as wide as bfloat16.
    """
    dtype, remainder, parts = q_BxTxNxH.dtype, slopes_N.astype(jnp.float32), []
    for _ in range(3):
        parts.append(jax.lax.reduce_precision(remainder, exponent_bits=8, mantissa_bits=7))
        remainder = remainder - parts[-1]
    slopes_NxF = jnp.stack([part for part in parts for _ in range(2)], axis=-1)
    low_BxS = positions_BxS % 256
    positions_BxSxF = jnp.stack([positions_BxS - low_BxS, low_BxS] * 3, axis=-1)
    append = lambda x, features: jnp.concatenate(
        [x, jnp.broadcast_to(features, (*x.shape[:3], 6)).astype(dtype)], axis=-1
    )
    return append(q_BxTxNxH, slopes_NxF), append(k_BxSxKxH, positions_BxSxF[:, :, None])


def _on_one_device(
    q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, q_segments_BxT, k_segments_BxS, sink_N, inputs: Inputs
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    T, S, N = q_BxTxNxH.shape[1], k_BxSxKxH.shape[1], q_BxTxNxH.shape[2]
    mask, window = inputs.mask, inputs.mask.window
    reach = (window - 1 if window else None, 0 if mask.causal else window - 1 if window else None)
    head_mask = (
        masks.FullMask((T, S))
        if reach == (None, None)
        else masks.LocalMask((T, S), reach, 0)
        if window
        else masks.CausalMask((T, S))
    )
    q_block, k_block = block_size(T), block_size(S)
    sizes = kernels.BlockSizes(
        block_q=q_block, block_kv=k_block, block_kv_compute=k_block,
        block_q_dkv=q_block, block_kv_dkv=k_block, block_kv_dkv_compute=k_block,
        block_q_dq=q_block, block_kv_dq=k_block,
    )  # fmt: skip
    kernel = kernels.make_splash_mha(
        masks.MultiHeadMask([head_mask] * N),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=inputs.soft_cap or None,
        interpret=platform() == "cpu",
    )
    by_heads = lambda x: jnp.swapaxes(x, 1, 2)
    attend = lambda q, k, v, segments: kernel(q, k, v, segments, sink_N)
    segments = kernels.SegmentIds(q_segments_BxT, k_segments_BxS)
    out_BxTxNxH = by_heads(
        jax.vmap(attend)(by_heads(q_BxTxNxH), by_heads(k_BxSxKxH), by_heads(v_BxSxKxH), segments)
    )
    # Queries without keys have an output of zero: padding, which the kernel treats as a document,
    # and documents without keys.
    if mask.causal:
        reads_BxT = q_segments_BxT > 0
    else:
        reads_BxT = jnp.any(
            (q_segments_BxT[:, :, None] == k_segments_BxS[:, None]) & (k_segments_BxS > 0)[:, None],
            axis=2,
        )
    return jnp.where(reads_BxT[..., None, None], out_BxTxNxH, 0)
