"""TPUs' fused attention: flash attention in Pallas, with all biases that depend on distance.

No array over queries and keys is stored, so memory is linear in length. The kernels (forward.py,
backward.py) compute one pair of a block of queries and a block of keys, as long as the on-chip
memory allows: usually the whole sequence. Longer sequences, and those that are sharded over
devices, combine several pairs (blockwise.py, ring.py).

Supported are all plain masks (tiles.py), packed documents, padding, soft caps, sinks, dropout,
grouped-query attention, any head size, and lengths that are no multiple of a block. Each device
computes its own sequences and heads. On CPUs, the kernels are interpreted, for tests.

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head size
(of values: V), D distances.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer.model.attention_backends.base import Inputs
from transformer.model.attention_backends.blockwise import blockwise
from transformer.model.attention_backends.flash.backward import backward
from transformer.model.attention_backends.flash.forward import forward
from transformer.model.attention_backends.flash.settings import Settings
from transformer.model.attention_backends.flash.tiles import LANES, Limits
from transformer.model.attention_backends.ring import ring
from transformer.model.attention_backends.ring import why_not as why_no_ring
from transformer.model.dropout import seeds
from transformer.model.masks import REAL, pairs
from transformer.model.positions import Position
from transformer.model.sharding import axis_of, fitting, platform

MEMORY = {"TPU v4": 16, "TPU v5": 64, "TPU v5p": 64, "TPU7x": 64}
"""MiB of on-chip vector memory of a core, by kind of device. Others have 128."""


def why_not(q, k, v, inputs: Inputs) -> str | None:
    """Returns why the backend does not support these inputs, in a few words, or None."""
    position, q_tokens, k_tokens = inputs.logits_position, inputs.q_tokens, inputs.k_tokens
    by_distance = position is not None and position.is_distance_bias
    in_order = q_tokens.order == k_tokens.order in ("rows", "zigzag")
    sharded = axis_of("length")[1] > 1 and q.shape[1] > 1
    problems = {
        "it does not run on GPUs": platform() == "gpu",
        f"it does not support the mask {inputs.mask}": not (
            inputs.mask.plain and inputs.mask.within
        ),
        "the position scheme is not a function of distance": position and not by_distance,
        "distances differ from those in the sequence": by_distance and not in_order,
    }
    reason = next((reason for reason, holds in problems.items() if holds), None)
    return reason or (why_no_ring(q, k, v, inputs) if sharded else None)


def flash(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs: Inputs) -> jax.Array:
    """Returns what `reference` returns."""
    inputs = inputs.by_index()
    sharded = axis_of("length")[1] > 1 and q_BxTxNxH.shape[1] > 1
    block = _block(q_BxTxNxH.dtype.itemsize, q_BxTxNxH.shape[-1], v_BxSxKxV.shape[-1])
    inner = Fused(block, not sharded and max(q_BxTxNxH.shape[1], k_BxSxKxH.shape[1]) <= block)
    return (ring if sharded else blockwise)(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs, inner)


def _memory() -> int:
    """Returns the bytes of on-chip memory of the device that the program is traced for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device is not None else jax.devices()[0].device_kind
    return MEMORY.get(kind, 128) * 2**20


