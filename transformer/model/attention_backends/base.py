"""What every inner attention is given, and the two steps that all plain ones share: logits, and reading by weights.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, G = N / K, H head size.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from transformer.model.activations import soft_cap
from transformer.model.dropout import keep_mask
from transformer.model.masks import Mask, Tokens
from transformer.model.positions import Pair, Position


def static(default=dataclasses.MISSING):
    """A field that is part of the program."""
    given = {} if default is dataclasses.MISSING else {"default": default}
    return struct.field(pytree_node=False, **given)


@struct.dataclass
class Inputs:
    """What every backend is given. `position` is None in cross-attention, `dropout_key` None without dropout."""

    mask: Mask = static()
    q_tokens: Tokens
    k_tokens: Tokens
    position: Position | None
    scale: float = static()
    soft_cap: float = static(0.0)
    sink_N: jax.Array | None = None
    dropout: float = static(0.0)
    dropout_key: jax.Array | None = None

    @property
    def logits_position(self) -> Position | None:
        """The scheme, where it has something to say about logits or about what is read."""
        return self.position if self.position is not None and self.position.acts_on_logits else None

    def by_place(self) -> "Inputs":
        """The same with tokens' places in the row for their positions, alike in all rows, where that changes nothing: what is said of a
        query and a key of one document depends on their distance alone, and no others meet. Then a bias is one for all rows."""
        q, k, position = self.q_tokens, self.k_tokens, self.logits_position
        alike = (
            q.order == k.order == "rows"
            and q.positions_BxT.shape == k.positions_BxT.shape
            and q.until_BxT is None
        )
        if not alike or not self.mask.within or position is None or not position.by_distance:
            return self
        places = jnp.arange(q.positions_BxT.shape[1], dtype=q.positions_BxT.dtype)[None]
        return self.replace(
            q_tokens=q.replace(positions_BxT=places), k_tokens=k.replace(positions_BxT=places)
        )

    def split(self) -> tuple[tuple, tuple, Callable[[tuple, tuple], "Inputs"]]:
        """(what has a gradient, what has none, how they make the whole again): for attention with a gradient of its own."""
        learned, fixed = (
            (self.position, self.sink_N),
            (self.q_tokens, self.k_tokens, self.dropout_key),
        )
        program = self.replace(
            position=None, sink_N=None, q_tokens=None, k_tokens=None, dropout_key=None
        )

        def whole(learned: tuple, fixed: tuple) -> "Inputs":
            (position, sink_N), (q_tokens, k_tokens, key) = learned, fixed
            return program.replace(
                position=position,
                sink_N=sink_N,
                q_tokens=q_tokens,
                k_tokens=k_tokens,
                dropout_key=key,
            )

        return learned, fixed, whole


PAIRS = "pairs"
"""The name scope of the products that a mask can forbid: of a query and a key, of a weight and a value."""

Attend = Callable[[jax.Array, jax.Array, jax.Array, Inputs], jax.Array]
"""attend(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, given) -> out_BxTxNxH."""


def logits(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, given: Inputs
) -> tuple[jax.Array, jax.Array]:
    """(float32[B, N, T, S], bool[B, T, S]): scale q k^T with position in it, capped where there is a cap; and which of them count."""
    heads, kv_heads = q_BxTxNxH.shape[2], k_BxSxKxH.shape[2]
    q_BxTxKxGxH = q_BxTxNxH.reshape(*q_BxTxNxH.shape[:2], kv_heads, heads // kv_heads, -1)
    with jax.named_scope(PAIRS):
        logits_BxKxGxTxS = given.scale * jnp.einsum(
            "BTKGH,BSKH->BKGTS", q_BxTxKxGxH, k_BxSxKxH, preferred_element_type=jnp.float32
        )
    logits_BxNxTxS = logits_BxKxGxTxS.reshape(-1, heads, *logits_BxKxGxTxS.shape[3:])
    mask_BxTxS, position = given.mask(given.q_tokens, given.k_tokens), given.logits_position
    if position is not None:
        pair = _pair(given, mask_BxTxS)
        bias_BxNxTxS = position.bias(pair.q_positions_BxT, pair.k_positions_BxS)
        if bias_BxNxTxS is not None:
            logits_BxNxTxS += bias_BxNxTxS
        if position.reads_content:
            k_BxSxNxH = jnp.repeat(k_BxSxKxH, heads // kv_heads, axis=2)
            logits_BxNxTxS = position.score(logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair)
    if given.soft_cap:
        logits_BxNxTxS = soft_cap(logits_BxNxTxS, given.soft_cap)
    return logits_BxNxTxS, mask_BxTxS


def read(
    weights_BxNxTxS: jax.Array,
    v_BxSxKxH: jax.Array,
    given: Inputs,
    mask_BxTxS: jax.Array,
    dtype=None,
) -> jax.Array:
    """weights v, with dropout on the weights and what the position scheme adds: [B, T, N, H] of `dtype`. Linear in the weights."""
    batch, heads, queries, keys = weights_BxNxTxS.shape
    kv_heads = v_BxSxKxH.shape[2]
    if given.dropout_key is not None:
        keep = keep_mask(given.dropout_key, given.dropout, weights_BxNxTxS.shape)
        weights_BxNxTxS = jnp.where(keep, weights_BxNxTxS / (1.0 - given.dropout), 0.0)
    weights_BxNxTxS = weights_BxNxTxS.astype(v_BxSxKxH.dtype)
    weights_BxKxGxTxS = weights_BxNxTxS.reshape(batch, kv_heads, heads // kv_heads, queries, keys)
    with jax.named_scope(PAIRS):
        out_BxTxKxGxH = jnp.einsum(
            "BKGTS,BSKH->BTKGH", weights_BxKxGxTxS, v_BxSxKxH, preferred_element_type=dtype
        )
    out_BxTxNxH = out_BxTxKxGxH.reshape(batch, queries, heads, v_BxSxKxH.shape[-1])
    position = given.logits_position
    if position is not None and position.reads_content:
        out_BxTxNxH = position.value(out_BxTxNxH, weights_BxNxTxS, _pair(given, mask_BxTxS))
    return out_BxTxNxH


def _pair(given: Inputs, mask_BxTxS: jax.Array) -> Pair:
    return Pair(given.q_tokens.positions_BxT, given.k_tokens.positions_BxT, mask_BxTxS, given.scale)
