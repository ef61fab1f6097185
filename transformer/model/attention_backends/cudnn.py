"""GPUs' fused attention: cuDNN's, through `jax.nn.dot_product_attention`. Elsewhere that function's plain path, for tests.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head size.

It is given every mask as an array, so that documents that share a row stay apart; a causal one is named
too, and what lies above the diagonal is not computed. ALiBi under a causal mask becomes features of queries and keys, as in splash.py.
"""

import jax
import jax.numpy as jnp

from transformer.model.attention_backends.base import Inputs
from transformer.model.attention_backends.splash import FARTHEST, too_far, with_slopes
from transformer.model.sharding import axis_of, fitting, platform

MOST_PAIRS = 8192**2
"""Of tokens, a row: the mask, the bias that it becomes and that bias's gradient take 5 bytes each, 320 MB then."""


def why_not(q, k, v, given: Inputs) -> str | None:
    """What it cannot do, in a few words."""
    T, S, position = q.shape[1], k.shape[1], given.logits_position
    size = q.shape[-1] + (0 if position is None else 8)
    problems = {
        "it is a GPU's": platform() == "tpu",
        "it takes bfloat16": platform() == "gpu" and q.dtype.itemsize != 2,
        "tokens are spread over devices": axis_of("length")[1] > 1 and T > 1,
        "it has no dropout on attention weights": given.dropout_key is not None,
        "it has no soft cap": bool(given.soft_cap),
        "it has no sinks": given.sink_N is not None,
        "the position scheme changes logits": position is not None and (position.past_slopes_N is None or not given.mask.causal),
        f"positions may be {FARTHEST:,} or more": position is not None and too_far(given, S),
        "fewer key heads than devices for heads": fitting("activation_heads", q.shape[2]) != fitting("activation_heads", k.shape[2]),
        f"a head size of {size} for queries and keys and {v.shape[-1]} for values": size % 8 or size > 128 or v.shape[-1] != q.shape[-1],
        f"{T} and {S} tokens are no even numbers": T % 2 or S % 2,
        f"the mask of {T} and {S} tokens would be too large": T * S > MOST_PAIRS,
    }  # fmt: skip
    return next((words for words, holds in problems.items() if holds), None)


def cudnn(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, given: Inputs
) -> jax.Array:
    """What `reference` computes."""
    d_value, position = v_BxSxKxH.shape[-1], given.logits_position
    mask_BxTxS = given.mask(given.q_tokens, given.k_tokens)
    if position is not None:
        q_BxTxNxH, k_BxSxKxH = with_slopes(
            q_BxTxNxH, k_BxSxKxH, position.past_slopes_N / given.scale, given.k_tokens.positions_BxT
        )
        widen = lambda x: jnp.pad(
            x, ((0, 0),) * 3 + ((0, d_value + 8 - x.shape[-1]),)
        )  # to one head size for all three
        q_BxTxNxH, k_BxSxKxH, v_BxSxKxH = map(widen, (q_BxTxNxH, k_BxSxKxH, v_BxSxKxH))
    by_place = (
        given.q_tokens.order == given.k_tokens.order in ("rows", "growing")
        and given.q_tokens.until_BxT is None
    )
    out_BxTxNxH = jax.nn.dot_product_attention(
        q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, mask=jnp.broadcast_to(mask_BxTxS[:, None], (len(q_BxTxNxH), 1, *mask_BxTxS.shape[1:])), scale=given.scale,
        is_causal=given.mask.causal and by_place and q_BxTxNxH.shape[1] == k_BxSxKxH.shape[1],
        implementation="cudnn" if platform() == "gpu" else "xla",
    )[..., :d_value]  # fmt: skip
    return jnp.where(jnp.any(mask_BxTxS, axis=-1)[..., None, None], out_BxTxNxH, 0)
