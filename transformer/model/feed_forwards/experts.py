"""A feed-forward that is a mixture of experts: a router sends every token to a few of many (Shazeer et al. 2017).

Shape suffixes: B batch, T length, D d_model, F d_ff (of one expert), E experts, K experts that a token goes to, C places of an expert
in a row, n pairs of a token and one of its experts.

With router probabilities p = softmax(x W_r) and the K largest of them, y = sum over these of w_e FF_e(x), where w is p, made to sum to
one if `normalize` (Mixtral) or as it is (Switch). Two ways to bring tokens to experts:

dropless (`capacity_factor` 0): pairs are sorted by expert and multiplied group by group (grouped.py). Nothing is lost. Where experts are
    spread over devices, each gathers the tokens of all and answers for its own experts: as it cannot know how many will ask for them, its
    rows have room for all.
capacity: in a row of T tokens each expert has C = ceil(capacity_factor T K / E) places; who comes too late is passed over, its stream
    goes on as it is (Lepikhin et al. 2021; Fedus et al. 2022). Places are given out in the order of tokens, so that no token depends
    on a later one. Tokens move to their experts' devices and back (all-to-all).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.sharding import PartitionSpec as P

from transformer.checks import at_least, at_most
from transformer.errors import UserError
from transformer.model.activations import ACTIVATIONS
from transformer.model.config import ModelConfig
from transformer.model.dropout import drop
from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward
from transformer.model.grouped import grouped_product
from transformer.model.initializers import matrix_init
from transformer.model.linear import Linear
from transformer.model.masks import Tokens
from transformer.model.sharding import constrain, fitting, gathered

MOST_EXPERTS = 4096
"""Tracing and compiling a model takes longer with each of them."""


@FEED_FORWARDS.register("experts")
@dataclasses.dataclass(frozen=True)
class Mixture(FeedForward):
    """A mixture of experts, each a feed-forward of `d_ff`."""

    num_experts: int = 8
    top_k: int = 2  # experts that a token goes to
    capacity_factor: float = 0.0  # places of an expert, as a multiple of its even share; 0: as many as it takes (dropless)
    normalize: bool = True  # the weights of a token's experts add up to 1 (Mixtral); False: they are its probabilities (Switch)
    load_balance: float = (
        0.01  # weight of the loss that keeps experts equally busy (Fedus et al. 2022)
    )
    router_z_loss: float = (
        0.001  # weight of the loss that keeps the router's logits small (Zoph et al. 2022)
    )

    def __post_init__(self):
        at_least("model.feed_forward", self, 1, "num_experts", "top_k")
        at_least("model.feed_forward", self, 0, "capacity_factor", "load_balance", "router_z_loss")
        at_most(
            "model.feed_forward",
            self,
            MOST_EXPERTS,
            num_experts="the largest published model has 2,048 (Switch-C)",
        )
        if self.top_k > self.num_experts:
            raise UserError(
                f"model.feed_forward.top_k: {self.top_k} of {self.num_experts} experts (num_experts)"
            )

    def build(self, config, gain, out_gain):
        return functools.partial(Experts, config, gain, out_gain)


@struct.dataclass
class Matrix:
    """An affine map of every expert: W_ExIxO, and perhaps b_ExO."""

    kernel_ExIxO: jax.Array
    bias_ExO: jax.Array | None


Product = Callable[[jax.Array, Matrix], jax.Array]
"""Rows, each of some expert, times that expert's matrix."""


