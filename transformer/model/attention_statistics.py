"""Where heads look, in numbers: from queries and keys alone, in plain JAX, whatever backend the model itself runs on.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head size; I blocks of queries, t queries in one.
"""

import jax
import jax.numpy as jnp

from transformer.model.attention_backends.base import Inputs, logits
from transformer.model.attention_backends.blockwise import BLOCK, cut
from transformer.model.attention_backends.reference import softmax


def weights(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, given: Inputs
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(weights, logits), float32[B, N, T, S], and bool[B, T, S], the keys that a query may see; both zero elsewhere."""
    logits_BxNxTxS, mask_BxTxS = logits(q_BxTxNxH, k_BxSxKxH, given)
    return (
        softmax(logits_BxNxTxS, mask_BxTxS, given.sink_N),
        jnp.where(mask_BxTxS[:, None], logits_BxNxTxS, 0.0),
        mask_BxTxS,
    )


def heads(q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, given: Inputs) -> dict[str, jax.Array]:
    """Of each head, float32[N], means over all queries that have a choice (two keys or more):

    entropy    - sum of w log w over keys, in nats
    sink       weight on the first token of the document, and on the learned sink where there is one
    distance   sum of w |query's position - key's position|, in tokens
    previous   weight on the token before the query
    repeated   weight on the key half a row less one back: in a row that says something twice, on what came after the query's token the
               first time, the prefix-matching score of induction heads (Olsson et al. 2022); means nothing elsewhere
    logit      the largest one

    Memory: B N 256 S numbers.
    """
    back = {"previous": 1, "repeated": q_BxTxNxH.shape[1] // 2 - 1}

    def block(part):
        q_BxtxNxH, tokens = part
        w_BxNxtxS, logits_BxNxtxS, mask_BxtxS = weights(
            q_BxtxNxH, k_BxSxKxH, given.replace(q_tokens=tokens)
        )
        at_q, at_k = tokens.positions_BxT[:, :, None], given.k_tokens.positions_BxT[:, None, :]
        chooses_Bxt = jnp.sum(mask_BxtxS, axis=-1) > 1

        def total(x_BxNxt, of_Bxt=chooses_Bxt):
            return jnp.sum(jnp.where(of_Bxt[:, None], x_BxNxt, 0.0), axis=(0, 2)), jnp.sum(of_Bxt)

        on = lambda keys: jnp.sum(jnp.where((keys & mask_BxtxS)[:, None], w_BxNxtxS, 0.0), axis=-1)
        every = jnp.sum(w_BxNxtxS, axis=-1)
        sums = {
            "entropy": total(-jnp.sum(jax.scipy.special.xlogy(w_BxNxtxS, w_BxNxtxS), axis=-1)),
            "sink": total(on(at_k == 0) + (0.0 if given.sink_N is None else 1.0 - every)),
            "distance": total(jnp.sum(w_BxNxtxS * jnp.abs(at_q - at_k)[:, None], axis=-1)),
        }
        for name, steps in back.items():
            there = (at_q - at_k == steps) & mask_BxtxS
            sums[name] = total(on(there), chooses_Bxt & jnp.any(there, axis=-1))
        least = jnp.finfo(jnp.float32).min
        return sums, jnp.max(jnp.where(mask_BxtxS[:, None], logits_BxNxtxS, least), axis=(0, 2, 3))

    tokens = given.q_tokens
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (q_BxTxNxH.shape[0], *x.shape[1:])), tokens)
    sums, largest_IxN = jax.lax.map(block, cut((q_BxTxNxH, rows), min(BLOCK, q_BxTxNxH.shape[1])))
    means = {
        name: jnp.sum(x, axis=0) / jnp.maximum(jnp.sum(count), 1)
        for name, (x, count) in sums.items()
    }
    return means | {"logit": jnp.max(largest_IxN, axis=0)}
