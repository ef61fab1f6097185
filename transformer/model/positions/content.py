"""Positions that interact with content: relative keys and values (Shaw), Transformer-XL, DeBERTa
and contextual positions (CoPE).

The logits depend on positions together with queries and keys, so no fused kernel supports these
schemes. Learned distances range from -`max_distance` to `max_distance`; longer ones share the last.

In equations, e_ts is the logit of query t and key s, and w_ts is their attention weight.

Shape suffixes: B batch, T query length, S key length, N heads, H head size, R distances, D d_model.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from transformer.model.positions.absolute import sinusoids
from transformer.model.positions.base import Pair, Param, Position, StackFacts, option, register


def _table(
    param: Param, name: str, facts: StackFacts, shape: tuple[int, ...], names: tuple
) -> jax.Array:
    """Declares a learned table with initial values of standard deviation 1 / sqrt(shape[-1])."""
    init = nn.with_logical_partitioning(nn.initializers.normal(shape[-1] ** -0.5), names)
    return param(name, init, shape, facts.param_dtype)


def _pick(x_BxNxTxR: jax.Array, index_BxTxS: jax.Array) -> jax.Array:
    """Returns x[b, n, t, index[b, t, s]], [B, N, T, S]."""
    return jnp.take_along_axis(x_BxNxTxR, index_BxTxS[:, None], axis=-1)


@register("shaw")
@struct.dataclass
class Shaw(Position):
    """Relative keys and values (Shaw et al. 2018).

        e_ts = q_t . (k_s + a^K_r) / sqrt(d_head),   o_t = sum_s w_ts (v_s + a^V_r)

    r = clip(s - t) is the clipped distance. a^K and, with `values`, a^V have one vector per
    distance, which the heads of a layer share.

    Parameters: (2 * max_distance + 1) * (d_head + d_value) per layer.
    Cross-attention: not applied.
    Cache: distances come from the positions that are stored with the keys.
    Beyond the training length: extrapolates for a while; all longer distances share a vector.
    """

    by_distance: ClassVar = True

    max_distance: int = option(16)
    values: bool = option(True)
    keys_RxH: jax.Array | None = None
    values_RxH: jax.Array | None = None

    def check(self, facts: StackFacts) -> str | None:
        return (
            f"model.position.max_distance: {self.max_distance} must be positive"
            if self.max_distance < 1
            else None
        )

    def bind_layer(self, param: Param, facts: StackFacts) -> "Shaw":
        distances, names = 2 * self.max_distance + 1, ("positions", "head")
        keys = _table(param, "relative_keys", facts, (distances, facts.d_head), names)
        values = (
            _table(param, "relative_values", facts, (distances, facts.d_value), names)
            if self.values
            else None
        )
        return self.replace(keys_RxH=keys, values_RxH=values)

    def _index(self, pair: Pair) -> jax.Array:
        return (
            jnp.clip(-pair.distance_BxTxS, -self.max_distance, self.max_distance)
            + self.max_distance
        )

    def score(self, logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair):
        products_BxNxTxR = jnp.einsum(
            "BTNH,RH->BNTR", q_BxTxNxH, self.keys_RxH, preferred_element_type=jnp.float32
        )
        return logits_BxNxTxS + pair.scale * _pick(products_BxNxTxR, self._index(pair))

    def value(self, out_BxTxNxH, weights_BxNxTxS, pair):
        if self.values_RxH is None:
            return out_BxTxNxH
        one_hot_BxTxSxR = jax.nn.one_hot(
            self._index(pair), self.values_RxH.shape[0], dtype=weights_BxNxTxS.dtype
        )
        weights_BxTxNxR = jnp.einsum("BNTS,BTSR->BTNR", weights_BxNxTxS, one_hot_BxTxSxR)
        return out_BxTxNxH + weights_BxTxNxR @ self.values_RxH.astype(out_BxTxNxH.dtype)


@register("transformer_xl")
@struct.dataclass
class TransformerXL(Position):
    """e_ts = ((q_t + u) . k_s + (q_t + v) . W_R p_{t-s}) / sqrt(d_head) (Dai et al. 2019).

    p is the sinusoidal embedding of the distance. Each layer has its own W_R, u and v.

    Parameters: d_model * num_heads * d_head + 2 * num_heads * d_head per layer.
    Cross-attention: not applied.
    Cache: distances come from the positions that are stored with the keys.
    Beyond the training length: degrades slowly.
    Cost: T * S sinusoidal embeddings of size d_model, and their products with queries.
    """

    by_distance: ClassVar = True

    d_model: int = struct.field(pytree_node=False, default=0)
    project_DxNxH: jax.Array | None = None
    u_NxH: jax.Array | None = None
    v_NxH: jax.Array | None = None

    def check(self, facts: StackFacts) -> str | None:
        return (
            "model.position: 'transformer_xl' needs an even model.d_model; change one of them"
            if facts.d_model % 2
            else None
        )

    def bind_layer(self, param: Param, facts: StackFacts) -> "TransformerXL":
        heads = (facts.num_heads, facts.d_head)
        matrix = nn.with_logical_partitioning(
            nn.initializers.normal(facts.d_model**-0.5), ("embed", "heads", "head")
        )
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("heads", "head"))
        return self.replace(
            d_model=facts.d_model,
            project_DxNxH=param(
                "relative_kernel", matrix, (facts.d_model, *heads), facts.param_dtype
            ),
            u_NxH=param("content_bias", zeros, heads, facts.param_dtype),
            v_NxH=param("position_bias", zeros, heads, facts.param_dtype),
        )

    def score(self, logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair):
        q, u, v = (x.astype(jnp.float32) for x in (q_BxTxNxH, self.u_NxH, self.v_NxH))
        content_BxNxS = jnp.einsum("NH,BSNH->BNS", u, k_BxSxNxH.astype(jnp.float32))
        # W_R is applied to the queries, so that no [T, S, N, H] array is materialized.
        query_BxTxNxD = jnp.einsum("BTNH,DNH->BTND", q + v, self.project_DxNxH.astype(jnp.float32))
        p_BxTxSxD = sinusoids(pair.distance_BxTxS, self.d_model, 10_000.0, "halves")
        position_BxNxTxS = jnp.einsum("BTND,BTSD->BNTS", query_BxTxNxD, p_BxTxSxD)
        return logits_BxNxTxS + pair.scale * (content_BxNxS[:, :, None] + position_BxNxTxS)


@register("deberta")
@struct.dataclass
class Deberta(Position):
    """Disentangled attention (He et al. 2021).

        e_ts = (q_t . k_s + q_t . K p_r + k_s . Q p_r) / sqrt(3 d_head),   r = clip(t - s)

    p has one learned vector per distance, which the layers of a stack share. Each layer has its own
    projections K and Q of p. The config's scale is divided by sqrt(3) for the three terms.

    Parameters: 2 * max_distance * d_model per stack, 2 * d_model * num_heads * d_head per layer.
    Cross-attention: not applied.
    Cache: distances come from the positions that are stored with the keys.
    Beyond the training length: all longer distances share a vector.
    """

    by_distance: ClassVar = True

    max_distance: int = option(128)
    table_RxD: jax.Array | None = None
    keys_RxNxH: jax.Array | None = None
    queries_RxNxH: jax.Array | None = None

    def check(self, facts: StackFacts) -> str | None:
        return (
            f"model.position.max_distance: {self.max_distance} must be positive"
            if self.max_distance < 1
            else None
        )

    def bind(self, param: Param, facts: StackFacts) -> "Deberta":
        distances = 2 * self.max_distance
        return self.replace(
            table_RxD=_table(
                param,
                "relative_embedding",
                facts,
                (distances, facts.d_model),
                ("positions", "embed"),
            )
        )

    def bind_layer(self, param: Param, facts: StackFacts) -> "Deberta":
        init = nn.with_logical_partitioning(
            nn.initializers.normal(facts.d_model**-0.5), ("embed", "heads", "head")
        )

        def project(name):
            kernel = param(
                name, init, (facts.d_model, facts.num_heads, facts.d_head), facts.param_dtype
            )
            return jnp.einsum(
                "RD,DNH->RNH", self.table_RxD.astype(jnp.float32), kernel.astype(jnp.float32)
            )

        return self.replace(
            keys_RxNxH=project("relative_key"), queries_RxNxH=project("relative_query")
        )

    def score(self, logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair):
        k = self.max_distance
        index_BxTxS = jnp.clip(pair.distance_BxTxS + k, 0, 2 * k - 1)
        to_position_BxNxTxR = jnp.einsum(
            "BTNH,RNH->BNTR", q_BxTxNxH.astype(jnp.float32), self.keys_RxNxH
        )
        from_position_BxNxSxR = jnp.einsum(
            "BSNH,RNH->BNSR", k_BxSxNxH.astype(jnp.float32), self.queries_RxNxH
        )
        terms_BxNxTxS = _pick(to_position_BxNxTxR, index_BxTxS)
        terms_BxNxTxS += jnp.swapaxes(
            _pick(from_position_BxNxSxR, jnp.swapaxes(index_BxTxS, 1, 2)), 2, 3
        )
        return (logits_BxNxTxS + pair.scale * terms_BxNxTxS) / 3**0.5


@register("cope")
@struct.dataclass
class CoPE(Position):
    """Contextual positions, which count the tokens that a query selects (Golovneva et al. 2024,
    "Contextual Position Encoding").

        e_ts + q_t . p(g_ts),   g_ts = sum over s' from s to t of sigmoid(e_ts')

    p is interpolated between integers. The heads of a layer share its `max_positions` vectors, and
    the last vector serves all larger counts.

    Parameters: max_positions * d_head per layer.
    Mask: must be causal.
    Cross-attention: not applied.
    Cache: keys are stored in the order of their positions, so that counts are unaffected.
    Beyond the training length: extrapolates where counts stay small.
    """

    pairwise: ClassVar[bool] = False
    reads_positions: ClassVar[bool] = False  # it counts tokens instead

    max_positions: int = option(64)
    table_RxH: jax.Array | None = None

    def check(self, facts: StackFacts) -> str | None:
        if not facts.causal:
            return (
                "model.position: 'cope' counts the tokens before a query and needs a causal mask; "
                "choose another scheme"
            )
        return (
            f"model.position.max_positions: {self.max_positions} must be at least 2"
            if self.max_positions < 2
            else None
        )

    def bind_layer(self, param: Param, facts: StackFacts) -> "CoPE":
        return self.replace(
            table_RxH=_table(
                param,
                "contextual_positions",
                facts,
                (self.max_positions, facts.d_head),
                ("positions", "head"),
            )
        )

    def score(self, logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair):
        gates_BxNxTxS = jnp.where(pair.mask_BxTxS[:, None], jax.nn.sigmoid(logits_BxNxTxS), 0.0)
        count_BxNxTxS = jnp.flip(jnp.cumsum(jnp.flip(gates_BxNxTxS, -1), axis=-1), -1)
        count_BxNxTxS = jnp.minimum(count_BxNxTxS, self.max_positions - 1)
        products_BxNxTxR = jnp.einsum(
            "BTNH,RH->BNTR", q_BxTxNxH, self.table_RxH, preferred_element_type=jnp.float32
        )
        below = jnp.floor(count_BxNxTxS)
        product_at = lambda index: jnp.take_along_axis(
            products_BxNxTxR, index.astype(jnp.int32), axis=-1
        )
        fraction = count_BxNxTxS - below
        return (
            logits_BxNxTxS
            + (1.0 - fraction) * product_at(below)
            + fraction * product_at(jnp.ceil(count_BxNxTxS))
        )
