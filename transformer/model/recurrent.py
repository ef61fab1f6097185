"""The baseline that attention replaced: an LSTM encoder-decoder with additive attention (Bahdanau et al. 2015).

Shape suffixes: B batch, T length (of the decoder's tokens, or of this stack's), S source length, D d_model, G a direction's width.

Wired like the other encoder-decoder, so it trains, packs, shards, decodes and is judged by the same code. Of the config it reads the
sizes (d_model, numbers of layers, vocabulary, embeddings), dropout, initialiser and types; positions, norms and heads have no place in it.
A token's state depends on that before it, so a row takes as many steps as it is long, one after another, and two tokens
n apart are n steps from each other; attention takes one.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.cache import Cache, LayerState
from transformer.model.config import ModelConfig
from transformer.model.dropout import Dropout
from transformer.model.initializers import matrix_init
from transformer.model.linear import Linear
from transformer.model.masks import SAME_SEGMENT, Tokens

State = tuple[jax.Array, jax.Array]
"""h and c of an LSTM, [B, D] each."""


def gate(z_Bx4xD: jax.Array, state: State) -> State:
    """One step of an LSTM (Hochreiter & Schmidhuber 1997; Gers et al. 2000): with i, f, o, g the four parts of z,
    c' = sigmoid(f + 1) c + sigmoid(i) tanh(g), h' = sigmoid(o) tanh(c')."""
    i, f, o, g = (z_Bx4xD[:, n].astype(jnp.float32) for n in range(4))
    c = jax.nn.sigmoid(f + 1.0) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def walk(
    step, state: State, inputs_BxT: tuple, tokens: Tokens, reverse: bool = False
) -> tuple[State, jax.Array]:
    """`step(state, inputs of one token) -> (state, output)` over the tokens of each row, one after another (or from the end). The state is
    zero where a document begins, and stays as it is over padding. Returns the last state and the outputs, [B, T, ...]."""
    seg_BxT = tokens.segments_BxT
    new_BxT = jnp.diff(seg_BxT, axis=1) != 0
    edge = jnp.zeros_like(seg_BxT[:, :1], bool)
    begins_BxT = jnp.concatenate([new_BxT, edge] if reverse else [edge, new_BxT], axis=1)
    turned = jax.tree.map(
        lambda x: jnp.moveaxis(x, 1, 0), (inputs_BxT, begins_BxT[..., None], seg_BxT[..., None] > 0)
    )

    def one(old: State, given):
        inputs, begins_Bx1, real_Bx1 = given
        fresh = jax.tree.map(lambda x: jnp.where(begins_Bx1, 0.0, x), old)
        new, out = step(fresh, inputs)
        return jax.tree.map(lambda a, b: jnp.where(real_Bx1, a, b), new, old), jax.tree.map(
            lambda x: jnp.where(real_Bx1, x, 0.0), out
        )

    state, out = jax.lax.scan(one, state, turned, reverse=reverse)
    return state, jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), out)


class Matrix(nn.Module):
    """A matrix by itself, for a step to multiply a state by."""

    config: ModelConfig

    @nn.compact
    def __call__(self, *shape: int) -> jax.Array:
        cfg = self.config

        def init(key, shape, dtype):
            inputs, outputs = shape[0], math.prod(shape[1:])
            return matrix_init(cfg.initializer, cfg.init_std)(
                key, (inputs, outputs), dtype
            ).reshape(shape)

        names = ("embed", *(None,) * (len(shape) - 1))
        kernel = self.param(
            "kernel", nn.with_logical_partitioning(init, names), shape, cfg.param_dtype
        )
        return kernel.astype(cfg.dtype)


class LSTM(nn.Module):
    """One direction of one layer."""

    config: ModelConfig
    width: int
    reverse: bool = False

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, tokens: Tokens, state: State | None = None
    ) -> tuple[jax.Array, State]:
        cfg, width = self.config, self.width
        z_BxTx4xG = Linear(cfg, (4, width), ("embed", None, None), True, name="input")(x_BxTxD)
        hidden = Matrix(cfg, name="hidden")(width, 4, width)

        def step(state, z):
            state = gate(z + jnp.einsum("BG,GFH->BFH", state[0].astype(cfg.dtype), hidden), state)
            return state, state[0]

        state, h_BxTxG = walk(
            step, state or zero_state(x_BxTxD.shape[0], width), z_BxTx4xG, tokens, self.reverse
        )
        return h_BxTxG.astype(cfg.dtype), state