class Experts(nn.Module):
    """y = sum over a token's K experts of w_e FF_e(x). What the router costs is sown into "losses"."""

    config: ModelConfig
    gain: float  # of the initial matrices
    out_gain: float  # of the initial W_out, on top

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, tokens: Tokens, deterministic: bool) -> jax.Array:
        cfg, kind = self.config, self.config.feed_forward_kind
        real_BxT = jnp.broadcast_to(tokens.segments_BxT > 0, x_BxTxD.shape[:2])
        router = Linear(
            cfg.part(dtype="float32"),
            (kind.num_experts,),
            (None, None),
            False,
            name="router",
        )
        logits_BxTxE = router(x_BxTxD)
        p_BxTxE = jax.nn.softmax(logits_BxTxE, axis=-1)
        weights_BxTxK, experts_BxTxK = jax.lax.top_k(p_BxTxE, kind.top_k)
        if kind.normalize:
            weights_BxTxK /= jnp.sum(weights_BxTxK, axis=-1, keepdims=True)
        weights_BxTxK = jnp.where(real_BxT[..., None], weights_BxTxK, 0.0)
        matrices = {
            name: Matrices(
                cfg, name == "out", self.gain * (self.out_gain if name == "out" else 1.0), name=name
            )()
            for name in ("in", "gate", "out")
            if cfg.glu or name != "gate"
        }
        rate = 0.0 if deterministic else cfg.activation_dropout
        key = self.make_rng("dropout") if rate else None

        def apply(x, matrices: dict[str, Matrix], product: Product, key):
            """FF_e of rows of which `product` knows the experts."""
            act, h = ACTIVATIONS[cfg.activation], product(x, matrices["in"])
            h = act(product(x, matrices["gate"])) * h if cfg.glu else act(h)
            return product(drop(key, rate, h) if rate else h, matrices["out"])

        bring = by_place(kind.capacity_factor) if kind.capacity_factor else dropless
        y_BxTxD, lost = bring(x_BxTxD, experts_BxTxK, weights_BxTxK, real_BxT, matrices, apply, key)
        if not self.is_initializing():
            self.sow(
                "losses",
                "costs",
                _costs(kind, logits_BxTxE, p_BxTxE, experts_BxTxK, real_BxT, lost),
            )
        return y_BxTxD


class Matrices(nn.Module):
    """W_in, W_gate or, `outwards`, W_out of every expert, each initialised as the matrix that it is; spread over devices as it is kept."""

    config: ModelConfig
    outwards: bool
    gain: float

    @nn.compact
    def __call__(self) -> Matrix:
        cfg, count = self.config, self.config.feed_forward_kind.num_experts
        sizes, names = (cfg.d_model, cfg.d_ff), ("embed", "ff")
        if self.outwards:
            sizes, names = sizes[::-1], names[::-1]
        one = matrix_init(cfg.initializer, cfg.init_std, self.gain)
        init = lambda key, shape, dtype: jax.vmap(lambda key: one(key, sizes, dtype))(
            jax.random.split(key, count)
        )
        boxed = nn.with_logical_partitioning(init, ("expert", *names))
        kernel = self.param("kernel", boxed, (count, *sizes), cfg.param_dtype).astype(cfg.dtype)
        if not cfg.use_bias:
            return Matrix(kernel, None)
        zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("expert", names[1]))
        return Matrix(
            kernel, self.param("bias", zeros, (count, sizes[1]), cfg.param_dtype).astype(cfg.dtype)
        )


def _costs(kind, logits_BxTxE, p_BxTxE, experts_BxTxK, real_BxT, lost) -> dict[str, jax.Array]:
    """loss, what is added to the objective; and of what it is made, as means over the real tokens of all devices:

    balance  E sum over e of f_e P_e, f_e being the share of choices that e got and P_e its mean probability; 1 at best
             (Fedus et al. 2022, eq. 4)
    z        (log sum exp logits)^2 (Zoph et al. 2022, eq. 5)
    lost     the share of choices for which there was no place
    """
    count = jnp.maximum(jnp.sum(real_BxT), 1)
    mean = lambda x: (
        jnp.sum(
            jnp.where(real_BxT.reshape(*real_BxT.shape, *[1] * (x.ndim - 2)), x, 0), axis=(0, 1)
        )
        / count
    )
    chosen_BxTxE = jnp.sum(jax.nn.one_hot(experts_BxTxK, kind.num_experts), axis=2) / kind.top_k
    balance = kind.num_experts * jnp.sum(mean(chosen_BxTxE) * mean(p_BxTxE))
    z = mean(jnp.square(jax.nn.logsumexp(logits_BxTxE, axis=-1)))
    loss = kind.load_balance * balance + kind.router_z_loss * z
    return {"loss": loss, "balance": balance, "z": z, "lost": lost / (count * kind.top_k)}


