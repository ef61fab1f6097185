"""The inner attention: from queries, keys, values, a mask and a position scheme to outputs.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, G = N / K, H head size.

A backend is a function with the signature of `reference`, plus a line in BACKENDS that says when it applies. `reference`
can do everything and is always there.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer.model.activations import soft_cap
from transformer.model.dropout import keep_mask
from transformer.model.masks import Mask, Tokens
from transformer.model.positions import Pair, Position


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What every backend is given. `position` is None in cross-attention, `dropout_key` None without dropout."""

    mask: Mask
    q_tokens: Tokens
    k_tokens: Tokens
    position: Position | None
    scale: float
    soft_cap: float = 0.0
    sink_N: jax.Array | None = None
    dropout: float = 0.0
    dropout_key: jax.Array | None = None


def reference(q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, given: Inputs) -> jax.Array:
    """softmax(scale q k^T + bias) v over the keys the mask allows, softmax in float32 (Vaswani et al. 2017, eq. 1).

    With `soft_cap` c the logits become c tanh(logits / c); with `sink_N` each head has one logit more, whose value is zero.
    Masked keys weigh exactly zero; a query with no key at all yields zeros, with finite gradients.
    """
    heads, kv_heads = q_BxTxNxH.shape[2], k_BxSxKxH.shape[2]
    group = lambda x_BxNxTxS: x_BxNxTxS.reshape(x_BxNxTxS.shape[0], kv_heads, -1, *x_BxNxTxS.shape[2:])
    q_BxTxKxGxH = q_BxTxNxH.reshape(*q_BxTxNxH.shape[:2], kv_heads, heads // kv_heads, -1)
    logits_BxKxGxTxS = given.scale * jnp.einsum(
        "BTKGH,BSKH->BKGTS", q_BxTxKxGxH, k_BxSxKxH, preferred_element_type=jnp.float32
    )
    mask_BxTxS, position = given.mask(given.q_tokens, given.k_tokens), given.position
    if position is not None:
        pair = Pair(given.q_tokens.positions_BxT, given.k_tokens.positions_BxT, mask_BxTxS, given.scale)
        bias_BxNxTxS = position.bias(pair.q_positions_BxT, pair.k_positions_BxS)
        if bias_BxNxTxS is not None:
            logits_BxKxGxTxS += group(bias_BxNxTxS)
        if position.reads_content:
            flat = logits_BxKxGxTxS.reshape(-1, heads, *logits_BxKxGxTxS.shape[3:])
            k_BxSxNxH = jnp.repeat(k_BxSxKxH, heads // kv_heads, axis=2)
            logits_BxKxGxTxS = group(position.score(flat, q_BxTxNxH, k_BxSxNxH, pair))
    if given.soft_cap:
        logits_BxKxGxTxS = soft_cap(logits_BxKxGxTxS, given.soft_cap)
    mask_Bx1x1xTxS = mask_BxTxS[:, None, None]
    logits_BxKxGxTxS = jnp.where(mask_Bx1x1xTxS, logits_BxKxGxTxS, jnp.finfo(jnp.float32).min)
    weights_BxKxGxTxS = jnp.where(mask_Bx1x1xTxS, _softmax(logits_BxKxGxTxS, given.sink_N), 0.0)
    if given.dropout_key is not None:
        keep = keep_mask(given.dropout_key, given.dropout, weights_BxKxGxTxS.shape)
        weights_BxKxGxTxS = jnp.where(keep, weights_BxKxGxTxS / (1.0 - given.dropout), 0.0)
    weights_BxKxGxTxS = weights_BxKxGxTxS.astype(v_BxSxKxH.dtype)
    out_BxTxKxGxH = jnp.einsum("BKGTS,BSKH->BTKGH", weights_BxKxGxTxS, v_BxSxKxH)
    out_BxTxNxH = out_BxTxKxGxH.reshape(*q_BxTxNxH.shape[:3], v_BxSxKxH.shape[-1])
    if position is not None and position.reads_content:
        out_BxTxNxH = position.value(out_BxTxNxH, weights_BxKxGxTxS.reshape(flat.shape), pair)
    return out_BxTxNxH


def _softmax(logits_BxKxGxTxS: jax.Array, sink_N: jax.Array | None) -> jax.Array:
    """Over the keys, and the sink where there is one."""
    if sink_N is None:
        return jax.nn.softmax(logits_BxKxGxTxS, axis=-1)
    kv_heads, group = logits_BxKxGxTxS.shape[1:3]
    sink = jnp.broadcast_to(
        sink_N.astype(jnp.float32).reshape(kv_heads, group, 1, 1), (*logits_BxKxGxTxS.shape[:-1], 1)
    )
    return jax.nn.softmax(jnp.concatenate([logits_BxKxGxTxS, sink], axis=-1), axis=-1)[..., :-1]


BACKENDS: dict[str, Callable[..., jax.Array]] = {"reference": reference}


def choose(name: str) -> Callable[..., jax.Array]:
    """The backend of a config; "auto" is the plain path, which every machine has."""
    return BACKENDS["reference" if name == "auto" else name]
