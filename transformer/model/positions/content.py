"""Positions that interact with content: those of Shaw, Transformer-XL, DeBERTa and CoPE. The logits
depend on positions together with queries and keys. All schemes but CoPE are functions of distance
and content, which `terms` describes to fused kernels. Learned distances range from -`max_distance`
to `max_distance`; longer ones share the last. In equations, e_ts is the logit of query t and key s,
and w_ts is their attention weight.
Shape suffixes: B batch, T queries, S keys, N heads, H head size, R distances, D d_model."""

from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, struct

from transformer.limits import Count, Size, at_least, at_most
from transformer.model.positions.absolute import Sinusoidal, sinusoids
from transformer.model.positions.base import Position, Terms, declare, option, register


def _table(param, facts, name: str, rows: int, size: int, axis: str = "head") -> jax.Array:
    """Declares a learned table. Its initial values have standard deviation 1 / sqrt(base size)."""
    init = nn.initializers.normal((size / (facts.m_D if axis == "embed" else 1.0)) ** -0.5)
    return declare(param, facts, name, (rows, size), ("positions", axis), init)


def _projection(param, facts, name: str) -> jax.Array:
    """Declares a matrix from d_model to the heads, [D, N, H]."""
    shape, names = (facts.d_model, facts.num_heads, facts.d_head), ("embed", "heads", "head")
    return declare(param, facts, name, shape, names, nn.initializers.normal(facts.d_model**-0.5))


def _products(x_BxTxNxH: jax.Array, table_RxH: jax.Array) -> jax.Array:
    return jnp.einsum("BTNH,RH->BNTR", x_BxTxNxH, table_RxH, preferred_element_type=jnp.float32)


def _pick(x_BxNxTxR: jax.Array, index_BxTxS: jax.Array) -> jax.Array:
    """Returns x[b, n, t, index[b, t, s]], [B, N, T, S]."""
    return jnp.take_along_axis(x_BxNxTxR, index_BxTxS[:, None], axis=-1)


@register("shaw")
class Shaw(Position):
    """Relative keys and values (Shaw et al. 2018).

        e_ts = q_t . (k_s + a^K_r) / sqrt(d_head),   o_t = sum_s w_ts (v_s + a^V_r)

    r = clip(s - t) is the clipped distance. a^K and, with `values`, a^V are vectors of a layer.

    Parameters: (2 * max_distance + 1) * (d_head + d_value) per layer.
    Beyond the training length: extrapolates for a while; all longer distances share a vector."""

    by_distance: ClassVar = True

    max_distance: Size = option(16)
    values: bool = option(True)
    keys_RxH: jax.Array | None = None
    values_RxH: jax.Array | None = None

    def bind_layer(self, param, facts):
        distances, values = 2 * self.max_distance + 1, None
        keys = _table(param, facts, "relative_keys", distances, facts.d_head)
        if self.values:
            values = _table(param, facts, "relative_values", distances, facts.d_value)
        return self.replace(keys_RxH=keys, values_RxH=values)

    def _index(self, distance: jax.Array) -> jax.Array:
        return jnp.clip(-distance, -self.max_distance, self.max_distance) + self.max_distance

    def score(self, logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair):
        terms_BxNxTxS = _pick(_products(q_BxTxNxH, self.keys_RxH), self._index(pair.distance_BxTxS))
        return logits_BxNxTxS + pair.scale * terms_BxNxTxS

    def value(self, out_BxTxNxH, weights_BxNxTxS, pair):
        if self.values_RxH is None:
            return out_BxTxNxH
        distances, dtype = self.values_RxH.shape[0], weights_BxNxTxS.dtype
        one_hot_BxTxSxR = jax.nn.one_hot(self._index(pair.distance_BxTxS), distances, dtype=dtype)
        weights_BxTxNxR = jnp.einsum("BNTS,BTSR->BTNR", weights_BxNxTxS, one_hot_BxTxSxR)
        return out_BxTxNxH + weights_BxTxNxR @ self.values_RxH.astype(out_BxTxNxH.dtype)

    def terms(self, distance_D, scale):
        index_D, k = self._index(distance_D), self.max_distance
        of_distance = lambda table_RxH: table_RxH[index_D][None]
        keys, values = jax.tree.map(of_distance, (self.keys_RxH, self.values_RxH))
        return Terms(scale, keys_NxDxH=keys, values_NxDxV=values, ends=(-k, k))