def by_place(factor: float):
    """`bring` for a capacity: tokens gathered into places, multiplied, and given back."""

    def bring(x_BxTxD, experts_BxTxK, weights_BxTxK, real_BxT, matrices, apply, key):
        (B, T, D), K, E = (
            x_BxTxD.shape,
            experts_BxTxK.shape[2],
            matrices["in"].kernel_ExIxO.shape[0],
        )
        names = {
            name: ("expert", "ff", "embed") if name == "out" else ("expert", "embed", "ff")
            for name in matrices
        }
        matrices = {
            name: m.replace(kernel_ExIxO=gathered(m.kernel_ExIxO, names[name]))
            for name, m in matrices.items()
        }
        C = min(T, math.ceil(factor * T * K / E))
        wants_BxTKxE = jax.nn.one_hot(
            jnp.where(real_BxT[..., None], experts_BxTxK, E), E, dtype=jnp.int32
        ).reshape(B, T * K, E)
        before_BxTKxE = jnp.cumsum(wants_BxTKxE, axis=1) - wants_BxTKxE
        place_BxTK = jnp.sum(before_BxTKxE * wants_BxTKxE, axis=2)
        kept_BxTK = (place_BxTK < C) & jnp.any(wants_BxTKxE > 0, axis=2)
        at_BxTK = jnp.where(
            kept_BxTK, experts_BxTxK.reshape(B, T * K) * C + place_BxTK, E * C
        )  # E C: nowhere
        token_TK = jnp.arange(T * K, dtype=jnp.int32) // K
        fill = lambda at_TK: jnp.full((E * C + 1,), T, jnp.int32).at[at_TK].set(token_TK)[: E * C]
        token_BxEC = jax.vmap(fill)(at_BxTK)  # T: an empty place
        x_BxECxD = _rows(jnp.pad(x_BxTxD, ((0, 0), (0, 1), (0, 0))), token_BxEC)
        to_experts = lambda x_BxExCxD: constrain(
            x_BxExCxD, ("expert_batch", "expert", "places", "activation_embed")
        )

        def product(x_BxExCxI, m: Matrix):
            y_BxExCxO = jnp.einsum("BECI,EIO->BECO", x_BxExCxI, m.kernel_ExIxO)
            return y_BxExCxO if m.bias_ExO is None else y_BxExCxO + m.bias_ExO[:, None]

        y_BxExCxD = to_experts(
            apply(to_experts(x_BxECxD.reshape(B, E, C, D)), matrices, product, key)
        )
        y_BxECxD = constrain(
            y_BxExCxD.reshape(B, E * C, D), ("batch", "places", "activation_embed")
        )
        own_BxTKxD = _rows(jnp.pad(y_BxECxD, ((0, 0), (0, 1), (0, 0))), at_BxTK)
        y_BxTxD = jnp.einsum(
            "BTK,BTKD->BTD", weights_BxTxK.astype(x_BxTxD.dtype), own_BxTKxD.reshape(B, T, K, D)
        )
        return y_BxTxD, jnp.sum(wants_BxTKxE) - jnp.sum(kept_BxTK)

    return bring


def _rows(x_BxSxD, index_BxT) -> jax.Array:
    """x[b, index[b, t]]."""
    return jax.vmap(lambda x, index: x[index])(x_BxSxD, index_BxT)


