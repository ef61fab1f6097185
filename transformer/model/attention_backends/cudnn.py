"""GPUs' fused attention: cuDNN's, through `jax.nn.dot_product_attention`. CPUs use that function's
XLA implementation, for tests. Every mask is passed as an array, so that documents in one sequence
do not attend to each other. A causal mask is also declared as causal, so that products above the
diagonal are skipped. Biases that depend on distance are passed as an array of the queries' type,
which all sequences share.
Shape suffixes: B batch, T queries, S keys, N query heads, K key/value heads, H head size."""

import jax
import jax.numpy as jnp

from transformer.model.attention_backends.base import Inputs
from transformer.model.sharding import axis_of, fitting, platform

MAX_PAIRS = 8192**2
"""The largest T * S. In each sequence, the mask, the bias made from it and the bias's gradient take
5 bytes per pair of tokens, 320 MiB at this size."""


def why_not(q, k, v, inputs: Inputs) -> str | None:
    """Returns why the backend does not support these inputs, in a few words, or None."""
    T, S, size, position = q.shape[1], k.shape[1], q.shape[-1], inputs.logits_position
    other_scheme = position is not None and not position.is_distance_bias
    head_axes, kv_axes = (fitting("activation_heads", x.shape[2]) for x in (q, k))
    problems = {
        "it does not run on TPUs": platform() == "tpu",
        "it requires bfloat16": platform() == "gpu" and q.dtype.itemsize != 2,
        "sequences are sharded over devices": axis_of("length")[1] > 1 and T > 1,
        "it does not support dropout on attention weights": inputs.dropout_key is not None,
        "it does not support soft caps": bool(inputs.soft_cap),
        "it does not support sinks": inputs.sink_N is not None,
        "the position scheme is not a function of distance": other_scheme,
        "there are fewer key heads than devices for heads": head_axes != kv_axes,
        f"it does not support head sizes {size} for queries and keys, {v.shape[-1]} for values": (
            size % 8 or size > 128 or v.shape[-1] != q.shape[-1]
        ),
        f"lengths {T} and {S} are not even": T % 2 or S % 2,
        f"a mask of {T} x {S} tokens is too large": T * S > MAX_PAIRS,
    }
    return next((reason for reason, holds in problems.items() if holds), None)


def cudnn(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, inputs: Inputs) -> jax.Array:
    """Returns what `reference` returns."""
    q_tokens, k_tokens, position = inputs.q_tokens, inputs.k_tokens, inputs.logits_position
    mask_BxTxS, bias_BxNxTxS = inputs.mask(q_tokens, k_tokens), None
    if position is not None:
        bias_BxNxTxS = position.bias(q_tokens.positions_BxT, k_tokens.positions_BxT)
        shape = (len(bias_BxNxTxS), q_BxTxNxH.shape[2], *bias_BxNxTxS.shape[2:])
        bias_BxNxTxS = jnp.broadcast_to(bias_BxNxTxS, shape).astype(q_BxTxNxH.dtype)
    is_sorted = q_tokens.order == k_tokens.order in ("contiguous", "increasing")
    in_order = is_sorted and q_tokens.until_BxT is None
    is_square = q_BxTxNxH.shape[1] == k_BxSxKxH.shape[1]
    mask_shape = (len(q_BxTxNxH), 1, *mask_BxTxS.shape[1:])
    options = {"bias": bias_BxNxTxS, "mask": jnp.broadcast_to(mask_BxTxS[:, None], mask_shape)}
    options |= {"scale": inputs.scale, "is_causal": inputs.mask.causal and in_order and is_square}
    options["implementation"] = "cudnn" if platform() == "gpu" else "xla"
    out_BxTxNxH = jax.nn.dot_product_attention(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, **options)
    return jnp.where(jnp.any(mask_BxTxS, axis=-1)[..., None, None], out_BxTxNxH, 0)
