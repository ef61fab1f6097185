"""Gated DeltaNet: a linear memory that forgets by a gate and writes by the delta rule (Yang et al. 2024, arXiv:2412.06464).

Shape suffixes: B batch, T length, D d_model, N heads, H d_head (of queries and keys), V d_value, W width of the convolution,
F = 2 H + V, the numbers of a head that are convolved, X chunks, C tokens of a chunk.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.checks import at_least
from transformer.model.config import ModelConfig
from transformer.model.linear import Linear
from transformer.model.masks import Tokens
from transformer.model.mixers.base import MIXERS, Context, Mixer
from transformer.model.positions import Position
from transformer.model.sharding import constrain


class Memory(NamedTuple):
    """The state: S, and the last tokens that a convolution still reads. Its size does not depend on the number of tokens."""

    s_BxNxHxV: jax.Array  # float32
    tail_BxWxNxF: jax.Array
    segments_BxW: jax.Array  # of the tail's tokens


@MIXERS.register("gated_delta")
@dataclasses.dataclass(frozen=True)
class GatedDelta(Mixer):
    """S_t = a_t S_(t-1) + b_t k_t (v_t - a_t S_(t-1)^T k_t)^T,  o_t = S_t^T q_t,  for each head,

    with q, k and v projected, convolved over the last `conv` tokens and passed through SiLU, q and k then of length 1, and q
    divided by sqrt(d_head); b = sigmoid(x W_b); a = exp(-A softplus(x W_a + dt)), A and dt learned. The output is
    norm(o) * SiLU(x W_g), times W_O. Causal decoders only. A document begins with an empty memory.
    """

    scope = "gated_delta"
    fields = frozenset({"num_heads", "d_head", "d_value"})
    in_order = True

    conv: int = 4  # tokens that a convolution reads, the last one included
    negative_eigenvalues: bool = False  # b in (0, 2) in place of (0, 1) (Grazzi et al. 2024)
    chunk: int = 64  # tokens that training computes at once; results do not depend on it

    def __post_init__(self):
        at_least("model.mixer", self, 1, "conv", "chunk")

    def check(self, config, side):
        if side == "encoder" or not config.causal or config.prefix_lm:
            return (
                "model.mixer: 'gated_delta' reads each token after those before it; it needs model.family='decoder' with a "
                "causal mask"
            )
        return None

    def build(self, config, side, gain, out_gain):
        return functools.partial(GatedDeltaNet, config, self, gain, out_gain)

    def empty_state(self, config, batch, slots):
        width, n, h, v = (
            max(self.conv - 1, 1),
            config.num_heads,
            config.head_size,
            config.value_size,
        )
        return Memory(
            jnp.zeros((batch, n, h, v), jnp.float32),
            jnp.zeros((batch, width, n, 2 * h + v), config.dtype),
            jnp.zeros((batch, width), jnp.int32),
        )


class GatedDeltaNet(nn.Module):
    """See GatedDelta."""

    config: ModelConfig
    kind: GatedDelta
    gain: float  # of the initial W_v and W_O
    out_gain: float  # of the initial W_O, on top

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        context: Context,
        position: Position,
        state: Memory | None,
        deterministic: bool,
    ) -> tuple[jax.Array, Memory | None]:
        cfg, kind, decoding = self.config, self.kind, state is not None
        (rows, length), h = x_BxTxD.shape[:2], cfg.head_size
        tokens = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (rows, length)), context.tokens.replace(until_BxT=None)
        )
        state = state if decoding else kind.empty_state(cfg, rows, length)
        real_BxTx1 = (tokens.segments_BxT > 0)[..., None]

        mixed_BxTxNxF = [
            self._heads("query", h)(x_BxTxD),
            self._heads("key", h)(x_BxTxD),
            self._heads("value", cfg.value_size, self.gain)(x_BxTxD),
        ]
        mixed_BxTxNxF = jnp.where(real_BxTx1[..., None], jnp.concatenate(mixed_BxTxNxF, axis=-1), 0)
        seen_BxLxNxF = jnp.concatenate([state.tail_BxWxNxF, mixed_BxTxNxF], axis=1)
        segments_BxL = jnp.concatenate([state.segments_BxW, tokens.segments_BxT], axis=1)
        mixed_BxTxNxF = nn.silu(self._convolved(seen_BxLxNxF, segments_BxL, length))
        q, k, v = jnp.split(mixed_BxTxNxF.astype(jnp.float32), [h, 2 * h], axis=-1)
        q, k = unit(q) * h**-0.5, unit(k)
        log_a_BxTxN, b_BxTxN = self._gates(x_BxTxD)
        log_a_BxTxN = jnp.where(real_BxTx1, log_a_BxTxN, 0.0)  # padding forgets nothing
        b_BxTxN = jnp.where(real_BxTx1, b_BxTxN, 0.0)  # and writes nothing
        document_BxT = documents(tokens, state.segments_BxW[:, -1:])
        walk = one_token if length == 1 else functools.partial(in_chunks, size=kind.chunk)
        o_BxTxNxV, s = walk(q, k, v, log_a_BxTxN, b_BxTxN, document_BxT, state.s_BxNxHxV)

        norm = functools.partial(cfg.norm_module, kind="rmsnorm", gain=True, offset=False)
        gate_BxTxNxV = self._heads("gate", cfg.value_size)(x_BxTxD)
        o_BxTxNxV = norm(name="norm")(o_BxTxNxV.astype(cfg.dtype)) * nn.silu(gate_BxTxNxV)
        o_BxTxNxV = constrain(o_BxTxNxV, ("batch", "length", "activation_heads", "head"))
        out = Linear(
            cfg, (cfg.d_model,), ("heads", "head", "embed"), False, self.gain * self.out_gain, name="out"
        )  # fmt: skip
        if not decoding:
            return out(o_BxTxNxV), None
        width = state.segments_BxW.shape[1]
        return out(o_BxTxNxV), Memory(s, seen_BxLxNxF[:, -width:], segments_BxL[:, -width:])

    def _heads(self, name: str, size: int, gain: float = 1.0) -> Linear:
        names = ("embed", "heads", "head")
        return Linear(self.config, (self.config.num_heads, size), names, False, gain, name=name)

    def _convolved(self, seen_BxLxNxF: jax.Array, segments_BxL: jax.Array, length: int):
        """y_t = sum_i w_i x_(t - i) over the last `conv` tokens of t's document, for each channel by itself, [B, T, N, F]."""
        cfg, width, total = self.config, self.kind.conv, segments_BxL.shape[1]
        init = lambda key, shape, dtype: jax.random.uniform(
            key, shape, dtype, -(width**-0.5), width**-0.5
        )
        init = nn.with_logical_partitioning(init, (None, "heads", "head"))
        shape = (width, *seen_BxLxNxF.shape[2:])
        kernel = self.param("convolution", init, shape, cfg.param_dtype).astype(cfg.dtype)
        y_BxTxNxF = 0.0
        for i in range(width):
            back = slice(total - length - i, total - i)
            same_BxT = segments_BxL[:, back] == segments_BxL[:, -length:]
            y_BxTxNxF += jnp.where(same_BxT[..., None, None], seen_BxLxNxF[:, back], 0) * kernel[i]
        return y_BxTxNxF

    def _gates(self, x_BxTxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """log a and b, float32[B, T, N]."""
        cfg, names = self.config, ("embed", "heads")
        one = lambda name: Linear(cfg, (cfg.num_heads,), names, False, name=name)(x_BxTxD)
        heads = lambda init: nn.with_logical_partitioning(init, ("heads",))

        def log_of_uniform(key, shape, dtype):
            return jnp.log(jax.random.uniform(key, shape, dtype, 0.01, 16.0))

        def inverse_softplus_of_dt(key, shape, dtype):
            dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(1e-1)))
            return dt + jnp.log(-jnp.expm1(-dt))

        shape = (cfg.num_heads,), cfg.param_dtype
        log_rate_N = self.param("log_rate", heads(log_of_uniform), *shape).astype(jnp.float32)
        dt_N = self.param("dt", heads(inverse_softplus_of_dt), *shape).astype(jnp.float32)
        step_BxTxN = nn.softplus(one("decay").astype(jnp.float32) + dt_N)
        b_BxTxN = nn.sigmoid(one("write").astype(jnp.float32))
        return -jnp.exp(log_rate_N) * step_BxTxN, b_BxTxN * (1 + self.kind.negative_eigenvalues)


