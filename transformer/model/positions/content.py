"""Positions that meet the content: relative keys and values (Shaw), Transformer-XL, DeBERTa, contextual positions (CoPE).

Shape suffixes: B batch, T query length, S key length, N heads, H head size, R distances, D d_model.

They change the logits by what queries and keys say, so no fused kernel serves them. Learned distances are those
from -`max_distance` to `max_distance`; longer ones share the last.
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
    """A learned table, normal with standard deviation 1 / sqrt(last axis)."""
    init = nn.with_logical_partitioning(nn.initializers.normal(shape[-1] ** -0.5), names)
    return param(name, init, shape, facts.param_dtype)


def _pick(x_BxNxTxR: jax.Array, index_BxTxS: jax.Array) -> jax.Array:
    """x[b, n, t, index[b, t, s]]: [B, N, T, S]."""
    return jnp.take_along_axis(x_BxNxTxR, index_BxTxS[:, None], axis=-1)


@register("shaw")
@struct.dataclass
class Shaw(Position):
    """e_ts = q_t . (k_s + a^K_r) / sqrt(d_head), o_t = sum_s w_ts (v_s + a^V_r), r = clip(s - t) (Shaw et al. 2018).

    a^K and, with `values`, a^V: one vector a distance, shared by a layer's heads.
    Parameters: (2 max_distance + 1) * (d_head + d_value) a layer. Cross-attention: nothing. Cache: distances come from the stored
    positions. Beyond the training length: all longer distances are one; holds for a while.
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
        rows, names = 2 * self.max_distance + 1, ("positions", "head")
        keys = _table(param, "relative_keys", facts, (rows, facts.d_head), names)
        values = (
            _table(param, "relative_values", facts, (rows, facts.d_value), names)
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
        met_BxNxTxR = jnp.einsum(
            "BTNH,RH->BNTR", q_BxTxNxH, self.keys_RxH, preferred_element_type=jnp.float32
        )
        return logits_BxNxTxS + pair.scale * _pick(met_BxNxTxR, self._index(pair))

    def value(self, out_BxTxNxH, weights_BxNxTxS, pair):
        if self.values_RxH is None:
            return out_BxTxNxH
        at_BxTxSxR = jax.nn.one_hot(
            self._index(pair), self.values_RxH.shape[0], dtype=weights_BxNxTxS.dtype
        )
        weights_BxTxNxR = jnp.einsum("BNTS,BTSR->BTNR", weights_BxNxTxS, at_BxTxSxR)
        return out_BxTxNxH + weights_BxTxNxR @ self.values_RxH.astype(out_BxTxNxH.dtype)


@register("transformer_xl")
@struct.dataclass
class TransformerXL(Position):
    """e_ts = ((q_t + u) . k_s + (q_t + v) . W_R p_{t-s}) / sqrt(d_head), p the sinusoids of the distance (Dai et al. 2019).

    W_R, u and v are each layer's own.
    Parameters: d_model * num_heads * d_head + 2 * num_heads * d_head a layer. Cross-attention: nothing. Cache: distances come from the stored
    positions. Beyond the training length: degrades slowly. Cost: T * S sinusoids of d_model, projected.
    """

    by_distance: ClassVar = True

    d_model: int = struct.field(pytree_node=False, default=0)
    project_DxNxH: jax.Array | None = None
    u_NxH: jax.Array | None = None
    v_NxH: jax.Array | None = None

    def check(self, facts: StackFacts) -> str | None:
        return (
            "model.position 'transformer_xl' needs an even model.d_model"
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
        # (q + v) W_R once a query, so that no [T, S, N, H] is ever made.
        asked_BxTxNxD = jnp.einsum("BTNH,DNH->BTND", q + v, self.project_DxNxH.astype(jnp.float32))
        p_BxTxSxD = sinusoids(pair.distance_BxTxS, self.d_model, 10_000.0, "halves")
        position_BxNxTxS = jnp.einsum("BTND,BTSD->BNTS", asked_BxTxNxD, p_BxTxSxD)
        return logits_BxNxTxS + pair.scale * (content_BxNxS[:, :, None] + position_BxNxTxS)


@register("deberta")
@struct.dataclass
class Deberta(Position):
    """e_ts = (q_t . k_s + q_t . K p_r + k_s . Q p_r) / sqrt(3 d_head), r = clip(t - s): disentangled attention (He et al. 2021).

    p: one learned vector a distance, shared by the stack; K and Q: each layer's projections of it. The scale of the config
    is divided by sqrt(3), for there are three terms.
    Parameters: 2 max_distance * d_model a stack, 2 * d_model * num_heads * d_head a layer. Cross-attention: nothing. Cache: distances come
    from the stored positions. Beyond the training length: all longer distances are one.
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
        rows = 2 * self.max_distance
        return self.replace(
            table_RxD=_table(
                param, "relative_embedding", facts, (rows, facts.d_model), ("positions", "embed")
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
        both = _pick(to_position_BxNxTxR, index_BxTxS)
        both += jnp.swapaxes(_pick(from_position_BxNxSxR, jnp.swapaxes(index_BxTxS, 1, 2)), 2, 3)
        return (logits_BxNxTxS + pair.scale * both) / 3**0.5


@register("cope")
@struct.dataclass
class CoPE(Position):
    """e_ts + q_t . p(g_ts), g_ts = sum over s' from s to t of sigmoid(e_ts'): positions counted in what the query finds worth
    counting (Golovneva et al. 2024, "Contextual Position Encoding"); p between whole numbers is interpolated.

    A layer's heads share `max_positions` vectors, the last of which serves all that lies further.
    Parameters: max_positions * d_head a layer. Needs a causal mask. Cross-attention: nothing. Cache: keys stand in the order of their
    positions, as they do when read at once. Beyond the training length: holds where counts stay small.
    """

    pairwise: ClassVar[bool] = False
    reads_positions: ClassVar[bool] = False  # it counts tokens instead

    max_positions: int = option(64)
    table_RxH: jax.Array | None = None

    def check(self, facts: StackFacts) -> str | None:
        if not facts.causal:
            return "model.position 'cope' counts the tokens before a query; an encoder has no such order, choose another"
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
        met_BxNxTxR = jnp.einsum(
            "BTNH,RH->BNTR", q_BxTxNxH, self.table_RxH, preferred_element_type=jnp.float32
        )
        below = jnp.floor(count_BxNxTxS)
        pick = lambda at: jnp.take_along_axis(met_BxNxTxR, at.astype(jnp.int32), axis=-1)
        share = count_BxNxTxS - below
        return logits_BxNxTxS + (1.0 - share) * pick(below) + share * pick(jnp.ceil(count_BxNxTxS))