def dropless(x_BxTxD, experts_BxTxK, weights_BxTxK, real_BxT, matrices, apply, key):
    """`bring` without a bound: sorted by expert, group after group. By hand over every axis of the mesh: what is sorted is what a device
    has."""
    E, D, F = matrices["in"].kernel_ExIxO.shape
    sizes = {
        "batch": x_BxTxD.shape[0],
        "length": x_BxTxD.shape[1],
        "expert": E,
        "embed": D,
        "activation_ff": F,
    }
    batch, length, expert, kept, ff = (fitting(name, size) for name, size in sizes.items())
    given = (x_BxTxD, experts_BxTxK, weights_BxTxK, matrices, key)
    axes = tuple(dict.fromkeys((*batch, *length, *expert, *ff)))
    local = functools.partial(
        _sorted,
        axes=axes,
        expert=expert,
        kept=kept,
        ff=ff,
        apart=expert and expert[0] in batch,
        apply=apply,
    )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and (by_hand := set(mesh.axis_names) - set(mesh.manual_axes)):
        rows = P(batch or None, length or None)
        spec = {
            "in": P(expert or None, kept or None, ff or None),
            "out": P(expert or None, ff or None, kept or None),
        }
        bias = {"in": P(expert or None, ff or None), "out": P(expert or None)}
        side = lambda name: "out" if name == "out" else "in"
        places = {
            name: Matrix(spec[side(name)], None if m.bias_ExO is None else bias[side(name)])
            for name, m in matrices.items()
        }
        local = jax.shard_map(
            local,
            in_specs=(rows, rows, rows, places, P()),
            out_specs=rows,
            axis_names=by_hand,
            check_vma=False,
        )
    return local(*given), jnp.zeros(())


def _sorted(
    x_BxTxD, experts_BxTxK, weights_BxTxK, matrices, key, *, axes, expert, kept, ff, apart, apply
):
    """On one device. `axes`: all that tokens or experts are spread on; `expert`, `ff`: those of experts, and of their d_ff; `kept`: those
    over which matrices are kept in parts along d_model (ZeRO-3); `apart`: tokens are spread on `expert` too."""
    if kept:
        whole = lambda name, x: jax.lax.all_gather(
            x, kept, axis=2 if name == "out" else 1, tiled=True
        )
        matrices = {
            name: m.replace(kernel_ExIxO=whole(name, m.kernel_ExIxO))
            for name, m in matrices.items()
        }
    if key is not None and axes:
        key = jax.random.fold_in(key, jax.lax.axis_index(axes))
    if apart:
        gather = lambda x: jax.lax.all_gather(x, expert, axis=0, tiled=True)
        x_BxTxD, experts_BxTxK, weights_BxTxK = map(gather, (x_BxTxD, experts_BxTxK, weights_BxTxK))
    here, K = matrices["in"].kernel_ExIxO.shape[0], experts_BxTxK.shape[2]
    own_n = experts_BxTxK.reshape(-1) - (jax.lax.axis_index(expert) * here if expert else 0)
    own_n = jnp.where((own_n >= 0) & (own_n < here), own_n, here)  # here: someone else's
    order_n = jnp.argsort(own_n, stable=True)
    expert_n, sizes_E = own_n[order_n], jnp.bincount(own_n, length=here)

    def product(x_nxI, m: Matrix):
        y_nxO = grouped_product(x_nxI, m.kernel_ExIxO, sizes_E)
        if m.bias_ExO is None:
            return y_nxO
        bias_ExO = m.bias_ExO
        if ff and m is matrices["out"]:  # one of those who add up a token's output
            bias_ExO = jnp.where(jax.lax.axis_index(ff) == 0, bias_ExO, 0)
        return y_nxO + bias_ExO[jnp.minimum(expert_n, here - 1)]

    y_nxD = apply(x_BxTxD.reshape(-1, x_BxTxD.shape[-1])[order_n // K], matrices, product, key)
    y_nxD = jnp.where((expert_n < here)[:, None], y_nxD, 0)[jnp.argsort(order_n)]
    y_BxTxKxD = y_nxD.reshape(*experts_BxTxK.shape, -1)
    y_BxTxD = jnp.einsum("BTK,BTKD->BTD", weights_BxTxK.astype(y_BxTxKxD.dtype), y_BxTxKxD)
    y_BxTxD = jax.lax.psum(y_BxTxD, ff) if ff else y_BxTxD
    if apart:
        return jax.lax.psum_scatter(y_BxTxD, expert, scatter_dimension=0, tiled=True)
    return jax.lax.psum(y_BxTxD, expert) if expert else y_BxTxD
