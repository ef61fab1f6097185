"""Statistics of attention heads, computed from queries and keys alone. They are plain JAX,
whichever backend the model runs on. Shape suffixes: B batch, T query length, S key length, N query
heads, K key/value heads, H head size; I blocks of queries, t queries in a block."""

import jax
import jax.numpy as jnp

from transformer.model.attention_backends.base import Inputs, logits, softmax
from transformer.model.attention_backends.blockwise import BLOCK, cut


def weights(q_BxTxNxH, k_BxSxKxH, inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns (weights, logits, mask): float32[B, N, T, S] twice, and bool[B, T, S]. The mask is
    true where a query may attend to a key; weights and logits are zero elsewhere."""
    logits_BxNxTxS, mask_BxTxS = logits(q_BxTxNxH, k_BxSxKxH, inputs)
    weights_BxNxTxS = softmax(logits_BxNxTxS, mask_BxTxS, inputs)
    return weights_BxNxTxS, jnp.where(mask_BxTxS[:, None], logits_BxNxTxS, 0.0), mask_BxTxS


def heads(q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, inputs: Inputs) -> dict[str, jax.Array]:
    """Computes statistics of each head, float32[N]. Memory: B N 256 S numbers.

    All but `logit` are means over the queries that can attend to at least two keys; w is a weight.

    entropy    - sum of w log w over keys, in nats
    sink       weight on the first token of the document, plus that on the learned sink, if any
    distance   sum of w |query position - key position|, in tokens
    previous   weight on the token before the query, over queries that have one
    repeated   weight on the token T / 2 - 1 positions back, over queries that have one: if the
               second half of a sequence repeats the first, the prefix-matching score of induction
               heads (Olsson et al. 2022)
    logit      the largest logit"""

    def block_statistics(block):
        q_BxtxNxH, tokens = block
        of_block = inputs.replace(q_tokens=tokens)
        w_BxNxtxS, logits_BxNxtxS, mask_BxtxS = weights(q_BxtxNxH, k_BxSxKxH, of_block)
        at_q, at_k = tokens.positions_BxT[:, :, None], inputs.k_tokens.positions_BxT[:, None, :]
        has_choice_Bxt = jnp.sum(mask_BxtxS, axis=-1) > 1

        def total(x_BxNxt, of_Bxt=has_choice_Bxt):
            """The sum over the queries `of_Bxt`, and their number."""
            return jnp.sum(jnp.where(of_Bxt[:, None], x_BxNxt, 0.0), axis=(0, 2)), jnp.sum(of_Bxt)

        kept = lambda keys: jnp.where((keys & mask_BxtxS)[:, None], w_BxNxtxS, 0.0)
        weight_on = lambda keys: jnp.sum(kept(keys), axis=-1)
        on_all = jnp.sum(w_BxNxtxS, axis=-1)
        sums = {
            "entropy": total(-jnp.sum(jax.scipy.special.xlogy(w_BxNxtxS, w_BxNxtxS), axis=-1)),
            "sink": total(weight_on(at_k == 0) + (0.0 if inputs.sink_N is None else 1.0 - on_all)),
            "distance": total(jnp.sum(w_BxNxtxS * jnp.abs(at_q - at_k)[:, None], axis=-1)),
        }
        for name, offset in {"previous": 1, "repeated": q_BxTxNxH.shape[1] // 2 - 1}.items():
            keys_BxtxS = (at_q - at_k == offset) & mask_BxtxS
            sums[name] = total(weight_on(keys_BxtxS), has_choice_Bxt & jnp.any(keys_BxtxS, axis=-1))
        lowest = jnp.finfo(jnp.float32).min
        return sums, jnp.max(jnp.where(mask_BxtxS[:, None], logits_BxNxtxS, lowest), axis=(0, 2, 3))

    to_batch = lambda x: jnp.broadcast_to(x, (len(q_BxTxNxH), *x.shape[1:]))
    size, q_tokens = min(BLOCK, q_BxTxNxH.shape[1]), jax.tree.map(to_batch, inputs.q_tokens)
    sums, largest_IxN = jax.lax.map(block_statistics, cut((q_BxTxNxH, q_tokens), size))
    mean = lambda x, count: jnp.sum(x, axis=0) / jnp.maximum(jnp.sum(count), 1)
    means = {name: mean(*sum_and_count) for name, sum_and_count in sums.items()}
    return means | {"logit": jnp.max(largest_IxN, axis=0)}