@register("transformer_xl")
class TransformerXL(Position):
    """e_ts = ((q_t + u) . k_s + (q_t + v) . W_R p_{t-s}) / sqrt(d_head) (Dai et al. 2019).

    p is the sinusoidal embedding of the distance. Each layer has its own W_R, u and v.

    Parameters: d_model * num_heads * d_head + 2 * num_heads * d_head per layer.
    Beyond the training length: degrades slowly.
    Cost: T * S sinusoidal embeddings of size d_model, and their products with queries."""

    by_distance: ClassVar = True

    d_model: int = struct.field(pytree_node=False, default=0)
    project_DxNxH: jax.Array | None = None
    u_NxH: jax.Array | None = None
    v_NxH: jax.Array | None = None

    check = Sinusoidal.check

    def bind_layer(self, param, facts):
        heads, names = (facts.num_heads, facts.d_head), ("heads", "head")
        zero = lambda name: declare(param, facts, name, heads, names, nn.initializers.zeros)
        project = _projection(param, facts, "relative_kernel")
        u, v = zero("content_bias"), zero("position_bias")
        return self.replace(d_model=facts.d_model, project_DxNxH=project, u_NxH=u, v_NxH=v)

    def score(self, logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair):
        q, u, v = (x.astype(jnp.float32) for x in (q_BxTxNxH, self.u_NxH, self.v_NxH))
        content_BxNxS = jnp.einsum("NH,BSNH->BNS", u, k_BxSxNxH.astype(jnp.float32))
        # W_R is applied to the queries, so that no [T, S, N, H] array is materialized.
        query_BxTxNxD = jnp.einsum("BTNH,DNH->BTND", q + v, self.project_DxNxH.astype(jnp.float32))
        p_BxTxSxD = sinusoids(pair.distance_BxTxS, self.d_model, 10_000.0, "halves")
        position_BxNxTxS = jnp.einsum("BTND,BTSD->BNTS", query_BxTxNxD, p_BxTxSxD)
        return logits_BxNxTxS + pair.scale * (content_BxNxS[:, :, None] + position_BxNxTxS)

    def terms(self, distance_D, scale):
        u, v, w = (x.astype(jnp.float32) for x in (self.u_NxH, self.v_NxH, self.project_DxNxH))
        p_DxM = sinusoids(distance_D, self.d_model, 10_000.0, "halves")
        keys_NxDxH = jnp.einsum("DM,MNH->NDH", p_DxM, w)
        # (q + v) . keys = (q + u) . keys + (v - u) . keys
        return Terms(scale, scale * jnp.einsum("NH,NDH->ND", v - u, keys_NxDxH), u, keys_NxDxH)


