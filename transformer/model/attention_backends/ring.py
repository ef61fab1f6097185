"""Ring attention (Liu et al. 2023): shards sequences, and passes keys and values around a ring.

Each device holds a shard of the queries. In each step, it processes the keys and values of one
device, then passes them on. Running statistics and gradients are those of blockwise.py. The
gradients of keys and values travel with them, and are back on their device after a full round.

With a causal mask, a device with early queries would finish early. In zigzag order, device d of n
holds chunks d and 2n - 1 - d of the sequence. In every step but the first, each then processes two
of four pairs of chunks, whichever device the keys come from (Brandon et al. 2023; Llama 3).

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head
size, I blocks of queries, J blocks of keys, t queries per block, s keys per block."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from transformer.model.attention_backends import blockwise
from transformer.model.attention_backends.base import Inputs
from transformer.model.attention_backends.blockwise import Gradients, Running, cut, join
from transformer.model.sharding import axis_of


def why_not(q, k, v, inputs: Inputs) -> str | None:
    """Returns why the backend does not support these inputs, in a few words, or None."""
    _, count = axis_of("length")
    if count == 1:
        return "sequences are not sharded over devices (mesh.context)"
    if q.shape[1] % count or k.shape[1] % count:
        return f"lengths {q.shape[1]} and {k.shape[1]} are not divisible by {count} devices"
    return blockwise.why_not(q, k, v, inputs)


def ring(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, inputs: Inputs, inner=None) -> jax.Array:
    """Returns what `reference` returns, with T and S sharded over the mesh axis of "length".
    `inner` computes a pair of blocks (blockwise.py). In zigzag order, so is the dropout mask."""
    axis, count = axis_of("length")
    learned, fixed, merge = inputs.replace(position=inputs.logits_position).split()
    lengths = (q_BxTxNxH.shape[1] // count, k_BxSxKxH.shape[1] // count)
    plan = _Plan.of(axis, count, inputs, *lengths, inner or blockwise.Einsum())
    by_token, by_query, replicated = P(None, axis), P(None, None, axis), P()
    in_specs = (by_token, by_token, by_token, replicated, (by_token, by_token, replicated))

    def on_devices(f, more_in_specs, out_specs):
        def local(q, k, v, learned, fixed, *more):
            return f(plan, q, k, v, merge(learned, fixed), *more)

        specs = {"in_specs": (*in_specs, *more_in_specs), "out_specs": out_specs}
        return jax.shard_map(local, **specs, axis_names={axis}, check_vma=False)

    device_forward = on_devices(_forward, (), (by_token, by_query))
    of_gradients = (*[by_token] * 3, replicated)
    device_backward = on_devices(_backward, (by_token, by_query, by_token), of_gradients)

    def forward(*args):
        # Otherwise, masks of all pairs would be computed before a loop over layers (blockwise.py).
        args = jax.lax.optimization_barrier(args)
        out, lse = device_forward(*args)
        return out, (*args, out, lse)

    attention = jax.custom_vjp(lambda *args: forward(*args)[0])
    attention.defvjp(forward, lambda saved, d_out: (*device_backward(*saved, d_out), None))
    return attention(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, learned, fixed)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Which pairs of blocks each device processes."""

    axis: str  # the mesh axis of the ring
    count: int  # its devices
    sizes: tuple[int, int]  # queries per block, keys per block
    blocks: tuple[int, int]  # blocks of queries per device, blocks of keys per device
    zigzag: bool  # whether tokens are in zigzag order under a causal mask
    inner: blockwise.Einsum  # computes a pair of blocks

    @staticmethod
    def of(axis: str, count: int, inputs: Inputs, T: int, S: int, inner) -> "_Plan":
        mask, q_tokens = inputs.mask, inputs.q_tokens
        in_zigzag = q_tokens.order == inputs.k_tokens.order == "zigzag" and T == S
        has_prefix = q_tokens.until_BxT is not None  # tokens of a prefix attend to later ones
        zigzag = in_zigzag and mask.within and mask.causal and not has_prefix
        sizes = tuple(_block_size(n // (1 + zigzag), inner.block) for n in (T, S))
        return _Plan(axis, count, sizes, (T // sizes[0], S // sizes[1]), zigzag, inner)

    def own_pairs(self) -> np.ndarray:
        """Returns the pairs of blocks of a device's queries and its own keys."""
        i, j = np.indices(self.blocks).reshape(2, -1)
        keep = i >= j if self.zigzag else i >= 0  # omit keys after the queries
        return np.stack([i[keep], j[keep]], axis=1)

    def other_pairs(self, me: jax.Array, source: jax.Array) -> jax.Array:
        """Returns the pairs of blocks of device `me`'s queries and device `source`'s keys."""
        if not self.zigzag:
            return jnp.asarray(np.indices(self.blocks).reshape(2, -1).T)
        chunk = self.blocks[0] // 2  # half of a device's blocks
        square = np.indices((chunk, chunk)).reshape(2, -1).T
        late_early = square + np.array([chunk, 0])
        # early queries with early keys, or late queries with late keys
        return jnp.concatenate([late_early, square + jnp.where(source < me, 0, chunk)])


def _block_size(tokens: int, block: int) -> int:
    """Returns the largest divisor of `tokens` up to `block`, or the next if it is below half."""
    largest = max(size for size in range(1, min(block, tokens) + 1) if tokens % size == 0)
    more = (size for size in range(block, tokens) if tokens % size == 0)
    return largest if 2 * largest >= min(block, tokens) else next(more, tokens)


def _pass_on(plan: _Plan, tree):
    permutation = [(d, (d + 1) % plan.count) for d in range(plan.count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, plan.axis, permutation), tree)


def _scan_ring(plan: _Plan, inputs: Inputs, carry, process: Callable):
    """Applies `process` to a device's own keys, then to the keys of every other device in turn.
    `process(carry, pairs, inputs)` returns the next carry. A carry is (arrays that stay, arrays
    that travel); the last that travel are the keys' tokens. Returns the final carry."""
    device = jax.lax.axis_index(plan.axis)

    def inputs_from(source, k_tokens) -> Inputs:
        lengths = [size * blocks for size, blocks in zip(plan.sizes, plan.blocks, strict=True)]
        first = jnp.stack([device * lengths[0], source * lengths[1]])
        return inputs.replace(k_tokens=k_tokens, first=first)

    def step(carry, distance):
        stays, travels = carry
        travels, source = _pass_on(plan, travels), (device - distance) % plan.count
        pairs = plan.other_pairs(device, source)
        return process((stays, travels), pairs, inputs_from(source, travels[-1])), None

    carry = process(carry, plan.own_pairs(), inputs_from(device, carry[1][-1]))
    return jax.lax.scan(step, carry, jnp.arange(1, plan.count))[0]


def _forward(plan: _Plan, q, k, v, inputs: Inputs):
    """Returns a device's outputs, and the log-sum-exp of its queries."""
    q, q_tokens = cut((q, inputs.q_tokens), plan.sizes[0])
    kv = cut((k, v, inputs.k_tokens), plan.sizes[1])
    inputs = inputs.replace(q_tokens=q_tokens)

    def process(carry, pairs, inputs: Inputs):
        running, (k, v, tokens) = carry
        return blockwise.accumulate(running, q, k, v, inputs, pairs, plan.inner), (k, v, tokens)

    running = Running.nothing(q, v.shape[-1], inputs.sink_N)
    running, _ = _scan_ring(plan, inputs, (running, kv), process)
    lse_BxTxN = join(jnp.swapaxes(running.lse_IxBxNxt, 2, 3))
    return join(running.out_IxBxtxNxV).astype(v.dtype), jnp.swapaxes(lse_BxTxN, 1, 2)


def _backward(plan: _Plan, q, k, v, inputs: Inputs, out, lse_BxNxT, d_out):
    """Returns the gradients of a device's q, k, v and, over all devices, of the learned inputs."""
    dtypes, learned = (q.dtype, k.dtype, v.dtype), (inputs.position, inputs.sink_N)
    (q, q_tokens, out, d_out) = cut((q, inputs.q_tokens, out, d_out), plan.sizes[0])
    k, v, k_tokens = cut((k, v, inputs.k_tokens), plan.sizes[1])
    lse = jnp.swapaxes(cut(jnp.swapaxes(lse_BxNxT, 1, 2), plan.sizes[0]), 2, 3)
    inputs, delta = inputs.replace(q_tokens=q_tokens), blockwise.row_products(d_out, out)

    def process(carry, pairs, inputs: Inputs):
        (d_q, d_position), (k, v, d_k, d_v, tokens) = carry
        blocks = Gradients(d_q, d_k, d_v, d_position), q, k, v, inputs, pairs, plan.inner
        grads = blockwise.accumulate_gradients(*blocks, lse, delta, d_out)
        return (grads.q_Ixs, grads.position), (k, v, grads.k_Jxs, grads.v_Jxs, tokens)

    zero = Gradients.zero(q, k, v, inputs.position)
    carry = (zero.q_Ixs, zero.position), (k, v, zero.k_Jxs, zero.v_Jxs, k_tokens)
    (d_q, d_position), travels = _scan_ring(plan, inputs, carry, process)
    d_k, d_v = _pass_on(plan, travels[2:4])
    d_sink = None if inputs.sink_N is None else blockwise.sink_gradient(inputs.sink_N, lse, delta)
    total = lambda d, x: jax.lax.psum(d.astype(jnp.float32), plan.axis).astype(x.dtype)
    d_learned = jax.tree.map(total, (d_position, d_sink), learned)
    return *map(lambda d, dtype: join(d).astype(dtype), (d_q, d_k, d_v), dtypes), d_learned
