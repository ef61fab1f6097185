"""The interface of position schemes: optional hooks, which default to the identity. Absolute
positions are always passed in, as int32, one per token. They are never recomputed from a length, so
one scheme serves padded, packed and cached batches alike. Phases, slopes and distances are computed
in float32, because bfloat16 has only 769 distinct values among the positions 0..4095.
Shape suffixes: B batch (or 1, if positions are the same in all sequences), T query length, S key
length, D d_model, N query heads, K key/value heads, H head size."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn, struct

from transformer.errors import UserError
from transformer.registry import Registry

_is_option = lambda field: field.metadata.get("option", False)
SCHEMES = Registry("model.position", __package__, _is_option, struct.dataclass)
register = SCHEMES.register
build = SCHEMES.build

Param = Callable[..., jax.Array]
"""`param(name, init, shape, dtype)` declares a parameter, as `nn.Module.param` does."""


def option(default):
    """Declares a static field that a config may set: part of the program, not a parameter."""
    return struct.field(pytree_node=False, default=default, metadata={"option": True})


def fact(default=None):
    """Declares a static field that `bind` sets to the StackFacts of the same name."""
    return struct.field(pytree_node=False, default=default, metadata={"fact": True})


def declare(param: Param, facts: "StackFacts", name: str, shape, names, init) -> jax.Array:
    """Declares a parameter with axes of these logical names, and returns it."""
    return param(name, nn.with_logical_partitioning(init, names), shape, facts.param_dtype)


def per_head(x_N: jax.Array, distance: jax.Array) -> jax.Array:
    """Returns float32[N, 1, ...], which broadcasts against `distance`."""
    return x_N.astype(jnp.float32).reshape(-1, *[1] * distance.ndim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackFacts:
    """The properties of a stack (encoder or decoder) that its position scheme may use."""

    d_model: int
    num_heads: int
    d_head: int
    d_value: int
    max_length: int
    causal: bool
    param_dtype: str = "float32"
    norm_epsilon: float = 1e-6
    m_D: float = 1.0  # d_model, relative to the base of the parametrization


@dataclasses.dataclass(frozen=True)
class Pair:
    """The positions of queries and keys, the mask between them, and the scale of their products."""

    q_positions_BxT: jax.Array
    k_positions_BxS: jax.Array
    mask_BxTxS: jax.Array
    scale: float

    @property
    def distance_BxTxS(self) -> jax.Array:
        """Query position minus key position; positive for keys before the query."""
        return self.q_positions_BxT[:, :, None] - self.k_positions_BxS[:, None, :]


@struct.dataclass
class Lines:
    """A continuous function f of one number x, for each head, that is linear between J knots in
    ascending order. Line i, f(x) = a_i + b_i x, holds from knot i to knot i + 1, and line 0 also
    before knot 0. All x are below the last knot. Knots have no gradient. I = J - 1."""

    knots_NxJ: jax.Array
    a_NxI: jax.Array
    b_NxI: jax.Array


@struct.dataclass
class Terms:
    """What a scheme adds to attention, as functions of the distance d = t - s:

        e_ts = scale (q_t + u) . (k_s + keys[d]) + scale k_s . queries[d] + bias[d]
        o_t = sum_s w_ts (v_s + values[d])

    Terms that are None are absent. D distances; N may be 1, for all heads. With `lines`, a function
    f, bias[d] is replaced by f(rows_t bias[d]). The backend sets `rows_BxNxT` from
    `Position.rows`. Lines and `ends` exclude each other."""

    scale: float = struct.field(pytree_node=False)
    bias_NxD: jax.Array | None = None
    u_NxH: jax.Array | None = None
    keys_NxDxH: jax.Array | None = None
    queries_NxDxH: jax.Array | None = None
    values_NxDxV: jax.Array | None = None
    lines: Lines | None = None
    rows_BxNxT: jax.Array | None = None
    # Keys, queries and values are constant up to the first, and from the second of these distances
    ends: tuple[int, int] | None = struct.field(pytree_node=False, default=None)

    @property
    def tables(self) -> list[jax.Array]:
        """The keys, queries and values that are present."""
        return jax.tree.leaves((self.keys_NxDxH, self.queries_NxDxH, self.values_NxDxV))


@struct.dataclass
class Position:
    """The base class of position schemes. A scheme overrides the hooks that it needs. By default,
    they do nothing. Unless a scheme says otherwise, the cache needs nothing but the positions that
    are stored with the keys, from which distances come. A config can set the fields that are
    declared with `option(default)`, and `check` rejects invalid values. `bind` and `bind_layer`
    declare parameters, and `project` uses a layer's. `at` computes values that all layers share."""

    def __init_subclass__(cls):
        by_distance = cls.by_distance or "distance_bias" in vars(cls)
        cls.by_distance = by_distance and "rows" not in vars(cls)

    def check(self, facts: StackFacts) -> str | None:
        """Returns why the scheme cannot serve this stack, in one line, or None."""
        return None

    def bind(self, param: Param, facts: StackFacts) -> "Position":
        """Returns the scheme with its facts and parameters, which `param` declares once per stack,
        or in each cross-attention."""
        names = [field.name for field in dataclasses.fields(self) if "fact" in field.metadata]
        return self.replace(**{name: getattr(facts, name) for name in names}) if names else self

    def bind_layer(self, param: Param, facts: StackFacts) -> "Position":
        """Returns the scheme with the parameters of one layer's attention."""
        return self

    def project(self, query: Callable, key: Callable) -> "Position":
        """Returns the scheme with vectors of its own, projected as the layer projects its inputs to
        queries and keys, before any norm: [..., D] -> [..., N, H] and [..., K, H]."""
        return self

    def at(self, positions_BxT: jax.Array) -> "Position":
        """Returns the scheme with all values that depend on positions alone."""
        return self

    def embed(self, x_BxTxD: jax.Array, positions_BxT: jax.Array) -> jax.Array:
        """Returns the token embeddings with positions added."""
        return x_BxTxD

    def rotate(self, q_BxTxNxH: jax.Array, k_BxTxKxH: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the queries and keys of the stack's tokens, rotated by their positions."""
        return q_BxTxNxH, k_BxTxKxH

    def key_size(self, facts: StackFacts) -> int:
        """Returns the head size of the queries and keys that `rotate` returns."""
        return facts.d_head

    def distance_bias(self, distance: jax.Array) -> jax.Array | None:
        """Returns the term of the scaled logits that depends on distance alone, or None. `distance`
        is int32, of any shape: query position minus key position, positive for keys before the
        query. The result is float32[N, ...], or float32[1, ...] for all heads."""
        return None

    def bias(self, q_positions_BxT: jax.Array, k_positions_BxS: jax.Array) -> jax.Array | None:
        """Returns float32[B, N, T, S] to add to the scaled logits, or None; see `distance_bias`."""
        distance_BxTxS = q_positions_BxT[:, :, None] - k_positions_BxS[:, None, :]
        bias, shape = self.distance_bias(distance_BxTxS), list(distance_BxTxS.shape)
        if bias is None:
            return None
        if list(bias.shape[1:]) != shape:
            name, expected = getattr(self, "name", type(self).__name__), ", ".join(map(str, shape))
            problem = f"returned shape {list(bias.shape)} for distances of shape {shape}"
            way_out = f"expected [num_heads or 1, {expected}]"
            raise UserError(f"model.position: {name!r}: distance_bias {problem}; {way_out}")
        return jnp.moveaxis(bias, 0, 1)

    def score(self, logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair: "Pair") -> jax.Array:
        """Returns the scaled logits with position terms that depend on queries and keys."""
        return logits_BxNxTxS

    def value(self, out_BxTxNxH: jax.Array, weights_BxNxTxS: jax.Array, pair: "Pair") -> jax.Array:
        """Returns the attention output with position terms added."""
        return out_BxTxNxH

    def terms(self, distance_D: jax.Array, scale: float) -> Terms:
        """Returns all that the scheme adds to attention at these distances. A scheme overrides it,
        so that fused kernels support it, if its `score` and `value` depend on distance alone, or
        its `bias` is a function of a row times one of distance. `scale` is that of the products."""
        return Terms(scale, self.distance_bias(distance_D))

    def rows(self, q_positions_BxT: jax.Array) -> jax.Array:
        """Returns float32[B, T], not 0, which multiplies the bias of `terms` before its lines."""
        return jnp.ones(q_positions_BxT.shape, jnp.float32)

    @property
    def is_distance_bias(self) -> bool:
        """Whether the scheme adds `distance_bias` to the logits and nothing else."""
        others = map(self._overrides, ("bias", "score", "value"))
        return self._overrides("distance_bias") and not any(others)

    @property
    def has_terms(self) -> bool:
        """Whether `terms` describes the scheme: no subclass changes another hook alone."""
        classes = type(self).__mro__
        level = lambda hook: next(i for i, cls in enumerate(classes) if hook in vars(cls))
        hooks = ("distance_bias", "bias", "score", "value")
        return self.is_distance_bias or all(level("terms") <= level(hook) for hook in hooks)

    def _overrides(self, hook: str) -> bool:
        return getattr(type(self), hook) is not getattr(Position, hook)

    # Whether `bias`, `score` and `value` at a query and a key depend on this pair alone
    pairwise: ClassVar[bool] = True
    # Whether `bias`, `score` and `value` depend on positions only through the distance t - s. Set
    # automatically for a scheme that overrides `distance_bias`.
    by_distance: ClassVar[bool] = False
    bounded: ClassVar[bool] = False  # has one parameter vector for each position below `max_length`
    ends: ClassVar[bool] = False  # is undefined at positions of `max_length` and beyond

    @property
    def hooks(self) -> frozenset[str]:
        """The hooks that it overrides, among embed, project, rotate, bias, score and value."""
        names = ("embed", "project", "rotate", "distance_bias", "bias", "score", "value")
        return frozenset(name.removeprefix("distance_") for name in names if self._overrides(name))

    @property
    def reads_positions(self) -> bool:
        """Whether the scheme depends on the positions of tokens."""
        return bool(self.hooks)

    @property
    def reads_content(self) -> bool:
        """Whether the scheme overrides `score` or `value`."""
        return bool(self.hooks & {"score", "value"})

    @property
    def acts_on_logits(self) -> bool:
        """Whether the scheme overrides `bias`, `score` or `value`."""
        return bool(self.hooks & {"bias", "score", "value"})


@register("none")
class NoPE(Position):
    """No positions ("NoPE"; Haviv et al. 2022, Kazemnejad et al. 2023).

    With a causal mask, a decoder can still infer positions from the number of tokens that each
    token attends to. Without one, attention ignores order: permuting tokens permutes outputs.

    Parameters: none.
    Cache: unaffected.
    Beyond the training length: well defined."""
