"""Attention: projections, positions, inner attention, output projection.

K = N is multi-head attention, 1 < K < N is grouped-query attention, K = 1 is multi-query attention.

Shape suffixes: B batch, T query length, S key length, D d_model, N query heads, K key/value heads,
H head size (d_value for values), E sources, Q queries of all sequences that share a source.
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
    """The decoding state: the keys and values of the tokens in its slots."""

    k_BxSxKxH: jax.Array
    v_BxSxKxH: jax.Array


@MIXERS.register("attention")
class SelfAttention(Mixer):
    """Self-attention: each token attends to the tokens of its document that the mask allows
    (Vaswani et al. 2017, sec. 3.2.2)."""

    scope = "self_attention"
    fields = frozenset(SHARED_FIELDS)
    hooks = frozenset({"embed", "rotate", "bias", "score", "value"})
    observes = frozenset({"heads", "maps"})

    def build(self, config, side, gain, out_gain):
        return functools.partial(Attention, config, side, gain, out_gain)

    def empty_state(self, config, batch, slots):
        """Returns empty keys and values. A layer with a window has at most `window` slots."""
        return KeyValue(
            empty_slots(config, batch, slots, config.kv_heads, config.key_size("decoder")),
            empty_slots(config, batch, slots, config.kv_heads, config.value_size),
        )


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(d_head)) V W_O. Q comes from `x`, K and V from `x` or the source."""

    config: ModelConfig
    side: str  # encoder | decoder
    gain: float  # scales the initial W_V and W_O
    out_gain: float  # additionally scales the initial W_O
    of_source: bool = False  # keys and values come from the source

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        context: Context,
        position: Position | None,
        state: KeyValue | None,
        deterministic: bool,
    ) -> tuple[jax.Array, KeyValue]:
        """Returns the output and the state: the keys and values so far, or those of the source."""
        cfg = self.config
        shard_heads = lambda x: constrain(x, ("batch", "length", "activation_heads", "head"))
        if self.of_source:
            kv_input_BxSxD, q_tokens, k_tokens = (
                context.source_BxSxD,
                context.tokens,
                context.source_tokens,
            )
            mask = SAME_SEGMENT
        else:
            kv_input_BxSxD, q_tokens, k_tokens = x_BxTxD, context.tokens, context.key_tokens
            mask = self_mask(cfg, self.side)
            position = position.bind_layer(self.param, cfg.stack_facts(self.side))
        q_BxTxNxH = shard_heads(self._heads("query", cfg.num_heads)(x_BxTxD))
        if cfg.qk_norm:
            q_BxTxNxH = cfg.norm_module(name="query_norm")(q_BxTxNxH)
        kv = state
        if kv_input_BxSxD is not None:
            k_BxSxKxH = shard_heads(self._heads("key", cfg.kv_heads)(kv_input_BxSxD))
            if cfg.qk_norm:
                k_BxSxKxH = cfg.norm_module(name="key_norm")(k_BxSxKxH)
            v_BxSxKxH = shard_heads(self._heads("value", cfg.kv_heads, self.gain)(kv_input_BxSxD))
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
            cfg, (cfg.d_model,), ("heads", "head", "embed"), cfg.attention_has_bias,
            self.gain * self.out_gain, name="out",
        )  # fmt: skip
        return out(shard_heads(out_BxTxNxH)), state

    def _heads(self, name: str, heads: int, gain: float = 1.0) -> Linear:
        """Returns the projection D -> heads x H."""
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
    """Cross-attention in which several sequences, the beams of a sentence, may share one source.

    The queries of sequences that share a source are concatenated into one long sequence, so that
    the source's keys and values need not be repeated.
    """
    kv, batch = state and state.value, len(x_BxTxD)
    sources = batch if kv is None else len(kv.k_BxSxKxH)
    group = lambda x: jnp.broadcast_to(x, (batch, *x.shape[1:])).reshape(sources, -1, *x.shape[2:])
    x_ExQxD = x_BxTxD
    if batch != sources:
        x_ExQxD = group(x_BxTxD)
        context = context.replace(tokens=jax.tree.map(group, context.tokens))
    out_ExQxD, kv = attend(x_ExQxD, context, None, kv, deterministic)
    return out_ExQxD.reshape(x_BxTxD.shape), Shared(kv)


def self_mask(config: ModelConfig, side: str) -> Mask:
    """Returns the self-attention mask: the tokens of its own stack that a token may attend to."""
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
    """Returns softmax(scale Q K^T) V, [B, T, N, H], from the backend that the config selects.

    The scale is 1 / sqrt(size) unless the config sets it. Also creates the attention sink's
    parameter, passes on dropout, and records statistics if `module` is watched (model/watch.py).
    """
    cfg = module.config
    sink_N = None
    if cfg.attention_sink:
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("heads",))
        sink_N = module.param("sink", zeros, (cfg.num_heads,), cfg.param_dtype)
    scale = size**-0.5 if cfg.attention_scale is None else cfg.attention_scale
    inputs = attention_backends.Inputs(
        mask, q_tokens, k_tokens, position, scale, cfg.attention_soft_cap, sink_N
    )
    if cfg.attention_dropout and not deterministic:
        inputs = inputs.replace(
            dropout=cfg.attention_dropout, dropout_key=module.make_rng("dropout")
        )
    if watched(module, "heads"):
        statistics = attention_statistics.heads(*qkv[:2], inputs)
        module.sow("heads", "heads", statistics)
    if watched(module, "maps"):
        weights, *_ = attention_statistics.weights(*qkv[:2], inputs)
        module.sow("maps", "weights", weights)
    arguments = (*qkv, inputs.by_index())
    return attention_backends.choose(cfg.attention_backend, *arguments)(*arguments)
