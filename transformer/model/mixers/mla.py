"""Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2").
Shape suffixes: B batch, T query length, S key length, D d_model, N heads, H d_head, V d_value, R
kv_rank, P size of the rotated part (d_rope, unless the position scheme widens it)."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.limits import Count
from transformer.model.cache import empty_slots, extend
from transformer.model.config import ModelConfig
from transformer.model.mixers.attention import inner_attention, merge_heads, self_mask, shard_heads
from transformer.model.mixers.base import MIXERS, NORM_FIELDS, Context, Mixer, MixerModule
from transformer.model.modules import Kernel, Linear
from transformer.model.positions import Position, build


class Latent(NamedTuple):
    """The decoding state: R + P numbers per token, from which keys and values are computed."""

    c_BxSxR: jax.Array
    k_BxSxP: jax.Array


@MIXERS.register("mla")
class MLA(Mixer):
    """Multi-head latent attention: keys and values come from a small vector ("DeepSeek-V2", 2024).

        c = norm(x W_c),   k^R = rotate(x W_r)                             shared by all heads
        query = [q, rotate(q^R)],   key = [c W_k, k^R],   value = c W_v    for each head

    The scale is 1 / sqrt(d_head + d_rope). Only the parts of size `d_rope` are rotated: a rotation
    between c and W_k would prevent absorbing W_k into the queries. Projections have no biases.

    Supported position schemes: none, and those that add to embeddings, rotate, or add a bias."""

    scope = "self_attention"
    fields = frozenset({
        "num_heads", "d_head", "d_value", "window", "attention_scale", "attention_soft_cap",
        "attention_sink", "attention_backend", "attention_dropout", *NORM_FIELDS,
    })  # fmt: skip
    hooks = frozenset({"embed", "rotate", "bias"})
    observes = frozenset({"heads", "maps"})
    module = lambda self, side: LatentAttention

    kv_rank: Count = 0  # size of c; 0: 4 * d_head
    q_rank: Count = 0  # size of a latent vector for queries; 0: project queries from x
    d_rope: Count = 0  # rotated size of each head's query and of the shared key; 0: d_head / 2

    def sizes(self, config: ModelConfig) -> tuple[int, int]:
        """Returns kv_rank and d_rope, with defaults filled in."""
        return self.kv_rank or 4 * config.head_size, self.d_rope or config.head_size // 2

    def check(self, config, side):
        rope = self.sizes(config)[1]
        if rope < 1:
            return "model.mixer.d_rope: 0 defaults to d_head / 2, which is less than 1; set it"
        if "rotate" in build(config.layer_position).hooks and rope % 2:
            why = f"model.position = {config.layer_position!r} rotates pairs of features"
            return f"model.mixer.d_rope: {rope} must be even, because {why}"
        return None

    def facts(self, config, facts):
        return dataclasses.replace(facts, d_head=self.sizes(config)[1])

    def empty_state(self, config, batch, slots):
        sizes = self.sizes(config)[0], config.key_size("decoder")
        return Latent(*(empty_slots(config, batch, slots, size) for size in sizes))


class LatentAttention(MixerModule):
    """The module of MLA, which has the equations."""

    @nn.compact
    def __call__(self, x_BxTxD, context: Context, position: Position, state, deterministic):
        cfg, k_tokens = self.config, context.key_tokens
        kv_rank, d_rope = self.kind.sizes(cfg)
        position = position.bind_layer(self.param, cfg.stack_facts(self.side))
        q_BxTxNxH, q_BxTxNxP, latent = self._project(x_BxTxD, position)
        if state is not None:
            latent, k_tokens, state = extend(state, latent, context)
        up = functools.partial(Kernel, cfg, (kv_rank,), names=(None, "heads", "head"))
        w_k_RxNxH = up((cfg.num_heads, cfg.head_size), name="key_up")()
        w_v_RxNxV = up((cfg.num_heads, cfg.value_size), gain=self.gain, name="value_up")()
        # For one new token, absorb W_k into the query and apply W_v to the output. Then all
        # heads share one key of size R + P. For many tokens, expanding the keys is less work.
        absorbed = state is not None and x_BxTxD.shape[1] == 1
        if absorbed:
            q_BxTxNxH = jnp.einsum("BTNH,RNH->BTNR", q_BxTxNxH, w_k_RxNxH)
            k_BxSxKxH, v_BxSxKxV = (latent.c_BxSxR[:, :, None],) * 2
        else:
            k_BxSxKxH = jnp.einsum("BSR,RNH->BSNH", latent.c_BxSxR, w_k_RxNxH)
            v_BxSxKxV = jnp.einsum("BSR,RNV->BSNV", latent.c_BxSxR, w_v_RxNxV)
        shape = (*k_BxSxKxH.shape[:3], latent.k_BxSxP.shape[-1])
        k_BxSxKxP = jnp.broadcast_to(latent.k_BxSxP[:, :, None], shape)
        q = jnp.concatenate([q_BxTxNxH, q_BxTxNxP], axis=-1)
        k = jnp.concatenate([k_BxSxKxH, k_BxSxKxP], axis=-1)
        qkv, mask, size = (q, k, v_BxSxKxV), self_mask(cfg, self.side), cfg.head_size + d_rope
        tokens, index = (context.tokens, k_tokens), context.index
        out = inner_attention(self, qkv, mask, tokens, position, size, deterministic, index)
        if absorbed:
            out = jnp.einsum("BTNR,RNV->BTNV", out, w_v_RxNxV)
        return merge_heads(self, out, bias=False), state

    def _project(self, x_BxTxD, position: Position) -> tuple[jax.Array, jax.Array, Latent]:
        """Returns the queries, their rotated parts, and the latent state of these tokens."""
        cfg, q_input, q_axis, q_rank = self.config, x_BxTxD, "embed", self.kind.q_rank
        kv_rank, d_rope = self.kind.sizes(cfg)
        if q_rank:
            down = Linear(cfg, (q_rank,), ("embed", None), False, name="query_down")
            q_input, q_axis = cfg.norm_module(name="query_norm")(down(x_BxTxD)), None
        shape = (cfg.num_heads, cfg.head_size + d_rope)
        q = Linear(cfg, shape, (q_axis, "heads", "head"), False, name="query")(q_input)
        q_BxTxNxH, q_BxTxNxP = jnp.split(shard_heads(q), [cfg.head_size], axis=-1)
        down = Linear(cfg, (kv_rank + d_rope,), ("embed", None), False, name="key_value_down")
        c_BxTxR, k_BxTxP = jnp.split(down(x_BxTxD), [kv_rank], axis=-1)
        c_BxTxR = cfg.norm_module(name="key_value_norm")(c_BxTxR)
        q_BxTxNxP, k_BxTx1xP = position.rotate(q_BxTxNxP, k_BxTxP[:, :, None])
        return q_BxTxNxH, q_BxTxNxP, Latent(c_BxTxR, k_BxTx1xP[:, :, 0])
