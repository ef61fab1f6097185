"""GPUs' fused attention: cuDNN's, through `jax.nn.dot_product_attention`.

CPUs use that function's XLA implementation, for tests.

Every mask is passed as an array, so that documents in one sequence do not attend to each other. A
causal mask is also declared as causal, so that products above the diagonal are skipped. ALiBi with
a causal mask needs no bias: -m (t - s) = m s - m t, and m t is the same for all keys of a query, so
the softmax does not depend on it. m s is the product of a number per head and a number per key, and
is computed by additional features of queries and keys. Each position is split into 256 a + b, and
each slope into three parts of eight bits. bfloat16 represents all of these exactly, so each product
is exact, and the products are summed in float32.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head
size, F additional features.
"""

import jax
import jax.numpy as jnp

from transformer.model.attention_backends.base import Inputs
from transformer.model.sharding import axis_of, fitting, platform

FARTHEST = 2**16
"""Positions below this are exact as two numbers of eight bits."""

MAX_PAIRS = 8192**2
"""The largest T * S. In each sequence, the mask, the bias made from it and the bias's gradient take
5 bytes per pair of tokens, 320 MiB at this size."""


def why_not(q, k, v, inputs: Inputs) -> str | None:
    """Returns why the backend does not support these inputs, in a few words, or None."""
    T, S, position = q.shape[1], k.shape[1], inputs.logits_position
    size = q.shape[-1] + (0 if position is None else 8)
    problems = {
        "it does not run on TPUs": platform() == "tpu",
        "it requires bfloat16": platform() == "gpu" and q.dtype.itemsize != 2,
        "sequences are sharded over devices": axis_of("length")[1] > 1 and T > 1,
        "it does not support dropout on attention weights": inputs.dropout_key is not None,
        "it does not support soft caps": bool(inputs.soft_cap),
        "it does not support sinks": inputs.sink_N is not None,
        "the position scheme changes logits": (
            position is not None and (position.past_slopes_N is None or not inputs.mask.causal)
        ),
        f"positions may be {FARTHEST:,} or more": position is not None and _too_far(inputs, S),
        "there are fewer key heads than devices for heads": (
            fitting("activation_heads", q.shape[2]) != fitting("activation_heads", k.shape[2])
        ),
        f"it does not support head sizes {size} for queries and keys, {v.shape[-1]} for values": (
            size % 8 or size > 128 or v.shape[-1] != q.shape[-1]
        ),
        f"lengths {T} and {S} are not even": T % 2 or S % 2,
        f"a mask of {T} x {S} tokens is too large": T * S > MAX_PAIRS,
    }
    return next((reason for reason, holds in problems.items() if holds), None)


def cudnn(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, inputs: Inputs
) -> jax.Array:
    """Returns what `reference` returns."""
    d_value, position = v_BxSxKxH.shape[-1], inputs.logits_position
    mask_BxTxS = inputs.mask(inputs.q_tokens, inputs.k_tokens)
    if position is not None:
        q_BxTxNxH, k_BxSxKxH = with_slopes(
            q_BxTxNxH,
            k_BxSxKxH,
            position.past_slopes_N / inputs.scale,
            inputs.k_tokens.positions_BxT,
        )
        # cuDNN needs one head size for queries, keys and values.
        widen = lambda x: jnp.pad(x, ((0, 0),) * 3 + ((0, d_value + 8 - x.shape[-1]),))
        q_BxTxNxH, k_BxSxKxH, v_BxSxKxH = map(widen, (q_BxTxNxH, k_BxSxKxH, v_BxSxKxH))
    in_order = (
        inputs.q_tokens.order == inputs.k_tokens.order in ("contiguous", "increasing")
        and inputs.q_tokens.until_BxT is None
    )
    out_BxTxNxH = jax.nn.dot_product_attention(
        q_BxTxNxH,
        k_BxSxKxH,
        v_BxSxKxH,
        mask=jnp.broadcast_to(mask_BxTxS[:, None], (len(q_BxTxNxH), 1, *mask_BxTxS.shape[1:])),
        scale=inputs.scale,
        is_causal=inputs.mask.causal and in_order and q_BxTxNxH.shape[1] == k_BxSxKxH.shape[1],
        implementation="cudnn" if platform() == "gpu" else "xla",
    )[..., :d_value]
    return jnp.where(jnp.any(mask_BxTxS, axis=-1)[..., None, None], out_BxTxNxH, 0)


def _too_far(inputs: Inputs, keys: int) -> bool:
    """Whether keys may have positions for which `with_slopes` is not exact."""
    return keys > FARTHEST or "increasing" in (inputs.q_tokens.order, inputs.k_tokens.order)


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
