"""Residual streams with learned reads and writes: hyper-connections, mHC, attention residuals.
Shape suffixes: B batch, T length, D d_model, n and m streams, S slots of a buffer of sums."""

import dataclasses
import math
from typing import Annotated

import jax
import jax.numpy as jnp
from jax.nn import initializers

from transformer.limits import Size, at_least
from transformer.model.placements.base import PLACEMENTS, Placement

ZEROS, ONES = initializers.zeros, initializers.ones


@dataclasses.dataclass(frozen=True)
class _Copies(Placement):
    """The base of placements with `streams` copies of the embeddings, whose sum ends the stack."""

    in_norm: bool = True
    final_norm: bool = True
    streams: Annotated[int, at_least(2)] = 4  # n
    fixed = ("out_norm", "residual_scale")

    def begin(self, x_BxTxD, sublayers):
        shape = (*x_BxTxD.shape[:2], self.streams, x_BxTxD.shape[-1])
        return jnp.broadcast_to(x_BxTxD[:, :, None], shape)

    def end(self, parts, streams, done):
        return super().end(parts, jnp.sum(streams, axis=2), done)


def _mixed(streams_BxTxnxD, read_BxTxn, keep_BxTxmxn, write_BxTxn, branch):
    """Returns keep X + write (branch(read . X)), in the type of the streams."""
    x = streams_BxTxnxD.astype(jnp.float32)
    h_BxTxD = jnp.einsum("BTn,BTnD->BTD", read_BxTxn, x).astype(streams_BxTxnxD.dtype)
    o_BxTxD = sum(branch(h_BxTxD)).astype(jnp.float32)
    kept = jnp.einsum("BTmn,BTnD->BTmD", keep_BxTxmxn, x)
    return (kept + write_BxTxn[..., None] * o_BxTxD[:, :, None]).astype(streams_BxTxnxD.dtype)


@PLACEMENTS.register("hyper_connections")
class HyperConnections(_Copies):
    """Dynamic hyper-connections (Zhu et al. 2024, arXiv:2409.19606).

    There are n streams X. With norm(X) over D:

        read  = s tanh(norm(X) W_m) + A_m,   h = read . X
        keep  = s tanh(norm(X) W_r) + A_r,   write = s' tanh(norm(X) W_b) + B
        X <- keep^T X + write f(N(h))

    At initialization, s = s' = 0.01, the matrices W are 0, A_r = I, B = 1, and A_m selects stream
    (k mod n) in sublayer k: the stack computes the same as with pre-norm. The streams begin as
    copies of the embeddings and end as their sum. The paper also scales the initial output
    matrices by a power of n that it does not state; set `branch_gain`."""

    def connect(self, parts, site, streams, branch):
        n, d_model = streams.shape[2:]
        # Static weights are vectors for the optimizer: they have no weight decay.
        static = lambda name, init, *shape: parts.declare(name, init, (None,) * len(shape), shape)
        dynamic = lambda name, m: parts.declare(name, ZEROS, ("embed", "streams"), (d_model, m))
        reads = lambda key, shape, dtype: jax.nn.one_hot(site.index % n, n, dtype=dtype)
        keeps = lambda key, shape, dtype: jnp.eye(n, dtype=dtype).reshape(shape)
        small = initializers.constant(0.01)
        x = parts.norm("stream_norm")(streams).astype(jnp.float32)
        of_x = lambda name, m: jnp.tanh(x @ dynamic(name, m).astype(jnp.float32))
        s, s_write = static("mix_scale", small), static("write_scale", small)
        read = s * of_x("read_kernel", 1)[..., 0] + static("read", reads, n)
        keep = s * of_x("keep_kernel", n) + static("keep", keeps, n * n).reshape(n, n)
        write = s_write * of_x("write_kernel", 1)[..., 0] + static("write", ONES, n)
        return _mixed(streams, read, keep.mT, write, branch)


