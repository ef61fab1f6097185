"""Inputs of attention backends, the reference backend, and what plain-JAX ones share: logits, and
weights times values. The reference supports all inputs; tests compare the other backends with it.
Shape suffixes: B batch, T queries, S keys, N query heads, K key/value heads, G = N / K, H size."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from transformer.model.dropout import keep_pairs, seeds, token_bits
from transformer.model.masks import Mask, Tokens, pairs, zigzag
from transformer.model.modules import soft_cap
from transformer.model.positions import Pair, Position
from transformer.model.sharding import axis_of

Attend = Callable[[jax.Array, jax.Array, jax.Array, "Inputs"], jax.Array]
"""attend(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, inputs) -> out_BxTxNxH."""


def static(default=dataclasses.MISSING):
    """Declares a static field: part of the program, not an array."""
    return struct.field(pytree_node=False, default=default)


@struct.dataclass
class Inputs:
    """The inputs of a backend, besides queries, keys and values."""

    mask: Mask = static()
    q_tokens: Tokens
    k_tokens: Tokens
    position: Position | None
    scale: float = static()
    soft_cap: float = static(0.0)
    sink_N: jax.Array | None = None
    dropout: float = static(0.0)
    dropout_key: jax.Array | None = None  # None without dropout
    first: jax.Array | None = None  # int32[2]: where the first query and key are in the sequence
    mask_value: float = static(0.0)  # attention_mask_value of the config
    additive_NxH: jax.Array | None = None  # of attention_score="additive"

    @property
    def logits_position(self) -> Position | None:
        """The position scheme if it acts on the logits or on the attention output, else None."""
        return self.position if self.position is not None and self.position.acts_on_logits else None

    def by_index(self, with_starts: bool = False) -> "Inputs":
        """Replaces positions by indices in the sequence, if this does not change results. All
        sequences then have the same positions, so that one bias array serves the whole batch, and
        blocks of tokens that a mask excludes are known from the positions. Results do not change if
        the tokens of a document are contiguous, queries attend only to keys of their document, and
        the position scheme's logits depend on distances alone. `with_starts`: and on the positions
        of queries, from which the backend subtracts `start_BxT`."""
        q, k, position = self.q_tokens, self.k_tokens, self.logits_position
        in_order = q.order == k.order in ("contiguous", "zigzag")
        aligned = self.first is not None or q.positions_BxT.shape[1] == k.positions_BxT.shape[1]
        by_distance = position is None or position.by_distance
        if not (in_order and aligned and self.mask.within and (by_distance or with_starts)):
            return self
        (q_first, k_first), until = (0, 0) if self.first is None else self.first, q.until_BxT
        count = lambda tokens: jnp.arange(tokens.positions_BxT.shape[1], dtype=jnp.int32)[None]
        q_indices, k_indices = q_first + count(q), k_first + count(k)
        if q.order == "zigzag":
            q_indices, k_indices = (zigzag(x, axis_of("length")[1]) for x in (q_indices, k_indices))
        if until is not None:
            until = until - q.positions_BxT + q_indices
        if not by_distance:
            q = q.replace(start_BxT=q_indices - q.positions_in_document)
        q = q.replace(positions_BxT=q_indices, until_BxT=until)
        return self.replace(q_tokens=q, k_tokens=k.replace(positions_BxT=k_indices))

    def split(self) -> tuple[tuple, tuple, Callable[[tuple, tuple], "Inputs"]]:
        """Returns (inputs with gradients, without gradients, function that joins the two)."""
        names = ("position", "sink_N", "q_tokens", "k_tokens", "dropout_key")
        arrays = tuple(getattr(self, name) for name in names)
        program = self.replace(**dict.fromkeys(names))
        named = lambda *arrays: dict(zip(names, arrays, strict=True))
        merge = lambda learned, fixed: program.replace(**named(*learned, *fixed))
        return arrays[:2], arrays[2:], merge


def by_head(x_BxTxNxH: jax.Array) -> jax.Array:
    """Returns [B, N, T, H], or the reverse."""
    return jnp.swapaxes(x_BxTxNxH, 1, 2)


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


def logits(q_BxTxNxH, k_BxSxKxH, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns the logits, float32[B, N, T, S], and the mask, bool[B, T, S]. Logits are scale q k^T,
    or scale v . tanh(q + k) if additive, with position scheme and soft cap, if any, applied."""
    heads, kv_heads = q_BxTxNxH.shape[2], k_BxSxKxH.shape[2]
    q_BxTxKxGxH = q_BxTxNxH.reshape(*q_BxTxNxH.shape[:2], kv_heads, heads // kv_heads, -1)
    with pairs(inputs.mask, inputs.q_tokens, q_BxTxNxH.shape[1], k_BxSxKxH.shape[1]):
        if inputs.additive_NxH is None:
            products = "BTKGH,BSKH->BKGTS", q_BxTxKxGxH, k_BxSxKxH
        else:
            sums = q_BxTxKxGxH[:, :, None] + k_BxSxKxH[:, None, :, :, None]
            vectors = inputs.additive_NxH.reshape(kv_heads, heads // kv_heads, -1)
            products = "BTSKGH,KGH->BKGTS", jnp.tanh(sums), vectors.astype(sums.dtype)
        logits_BxKxGxTxS = inputs.scale * jnp.einsum(*products, preferred_element_type=jnp.float32)
    logits_BxNxTxS = logits_BxKxGxTxS.reshape(-1, heads, *logits_BxKxGxTxS.shape[3:])
    mask_BxTxS, position = inputs.mask(inputs.q_tokens, inputs.k_tokens), inputs.logits_position
    if position is not None:
        pair = _pair(inputs, mask_BxTxS)
        bias_BxNxTxS = position.bias(pair.q_positions_BxT, pair.k_positions_BxS)
        if bias_BxNxTxS is not None:
            logits_BxNxTxS += bias_BxNxTxS
        if position.reads_content:
            k_BxSxNxH = jnp.repeat(k_BxSxKxH, heads // kv_heads, axis=2)
            logits_BxNxTxS = position.score(logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair)
    if inputs.soft_cap:
        logits_BxNxTxS = soft_cap(logits_BxNxTxS, inputs.soft_cap)
    return logits_BxNxTxS, mask_BxTxS


def read(weights_BxNxTxS, v_BxSxKxH, inputs: Inputs, mask_BxTxS, dtype=None) -> jax.Array:
    """Returns weights v, [B, T, N, H] of `dtype`, with dropout and scheme. Linear in weights."""
    (batch, heads, queries, keys), kv_heads = weights_BxNxTxS.shape, v_BxSxKxH.shape[2]
    if inputs.dropout_key is not None:
        keep = _keep(inputs, weights_BxNxTxS.shape)
        weights_BxNxTxS = jnp.where(keep, weights_BxNxTxS / (1.0 - inputs.dropout), 0.0)
    weights_BxNxTxS = weights_BxNxTxS.astype(v_BxSxKxH.dtype)
    weights_BxKxGxTxS = weights_BxNxTxS.reshape(batch, kv_heads, heads // kv_heads, queries, keys)
    with pairs(inputs.mask, inputs.q_tokens, queries, keys):
        # The weights are the left operand of this order of results, which is faster on CPUs.
        products = "BKGTS,BSKH->BKGTH", weights_BxKxGxTxS, v_BxSxKxH
        out_BxKxGxTxH = jnp.einsum(*products, preferred_element_type=dtype)
    out_BxTxNxH = by_head(out_BxKxGxTxH.reshape(batch, heads, queries, -1))
    position = inputs.logits_position
    if position is not None and position.reads_content:
        out_BxTxNxH = position.value(out_BxTxNxH, weights_BxNxTxS, _pair(inputs, mask_BxTxS))
    return out_BxTxNxH


def _keep(inputs: Inputs, shape: tuple[int, int, int, int]) -> jax.Array:
    """Returns bool[B, N, T, S]: False for the weights that dropout sets to zero."""
    batch, heads, queries, keys = shape
    seed, streams = seeds(inputs.dropout_key), jnp.arange(batch * heads).reshape(batch, heads, 1)
    q_first, k_first = (0, 0) if inputs.first is None else inputs.first
    q_bits_BxNxT = token_bits(seed[0], streams, q_first + jnp.arange(queries))
    k_bits_BxNxS = token_bits(seed[1], streams, k_first + jnp.arange(keys))
    return keep_pairs(inputs.dropout, q_bits_BxNxT[..., None], k_bits_BxNxS[:, :, None])


def _pair(inputs: Inputs, mask_BxTxS: jax.Array) -> Pair:
    q, k = inputs.q_tokens, inputs.k_tokens
    return Pair(q.positions_BxT, k.positions_BxT, mask_BxTxS, inputs.scale)
