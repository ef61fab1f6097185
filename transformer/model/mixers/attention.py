"""Attention: projections, positions, inner attention, output projection. K = N is multi-head
attention, 1 < K < N is grouped-query attention, K = 1 is multi-query attention.
Shape suffixes: B batch, T query length, S key length, D d_model, N query heads, K key/value heads,
H head size (d_value for values)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.errors import UserError
from transformer.model import attention_backends, attention_statistics
from transformer.model.attention_backends.base import by_head
from transformer.model.cache import Shared, by_beam, empty_slots, extend
from transformer.model.config import ModelConfig
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Mask, window
from transformer.model.mixers import base
from transformer.model.mixers.base import MIXERS, SHARED_FIELDS, SOURCE_MIXERS, Context, Mixer
from transformer.model.modules import Linear, declare, watched
from transformer.model.positions import Position, build
from transformer.model.sharding import constrain


class KeyValue(NamedTuple):
    """The decoding state: the keys and values of the tokens in its slots."""

    k_BxKxSxH: jax.Array
    v_BxKxSxH: jax.Array


@MIXERS.register("attention")
class SelfAttention(Mixer):
    """Self-attention to the tokens of the document that the mask allows (Vaswani et al. 2017)."""

    scope = "self_attention"
    fields = frozenset(SHARED_FIELDS) - {"cross_position"}
    hooks = frozenset({"embed", "project", "rotate", "bias", "score", "value"})
    observes = frozenset({"heads", "maps"})
    module = lambda self, side: Attention

    def check(self, config, side):
        if config.attention_score == "additive" and "rotate" in build(config.layer_position).hooks:
            problem = f"'additive' scores do not support position = {config.layer_position!r}"
            return f"model.attention_score: {problem}, which rotates queries and keys"
        size = config.num_heads * config.value_size
        if not config.attention_out and size != config.d_model:
            outputs = f"num_heads * d_value = {size} outputs, but model.d_model = {config.d_model}"
            return f"model.attention_out: False leaves {outputs}; set it to True, or change a size"
        return None

    def empty_state(self, config, batch, slots):
        """Returns empty keys and values. A layer with a window has at most `window` slots."""
        sizes = config.key_size("decoder"), config.value_size
        return KeyValue(*(empty_slots(config, batch, slots, config.kv_heads, n) for n in sizes))


@SOURCE_MIXERS.register("cross_attention")
class CrossAttention(Mixer):
    """Attention to the source, in a sublayer of its own. The first call creates its state."""

    scope = "cross_attention"
    fields = frozenset(SHARED_FIELDS) - {"window", "attention_layer_scale", "canon"}
    observes = SelfAttention.observes
    module = lambda self, side: SourceAttention

    def check(self, config, side):
        try:
            scheme = build(config.cross_position)
            problem = scheme.check(self.facts(config, config.stack_facts(side)))
        except UserError as e:
            return str(e).replace("model.position", "model.cross_position")
        additive, spread = config.attention_score == "additive", config.random_positions > 0
        reasons = {
            "is absolute": "embed" in scheme.hooks,
            "shares the projections of self-attention": "project" in scheme.hooks,
            "rotates keys, unlike additive scores": "rotate" in scheme.hooks and additive,
            "depends on the length of each sequence": getattr(scheme, "by_length", False),
            "does not support model.random_positions": scheme.reads_positions and spread,
        }
        reason = next((reason for reason, holds in reasons.items() if holds), None)
        if reason and not problem:
            problem = f"model.position: {scheme.name!r} {reason}; choose another scheme"
        return problem and problem.replace("model.position", "model.cross_position")

    def facts(self, config, facts):
        return dataclasses.replace(facts, d_head=config.head_size, causal=False)


class Attention(base.MixerModule):
    """softmax(Q K^T / sqrt(d_head)) V W_O of the tokens of one stack."""

    @nn.compact
    def __call__(self, x_BxTxD, context: Context, position: Position, state, deterministic):
        """Returns the output, keys and values so far and, with `value_residual`, the first."""
        position, q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = self._projected(x_BxTxD, context, position)
        v_BxTxKxH, *first = self._with_first(v_BxTxKxH, context)
        qkv = q_BxTxNxH, k_BxTxKxH, v_BxTxKxH
        return *self._read(x_BxTxD, qkv, context, position, state, deterministic), *first

    def _projected(self, x_BxTxD, context: Context, position: Position) -> tuple:
        """Returns the position scheme with the layer's parameters, and queries, keys, values."""
        query, key = self._heads("query"), self._heads("key")
        position = position.bind_layer(self.param, self.config.stack_facts(self.side))
        position = position.project(query, key)
        q_BxTxNxH = self._queries(query(x_BxTxD))
        k_BxTxKxH, v_BxTxKxH = self._keys_and_values(key(x_BxTxD), x_BxTxD)
        canon = lambda name, axis, x: context.canon(self, f"B_{name}", (axis, "head"), x)
        q_BxTxNxH = canon("query", "heads", q_BxTxNxH)
        k_BxTxKxH = canon("key", "kv_heads", k_BxTxKxH)
        v_BxTxKxH = canon("value", "kv_heads", v_BxTxKxH)
        if self.config.attention_layer_scale:
            q_BxTxNxH /= jnp.asarray(context.layer + 1, q_BxTxNxH.dtype)
        return position, *position.rotate(q_BxTxNxH, k_BxTxKxH), v_BxTxKxH

    def _read(self, x_BxTxD, qkv, context: Context, position, state, deterministic):
        """Returns the output and the keys and values so far."""
        q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = qkv
        kv = new = KeyValue(by_head(k_BxTxKxH), by_head(v_BxTxKxH))
        k_tokens = context.key_tokens
        if state is not None:
            kv, k_tokens, new = extend(state, new, context)
        mask, tokens = self_mask(self.config, self.side), (context.tokens, k_tokens)
        options = position, deterministic, context.index, context.layer
        return self._attend(x_BxTxD, (q_BxTxNxH, kv), mask, tokens, *options), new

    def _queries(self, q_BxTxNxH: jax.Array) -> jax.Array:
        """Returns projected queries, normalized and multiplied by M, as the config sets."""
        cfg = self.config
        q_BxTxNxH = self._normalized("query_norm", shard_heads(q_BxTxNxH), cfg.qk_norm)
        if cfg.attention_score != "bilinear":
            return q_BxTxNxH
        shape, names = (cfg.num_heads, *[cfg.head_size] * 2), ("heads", "head", None)
        eye = lambda key, shape, dtype: jnp.broadcast_to(jnp.eye(shape[-1], dtype=dtype), shape)
        matrices_NxHxH = declare(self, "bilinear", eye, names, shape).astype(cfg.dtype)
        return jnp.einsum("BTNH,NHI->BTNI", q_BxTxNxH, matrices_NxHxH)

    def _keys_and_values(self, k_BxSxKxH, x_BxSxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns projected keys and the values of x, normalized as the config sets."""
        v_BxSxKxH = shard_heads(self._value(x_BxSxD))
        k_BxSxKxH = self._normalized("key_norm", shard_heads(k_BxSxKxH), self.config.qk_norm)
        return k_BxSxKxH, self._normalized("value_norm", v_BxSxKxH, self.config.v_norm)

    def _value(self, x_BxSxD: jax.Array) -> jax.Array:
        return self._heads("value", self.gain)(x_BxSxD)

    def _with_first(self, v_BxTxKxH, context: Context) -> list[jax.Array]:
        """Returns [v] or, with `value_residual`, [w_1 v_first + w_2 v, v_first]; first layer: v."""
        cfg = self.config
        if not cfg.value_residual:
            return [v_BxTxKxH]
        weights = jnp.array([0.5, 0.5])
        if cfg.value_residual == "learned":
            weights = declare(self, "value_residual", nn.initializers.constant(0.5), (None,), (2,))
        w_first, w_own = weights.astype(v_BxTxKxH.dtype)
        is_first = context.layer == 0
        first_BxTxKxH = jnp.where(is_first, v_BxTxKxH, context.passed)
        mixed_BxTxKxH = w_first * first_BxTxKxH + w_own * v_BxTxKxH
        return [jnp.where(is_first, v_BxTxKxH, mixed_BxTxKxH), first_BxTxKxH]

    def _attend(self, x_BxTxD, q_and_kv, *options) -> jax.Array:
        """Returns the output, [B, T, D]. `options` are those of `_inner`."""
        cfg, out_BxTxNxH = self.config, self._inner(q_and_kv, *options)
        if cfg.attention_gate:
            out_BxTxNxH *= jax.nn.sigmoid(self._gate(x_BxTxD))
        if not cfg.attention_out:
            return out_BxTxNxH.reshape(x_BxTxD.shape)
        return merge_heads(self, out_BxTxNxH, cfg.attention_has_bias)

    def _inner(self, q_and_kv, mask, tokens, position, deterministic, index=None, layer=None):
        """Returns softmax(Q K^T / sqrt(d_head)) V, [B, T, N, H]. `tokens` are those of q and k."""
        (q_BxTxNxH, kv), options = q_and_kv, (self.config.head_size, deterministic, index)
        qkv = q_BxTxNxH, *map(by_head, kv)
        return inner_attention(self, qkv, mask, tokens, position, *options)

    def _heads(self, name: str, gain: float = 1.0, shape: tuple[int, ...] = ()) -> Linear:
        """Returns the projection D -> heads x H; `shape` overrides the number and size of heads."""
        cfg, heads = self.config, "heads" if name == "query" else "kv_heads"
        size = cfg.value_size if name == "value" else cfg.head_size
        shape = shape or (cfg.num_heads if name == "query" else cfg.kv_heads, size)
        return Linear(cfg, shape, ("embed", heads, "head"), cfg.qkv_has_bias, gain, name=name)

    def _gate(self, x_BxTxD: jax.Array) -> jax.Array:
        """Returns the logits of the gate, [B, T, N, H], or [B, T, N, 1] for one per head."""
        cfg, outputs, names = self.config, (self.config.num_heads,), ("embed", "heads")
        if cfg.attention_gate == "elementwise":
            outputs, names = (*outputs, cfg.value_size), (*names, "head")
        logits = Linear(cfg, outputs, names, False, name="gate")(x_BxTxD)
        return logits if cfg.attention_gate == "elementwise" else logits[..., None]

    def _normalized(self, name: str, x_BxTxNxH: jax.Array, is_on: bool) -> jax.Array:
        if not is_on:
            return x_BxTxNxH
        joint = self.config.qk_norm_joint and name != "value_norm"
        axes = x_BxTxNxH.shape[:2] if joint else x_BxTxNxH.shape[:3]
        norm = self.config.norm_module(name=name)
        return norm(x_BxTxNxH.reshape(*axes, -1)).reshape(x_BxTxNxH.shape)


def shard_heads(x_BxTxNxH: jax.Array) -> jax.Array:
    """Shards values of heads over devices."""
    return constrain(x_BxTxNxH, ("batch", "length", "activation_heads", "head"))


def merge_heads(module: nn.Module, out_BxTxNxH: jax.Array, bias: bool) -> jax.Array:
    """Returns the output projection of a mixer's heads, [B, T, D]; its matrix is W_O."""
    cfg, names, gain = module.config, ("heads", "head", "embed"), module.gain * module.out_gain
    return Linear(cfg, (cfg.d_model,), names, bias, gain, name="out")(shard_heads(out_BxTxNxH))


class SourceAttention(Attention):
    """softmax(Q K^T / sqrt(d_head)) V W_O, with K and V from the source, which rows may share.
    Uses the position scheme `cross_position` in place of `position`, with parameters of its own."""

    @nn.compact
    def __call__(self, x_BxTxD, context: Context, position, state: Shared | None, deterministic):
        """Returns the output and the keys and values of the source."""
        facts = self.kind.facts(self.config, self.config.stack_facts(self.side))
        param = lambda name, *args: self.param(f"position_{name}", *args)
        scheme = build(self.config.cross_position).bind(param, facts).bind_layer(param, facts)
        q_BxTxNxH = self._queries(self._heads("query")(x_BxTxD))
        at = lambda tokens: scheme.at(tokens.positions_BxT).rotate
        if state is None:
            keys_BxSxKxH = self._heads("key")(context.source_BxSxD)
            k_BxSxKxH, v_BxSxKxH = self._keys_and_values(keys_BxSxKxH, context.source_BxSxD)
            groups = self.config.num_heads // self.config.kv_heads
            _, k_BxSxKxH = at(context.source_tokens)(jnp.repeat(k_BxSxKxH, groups, 2), k_BxSxKxH)
            state = Shared(KeyValue(by_head(k_BxSxKxH), by_head(v_BxSxKxH)))
        q_BxTxNxH, _ = at(context.tokens)(q_BxTxNxH, q_BxTxNxH[:, :, : self.config.kv_heads])
        spread = lambda x: jnp.repeat(x, len(x_BxTxD) // len(x), axis=0)
        kv, tokens = state.value, (context.tokens, jax.tree.map(spread, context.source_tokens))
        if context.index is None:  # not in decoding: dropout differs between sequences
            kv = jax.tree.map(spread, kv)
        if scheme.acts_on_logits:  # distances are those of positions, not those in the sequences
            tokens = tuple(x.replace(order="") for x in tokens)
        options = SAME_SEGMENT, tokens, scheme, deterministic
        return self._attend(x_BxTxD, (q_BxTxNxH, kv), *options), state


def self_mask(config: ModelConfig, side: str) -> Mask:
    """Returns the self-attention mask: the tokens of its own stack that a token may attend to."""
    mask = SAME_SEGMENT & CAUSAL if side == "decoder" and config.causal else SAME_SEGMENT
    return mask & window(config.window) if config.window else mask


def scale_of(config: ModelConfig, size: int) -> float:
    """Returns the scale of products of queries and keys. It is 1 / sqrt(size), times sqrt(d_head of
    the base / d_head), unless the config sets it. For additive scores, it is 1."""
    if config.attention_score == "additive":
        return 1.0
    if config.attention_scale is not None:
        return config.attention_scale
    return size**-0.5 * (config.base.head_size / config.head_size) ** 0.5


def inner_attention(
    module: nn.Module, qkv, mask: Mask, tokens, position, size: int, deterministic, index=None
) -> jax.Array:
    """Returns softmax(scale Q K^T) V, [B, T, N, H], from the backend that the config selects.
    `tokens` are those of the queries and those of the keys. `size` sets the scale (`scale_of`).
    `index` is the cache slot of the first query; None outside decoding. Also creates the parameters
    of the attention sink and of additive scores, passes on dropout, and records statistics if
    `module` is watched (model/modules.py)."""
    cfg, sink_N = module.config, None
    if cfg.attention_sink:
        sink_N = declare(module, "sink", nn.initializers.zeros, ("heads",), (cfg.num_heads,))
    options = position, scale_of(cfg, size), cfg.attention_soft_cap, sink_N
    inputs = attention_backends.Inputs(mask, *tokens, *options, mask_value=cfg.attention_mask_value)
    if cfg.attention_score == "additive":
        shape, init = (cfg.num_heads, cfg.head_size), nn.initializers.lecun_normal()
        vectors_NxH = declare(module, "additive", init, ("heads", "head"), shape)
        inputs = inputs.replace(additive_NxH=vectors_NxH)
    if index is not None:
        inputs = inputs.replace(first=jnp.stack([index, jnp.zeros_like(index)]))
    if cfg.attention_dropout and not deterministic:
        key = module.make_rng("dropout")
        inputs = inputs.replace(dropout=cfg.attention_dropout, dropout_key=key)
    if watched(module, "heads"):
        module.sow("heads", "heads", attention_statistics.heads(*qkv[:2], inputs))
    if watched(module, "maps"):
        module.sow("maps", "weights", attention_statistics.weights(*qkv[:2], inputs)[0])

    def attend(kv, q_BxTxNxH, q_tokens, k_tokens):
        arguments = q_BxTxNxH, *kv, inputs.replace(q_tokens=q_tokens, k_tokens=k_tokens).by_index()
        return attention_backends.choose(cfg.attention_backend, *arguments)(*arguments)

    return by_beam(attend, qkv[1:], qkv[0], *tokens)
