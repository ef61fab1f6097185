"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464).
Shape suffixes: B batch, T length, D d_model, N heads, H d_head (of queries and keys), V d_value, W
past tokens that the convolution reads (conv - 1, but at least 1), L = W + T, F = 2 H + V convolved
channels per head, X chunks, C tokens per chunk."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.limits import Size
from transformer.model.convolution import convolved
from transformer.model.mixers.attention import merge_heads
from transformer.model.mixers.base import MIXERS, Context, Mixer, MixerModule
from transformer.model.modules import Linear, declare


class GatedDeltaState(NamedTuple):
    """The decoding state, of constant size: S, and the last W tokens, for the convolution."""

    s_BxNxHxV: jax.Array  # float32
    tail_BxWxNxF: jax.Array
    segments_BxW: jax.Array  # segments of the tokens in the tail


@MIXERS.register("gated_delta")
class GatedDelta(Mixer):
    """Gated DeltaNet: a linear memory with a forget gate and delta-rule writes (Yang et al. 2024).

    For each head,

        S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T,    o_t = S_t^T q_t

    q, k and v are projections of x, convolved over the last `conv` tokens and passed through SiLU.
    Then q and k are normalized to length 1, and q is divided by sqrt(d_head). The gates are
    b = sigmoid(x W_b) and a = exp(-A softplus(x W_a + dt)), with learned A and dt. The output is
    (norm(o) * SiLU(x W_g)) W_O. Only causal decoders are supported. Documents start with S = 0."""

    scope = "gated_delta"
    fields = frozenset({"num_heads", "d_head", "d_value", "norm_epsilon"})
    in_order = True
    causal = True
    skips_padding = False  # the convolution reads adjacent positions
    module = lambda self, side: GatedDeltaNet

    conv: Size = 4  # tokens that the convolution reads, including the current one
    negative_eigenvalues: bool = False  # b in (0, 2) instead of (0, 1) (Grazzi et al. 2024)
    chunk: Size = 64  # tokens that are computed at once; does not affect results

    def empty_state(self, config, batch, slots):
        width, heads = max(self.conv - 1, 1), config.num_heads
        d_head, d_value = config.head_size, config.value_size
        s_BxNxHxV = jnp.zeros((batch, heads, d_head, d_value), jnp.float32)
        tail_BxWxNxF = jnp.zeros((batch, width, heads, 2 * d_head + d_value), config.dtype)
        return GatedDeltaState(s_BxNxHxV, tail_BxWxNxF, jnp.zeros((batch, width), jnp.int32))


