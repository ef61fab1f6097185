"""Mixtures of experts: a router sends each token to a few feed-forwards (Shazeer et al. 2017).

With router scores p = softmax(x W_r), or sigmoid(x W_r) (DeepSeek-V3), the output y is the sum of
w_e FF_e(x) over the K experts with the largest p. The weights w are p, normalized to sum to one
over these experts if `normalize` is set (Mixtral), or unchanged (Switch). With `shared`
experts, the output of a feed-forward that all tokens use is added (Dai et al. 2024, "DeepSeekMoE").

With `bias_rate` (auxiliary-loss-free balancing; Wang et al. 2024, arXiv:2408.15664), the K experts
are those with the largest p + b. The weights do not contain b, which no gradient of the loss
changes. After each step, b_e <- b_e + bias_rate sign(mean load - load of e), over the batch.

Tokens are dispatched to experts in one of two ways:

dropless (`capacity_factor` 0): Pairs of a token and one of its experts are sorted by expert and
    multiplied group by group (`grouped_product`). Where experts are spread over devices, each
    device gathers all tokens and computes its own experts. Buffers have room for all pairs.
capacity (`capacity_factor` > 0): In a sequence of T tokens, each expert has
    C = ceil(capacity_factor T K / E) capacity slots. Tokens beyond the capacity skip the expert, so
    that only the residual connection carries them (Lepikhin et al. 2021; Fedus et al. 2022). Slots
    are assigned in the order of tokens. All-to-all collectives move tokens to experts and back.

Shape suffixes: B batch, T length, D d_model, F d_ff (of one expert), E experts, K experts per
token, C capacity slots per expert and sequence, n pairs of a token and one of its experts, I inputs
and O outputs of a matrix, G groups of rows."""

import functools
import math
from collections.abc import Callable
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn, struct
from jax.sharding import PartitionSpec as P

from transformer.errors import UserError
from transformer.limits import Count, NonNegative, Size, at_most
from transformer.model.config import ModelConfig
from transformer.model.dropout import drop
from transformer.model.feed_forwards.base import FEED_FORWARDS, MLP, FeedForward
from transformer.model.mixers.base import Context
from transformer.model.modules import ACTIVATIONS, Linear, declare, gated, matrix_init
from transformer.model.sharding import constrain, fitting, gathered, platform

BIAS = "router_bias"
"""The name of the parameter that balances loads. The optimizer updates it by the sign of loads."""

_AXES = {"in": ("embed", "ff"), "gate": ("embed", "ff"), "out": ("ff", "embed")}
"""The logical names of the input and the output axis of each matrix."""

TILE = (512, 1024, 1024)  # the largest tile of a kernel: rows, contracted elements, columns
SUBLANES = 16  # the number of rows of a kernel's tile is a multiple of this
MAX_EXPERTS = 4096  # the largest `num_experts`. Each makes tracing and compiling slower


@FEED_FORWARDS.register("experts")
class Mixture(FeedForward):
    """A mixture of experts, each a feed-forward of `d_ff`."""

    num_experts: Annotated[Size, at_most(MAX_EXPERTS, "published models have up to 2,048")] = 8
    top_k: Size = 2  # experts per token
    # slots per expert, as a multiple of an even share; 0: dropless
    capacity_factor: NonNegative = 0.0
    # experts that all tokens use, as one feed-forward of shared * d_ff (DeepSeek)
    shared: Annotated[Count, at_most(MAX_EXPERTS, "published models have 1 or 2")] = 0
    score: Literal["softmax", "sigmoid"] = "softmax"  # of the router
    normalize: bool = True  # normalize a token's K weights to sum to 1 (Mixtral; False: Switch)
    load_balance: NonNegative = 0.01  # weight of the load-balancing loss (Fedus et al. 2022)
    # weight of the loss on large router logits (Zoph et al. 2022)
    router_z_loss: NonNegative = 0.001
    router_use_bias: bool = False  # the router has a bias (GPT-OSS)
    # Step of biases that balance loads without a loss (DeepSeek-V3: 0.001). 0: no biases.
    bias_rate: NonNegative = 0.0

    def __post_init__(self):
        if self.top_k > self.num_experts:
            problem = f"{self.top_k} is more than num_experts = {self.num_experts}"
            way_out = "lower top_k or raise num_experts"
            raise UserError(f"model.feed_forward.top_k: {problem}; {way_out}")

    def build(self, config, gain, out_gain):
        return functools.partial(Experts, config, gain, out_gain)


