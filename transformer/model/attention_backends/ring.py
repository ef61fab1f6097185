"""Ring attention: a sequence's tokens spread over devices, keys and values passed around (Liu, Zaharia & Abbeel 2023).

Shape suffixes: B batch, T query length, S key length, N query heads, K key/value heads, H head size; I blocks of queries, J blocks
of keys, t and s positions in one.

Every device holds a part of the queries and meets, turn by turn, every device's keys and values; what it knows of its rows is
kept as in blockwise.py, and so are the gradients: those of keys and values travel with them and are home after a whole round.

Under a causal mask a device with early queries would be done early. Where tokens stand in zigzag order, device d of n holds chunks
d and 2n - 1 - d of the row; then in every turn but the first each device has two of four pairs of chunks to look at, whoever's keys
they are (Brandon et al. 2023; Llama 3's context parallelism).
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from transformer.model.attention_backends import blockwise
from transformer.model.attention_backends.base import Inputs
from transformer.model.attention_backends.blockwise import Gradients, Running, cut, join
from transformer.model.sharding import axis_of


def why_not(q, k, v, given: Inputs) -> str | None:
    """What it cannot do, in a few words."""
    _, count = axis_of("length")
    if count == 1:
        return "tokens are not spread over devices (mesh.context)"
    if q.shape[1] % count or k.shape[1] % count:
        return f"{q.shape[1]} and {k.shape[1]} tokens do not divide over {count} devices"
    return blockwise.why_not(q, k, v, given)


def ring(
    q_BxTxNxH: jax.Array, k_BxSxKxH: jax.Array, v_BxSxKxH: jax.Array, given: Inputs
) -> jax.Array:
    """What `reference` computes, with T and S spread over the mesh axis of "length". Dropout draws another mask for each block."""
    axis, count = axis_of("length")
    learned, fixed, whole = given.replace(position=given.logits_position).split()
    plan = _Plan.of(axis, count, given, q_BxTxNxH.shape[1] // count, k_BxSxKxH.shape[1] // count)
    spread, same = P(None, axis), P()
    rows = P(None, None, axis)
    places = (spread, spread, spread, same, (spread, spread, same))
    manual = functools.partial(jax.shard_map, axis_names={axis}, check_vma=False)

    here_forward = manual(
        lambda q, k, v, learned, fixed: _forward(plan, q, k, v, whole(learned, fixed)),
        in_specs=places,
        out_specs=(spread, rows),
    )
    here_backward = manual(
        lambda q, k, v, learned, fixed, *kept: _backward(plan, q, k, v, whole(learned, fixed), *kept),
        in_specs=(*places, spread, rows, spread), out_specs=(spread, spread, spread, (same, same)),
    )  # fmt: skip

    def forward(*args):
        out, lse = here_forward(*args)
        return out, (*args, out, lse)

    def backward(kept, d_out):
        return *here_backward(*kept, d_out), None

    attention = jax.custom_vjp(lambda *args: forward(*args)[0])
    attention.defvjp(forward, backward)
    return attention(q_BxTxNxH, k_BxSxKxH, v_BxSxKxH, learned, fixed)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Who meets whom. Sizes in tokens are those of a block on one device; `chunk` is half a device's blocks."""

    axis: str
    count: int
    sizes: tuple[int, int]
    blocks: tuple[int, int]
    zigzag: bool

    @staticmethod
    def of(axis: str, count: int, given: Inputs, T: int, S: int) -> "_Plan":
        orders = {given.q_tokens.order, given.k_tokens.order}
        ahead = given.q_tokens.until_BxT is not None  # a prefix sees what comes after it
        zigzag = (
            orders == {"zigzag"}
            and given.mask.within
            and given.mask.causal
            and not ahead
            and T == S
        )
        sizes = tuple(_divisor(n // (1 + zigzag)) for n in (T, S))
        return _Plan(axis, count, sizes, (T // sizes[0], S // sizes[1]), zigzag)

    @property
    def chunk(self) -> int:
        return self.blocks[0] // 2

    def own(self) -> np.ndarray:
        """Pairs of blocks among a device's own tokens."""
        i, j = np.indices(self.blocks).reshape(2, -1)
        keep = i >= j if self.zigzag else i >= 0  # its early chunk comes before its late one
        return np.stack([i[keep], j[keep]], axis=1)

    def others(self, me: jax.Array, source: jax.Array) -> jax.Array:
        """Pairs of blocks between this device's queries and the keys of device `source`."""
        if not self.zigzag:
            return jnp.asarray(np.indices(self.blocks).reshape(2, -1).T)
        square = np.indices((self.chunk, self.chunk)).reshape(2, -1).T
        late_early = square + np.array([self.chunk, 0])
        same_half = square + jnp.where(
            source < me, 0, self.chunk
        )  # early to early, or late to late
        return jnp.concatenate([late_early, same_half])


def _divisor(tokens: int) -> int:
    """The size of block, of those that divide so many tokens, nearest to the usual one."""
    sizes = [size for size in range(1, tokens + 1) if tokens % size == 0]
    return min(sizes, key=lambda size: abs(math.log(size / blockwise.BLOCK)))


def _turn(plan: _Plan, tree):
    """Everything to the next device of the ring."""
    pass_on = [(d, (d + 1) % plan.count) for d in range(plan.count)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, plan.axis, pass_on), tree)


def _meetings(plan: _Plan, given: Inputs, carry, meet: Callable):
    """carry after meet(carry, pairs, inputs) with one's own keys and then, turn by turn, with everyone else's. `carry` is
    (what stays, what travels); keys' tokens travel last."""
    me = jax.lax.axis_index(plan.axis)

    def at(source, k_tokens) -> Inputs:
        key = given.dropout_key
        if key is not None:
            key = jax.random.fold_in(jax.random.fold_in(key, me), source)
        return given.replace(k_tokens=k_tokens, dropout_key=key)

    def one(carry, turn):
        stays, travels = carry
        travels = _turn(plan, travels)
        source = (me - turn) % plan.count
        return meet((stays, travels), plan.others(me, source), at(source, travels[-1])), None

    carry = meet(carry, plan.own(), at(me, carry[1][-1]))
    return jax.lax.scan(one, carry, jnp.arange(1, plan.count))[0]


def _forward(plan: _Plan, q, k, v, given: Inputs):
    """On each device: (its outputs, its rows' log-sum-exp)."""
    (q, q_tokens), kv = (
        cut((q, given.q_tokens), plan.sizes[0]),
        cut((k, v, given.k_tokens), plan.sizes[1]),
    )
    given = given.replace(q_tokens=q_tokens)

    def meet(carry, pairs, here: Inputs):
        running, (k, v, tokens) = carry
        return blockwise.accumulate(running, q, k, v, here, pairs), (k, v, tokens)

    running, _ = _meetings(plan, given, (Running.nothing(q, v.shape[-1], given.sink_N), kv), meet)
    out, lse_IxBxNxt = running.finish(v.dtype)
    return join(out), _join_rows(lse_IxBxNxt)


def _backward(plan: _Plan, q, k, v, given: Inputs, out, lse_BxNxT, d_out):
    """On each device: the gradients by its queries, keys and values; by what all share, summed over devices."""
    dtypes, learned = (q.dtype, k.dtype, v.dtype), (given.position, given.sink_N)
    (q, q_tokens, out, d_out) = cut((q, given.q_tokens, out, d_out), plan.sizes[0])
    k, v, k_tokens = cut((k, v, given.k_tokens), plan.sizes[1])
    lse = jnp.swapaxes(cut(jnp.swapaxes(lse_BxNxT, 1, 2), plan.sizes[0]), 2, 3)
    given, delta = given.replace(q_tokens=q_tokens), blockwise.row_products(d_out, out)

    def meet(carry, pairs, here: Inputs):
        (d_q, d_position), (k, v, d_k, d_v, tokens) = carry
        grads = Gradients(d_q, d_k, d_v, d_position)
        grads = blockwise.pull_back(q, k, v, here, pairs, lse, d_out, delta, grads)
        return (grads.q_Ixs, grads.position), (k, v, grads.k_Jxs, grads.v_Jxs, tokens)

    zero = Gradients.zero(q, k, v, given.position)
    travels = (k, v, zero.k_Jxs, zero.v_Jxs, k_tokens)
    (d_q, d_position), travels = _meetings(
        plan, given, ((zero.q_Ixs, zero.position), travels), meet
    )
    d_k, d_v = _turn(plan, travels[2:4])
    d_sink = None if given.sink_N is None else blockwise.sink_gradient(given.sink_N, lse, delta)
    d_shared = jax.tree.map(
        lambda d, x: jax.lax.psum(d.astype(jnp.float32), plan.axis).astype(x.dtype),
        (d_position, d_sink),
        learned,
    )
    return *(
        join(d).astype(dtype) for d, dtype in zip((d_q, d_k, d_v), dtypes, strict=True)
    ), d_shared


def _join_rows(x_IxBxNxt: jax.Array) -> jax.Array:
    """[I, B, N, t] -> [B, N, I * t]."""
    return jnp.swapaxes(join(jnp.swapaxes(x_IxBxNxt, 2, 3)), 1, 2)
