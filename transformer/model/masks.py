"""Masks as functions of where the query and the key stand; materialised only when an attention backend asks.

Shape suffixes: B batch (or 1), T query length, S key length.

A mask never looks at shapes or offsets, only at the `Tokens` it is given, so the same `CAUSAL & SAME_SEGMENT` serves a
padded batch, a packed one, a prefill and a single cached step.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class Tokens:
    """Where the tokens of one side stand.

    positions_BxT: int32, the absolute position of each token within its own document.
    segments_BxT: int32, which document of its row a token belongs to, from 1; 0 is padding (or an empty cache slot).
    until_BxT: int32, the last position that a token may see under a causal mask; None: its own. That of a prefix's tokens is where
        the prefix ends.
    order: what is known of where tokens stand in their row. "rows": each document's side by side, as far apart in position as in the
        row. "growing": side by side in the order of their positions, at least as far apart in position as in the row. "zigzag": rows so cut into chunks that device d of n holds chunks d and
        2n - 1 - d (see attention_backends/ring.py). "": nothing. Then whole blocks of a mask are known to be empty beforehand.
    """

    positions_BxT: jax.Array
    segments_BxT: jax.Array
    until_BxT: jax.Array | None = None
    order: str = struct.field(pytree_node=False, default="")


@dataclasses.dataclass(frozen=True)
class Mask:
    """`rule(q, k)` is true where a query may attend to a key. Compose with `&` and `|`; call for bool[B, T, S].

    What a backend may make use of: `within`, no key is of another document; `causal`, no key is later than its query (or the query's
    prefix); `window`, keys are fewer than so many positions away (0: no such bound); `plain`, these three are all it says.
    """

    rule: Callable[[Tokens, Tokens], jax.Array]
    name: str
    within: bool = False
    causal: bool = False
    window: int = 0
    plain: bool = False

    def __call__(self, q: Tokens, k: Tokens) -> jax.Array:
        return self.rule(q, k)

    def __and__(self, other: "Mask") -> "Mask":
        window = min(self.window, other.window) or max(self.window, other.window)
        rule = lambda q, k: self(q, k) & other(q, k)
        return Mask(
            rule,
            f"({self.name} & {other.name})",
            self.within or other.within,
            self.causal or other.causal,
            window,
            self.plain and other.plain,
        )

    def __or__(self, other: "Mask") -> "Mask":
        window = max(self.window, other.window) if self.window and other.window else 0
        rule = lambda q, k: self(q, k) | other(q, k)
        return Mask(
            rule,
            f"({self.name} | {other.name})",
            self.within and other.within,
            self.causal and other.causal,
            window,
        )

    def __repr__(self) -> str:
        return self.name


def _causal(q: Tokens, k: Tokens) -> jax.Array:
    until_BxT = q.positions_BxT if q.until_BxT is None else q.until_BxT
    return k.positions_BxT[:, None, :] <= until_BxT[:, :, None]


def _same_segment(q: Tokens, k: Tokens) -> jax.Array:
    return (q.segments_BxT[:, :, None] == k.segments_BxT[:, None, :]) & (
        k.segments_BxT[:, None, :] > 0
    )


CAUSAL = Mask(_causal, "causal", causal=True, plain=True)
"""A key no later than the query; in a prefix, than the prefix."""

SAME_SEGMENT = Mask(_same_segment, "same_segment", within=True, plain=True)
"""Both in one document; padding belongs to none, so this is the padding mask too."""


REAL = Mask(
    lambda q, k: (k.segments_BxT > 0)[:, None, :] & (q.segments_BxT >= 0)[:, :, None], "real"
)
"""Any key that is no padding."""


def window(size: int) -> Mask:
    """Keys fewer than `size` positions away from the query, on either side."""

    def near(q: Tokens, k: Tokens) -> jax.Array:
        return jnp.abs(q.positions_BxT[:, :, None] - k.positions_BxT[:, None, :]) < size

    return Mask(near, f"window({size})", window=size, plain=True)