@struct.dataclass
class Matrix:
    """One affine map per expert. The bias is optional."""

    kernel_ExIxO: jax.Array
    bias_ExO: jax.Array | None


def _map_kernels(f: Callable, matrices: dict[str, Matrix]) -> dict[str, Matrix]:
    return {name: m.replace(kernel_ExIxO=f(name, m.kernel_ExIxO)) for name, m in matrices.items()}


Product = Callable[[jax.Array, Matrix], jax.Array]
"""product(x, matrix) applies to each row of x the affine map of the row's expert."""


class Experts(nn.Module):
    """The sum over a token's K experts of w_e FF_e(x). Sows router losses into "losses"."""

    config: ModelConfig
    gain: float  # scales the initial matrices
    out_gain: float  # additionally scales the initial W_out

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, context: Context, deterministic: bool) -> jax.Array:
        cfg, kind = self.config, self.config.feed_forward_kind
        real_BxT = jnp.broadcast_to(context.tokens.segments_BxT > 0, x_BxTxD.shape[:2])
        exact, names = cfg.part(dtype="float32"), (None, None)
        router = Linear(exact, (kind.num_experts,), names, kind.router_use_bias, name="router")
        logits_BxTxE = router(x_BxTxD)
        p_BxTxE = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[kind.score](logits_BxTxE)
        bias_E = jnp.zeros(kind.num_experts)
        if kind.bias_rate:
            bias_E = declare(self, BIAS, nn.initializers.zeros, (None,), bias_E.shape)
        _, experts_BxTxK = jax.lax.top_k(p_BxTxE + bias_E, kind.top_k)
        weights_BxTxK = jnp.take_along_axis(p_BxTxE, experts_BxTxK, axis=-1)
        if kind.normalize:
            weights_BxTxK /= jnp.sum(weights_BxTxK, axis=-1, keepdims=True)
        weights_BxTxK = jnp.where(real_BxT[..., None], weights_BxTxK, 0.0)
        gains = {"in": self.gain} | ({"gate": self.gain} if cfg.glu else {})
        gains["out"] = self.gain * self.out_gain
        matrices = {name: Matrices(cfg, gains[name], name=name)() for name in gains}
        rate = 0.0 if deterministic else cfg.activation_dropout
        key = self.make_rng("dropout") if rate else None

        def apply(x, matrices: dict[str, Matrix], product: Product, key):
            """Returns FF_e(x) for each row of x, whose expert `product` determines."""
            act, h = ACTIVATIONS[cfg.activation], product(x, matrices["in"])
            h = gated(act, cfg.glu_limit, product(x, matrices["gate"]), h) if cfg.glu else act(h)
            return product(drop(key, rate, h) if rate else h, matrices["out"])

        dispatch = with_capacity(kind.capacity_factor) if kind.capacity_factor else dropless
        chosen = experts_BxTxK, weights_BxTxK, real_BxT
        y_BxTxD, lost = dispatch(x_BxTxD, *chosen, matrices, apply, key)
        if not self.is_initializing():
            costs = _costs(kind, logits_BxTxE, p_BxTxE, bias_E, experts_BxTxK, real_BxT, lost)
            self.sow("losses", "costs", costs)
        if kind.shared:
            width = cfg.part(d_ff=kind.shared * cfg.ff_size)
            shared = MLP(width, self.gain, self.out_gain, name="shared")
            y_BxTxD += shared(x_BxTxD, context, deterministic)
        return y_BxTxD