class GatedDeltaNet(MixerModule):
    """The module of GatedDelta, which has the equations."""

    @nn.compact
    def __call__(self, x_BxTxD, context: Context, position, state, deterministic):
        cfg, kind, (batch, length) = self.config, self.kind, x_BxTxD.shape[:2]
        segments_BxT = jnp.broadcast_to(context.tokens.segments_BxT, (batch, length))
        state = kind.empty_state(cfg, batch, length) if state is None else state
        d_head, real_BxTx1 = cfg.head_size, (segments_BxT > 0)[..., None]

        q, k = (self._heads(name, d_head)(x_BxTxD) for name in ("query", "key"))
        v = self._heads("value", cfg.value_size, self.gain)(x_BxTxD)
        qkv_BxTxNxF = jnp.where(real_BxTx1[..., None], jnp.concatenate([q, k, v], axis=-1), 0)
        inputs_BxLxNxF = jnp.concatenate([state.tail_BxWxNxF, qkv_BxTxNxF], axis=1)
        segments_BxL = jnp.concatenate([state.segments_BxW, segments_BxT], axis=1)
        inputs = kind.conv, ("heads", "head"), inputs_BxLxNxF, segments_BxL, length
        qkv_BxTxNxF = nn.silu(convolved(self, "convolution", *inputs))
        q, k, v = jnp.split(qkv_BxTxNxF.astype(jnp.float32), [d_head, 2 * d_head], axis=-1)
        q, k = unit(q) * d_head**-0.5, unit(k)
        log_a_BxTxN, b_BxTxN = self._gates(x_BxTxD)
        log_a_BxTxN = jnp.where(real_BxTx1, log_a_BxTxN, 0.0)  # padding does not decay S
        b_BxTxN = jnp.where(real_BxTx1, b_BxTxN, 0.0)  # or write to it
        # The number of documents started up to each token; 0: the one before these tokens
        before_BxT = jnp.concatenate([state.segments_BxW[:, -1:], segments_BxT[:, :-1]], axis=1)
        document_BxT = jnp.cumsum((segments_BxT != before_BxT) & (segments_BxT > 0), axis=1)
        chunked = functools.partial(chunked_recurrence, size=kind.chunk)
        recurrence = single_step if length == 1 else chunked
        o_BxTxNxV, s = recurrence(q, k, v, log_a_BxTxN, b_BxTxN, document_BxT, state.s_BxNxHxV)

        gain = {"norm_gain": True, "norm_zero_centered": False}
        norm = cfg.part(norm="rmsnorm", **gain).norm_module(name="norm")
        gate_BxTxNxV = self._heads("gate", cfg.value_size)(x_BxTxD)
        o_BxTxNxV = norm(o_BxTxNxV.astype(cfg.dtype)) * nn.silu(gate_BxTxNxV)
        width = state.segments_BxW.shape[1]
        new_state = GatedDeltaState(s, inputs_BxLxNxF[:, -width:], segments_BxL[:, -width:])
        return merge_heads(self, o_BxTxNxV, bias=False), new_state

    def _heads(self, name: str, size: int, gain: float = 1.0) -> Linear:
        names = ("embed", "heads", "head")
        return Linear(self.config, (self.config.num_heads, size), names, False, gain, name=name)

    def _gates(self, x_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns log a and b, float32[B, T, N]."""
        cfg, names = self.config, ("embed", "heads")
        project = lambda name: Linear(cfg, (cfg.num_heads,), names, False, name=name)(x_BxTxD)
        per_head = lambda name, init: declare(self, name, init, ("heads",), (cfg.num_heads,))
        log_of_uniform = lambda *args: jnp.log(jax.random.uniform(*args, 0.01, 16.0))

        def inverse_softplus_of_dt(key, shape, dtype):
            dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1)))
            return dt + jnp.log(-jnp.expm1(-dt))

        log_rate_N = per_head("log_rate", log_of_uniform).astype(jnp.float32)
        dt_N = per_head("dt", inverse_softplus_of_dt).astype(jnp.float32)
        step_BxTxN = nn.softplus(project("decay").astype(jnp.float32) + dt_N)
        b_BxTxN = nn.sigmoid(project("write").astype(jnp.float32))
        return -jnp.exp(log_rate_N) * step_BxTxN, b_BxTxN * (1 + self.kind.negative_eigenvalues)


def unit(x: jax.Array) -> jax.Array:
    """Returns x / |x| over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def single_step(q, k, v, log_a, b, document_BxT, s_BxNxHxV):
    """Computes the recurrence step for one token per sequence."""
    q, k, v, a, b = (x[:, 0] for x in (q, k, v, jnp.exp(log_a), b))
    decayed = jnp.where(document_BxT == 0, a, 0.0)[..., None, None] * s_BxNxHxV
    u_BxNxV = b[..., None] * (v - jnp.einsum("BNHV,BNH->BNV", decayed, k))
    s_BxNxHxV = decayed + k[..., None] * u_BxNxV[:, :, None]
    return jnp.einsum("BNHV,BNH->BNV", s_BxNxHxV, q)[:, None], s_BxNxHxV


def chunked_recurrence(q, k, v, log_a, b, document_BxT, s_BxNxHxV, *, size: int):
    """Computes the recurrence in chunks of `size` tokens: products in a chunk, a scan over chunks.

    Let c be the cumulative sum of log a within a chunk. Let E_ij = exp(c_i - c_j) if j <= i and
    both tokens are in the same document, and 0 otherwise. Then

        (I + A) u = b (v - exp(c) k S),     A_ij = b_i E_ij k_i . k_j for j < i
        o = exp(c) q S + ((q k^T) * E) u,   S' = exp(c_last) S + (E_last k)^T u

    The state S before a chunk contributes only to the tokens that continue its document."""
    (length, heads), size = q.shape[1:3], min(size, q.shape[1])
    padding = -length % size

    def cut(x):
        """[B, T, N, ...] -> [B, N, X, C, ...]. The padding neither decays S nor writes to it."""
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(len(x), -1, size, *x.shape[2:]), 3, 1)

    q, k, v, b = (cut(x) for x in (q, k, v, b))
    c = jnp.cumsum(cut(log_a), axis=-1)
    document = jnp.pad(document_BxT, ((0, 0), (0, padding)), mode="edge")
    document = document.reshape(len(document), 1, -1, size)  # B, 1, X, C
    previous_document = jnp.pad(document[..., -1], ((0, 0), (0, 0), (1, 0)))[..., :-1, None]
    continues = document == previous_document
    same_document = document[..., :, None] == document[..., None, :]
    causal = jnp.tril(jnp.ones((size, size), bool))
    e = jnp.exp(jnp.where(causal & same_document, c[..., :, None] - c[..., None, :], -jnp.inf))
    a = jnp.tril(b[..., None] * e * jnp.einsum("BNXIH,BNXJH->BNXIJ", k, k), -1)
    decay = jnp.where(continues, jnp.exp(c), 0.0)[..., None]
    rhs = jnp.concatenate([b[..., None] * v, b[..., None] * decay * k], axis=-1)
    triangle = {"left_side": True, "lower": True, "unit_diagonal": True}
    solved = jax.lax.linalg.triangular_solve(a + jnp.eye(size), rhs, **triangle)
    u, w = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = e * jnp.einsum("BNXIH,BNXJH->BNXIJ", q, k)
    per_chunk = (decay * q, scores, u, w, e[..., -1, :, None] * k, decay[..., -1:, :])

    def step(s, chunk):
        q, scores, u, w, k, chunk_decay = chunk
        u = u - jnp.einsum("BNCH,BNHV->BNCV", w, s)
        o = jnp.einsum("BNCH,BNHV->BNCV", q, s) + jnp.einsum("BNIJ,BNJV->BNIV", scores, u)
        return chunk_decay * s + jnp.einsum("BNCH,BNCV->BNHV", k, u), o

    chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), per_chunk)
    s_BxNxHxV, o = jax.lax.scan(step, s_BxNxHxV, chunks)
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # B, X, C, N, V
    return o.reshape(len(o), -1, heads, v.shape[-1])[:, :length], s_BxNxHxV
