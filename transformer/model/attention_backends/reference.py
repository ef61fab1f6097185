"""The reference backend, which supports all inputs. Tests compare the other backends with it.
Shape suffixes: B batch, T queries, S keys, N query heads, K key/value heads, H head size."""

import jax
import jax.numpy as jnp

from transformer.model.attention_backends.base import Inputs, logits, read


def reference(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, inputs: Inputs) -> jax.Array:
    """Returns softmax(scale q k^T + bias) v over unmasked keys (Vaswani et al. 2017, eq. 1), in
    float32. With `soft_cap` c, the logits become c tanh(logits / c). With `sink_N`, each head has
    an additional logit, whose value vector is zero. Masked keys have exactly zero weight. The
    output of a query without keys is zero, with finite gradients. Memory: B N T S numbers."""
    logits_BxNxTxS, mask_BxTxS = logits(q_BxTxNxH, k_BxSxKxH, inputs)
    return read(softmax(logits_BxNxTxS, mask_BxTxS, inputs), v_BxSxKxH, inputs, mask_BxTxS)


def softmax(logits_BxNxTxS, mask_BxTxS, inputs: Inputs) -> jax.Array:
    """Returns weights over the unmasked keys, and zero elsewhere. With a sink, they sum to less
    than one. With `mask_value`, masked keys are not excluded; it is added to their logits."""
    mask_Bx1xTxS, sink_N = mask_BxTxS[:, None], inputs.sink_N
    if inputs.mask_value:
        return _softmax(logits_BxNxTxS + jnp.where(mask_Bx1xTxS, 0.0, inputs.mask_value), sink_N)
    logits_BxNxTxS = jnp.where(mask_Bx1xTxS, logits_BxNxTxS, jnp.finfo(jnp.float32).min)
    return jnp.where(mask_Bx1xTxS, _softmax(logits_BxNxTxS, sink_N), 0.0)


def _softmax(logits_BxNxTxS: jax.Array, sink_N: jax.Array | None) -> jax.Array:
    if sink_N is None:
        return jax.nn.softmax(logits_BxNxTxS, axis=-1)
    shape, sink_Nx1x1 = (*logits_BxNxTxS.shape[:-1], 1), sink_N.astype(jnp.float32)[:, None, None]
    with_sink = jnp.concatenate([logits_BxNxTxS, jnp.broadcast_to(sink_Nx1x1, shape)], axis=-1)
    return jax.nn.softmax(with_sink, axis=-1)[..., :-1]
