"""Pooling of a sequence's hidden states for classification, by name.
Shape suffixes: B batch, T length, D d_model."""

import jax.numpy as jnp


def _last(h_BxTxD, real_BxTx1):
    index_BxTx1 = jnp.where(real_BxTx1, jnp.arange(h_BxTxD.shape[1])[:, None], 0)
    return jnp.take_along_axis(h_BxTxD, jnp.max(index_BxTx1, axis=1, keepdims=True), axis=1)[:, 0]


POOLINGS = {
    "none": lambda h_BxTxD, real_BxTx1: h_BxTxD,  # one label per token: tagging
    "cls": lambda h_BxTxD, real_BxTx1: h_BxTxD[:, 0],
    "mean": lambda h_BxTxD, real_BxTx1: (
        jnp.sum(h_BxTxD * real_BxTx1, 1) / jnp.maximum(jnp.sum(real_BxTx1, 1), 1)
    ),
    "last": _last,
}
"""Name -> function (h_BxTxD, real_BxTx1) -> h. "cls" takes the first token, "mean" averages over
real tokens, "last" takes the last real token."""
