"""Attention masks as functions of token positions; materialized only if a backend requires it. A
mask depends only on the `Tokens` that it is called with, not on shapes or offsets. So the same
`CAUSAL & SAME_SEGMENT` serves padded and packed batches, prefill and single decoding steps.
Shape suffixes: B batch (or 1), T query length, S key length."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Tokens:
    """The positions and documents of the tokens of a stack.

    order: how the tokens are known to be arranged in a sequence. Backends use it to skip empty
        blocks of a mask. In decoding, it includes the tokens before them in the cache.
        "contiguous": the tokens of a document are adjacent, and their distances in position equal
            those in the sequence.
        "increasing": the tokens of a document are adjacent and sorted by position, and their
            distances in position are at least those in the sequence.
        "zigzag": device d of n holds chunks d and 2n - 1 - d (see attention_backends/ring.py).
        "": nothing is known."""

    positions_BxT: jax.Array  # int32, of each token within its document
    segments_BxT: jax.Array  # int32, its document in the sequence, from 1; 0: padding, empty slot
    # int32, the last position that a token may attend to if causal: a prefix's end. None: its own
    until_BxT: jax.Array | None = None
    # int32, where its document starts, where positions are indices in the sequence; see `by_index`
    start_BxT: jax.Array | None = None
    order: str = struct.field(pytree_node=False, default="")

    @property
    def positions_in_document(self) -> jax.Array:
        """The positions of tokens within their documents."""
        start = self.start_BxT
        return self.positions_BxT if start is None else self.positions_BxT - start


@dataclasses.dataclass(frozen=True)
class Mask:
    """An attention mask: `rule(q, k)` is True where a query may attend to a key. Calling a mask
    returns bool[B, T, S]. Masks compose with `&` and `|`. Backends may use the other facts."""

    rule: Callable[[Tokens, Tokens], jax.Array]
    name: str
    within: bool = False  # every allowed key is in the query's document
    causal: bool = False  # no allowed key is later than its query (or the end of its prefix)
    window: int = 0  # allowed keys are fewer than this many positions away; 0: no bound
    plain: bool = False  # the three facts above describe the mask completely

    def __call__(self, q: Tokens, k: Tokens) -> jax.Array:
        return self.rule(q, k)

    def __and__(self, other: "Mask") -> "Mask":
        window = min(self.window, other.window) or max(self.window, other.window)
        rule = lambda q, k: self(q, k) & other(q, k)
        facts = self.within or other.within, self.causal or other.causal, window
        return Mask(rule, f"({self.name} & {other.name})", *facts, self.plain and other.plain)

    def __or__(self, other: "Mask") -> "Mask":
        window = max(self.window, other.window) if self.window and other.window else 0
        rule = lambda q, k: self(q, k) | other(q, k)
        facts = self.within and other.within, self.causal and other.causal, window
        return Mask(rule, f"({self.name} | {other.name})", *facts)

    def __repr__(self) -> str:
        return self.name


def _causal(q: Tokens, k: Tokens) -> jax.Array:
    until_BxT = q.positions_BxT if q.until_BxT is None else q.until_BxT
    return k.positions_BxT[:, None, :] <= until_BxT[:, :, None]


def _same_segment(q: Tokens, k: Tokens) -> jax.Array:
    k_segments_Bx1xS = k.segments_BxT[:, None, :]
    return (q.segments_BxT[:, :, None] == k_segments_Bx1xS) & (k_segments_Bx1xS > 0)


CAUSAL = Mask(_causal, "causal", causal=True, plain=True)
"""Allows keys no later than the query or, for a query in a prefix, the end of the prefix."""

SAME_SEGMENT = Mask(_same_segment, "same_segment", within=True, plain=True)
"""Allows keys of the query's document. Padding is in none, so this is also the padding mask."""

REAL = Mask(lambda q, k: (k.segments_BxT > 0)[:, None] & (q.segments_BxT >= 0)[:, :, None], "real")
"""Allows all keys but padding."""


def window(size: int) -> Mask:
    """Returns a mask of keys fewer than `size` positions away from the query, on either side."""
    near = lambda q, k: jnp.abs(q.positions_BxT[:, :, None] - k.positions_BxT[:, None, :]) < size
    return Mask(near, f"window({size})", window=size, plain=True)


def pairs(mask: Mask, q: Tokens, num_queries: int, num_keys: int, *tile: int):
    """Returns a name scope for products over all queries and keys: q k^T, and weights v. Only the
    share of them that the mask allows counts as FLOPs (planning/model_flops.py). The name has the
    numbers of queries and keys, whether the mask is causal, and its window: "pairs.64.64.1.0". In a
    fused kernel, the queries and keys per tile follow."""
    causal = int(mask.causal and q.until_BxT is None)
    numbers = (num_queries, num_keys, causal, mask.window, *tile)
    return jax.named_scope(".".join(["pairs", *map(str, numbers)]))


def zigzag(x_BxT: jax.Array, count: int) -> jax.Array:
    """Reorders 2 `count` chunks of each sequence: part n holds chunks n and 2 count - 1 - n."""
    chunks = x_BxT.reshape(x_BxT.shape[0], 2 * count, -1)
    pairs = jnp.stack([chunks[:, :count], jnp.flip(chunks[:, count:], axis=1)], axis=2)
    return pairs.reshape(x_BxT.shape)