class Matrices(nn.Module):
    """W_in, W_gate or W_out of all experts, as the name says. The initializer is applied to each
    expert's matrix. The result is sharded as the parameter is; dispatch functions gather it."""

    config: ModelConfig
    gain: float

    @nn.compact
    def __call__(self) -> Matrix:
        cfg, count = self.config, self.config.feed_forward_kind.num_experts
        names = _AXES[self.name]
        sizes = tuple({"embed": cfg.d_model, "ff": cfg.ff_size}[name] for name in names)
        init_expert = matrix_init(cfg.initializer, cfg.init_std, self.gain)

        def init(key, shape, dtype):
            keys = jax.random.split(key, count)
            return jax.vmap(lambda key: init_expert(key, sizes, dtype))(keys)

        def of_experts(name, init, sizes, names):
            return declare(self, name, init, ("expert", *names), (count, *sizes)).astype(cfg.dtype)

        kernel, bias = of_experts("kernel", init, sizes, names), None
        if cfg.use_bias:
            bias = of_experts("bias", nn.initializers.zeros, sizes[1:], names[1:])
        return Matrix(kernel, bias)


def _costs(kind, logits_BxTxE, p_BxTxE, bias_E, experts_BxTxK, real_BxT, lost) -> dict:
    """Returns the router's loss and its parts, as means over the real tokens of all devices:

    loss     the weighted sum of `balance` and `z`, which is added to the objective
    balance  E sum over e of f_e P_e, where f_e is the share of choices that expert e received and
             P_e the mean of its score's share; 1 if balanced (Fedus et al. 2022, eq. 4)
    z        (log sum exp logits)^2 (Zoph et al. 2022, eq. 5)
    lost     the share of choices that were dropped because no slot was free"""
    count = jnp.maximum(jnp.sum(real_BxT), 1)

    def mean(x):
        real = real_BxT.reshape(*real_BxT.shape, *[1] * (x.ndim - 2))
        return jnp.sum(jnp.where(real, x, 0), axis=(0, 1)) / count

    chosen_BxTxE = jnp.sum(jax.nn.one_hot(experts_BxTxK, kind.num_experts), axis=2) / kind.top_k
    share_BxTxE = p_BxTxE / jnp.sum(p_BxTxE, axis=-1, keepdims=True)
    load_E = mean(chosen_BxTxE)
    balance = kind.num_experts * jnp.sum(load_E * mean(share_BxTxE))
    z = mean(jnp.square(jax.nn.logsumexp(logits_BxTxE, axis=-1)))
    loss = kind.load_balance * balance + kind.router_z_loss * z
    # Adds 0, whose gradient of the biases is the excess load. The optimizer reads its sign alone
    # (training/optimizer.py); it is so small that it does not change the norm of all gradients.
    excess = 1e-12 * jnp.sum(bias_E * (load_E - jnp.mean(load_E)))
    loss += excess - jax.lax.stop_gradient(excess)
    return {"loss": loss, "balance": balance, "z": z, "lost": lost / (count * kind.top_k)}