@register("deberta")
class Deberta(Position):
    """Disentangled attention (He et al. 2021).

        e_ts = (q_t . k_s + q_t . K p_r + k_s . Q p_r) / sqrt(3 d_head),   r = clip(t - s)

    p has one learned vector per distance, which the layers of a stack share. Each layer has its own
    projections K and Q of p. The config's scale is divided by sqrt(3) for the three terms.

    DeBERTa v2 and v3 (He et al. 2023) set three options. With `buckets`, r = clip(bucket(t - s))
    (`log_buckets`), and p has one vector per bucket. With `shared`, K and Q are the layer's
    projections of keys and queries, with their biases, but without what follows them, such as
    `qk_norm`. With `norm`, p is normalized (LayerNorm).

    Parameters: 2 * (buckets or max_distance) * d_model per stack, with `norm` 2 * d_model more;
    unless `shared`, 2 * d_model * num_heads * d_head per layer.
    Beyond the training length: all longer distances share a vector."""

    by_distance: ClassVar = True

    max_distance: Annotated[Size, at_most(10**6)] = option(128)
    buckets: Count = option(0)
    shared: bool = option(False)
    norm: bool = option(False)
    table_RxD: jax.Array | None = None
    keys_RxNxH: jax.Array | None = None
    queries_RxNxH: jax.Array | None = None

    @property
    def hooks(self):
        return super().hooks - (set() if self.shared else {"project"})

    def check(self, facts):
        if self.buckets and (self.buckets % 2 or self.buckets // 2 + 1 >= self.max_distance):
            sizes = f"buckets = {self.buckets} and max_distance = {self.max_distance}"
            needs = "needs an even number of buckets, less than 2 * max_distance - 2"
            return f"model.position: 'deberta' with {sizes} {needs}"
        return None

    def bind(self, param, facts):
        name, rows = "relative_embedding", 2 * (self.buckets or self.max_distance)
        table_RxD = _table(param, facts, name, rows, facts.d_model, "embed")
        if self.norm:
            args = (facts.d_model,), ("norm",)
            gain_D = declare(param, facts, "relative_norm_gain", *args, nn.initializers.ones)
            offset_D = declare(param, facts, "relative_norm_offset", *args, nn.initializers.zeros)
            x_RxD = table_RxD.astype(jnp.float32)
            x_RxD -= x_RxD.mean(axis=-1, keepdims=True)
            norm_Rx1 = jnp.sqrt(x_RxD.var(axis=-1, keepdims=True) + facts.norm_epsilon)
            table_RxD = x_RxD / norm_Rx1 * gain_D + offset_D
        return self.replace(table_RxD=table_RxD)

    def project(self, query, key):
        if not self.shared:
            return self
        queries_RxNxH, keys_RxKxH = (f(self.table_RxD).astype(jnp.float32) for f in (query, key))
        keys_RxNxH = jnp.repeat(keys_RxKxH, queries_RxNxH.shape[1] // keys_RxKxH.shape[1], axis=1)
        return self.replace(keys_RxNxH=keys_RxNxH, queries_RxNxH=queries_RxNxH)

    def bind_layer(self, param, facts):
        if self.shared:
            return self

        def project(name):
            kernel = _projection(param, facts, name).astype(jnp.float32)
            return jnp.einsum("RD,DNH->RNH", self.table_RxD.astype(jnp.float32), kernel)

        keys, queries = project("relative_key"), project("relative_query")
        return self.replace(keys_RxNxH=keys, queries_RxNxH=queries)

    def _index(self, distance: jax.Array) -> jax.Array:
        k, half = self.max_distance, self.buckets or self.max_distance
        if self.buckets:
            buckets = jnp.asarray(log_buckets(np.arange(-k, k + 1), half, k))
            distance = buckets[jnp.clip(distance, -k, k) + k]
        return jnp.clip(distance + half, 0, 2 * half - 1)

    def score(self, logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair):
        transposed = lambda x: jnp.swapaxes(x, -2, -1)
        index_BxTxS = self._index(pair.distance_BxTxS)
        products = lambda x, table: jnp.einsum("BTNH,RNH->BNTR", x.astype(jnp.float32), table)
        terms_BxNxTxS = _pick(products(q_BxTxNxH, self.keys_RxNxH), index_BxTxS)
        from_position_BxNxSxR = products(k_BxSxNxH, self.queries_RxNxH)
        terms_BxNxTxS += transposed(_pick(from_position_BxNxSxR, transposed(index_BxTxS)))
        return (logits_BxNxTxS + pair.scale * terms_BxNxTxS) / 3**0.5

    def terms(self, distance_D, scale):
        index_D, k = self._index(distance_D), self.max_distance
        of_distance = lambda table_RxNxH: jnp.swapaxes(table_RxNxH[index_D], 0, 1)
        keys, queries = of_distance(self.keys_RxNxH), of_distance(self.queries_RxNxH)
        return Terms(scale / 3**0.5, keys_NxDxH=keys, queries_NxDxH=queries, ends=(-k, k - 1))


def log_buckets(distance: np.ndarray, buckets: int, max_distance: int) -> np.ndarray:
    """Returns the buckets of distances (DeBERTa v2). With m = buckets / 2, distances up to m are
    their own buckets. The bucket of a longer distance d > 0 is

        ceil(log(d / m) / log((max_distance - 1) / m) (m - 1)) + m

    and that of -d is its negative. Computed in float32, as in the published code."""
    m, size = buckets // 2, np.maximum(np.abs(distance), 1)
    longest = np.log(np.float32((max_distance - 1) / m))
    log = np.log(size.astype(np.float32) / np.float32(m)) / longest * np.float32(m - 1)
    return np.where(size <= m, distance, np.sign(distance) * (np.ceil(log).astype(int) + m))


@register("cope")
class CoPE(Position):
    """Contextual positions: they count tokens that a query selects (Golovneva et al. 2024, "CoPE").

        e_ts + q_t . p(g_ts),   g_ts = sum over s' from s to t of sigmoid(e_ts')

    p is interpolated between integers. The heads of a layer share its `max_positions` vectors, and
    the last vector serves all larger counts.

    Parameters: max_positions * d_head per layer.
    Mask: must be causal.
    Cache: keys are stored in the order of their positions, so that counts are unaffected.
    Beyond the training length: extrapolates where counts stay small."""

    pairwise: ClassVar[bool] = False
    reads_positions: ClassVar[bool] = False  # it counts tokens instead

    max_positions: Annotated[int, at_least(2)] = option(64)
    table_RxH: jax.Array | None = None

    def check(self, facts):
        if not facts.causal:
            needs = "counts the tokens before a query and needs a causal mask"
            return f"model.position: 'cope' {needs}; choose another scheme"
        return None

    def bind_layer(self, param, facts):
        table = _table(param, facts, "contextual_positions", self.max_positions, facts.d_head)
        return self.replace(table_RxH=table)

    def score(self, logits_BxNxTxS, q_BxTxNxH, k_BxSxNxH, pair):
        gates_BxNxTxS = jnp.where(pair.mask_BxTxS[:, None], jax.nn.sigmoid(logits_BxNxTxS), 0.0)
        count_BxNxTxS = jnp.flip(jnp.cumsum(jnp.flip(gates_BxNxTxS, -1), axis=-1), -1)
        count_BxNxTxS = jnp.minimum(count_BxNxTxS, self.max_positions - 1)
        products_BxNxTxR = _products(q_BxTxNxH, self.table_RxH)
        at = lambda i: jnp.take_along_axis(products_BxNxTxR, i.astype(jnp.int32), axis=-1)
        below, above = jnp.floor(count_BxNxTxS), jnp.ceil(count_BxNxTxS)
        fraction = count_BxNxTxS - below
        return logits_BxNxTxS + (1.0 - fraction) * at(below) + fraction * at(above)