def _block(itemsize: int, H: int, V: int) -> int:
    """Returns the number of tokens whose backward pass fits into on-chip memory, a multiple of 128.

    Per token: queries, the gradients of outputs and of queries, each in two buffers; the sum of the
    gradients of queries; rows of the bias table and of its gradient.
    """
    lanes = lambda size: -(-size // LANES) * LANES
    per_token = 2 * itemsize * (2 * lanes(H) + lanes(V)) + 4 * lanes(H) + 2 * 2 * 4 * LANES
    return max(int(0.6 * _memory() / per_token) // LANES * LANES, LANES)


class Fused:
    """Computes a pair of blocks with the kernels (see blockwise.py).

    `whole`: there is one pair, the whole sequences.
    """

    def __init__(self, block: int, whole: bool):
        self.block, self.whole = block, whole

    def forward(self, q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs: Inputs):
        """Returns (out [B, T, N, V], log-sum-exp float32[B, N, T])."""
        call = _Call.of(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs, self.whole)
        bias_NxD = call.bias(inputs.position)
        out_BxNxTxV, lse_BxNxT = call.on_each_device(forward, 2, bias_NxD)
        T = q_BxTxNxH.shape[1]
        return _by_token(out_BxNxTxV)[:, :T], lse_BxNxT[:, :, :T]

    def backward(
        self, q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs: Inputs, lse_BxNxT, delta_BxNxT, d_out
    ):
        """Returns the gradients of q, k, v and the position scheme."""
        call = _Call.of(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs, self.whole)
        (T, N), (S, K) = q_BxTxNxH.shape[1:3], k_BxSxKxH.shape[1:3]
        bias_NxD, pull_bias = jax.vjp(call.bias, inputs.position)
        learned = bias_NxD is not None and bool(jax.tree.leaves(inputs.position))
        end = ((0, 0), (0, 0), (0, call.q.shape[2] - T))
        lse_BxNxT, delta_BxNxT = (jnp.pad(x, end) for x in (lse_BxNxT, delta_BxNxT))
        d_out_BxNxTxV = jnp.pad(_by_head(d_out), (*end, (0, 0))).astype(v_BxSxKxV.dtype)
        d_q, d_k, d_v, *d_bias = call.on_each_device(
            functools.partial(backward, learned=learned), 3, bias_NxD,
            lse_BxNxT, delta_BxNxT, d_out_BxNxTxV, learned=learned,
        )  # fmt: skip
        of_group = lambda x: jnp.sum(x.reshape(len(x), K, N // K, *x.shape[2:]), axis=2)
        d_k, d_v = (_by_token(of_group(x))[:, :S] for x in (d_k, d_v))
        d_position = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), inputs.position)
        if learned:
            d_position = pull_bias(d_bias[0])[0]
        return inputs.scale * _by_token(d_q)[:, :T], d_k, d_v, d_position


def _by_head(x_BxTxNxH: jax.Array) -> jax.Array:
    return jnp.swapaxes(x_BxTxNxH, 1, 2)


_by_token = _by_head


COST = {512: 1.0, 256: 1.15, 128: 1.5}
"""Time per pair of tokens by the number of tokens per tile, relative to the largest tile."""


def tile_size(tokens: int) -> int:
    """Returns the number of tokens per tile. Smaller tiles need less padding."""
    return min(COST, key=lambda tile: -(-tokens // tile) * tile * COST[tile])


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a kernel: the tokens of the inputs, padded to whole tiles, by head."""

    settings: Settings
    q: jax.Array  # [B, N, T, H], scaled
    k: jax.Array  # [B, K, S, H]
    v: jax.Array  # [B, K, S, V]
    limits: Limits
    seed: jax.Array  # int32[4]: the seeds of dropout, the first query and key
    inputs: Inputs
    whole: bool

    @staticmethod
    def of(q_BxTxNxH, k_BxSxKxH, v_BxSxKxV, inputs: Inputs, whole: bool) -> "_Call":
        (T, N), S, dtype = q_BxTxNxH.shape[1:3], k_BxSxKxH.shape[1], k_BxSxKxH.dtype
        t, s = tile_size(T), tile_size(S)
        padded_T, padded_S = -(-T // t) * t, -(-S // s) * s
        # Under a causal mask of one sequence, the tiles end less than a tile after their queries.
        causal = whole and inputs.mask.causal and inputs.q_tokens.until_BxT is None
        reach = min(t + s - LANES, padded_S) if causal else padded_S
        settings = Settings(
            t, s, reach, inputs.soft_cap,
            inputs.dropout if inputs.dropout_key is not None else 0.0,
            N, not whole, int(0.9 * _memory()), platform() == "cpu",
        )  # fmt: skip
        seed = jnp.zeros(4, jnp.int32)
        if inputs.dropout_key is not None:
            first = inputs.first if inputs.first is not None else seed[:2]
            seed = jnp.concatenate([seeds(inputs.dropout_key), first])
        pad = lambda x, size: jnp.pad(_by_head(x), ((0, 0), (0, 0), (0, size), (0, 0)))
        return _Call(
            settings,
            pad((q_BxTxNxH * inputs.scale).astype(dtype), padded_T - T),
            pad(k_BxSxKxH, padded_S - S),
            pad(v_BxSxKxV, padded_S - S),
            Limits.of(inputs).pad(padded_T - T, padded_S - S),
            seed,
            inputs,
            whole,
        )

    def bias(self, position: Position | None) -> jax.Array | None:
        """Returns the bias at all distances between the tokens, float32[N, D]."""
        if position is None:
            return None
        q_start, k_start = (
            tokens.positions_BxT[0, 0] for tokens in (self.inputs.q_tokens, self.inputs.k_tokens)
        )
        (_, N, T, _), reach = self.q.shape, self.settings.reach
        distances = q_start - k_start + jnp.arange(1 - reach, T, dtype=jnp.int32)
        return jnp.broadcast_to(position.distance_bias(distances), (N, len(distances)))

    def on_each_device(self, kernel, results: int, bias_NxD, *more, learned: bool = False):
        """Calls kernel(settings, q, k, v, limits, bias, seed, *more) on every device.

        Each device has its own sequences and heads. `more` and the `results` results are
        [B, N, ...]. If `learned`, the gradient of the bias follows, [N, D].
        """
        batch, heads, k, v = *self.q.shape[:2], self.k, self.v
        batch_axes, head_axes = fitting("batch", batch), fitting("activation_heads", heads)
        if head_axes != fitting("activation_heads", k.shape[1]):  # fewer key heads than devices
            k, v = (jnp.repeat(x, heads // x.shape[1], axis=1) for x in (k, v))

        def local(q, k, v, limits, bias_NxD, seed, *more):
            index = lambda axes: jax.lax.axis_index(axes) if axes else 0
            seed = jnp.stack([*seed, index(batch_axes) * len(q), index(head_axes) * q.shape[1]])
            out = kernel(self.settings, q, k, v, limits, bias_NxD, seed, *more)
            if learned and batch_axes:
                out = (*out[:-1], jax.lax.psum(out[-1], batch_axes))
            return out

        mesh = jax.sharding.get_abstract_mesh()
        if not mesh.empty and (axes := set(mesh.axis_names) - set(mesh.manual_axes)):
            by_head, by_sequence = P(batch_axes or None, head_axes or None), P(batch_axes or None)
            of_limits = jax.tree.map(lambda x: by_sequence if len(x) > 1 else P(), self.limits)
            of_bias = None if bias_NxD is None else P(head_axes or None)
            local = jax.shard_map(
                local,
                in_specs=(
                    by_head,
                    by_head,
                    by_head,
                    of_limits,
                    of_bias,
                    P(),
                    *[by_head] * len(more),
                ),
                out_specs=(*[by_head] * results, *[of_bias] * learned),
                axis_names=axes,
                check_vma=False,
            )
        # The share of pairs that a causal mask allows differs between the pairs of blocks.
        mask = self.inputs.mask if self.whole else REAL
        with pairs(mask, self.inputs.q_tokens, self.q.shape[2], k.shape[2]):
            return local(self.q, k, v, self.limits, bias_NxD, self.seed, *more)