def with_capacity(factor: float):
    """Returns the dispatch function that moves tokens to capacity slots, and outputs back."""

    def dispatch(x_BxTxD, experts_BxTxK, weights_BxTxK, real_BxT, matrices, apply, key):
        (B, T, D), K, E = x_BxTxD.shape, experts_BxTxK.shape[2], len(matrices["in"].kernel_ExIxO)
        matrices = _map_kernels(lambda name, x: gathered(x, ("expert", *_AXES[name])), matrices)
        C = min(T, math.ceil(factor * T * K / E))
        expert_BxTxK = jnp.where(real_BxT[..., None], experts_BxTxK, E)
        chosen_BxTKxE = jax.nn.one_hot(expert_BxTxK, E, dtype=jnp.int32).reshape(B, T * K, E)
        earlier_BxTKxE = jnp.cumsum(chosen_BxTKxE, axis=1) - chosen_BxTKxE
        rank_BxTK = jnp.sum(earlier_BxTKxE * chosen_BxTKxE, axis=2)
        has_slot_BxTK = (rank_BxTK < C) & jnp.any(chosen_BxTKxE > 0, axis=2)
        # Pairs without a slot have index E C; empty slots have token T.
        slot_BxTK = jnp.where(has_slot_BxTK, experts_BxTxK.reshape(B, T * K) * C + rank_BxTK, E * C)
        token_TK = jnp.arange(T * K, dtype=jnp.int32) // K
        empty = jnp.full((E * C + 1,), T, jnp.int32)
        token_BxEC = jax.vmap(lambda slot_TK: empty.at[slot_TK].set(token_TK)[: E * C])(slot_BxTK)
        x_BxECxD = _take(jnp.pad(x_BxTxD, ((0, 0), (0, 1), (0, 0))), token_BxEC)
        names = ("expert_batch", "expert", "capacity", "activation_embed")
        to_experts = lambda x_BxExCxD: constrain(x_BxExCxD, names)

        def product(x_BxExCxI, m: Matrix):
            y_BxExCxO = jnp.einsum("BECI,EIO->BECO", x_BxExCxI, m.kernel_ExIxO)
            return y_BxExCxO if m.bias_ExO is None else y_BxExCxO + m.bias_ExO[:, None]

        x_BxExCxD = to_experts(x_BxECxD.reshape(B, E, C, D))
        y_BxECxD = to_experts(apply(x_BxExCxD, matrices, product, key)).reshape(B, E * C, D)
        y_BxECxD = constrain(y_BxECxD, ("batch", "capacity", "activation_embed"))
        y_BxTKxD = _take(jnp.pad(y_BxECxD, ((0, 0), (0, 1), (0, 0))), slot_BxTK)
        y_BxTxKxD = y_BxTKxD.reshape(B, T, K, D)
        y_BxTxD = jnp.einsum("BTK,BTKD->BTD", weights_BxTxK.astype(x_BxTxD.dtype), y_BxTxKxD)
        return y_BxTxD, jnp.sum(chosen_BxTKxE) - jnp.sum(has_slot_BxTK)

    return dispatch


def _take(x_BxSxD, index_BxT) -> jax.Array:
    """Returns x[b, index[b, t]]."""
    return jax.vmap(lambda x, index: x[index])(x_BxSxD, index_BxT)


def dropless(x_BxTxD, experts_BxTxK, weights_BxTxK, real_BxT, matrices, apply, key):
    """The dispatch function without a capacity: sorts pairs by expert and computes group by group.
    All mesh axes are manual (shard_map), so that each device sorts the pairs that it holds."""
    names = ("batch", "length", "expert", "embed", "activation_ff")
    sizes = (*x_BxTxD.shape[:2], *matrices["in"].kernel_ExIxO.shape)
    batch, length, expert, embed, ff = map(fitting, names, sizes)
    axes = tuple(dict.fromkeys((*batch, *length, *expert, *ff)))
    gather_tokens = expert and expert[0] in batch
    local = functools.partial(_sorted, apply, axes, expert, embed, ff, gather_tokens)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and (manual := set(mesh.axis_names) - set(mesh.manual_axes)):
        by_token, of_axis = P(batch or None, length or None), {"embed": embed, "ff": ff}
        by_name = {}
        for name, matrix in matrices.items():
            kernel = P(expert or None, *(of_axis[axis] or None for axis in _AXES[name]))
            bias = P(expert or None) if name == "out" else P(expert or None, ff or None)
            by_name[name] = Matrix(kernel, None if matrix.bias_ExO is None else bias)
        specs = {"in_specs": (by_token, by_name, P()), "out_specs": by_token}
        local = jax.shard_map(local, axis_names=manual, check_vma=False, **specs)
    return local((x_BxTxD, experts_BxTxK, weights_BxTxK), matrices, key), jnp.zeros(())