def unit(x: jax.Array) -> jax.Array:
    """x / |x| over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)


def documents(tokens: Tokens, before_Bx1: jax.Array) -> jax.Array:
    """int32[B, T]: how many documents have begun in these tokens, up to each. 0: that of the tokens before them."""
    segments_BxT = tokens.segments_BxT
    last_BxT = jnp.concatenate([before_Bx1, segments_BxT[:, :-1]], axis=1)
    return jnp.cumsum((segments_BxT != last_BxT) & (segments_BxT > 0), axis=1)


def one_token(q, k, v, log_a, b, document_BxT, s_BxNxHxV):
    """The recurrence itself, for sequences of one token."""
    q, k, v, a, b = (x[:, 0] for x in (q, k, v, jnp.exp(log_a), b))
    kept = jnp.where(document_BxT == 0, a, 0.0)[..., None, None] * s_BxNxHxV
    u_BxNxV = b[..., None] * (v - jnp.einsum("BNHV,BNH->BNV", kept, k))
    s_BxNxHxV = kept + k[..., None] * u_BxNxV[:, :, None]
    return jnp.einsum("BNHV,BNH->BNV", s_BxNxHxV, q)[:, None], s_BxNxHxV


def in_chunks(q, k, v, log_a, b, document_BxT, s_BxNxHxV, *, size: int):
    """The same for many tokens, `size` at a time: within a chunk by matrix products, from chunk to chunk by the recurrence.

    With c the sum of log a within a chunk, E_ij = exp(c_i - c_j) for j <= i in one document, and else 0,

        (I + A) u = b (v - exp(c) k S),   A_ij = b_i E_ij k_i . k_j for j < i
        o = exp(c) q S + ((q k^T) * E) u,   S' = exp(c_last) S + (E_last k)^T u.

    What came before a chunk counts for those of its tokens that continue the document.
    """
    length, n = q.shape[1:3]
    size = min(size, length)
    more = -length % size

    def cut(x):
        """[B, T, N, ...] -> [B, N, X, C, ...]; what is added writes nothing and forgets nothing."""
        x = jnp.pad(x, ((0, 0), (0, more)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(len(x), -1, size, *x.shape[2:])
        return jnp.moveaxis(x, 3, 1)

    q, k, v, b = (cut(x) for x in (q, k, v, b))
    c = jnp.cumsum(cut(log_a), axis=-1)
    document = jnp.pad(document_BxT, ((0, 0), (0, more)), mode="edge")
    document = document.reshape(len(document), 1, -1, size)  # B, 1, X, C
    before = jnp.pad(document[..., -1], ((0, 0), (0, 0), (1, 0)))[..., :-1, None]
    carries = document == before
    same = document[..., :, None] == document[..., None, :]
    lower = jnp.tril(jnp.ones((size, size), bool))
    e = jnp.exp(jnp.where(lower & same, c[..., :, None] - c[..., None, :], -jnp.inf))
    a = jnp.tril(b[..., None] * e * jnp.einsum("BNXIH,BNXJH->BNXIJ", k, k), -1)
    grown = jnp.where(carries, jnp.exp(c), 0.0)[..., None]
    right = jnp.concatenate([b[..., None] * v, b[..., None] * grown * k], axis=-1)
    solved = jax.lax.linalg.triangular_solve(
        a + jnp.eye(size), right, left_side=True, lower=True, unit_diagonal=True
    )
    u, w = jnp.split(solved, [v.shape[-1]], axis=-1)
    scores = e * jnp.einsum("BNXIH,BNXJH->BNXIJ", q, k)
    per_chunk = (grown * q, scores, u, w, e[..., -1, :, None] * k, grown[..., -1:, :])

    def step(s, chunk):
        q, scores, u, w, k, kept = chunk
        u = u - jnp.einsum("BNCH,BNHV->BNCV", w, s)
        o = jnp.einsum("BNCH,BNHV->BNCV", q, s) + jnp.einsum("BNIJ,BNJV->BNIV", scores, u)
        return kept * s + jnp.einsum("BNCH,BNCV->BNHV", k, u), o

    chunks = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), per_chunk)
    s_BxNxHxV, o = jax.lax.scan(step, s_BxNxHxV, chunks)
    o = jnp.moveaxis(o, (0, 3), (1, 2))  # B, X, C, N, V
    return o.reshape(len(o), -1, n, v.shape[-1])[:, :length], s_BxNxHxV
