"""Attention = projections + position + inner attention + output projection.

Shape suffixes: B batch, T query length, S key length, D d_model, N query heads, K key/value heads, H head size (of values: d_value),
E sequences that share a source, Q queries of all sequences that share one.
Multi-head, grouped-query and multi-query attention are K = N, 1 < K < N and K = 1.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model import attention_backends, attention_statistics
from transformer.model.cache import Shared, empty_slots, extend
from transformer.model.config import ModelConfig
from transformer.model.linear import Linear
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Mask, Tokens, window
from transformer.model.mixers.base import MIXERS, SHARED_FIELDS, Context, Mixer
from transformer.model.positions import Position
from transformer.model.sharding import constrain
from transformer.model.watch import watched


class KeyValue(NamedTuple):
    """The state of attention: keys and values of the tokens in its slots."""

    k_BxSxKxH: jax.Array
    v_BxSxKxH: jax.Array


@MIXERS.register("attention")
class SelfAttention(Mixer):
    """Every token reads those of its document that the mask allows (Vaswani et al. 2017, sec. 3.2.2)."""

    scope = "self_attention"
    fields = frozenset(SHARED_FIELDS)
    hooks = frozenset({"embed", "rotate", "bias", "score", "value"})
    observes = frozenset({"heads", "maps"})
    pairs = True

    def build(self, config, side, gain, out_gain):
        return functools.partial(Attention, config, side, gain, out_gain)

    def empty_state(self, config, batch, slots):
        """Keys and values. A layer with a window keeps as many as it can still see."""
        return KeyValue(
            empty_slots(config, batch, slots, config.kv_heads, config.key_size("decoder")),
            empty_slots(config, batch, slots, config.kv_heads, config.value_size),
        )


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(d_head)) V, then W_O. Queries are of `x`; keys and values are of `x` too, or of the source."""

    config: ModelConfig
    side: str  # encoder | decoder
    gain: float  # of the initial W_V and W_O
    out_gain: float  # of the initial W_O, on top
    of_source: bool = False

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        context: Context,
        position: Position | None,
        state: KeyValue | None,
        deterministic: bool,
    ) -> tuple[jax.Array, KeyValue]:
        """The output, and the state: keys and values of all tokens read, or of the source."""
        cfg = self.config
        by_heads = lambda x: constrain(x, ("batch", "length", "activation_heads", "head"))
        if self.of_source:
            y_BxSxD, q_tokens, k_tokens = (
                context.source_BxSxD,
                context.tokens,
                context.source_tokens,
            )
            mask = SAME_SEGMENT
        else:
            y_BxSxD, q_tokens, k_tokens = x_BxTxD, context.tokens, context.key_tokens
            mask = self_mask(cfg, self.side)
            position = position.bind_layer(self.param, cfg.stack_facts(self.side))
        q_BxTxNxH = by_heads(self._heads("query", cfg.num_heads)(x_BxTxD))
        if cfg.qk_norm:
            q_BxTxNxH = cfg.norm_module(name="query_norm")(q_BxTxNxH)
        kv = state
        if y_BxSxD is not None:
            k_BxSxKxH = by_heads(self._heads("key", cfg.kv_heads)(y_BxSxD))
            if cfg.qk_norm:
                k_BxSxKxH = cfg.norm_module(name="key_norm")(k_BxSxKxH)
            v_BxSxKxH = by_heads(self._heads("value", cfg.kv_heads, self.gain)(y_BxSxD))
            if position is not None:
                q_BxTxNxH, k_BxSxKxH = position.rotate(q_BxTxNxH, k_BxSxKxH)
            kv = new = KeyValue(k_BxSxKxH, v_BxSxKxH)
            if state is None:
                state = new
            else:
                kv, k_tokens, state = extend(state, new, context)
        out_BxTxNxH = inner_attention(
            self, (q_BxTxNxH, *kv), mask, q_tokens, k_tokens, position, cfg.head_size, deterministic
        )
        out = Linear(
            cfg, (cfg.d_model,), ("heads", "head", "embed"), cfg.attention_has_bias, self.gain * self.out_gain, name="out"
        )  # fmt: skip
        return out(by_heads(out_BxTxNxH)), state

    def _heads(self, name: str, heads: int, gain: float = 1.0) -> Linear:
        """A projection D -> heads x H."""
        cfg, axis = self.config, "heads" if name == "query" else "kv_heads"
        size = cfg.value_size if name == "value" else cfg.head_size
        return Linear(
            cfg, (heads, size), ("embed", axis, "head"), cfg.qkv_has_bias, gain, name=name
        )


def shared_source(
    attend: Attention,
    x_BxTxD: jax.Array,
    context: Context,
    state: Shared | None,
    deterministic: bool,
) -> tuple[jax.Array, Shared]:
    """Cross-attention, where several sequences may read one source: the beams of a sentence. They stand side by side, as the
    queries of one, so that the source's keys and values need not be repeated."""
    kv, rows = state and state.value, len(x_BxTxD)
    shared = rows if kv is None else len(kv.k_BxSxKxH)
    together = lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:])).reshape(shared, -1, *x.shape[2:])
    x_ExQxD = x_BxTxD
    if rows != shared:
        x_ExQxD = together(x_BxTxD)
        context = context.replace(tokens=jax.tree.map(together, context.tokens))
    out_ExQxD, kv = attend(x_ExQxD, context, None, kv, deterministic)
    return out_ExQxD.reshape(x_BxTxD.shape), Shared(kv)


def self_mask(config: ModelConfig, side: str) -> Mask:
    """Which tokens of its own stack a token may read."""
    mask = SAME_SEGMENT & CAUSAL if side == "decoder" and config.causal else SAME_SEGMENT
    return mask & window(config.window) if config.window else mask


def inner_attention(
    module: nn.Module,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    mask: Mask,
    q_tokens: Tokens,
    k_tokens: Tokens,
    position: Position | None,
    size: int,
    deterministic: bool,
) -> jax.Array:
    """softmax(scale Q K^T) V by the backend that the config chooses, [B, T, N, H], with what goes with it: dropout, the sink's parameter,
    and what `module` tells to those who watch it. The scale is 1 / sqrt(size) unless the config gives one."""
    cfg = module.config
    sink_N = None
    if cfg.attention_sink:
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("heads",))
        sink_N = module.param("sink", zeros, (cfg.num_heads,), cfg.param_dtype)
    scale = size**-0.5 if cfg.attention_scale is None else cfg.attention_scale
    given = attention_backends.Inputs(
        mask, q_tokens, k_tokens, position, scale, cfg.attention_soft_cap, sink_N
    )
    if cfg.attention_dropout and not deterministic:
        given = given.replace(dropout=cfg.attention_dropout, dropout_key=module.make_rng("dropout"))
    if watched(module, "heads"):
        by_head = attention_statistics.heads(*qkv[:2], given)
        module.sow("heads", "heads", by_head)
    if watched(module, "maps"):
        weights, *_ = attention_statistics.weights(*qkv[:2], given)
        module.sow("maps", "weights", weights)
    inputs = (*qkv, given.by_place())
    return attention_backends.choose(cfg.attention_backend, *inputs)(*inputs)