def _sorted(apply, axes, expert, embed, ff, gather_tokens, tokens, matrices, key):
    """Computes the dropless mixture of `tokens`, (x, experts, weights), on one device.

    axes: all mesh axes over which tokens or experts are spread.
    expert, ff: the mesh axes of the experts and of their d_ff.
    embed: the mesh axes over which matrices are sharded along d_model (ZeRO-3).
    gather_tokens: whether tokens are spread over `expert` too."""
    if embed:
        axis = lambda name: 1 + _AXES[name].index("embed")
        gather_embed = lambda name, x: jax.lax.all_gather(x, embed, axis=axis(name), tiled=True)
        matrices = _map_kernels(gather_embed, matrices)
    if key is not None and axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(axes))
    if gather_tokens:
        tokens = [jax.lax.all_gather(x, expert, axis=0, tiled=True) for x in tokens]
    x_BxTxD, experts_BxTxK, weights_BxTxK = tokens
    num_local, K = len(matrices["in"].kernel_ExIxO), experts_BxTxK.shape[2]
    local_n = experts_BxTxK.reshape(-1) - (jax.lax.axis_index(expert) * num_local if expert else 0)
    # Index `num_local` stands for an expert of another device.
    local_n = jnp.where((local_n >= 0) & (local_n < num_local), local_n, num_local)
    order_n = jnp.argsort(local_n, stable=True)
    expert_n, sizes_E = local_n[order_n], jnp.bincount(local_n, length=num_local)

    def product(x_nxI, m: Matrix):
        y_nxO = grouped_product(x_nxI, m.kernel_ExIxO, sizes_E)
        if m.bias_ExO is None:
            return y_nxO
        bias_ExO = m.bias_ExO
        if ff and m is matrices["out"]:  # one device adds the bias, as outputs are summed over `ff`
            bias_ExO = jnp.where(jax.lax.axis_index(ff) == 0, bias_ExO, 0)
        return y_nxO + bias_ExO[jnp.minimum(expert_n, num_local - 1)]

    y_nxD = apply(x_BxTxD.reshape(-1, x_BxTxD.shape[-1])[order_n // K], matrices, product, key)
    y_nxD = jnp.where((expert_n < num_local)[:, None], y_nxD, 0)[jnp.argsort(order_n)]
    y_BxTxKxD = y_nxD.reshape(*experts_BxTxK.shape, -1)
    y_BxTxD = jnp.einsum("BTK,BTKD->BTD", weights_BxTxK.astype(y_BxTxKxD.dtype), y_BxTxKxD)
    y_BxTxD = jax.lax.psum(y_BxTxD, ff) if ff else y_BxTxD
    if gather_tokens:
        return jax.lax.psum_scatter(y_BxTxD, expert, scatter_dimension=0, tiled=True)
    return jax.lax.psum(y_BxTxD, expert) if expert else y_BxTxD


def grouped_product(x_nxI: jax.Array, w_GxIxO: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Computes y_n = x_n W_g, where g is the group of row n. The first sizes_0 rows belong to group
    0, the next sizes_1 to group 1, and so on. Output rows after the last group are zero.

    `jax.lax.ragged_dot` computes this. On TPUs its gradient by the matrices multiplies all rows by
    every group and masks most of the result to zero (as libtpu 0.0.42.1 compiles it). So TPUs use
    JAX's "MegaBlocks" kernels (Gale et al. 2023), which process only the rows of each group."""
    if platform() == "tpu":
        return megablox_product(x_nxI, w_GxIxO, sizes_G)
    return jax.lax.ragged_dot(x_nxI, w_GxIxO, sizes_G)


def megablox_product(x_nxI, w_GxIxO, sizes_G, interpret: bool = False) -> jax.Array:
    """Computes `grouped_product` with TPU kernels. `interpret=True` emulates them for tests."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    n = len(x_nxI)
    rows = min(TILE[0], -(-n // SUBLANES) * SUBLANES)
    padding = -n % rows
    # The remaining rows form a group without a matrix, for which the kernel returns zeros.
    sizes_G = jnp.concatenate([sizes_G, (n + padding - jnp.sum(sizes_G))[None]]).astype(jnp.int32)
    # The tile of every product, including those of the gradients.
    tile = lambda n, inner, outer: (rows, min(TILE[1], inner), min(TILE[2], outer))
    x_nxI = jnp.pad(x_nxI, ((0, padding), (0, 0)))
    return gmm(x_nxI, w_GxIxO, sizes_G, x_nxI.dtype, tile, interpret=interpret)[:n]