@PLACEMENTS.register("mhc")
class ManifoldHyperConnections(_Copies):
    """Manifold-constrained hyper-connections (DeepSeek-AI 2025, arXiv:2512.24880).

    There are n streams X, and x is all of a token's streams as one vector:

        [read | write | keep] = a (x phi) / rms(x) + b        a: one scalar for each part
        X <- Sinkhorn(exp(keep)) X + 2 sigmoid(write) f(N(sigmoid(read) . X))

    20 Sinkhorn iterations normalize rows, then columns: keep is close to doubly stochastic, so that
    the streams, which end as their sum, neither grow nor vanish with depth. The paper does not
    state the initial values; as in MaxText, phi ~ N(0, 1 / (n D)), b = 0 and a = 0.01."""

    iterations: Size = 20  # of Sinkhorn's algorithm

    def connect(self, parts, site, streams, branch):
        n, d_model = streams.shape[2:]
        x = streams.astype(jnp.float32).reshape(*streams.shape[:2], n * d_model)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
        outputs = n * n + 2 * n
        std = initializers.normal((n * d_model) ** -0.5)
        phi = parts.declare("phi", std, ("embed", "streams"), (n * d_model, outputs))
        a = parts.declare("scale", initializers.constant(0.01), (None,), (3,))
        b = parts.declare("bias", ZEROS, (None,), (outputs,))
        sizes = jnp.array([n, n, n * n])
        scales = jnp.repeat(a.astype(jnp.float32), sizes, total_repeat_length=outputs)
        raw = scales * (x @ phi.astype(jnp.float32)) + b.astype(jnp.float32)
        read, write, keep = jnp.split(raw, [n, 2 * n], axis=-1)
        keep = sinkhorn(keep.reshape(*keep.shape[:2], n, n), self.iterations)
        return _mixed(streams, jax.nn.sigmoid(read), keep, 2 * jax.nn.sigmoid(write), branch)


def sinkhorn(x_BxTxmxn: jax.Array, iterations: int) -> jax.Array:
    """Returns exp(x) with rows and columns normalized in turn, columns last."""
    for _ in range(iterations):  # of logarithms, because a row of exp(x) can be all 0 in float32
        x_BxTxmxn = jax.nn.log_softmax(x_BxTxmxn, axis=-1)
        x_BxTxmxn = jax.nn.log_softmax(x_BxTxmxn, axis=-2)
    return jnp.exp(x_BxTxmxn)


@PLACEMENTS.register("attention_residuals")
class AttentionResiduals(Placement):
    """Attention residuals (Kimi Team 2026, arXiv:2603.15031): attention over earlier sublayers.

        h_k = sum_i softmax_i(w_k . N_k(v_i)) v_i,   v_k = f(N(h_k))

    The sources v_i of sublayer k are the embeddings and the outputs of all earlier sublayers. A
    last query w and norm N aggregate all of them before the final norm. All w start at 0: the mean.

    With `block` > 1, the sources are the embeddings, the sums of the outputs in each block of
    `block` sublayers, and the sum in the current block so far. Every layer of training keeps all
    sources, so memory grows as layers^2 / `block`. Decoding keeps those of new tokens alone."""

    in_norm: bool = True
    final_norm: bool = True
    block: Size = 1  # sublayers of a block
    fixed = ("out_norm", "residual_scale")

    def begin(self, x_BxTxD, sublayers):
        blocks = math.ceil(sublayers / self.block)
        return jnp.pad(x_BxTxD[:, :, None], ((0, 0), (0, 0), (0, blocks), (0, 0)))

    def connect(self, parts, site, streams, branch):
        h_BxTxD = self._aggregate(parts, streams, site.index, "source")
        slot = site.index // self.block + 1
        here_S = (jnp.arange(streams.shape[2]) == slot).astype(streams.dtype)
        return streams + here_S[:, None] * sum(branch(h_BxTxD))[:, :, None]

    def end(self, parts, streams, done):
        return super().end(parts, self._aggregate(parts, streams, done, "last"), done)

    def _aggregate(self, parts, streams_BxTxSxD, done, name: str) -> jax.Array:
        """Returns the weighted sum of the sources after `done` sublayers, [B, T, D]."""
        query_D = parts.declare(f"{name}_query", ZEROS, ("norm",), streams_BxTxSxD.shape[-1:])
        keys = parts.norm(f"{name}_norm")(streams_BxTxSxD).astype(jnp.float32)
        logits_BxTxS = keys @ query_D.astype(jnp.float32)
        exists_S = jnp.arange(streams_BxTxSxD.shape[2]) <= -(-done // self.block)
        weights = jax.nn.softmax(jnp.where(exists_S, logits_BxTxS, -jnp.inf), axis=-1)
        sources = streams_BxTxSxD.astype(jnp.float32)
        return jnp.einsum("BTS,BTSD->BTD", weights, sources).astype(streams_BxTxSxD.dtype)
