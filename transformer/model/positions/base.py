"""What a position scheme may do: optional hooks, each the identity unless the scheme overrides it.

Shape suffixes: B batch (or 1: the same for all rows), T query length, S key length, D d_model, N heads, H head size.

Absolute positions are always passed in, int32, one per token. They are never recomputed from a length, so one scheme
serves padded, packed and cached batches alike. Phases, slopes and distances are computed in float32: bfloat16 knows
only 769 distinct values among the positions 0..4095.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
from flax import struct

from transformer.registry import Registry

SCHEMES = Registry("model.position", __package__, lambda field: field.metadata.get("option", False))

register = SCHEMES.register

build = SCHEMES.build

Param = Callable[..., jax.Array]
"""`param(name, init, shape, dtype)` declares a parameter, as `nn.Module.param` does."""


def option(default):
    """A field that a config may set. Static: it is part of the program, not of the parameters."""
    return struct.field(pytree_node=False, default=default, metadata={"option": True})


def fact(default=None):
    """A static field that `bind` fills in from the stack."""
    return struct.field(pytree_node=False, default=default)


@dataclasses.dataclass(frozen=True)
class StackFacts:
    """What a scheme may know of the stack (encoder or decoder) it serves."""

    d_model: int
    num_heads: int
    num_kv_heads: int
    d_head: int
    d_value: int
    max_length: int
    causal: bool
    param_dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Queries and keys that meet: where both stand, which of them may, and what their products are multiplied by."""

    q_positions_BxT: jax.Array
    k_positions_BxS: jax.Array
    mask_BxTxS: jax.Array
    scale: float

    @property
    def distance_BxTxS(self) -> jax.Array:
        """Query minus key: positive for keys of the past."""
        return self.q_positions_BxT[:, :, None] - self.k_positions_BxS[:, None, :]


@struct.dataclass
class Position:
    """No position at all ("NoPE"; Haviv et al. 2022, Kazemnejad et al. 2023). The base of every scheme.

    With a causal mask a decoder can still count (a token sees how many come before it); without one, attention is
    blind to order: permuting the tokens permutes the outputs. Parameters: none. Cross-attention: nothing.
    Cache: nothing to do. Beyond the training length: nothing breaks by itself.
    """

    def check(self, facts: StackFacts) -> str | None:
        """Why this scheme cannot serve that stack, in one line; None if it can."""
        return None

    def bind(self, param: Param, facts: StackFacts) -> "Position":
        """The scheme with its parameters, declared by `param` (once a stack, shared by its layers)."""
        return self

    def bind_layer(self, param: Param, facts: StackFacts) -> "Position":
        """The scheme with parameters that each layer has for itself, declared in its self-attention."""
        return self

    def at(self, positions_BxT: jax.Array) -> "Position":
        """The scheme with what depends on the tokens' positions alone: computed once a stack, not in every layer."""
        return self

    def embed(self, x_BxTxD: jax.Array, positions_BxT: jax.Array) -> jax.Array:
        """The token embeddings with position added."""
        return x_BxTxD

    def rotate(self, q_BxTxNxH: jax.Array, k_BxTxKxH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries and keys of the stack's tokens, turned by their position."""
        return q_BxTxNxH, k_BxTxKxH

    def key_size(self, facts: StackFacts) -> int:
        """The head size of the queries and keys that `rotate` returns."""
        return facts.d_head

    def bias(self, q_positions_BxT: jax.Array, k_positions_BxS: jax.Array) -> jax.Array | None:
        """float32[B, N, T, S] added to the scaled logits, or None."""
        return None

    def score(
        self, logits_BxNxTxS: jax.Array, q_BxTxNxH: jax.Array, k_BxSxNxH: jax.Array, pair: "Pair"
    ) -> jax.Array:
        """The scaled logits with position in them, where that depends on queries and keys. No fused kernel's."""
        return logits_BxNxTxS

    def value(self, out_BxTxNxH: jax.Array, weights_BxNxTxS: jax.Array, pair: "Pair") -> jax.Array:
        """What attention read, with position added to it. No fused kernel's."""
        return out_BxTxNxH

    @property
    def past_slopes_N(self) -> jax.Array | None:
        """float32[N]: m, where `bias` is -m_n (t - s) for a key of the past and there is nothing else; then a kernel needs no bias."""
        return None

    pairwise: ClassVar[bool] = True
    """Whether what `bias`, `score` and `value` say of a query and a key depends on these two alone."""

    by_distance: ClassVar[bool] = False
    """Whether what `bias`, `score` and `value` say of a query and a key depends on how far apart they are, and not on where."""

    bounded: ClassVar[bool] = False
    """Whether it has a parameter for each position up to `max_length`, and none beyond."""

    ends: ClassVar[bool] = False
    """Whether positions of `max_length` and beyond have no meaning for it."""

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks that change something, of embed, rotate, bias, score and value."""
        names = ("embed", "rotate", "bias", "score", "value")
        return frozenset(
            hook for hook in names if getattr(type(self), hook) is not getattr(Position, hook)
        )

    @property
    def reads_positions(self) -> bool:
        """Whether anything depends on where tokens stand."""
        return bool(self.hooks)

    @property
    def reads_content(self) -> bool:
        """Whether `score` or `value` do anything: then no fused backend will do."""
        return bool(self.hooks & {"score", "value"})

    @property
    def acts_on_logits(self) -> bool:
        """Whether there is anything to do where queries meet keys."""
        return bool(self.hooks & {"bias", "score", "value"})


register("none")(Position)
