"""What a position scheme may do: optional hooks, each the identity unless the scheme overrides it.

Shape suffixes: B batch (or 1: the same for all rows), T query length, S key length, D d_model, N heads, H head size.

Absolute positions are always passed in, int32, one per token. They are never recomputed from a length, so one scheme
serves padded, packed and cached batches alike. Phases, slopes and distances are computed in float32: bfloat16 knows
only 769 distinct values among the positions 0..4095.
"""

import dataclasses

import jax
from flax import linen as nn
from flax import struct
from flax.core import FrozenDict

from transformer.errors import UserError, look_up, nearest

SCHEMES: dict[str, type["Position"]] = {}


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
    d_head: int
    max_length: int
    causal: bool
    param_dtype: str = "float32"


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

    def bind(self, scope: nn.Module, facts: StackFacts) -> "Position":
        """The scheme with its parameters, which are declared in `scope` (once a stack, shared by its layers)."""
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

    def bias(self, q_positions_BxT: jax.Array, k_positions_BxS: jax.Array) -> jax.Array | None:
        """float32[B, N, T, S] added to the scaled logits, or None."""
        return None


def register(name: str):
    """Class decorator: gives a scheme the name by which a config asks for it."""

    def add(cls):
        SCHEMES[name] = cls
        return cls

    return add


register("none")(Position)


def build(spec: str | FrozenDict) -> Position:
    """The scheme of a config: `"rotary"`, or `dict(name="rotary", theta=500_000.0)`. Raises UserError."""
    name, given = (
        (spec, {}) if isinstance(spec, str) else (spec.get("name", ""), {k: v for k, v in spec.items() if k != "name"})
    )
    cls = look_up(SCHEMES, name, "model.position")
    options = {f.name: f.default for f in dataclasses.fields(cls) if f.metadata.get("option")}
    for key in given:
        if key not in options:
            way_out = nearest(key, options) if options else "it takes no options"
            raise UserError(f"model.position: {name!r} has no option {key!r}; {way_out}")
        kind = type(options[key])
        if not isinstance(given[key], (int, float) if kind is float else kind) or isinstance(given[key], bool):
            raise UserError(f"model.position.{key}: expected {kind.__name__}, got {given[key]!r}")
    return cls(**given)
