"""Attention = projections + position + inner attention + output projection.

Shape suffixes: B batch, T query length, S key length, D d_model, N query heads, K key/value heads, H head size (of values: d_value).
Multi-head, grouped-query and multi-query attention are K = N, 1 < K < N and K = 1.
"""

import jax
from flax import linen as nn

from transformer.model import attention_backends, attention_statistics
from transformer.model.cache import KeyValue
from transformer.model.config import ModelConfig
from transformer.model.linear import Linear
from transformer.model.masks import Mask, Tokens
from transformer.model.positions import Position
from transformer.model.sharding import constrain
from transformer.model.watch import watched


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(d_head)) V, then W_O; queries from `x`, keys and values from `y` (self-attention: y is x)."""

    config: ModelConfig
    side: str  # encoder | decoder
    gain: float  # of the initial W_V and W_O
    out_gain: float  # of the initial W_O, on top

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        y_BxSxD: jax.Array | None,
        mask: Mask,
        q_tokens: Tokens,
        k_tokens: Tokens,
        position: Position | None,
        deterministic: bool,
        cached: KeyValue | None = None,
        index: jax.Array | None = None,
    ) -> tuple[jax.Array, KeyValue]:
        """Returns the output and the keys and values it read.

        With `cached` and `index` (self-attention) the new keys and values are written into the cache at slot `index`
        before it is read; with `cached` and no `y` (cross-attention) they are read as they are.
        """
        cfg = self.config
        if position is not None:
            position = position.bind_layer(self.param, cfg.stack_facts(self.side))
        by_heads = lambda x: constrain(x, ("batch", "length", "activation_heads", "head"))
        q_BxTxNxH, kv = by_heads(self._heads("query", cfg.num_heads)(x_BxTxD)), cached
        if cfg.qk_norm:
            q_BxTxNxH = cfg.norm_module(name="query_norm")(q_BxTxNxH)
        if y_BxSxD is not None:
            k_BxSxKxH = by_heads(self._heads("key", cfg.num_kv_heads)(y_BxSxD))
            if cfg.qk_norm:
                k_BxSxKxH = cfg.norm_module(name="key_norm")(k_BxSxKxH)
            v_BxSxKxH = by_heads(self._heads("value", cfg.num_kv_heads, self.gain)(y_BxSxD))
            if position is not None:
                q_BxTxNxH, k_BxSxKxH = position.rotate(q_BxTxNxH, k_BxSxKxH)
            new = KeyValue(k_BxSxKxH, v_BxSxKxH)
            kv = new if cached is None else cached.write(new, index)
        sink_N = None
        if cfg.attention_sink:
            zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("heads",))
            sink_N = self.param("sink", zeros, (cfg.num_heads,), cfg.param_dtype)
        scale = cfg.d_head**-0.5 if cfg.attention_scale is None else cfg.attention_scale
        given = attention_backends.Inputs(
            mask, q_tokens, k_tokens, position, scale, cfg.attention_soft_cap, sink_N
        )
        if cfg.attention_dropout and not deterministic:
            given = given.replace(
                dropout=cfg.attention_dropout, dropout_key=self.make_rng("dropout")
            )
        inputs = (q_BxTxNxH, kv.k_BxSxKxH, kv.v_BxSxKxH, given.by_place())
        if watched(self, "heads"):
            self.sow("heads", "heads", attention_statistics.heads(q_BxTxNxH, kv.k_BxSxKxH, given))
        if watched(self, "maps"):
            self.sow(
                "maps", "weights", attention_statistics.weights(q_BxTxNxH, kv.k_BxSxKxH, given)[0]
            )
        out_BxTxNxH = attention_backends.choose(cfg.attention_backend, *inputs)(*inputs)
        out_BxTxNxH = by_heads(out_BxTxNxH)
        out = Linear(
            cfg,
            (cfg.d_model,),
            ("heads", "head", "embed"),
            cfg.attention_has_bias,
            self.gain * self.out_gain,
            name="out",
        )
        return out(out_BxTxNxH), kv

    def _heads(self, name: str, heads: int, gain: float = 1.0) -> Linear:
        """A projection D -> heads x H."""
        cfg, axis = self.config, "heads" if name == "query" else "kv_heads"
        size = cfg.value_size if name == "value" else cfg.d_head
        return Linear(
            cfg, (heads, size), ("embed", axis, "head"), cfg.qkv_has_bias, gain, name=name
        )
