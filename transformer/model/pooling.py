"""Pooling of a sequence's hidden states for classification, by name.

Shape suffixes: B batch, T length, D d_model.
"""

import jax.numpy as jnp

POOLINGS = {
    "none": lambda h_BxTxD, real_BxTx1: h_BxTxD,  # one label per token: tagging
    "cls": lambda h_BxTxD, real_BxTx1: h_BxTxD[:, 0],
    "mean": lambda h_BxTxD, real_BxTx1: (
        jnp.sum(h_BxTxD * real_BxTx1, 1) / jnp.maximum(jnp.sum(real_BxTx1, 1), 1)
    ),
    "last": lambda h_BxTxD, real_BxTx1: jnp.take_along_axis(
        h_BxTxD,
        jnp.max(jnp.where(real_BxTx1, jnp.arange(h_BxTxD.shape[1])[None, :, None], 0), axis=1)[
            :, None
        ],
        axis=1,
    )[:, 0],
}
"""Name -> function (h_BxTxD, real_BxTx1) -> h.

"cls" takes the first token, "mean" averages over real tokens, "last" takes the last real token.
"""