class AttentiveLSTM(nn.Module):
    """A layer that, before each step, reads the encoder: with s the last state and h_j the encoder's outputs,

    e_j = v . tanh(W s + U h_j),  a = softmax(e),  context = sum_j a_j h_j,  s' = LSTM([x, context], s)

    and that puts out tanh(V [s', context, x]): after Bahdanau et al. (2015, sec. 3.1 and appendix A.2), who have a GRU that starts from
    the backward encoder's first state, and a maxout; here an LSTM that starts from zero, and a tanh.

    With `pooling="last"` it reads the encoder's last state alone, whatever it asks: what recurrence remembers without attention (after
    Sutskever et al. 2014)."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BxTxD,
        tokens: Tokens,
        encoded_BxSxD,
        keys_BxSxD,
        source: Tokens,
        state: State | None,
    ):
        cfg = self.config
        z_BxTx4xD = Linear(cfg, (4, cfg.d_model), ("embed", None, None), True, name="input")(
            x_BxTxD
        )
        hidden, read = (
            Matrix(cfg, name=name)(cfg.d_model, 4, cfg.d_model) for name in ("hidden", "context")
        )
        query, score = (
            Matrix(cfg, name=name)(cfg.d_model, n)
            for name, n in (("query", cfg.d_model), ("score", 1))
        )
        may_BxTxS = SAME_SEGMENT(tokens, source)
        if cfg.pooling == "last":
            may_BxTxS &= ends(source)[:, None]

        def step(state, given):
            z, may_BxS = given
            e_BxS = (
                jnp.tanh(keys_BxSxD + (state[0].astype(cfg.dtype) @ query)[:, None]) @ score[:, 0]
            )
            e_BxS = jnp.where(may_BxS, e_BxS.astype(jnp.float32), -1e30)
            a_BxS = jnp.where(may_BxS, jax.nn.softmax(e_BxS, axis=-1), 0.0).astype(cfg.dtype)
            context_BxD = jnp.einsum("BS,BSD->BD", a_BxS, encoded_BxSxD)
            z += jnp.einsum("BD,DFE->BFE", state[0].astype(cfg.dtype), hidden) + jnp.einsum(
                "BD,DFE->BFE", context_BxD, read
            )
            state = gate(z, state)
            return state, (state[0], context_BxD.astype(jnp.float32))

        start = state or zero_state(x_BxTxD.shape[0], cfg.d_model)
        state, (h_BxTxD, context_BxTxD) = walk(step, start, (z_BxTx4xD, may_BxTxS), tokens)
        both = jnp.concatenate(
            [h_BxTxD.astype(cfg.dtype), context_BxTxD.astype(cfg.dtype), x_BxTxD], axis=-1
        )
        return jnp.tanh(Linear(cfg, (cfg.d_model,), ("embed", None), True, name="out")(both)), state


def ends(tokens: Tokens) -> jax.Array:
    """bool[B, T]: the last token of each document."""
    return jnp.diff(tokens.segments_BxT, axis=1, append=0) != 0


def zero_state(rows: int, width: int) -> State:
    return (jnp.zeros((rows, width), jnp.float32),) * 2


class RecurrentEncoder(nn.Module):
    """Layers of two directions, half of d_model each, side by side; from the second on, added to what they read."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self, x_BxTxD, tokens: Tokens, deterministic: bool = True
    ) -> tuple[jax.Array, None]:
        cfg = self.config
        x_BxTxD = Dropout(cfg.dropout)(x_BxTxD, deterministic)
        for i in range(cfg.num_encoder_layers):
            sides = [
                LSTM(cfg, cfg.d_model // 2, way == "backward", name=f"layers_{i}_{way}")(
                    x_BxTxD, tokens
                )[0]
                for way in ("forward", "backward")
            ]
            h_BxTxD = Dropout(cfg.dropout)(jnp.concatenate(sides, axis=-1), deterministic)
            x_BxTxD = x_BxTxD + h_BxTxD if i else h_BxTxD
        return x_BxTxD, None


class RecurrentDecoder(nn.Module):
    """A layer that reads the encoder, and plain ones on top, each added to what it reads."""

    config: ModelConfig

    @nn.compact
    def __call__(
        self,
        x_BxTxD,
        tokens: Tokens,
        encoded_BxSxD,
        encoded_tokens: Tokens,
        cache: Cache | None = None,
        deterministic: bool = True,
    ) -> tuple[jax.Array, Cache | None]:
        """The outputs of the last layer, and the cache with these tokens read. A cache holds each layer's state, and what the first
        reads of the encoder."""
        cfg = self.config
        states = (
            [layer.mixer for layer in cache.layers] if cache else [None] * cfg.num_decoder_layers
        )
        project = Linear(cfg, (cfg.d_model,), ("embed", None), False, name="keys")
        read = (
            cache.layers[0].source
            if encoded_BxSxD is None
            else (encoded_BxSxD, project(encoded_BxSxD))
        )
        kept, beams = read, len(x_BxTxD) // len(read[0])  # beams share what is read of the encoder
        if beams > 1:
            read, encoded_tokens = jax.tree.map(
                lambda x: jnp.repeat(x, beams, axis=0), (read, encoded_tokens)
            )
        x_BxTxD, new = Dropout(cfg.dropout)(x_BxTxD, deterministic), []
        for i, state in enumerate(states):
            if i == 0:
                h_BxTxD, state = AttentiveLSTM(cfg, name="layers_0")(
                    x_BxTxD, tokens, *read, encoded_tokens, state
                )
            else:
                h_BxTxD, state = LSTM(cfg, cfg.d_model, name=f"layers_{i}")(x_BxTxD, tokens, state)
            h_BxTxD = Dropout(cfg.dropout)(h_BxTxD, deterministic)
            x_BxTxD = x_BxTxD + h_BxTxD if i else h_BxTxD
            new.append(state)
        if cache is not None:
            layers = tuple(
                LayerState(state, kept if i == 0 else None) for i, state in enumerate(new)
            )
            cache = Cache(layers, cache.append(tokens), cache.index + x_BxTxD.shape[1])
        return x_BxTxD, cache


def empty_recurrent_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """States of zero, and room to note where `slots` tokens a row stand."""
    nothing = jnp.zeros((batch, slots), jnp.int32)
    layers = tuple(
        LayerState(zero_state(batch, config.d_model)) for _ in range(config.num_decoder_layers)
    )
    return Cache(layers, Tokens(nothing, nothing), jnp.zeros((), jnp.int32))
