"""Pipeline parallelism over layers (Huang et al. 2019, "GPipe").

Layers are sharded along "stage", and micro-batches are passed from stage to stage.

Shape suffixes: M micro-batches, b sequences of a micro-batch, T length, D d_model; S stages,
R rounds, L layers (or periods of layers).

With R rounds the schedule is circular (Narayanan et al. 2021, "interleaved"): in round r, stage s
applies the layers from (r S + s) L / (R S) on, and the output of the last stage enters the first
stage again. Parameters are stacked as [R, L / R] (or [L] with one round), so that those of a stage
are a slice. Each stage is idle for a fraction (S - 1) / (M R + S - 1) of the steps."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer.model.sharding import axis_of, constrain

Layers = Callable[..., tuple[jax.Array, object]]
"""layers(params, x_bxTxD, shared, same, key) -> (x_bxTxD, sown values, stacked). Applies the layers
of one stage in one round. x_bxTxD is an array or a tree of residual streams."""


def why_not(batch: int, micro: int, rounds: int) -> str | None:
    """Returns why a batch cannot be pipelined in `micro` micro-batches; None if it can."""
    _, stages = axis_of("layers")
    if batch % micro:
        return f"{batch} sequences do not divide into {micro} micro-batches"
    return f"{micro} micro-batches for {stages} stages" if rounds > 1 and micro < stages else None


def where(condition: jax.Array, a, b):
    """Returns `a` where the condition holds, else `b`, for trees of arrays."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), a, b)


def of(tree, i: jax.Array | int):
    """Returns element i along axis 0 of every array."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def pipelined(layers: Layers, params, x_BxTxD, shared, same, key, micro: int, rounds: int):
    """Applies all layers. Returns the residual streams and the sown values. The sown values are
    stacked like the layers and averaged over micro-batches. `params` are stacked; `shared` holds
    arrays [B, ...]; `same` is the same for all sequences."""
    axis, stages = axis_of("layers")
    # Sequence i goes to micro-batch i mod M, so that sequences stay on their devices.
    cut = lambda x: jnp.moveaxis(x.reshape(-1, micro, *x.shape[1:]), 1, 0)
    params = params if rounds > 1 else jax.tree.map(lambda x: x[None], params)
    ring = [(i, (i + 1) % stages) for i in range(stages)]

    def stage(params, waiting_MxbxTxD, shared, same, key):
        """Runs stage s. Step t processes unit t - s; unit r M + m is micro-batch m of round r."""
        s = jax.lax.axis_index(axis)

        def step(carry, t):
            waiting, received_bxTxD, sown = carry
            unit = t - s
            busy, r, m = (unit >= 0) & (unit < micro * rounds), unit // micro % rounds, unit % micro
            sub_key = None if key is None else jax.random.fold_in(key, (r * stages + s) * micro + m)
            x_bxTxD = where(s == 0, of(waiting, m), received_bxTxD)
            y_bxTxD, new = layers(of(params, r), x_bxTxD, of(shared, m), same, sub_key)
            sown = jax.tree.map(lambda total, x: total.at[r].add(jnp.where(busy, x, 0)), sown, new)
            received_bxTxD = jax.lax.ppermute(y_bxTxD, axis, ring)
            returned = t - (stages - 1)  # the unit that the first stage receives from the last
            slot, keep = returned % micro, (s == 0) & (returned >= 0)
            kept_bxTxD = where(keep, received_bxTxD, of(waiting, slot))
            waiting = jax.tree.map(lambda x, kept: x.at[slot].set(kept), waiting, kept_bxTxD)
            return (waiting, received_bxTxD, sown), None

        first = of(waiting_MxbxTxD, 0)
        _, new = jax.eval_shape(layers, of(params, 0), first, of(shared, 0), same, key)
        sown = jax.tree.map(lambda x: jnp.zeros((rounds, *x.shape), x.dtype), new)
        start = (waiting_MxbxTxD, jax.tree.map(jnp.zeros_like, first), sown)
        times = jnp.arange(micro * rounds + stages - 1)
        (done_MxbxTxD, _, sown), _ = jax.lax.scan(step, start, times)
        done_MxbxTxD = jax.tree.map(lambda x: jnp.where(s == 0, x, 0), done_MxbxTxD)
        return jax.lax.psum(done_MxbxTxD, axis), sown

    by_stage = P(None, axis)
    specs = {"in_specs": (by_stage, P(), P(), P(), P()), "out_specs": (P(), by_stage)}
    run = jax.shard_map(stage, axis_names={axis}, check_vma=False, **specs)
    y_MxbxTxD, sown = run(params, *jax.tree.map(cut, (x_BxTxD, shared)), same, key)
    names = lambda x: ("batch", "length", *[None] * (x.ndim - 3), "activation_embed")
    y_BxTxD = jax.tree.map(lambda y, x: jnp.moveaxis(y, 0, 1).reshape(x.shape), y_MxbxTxD, x_BxTxD)
    y_BxTxD = jax.tree.map(lambda y: constrain(y, names(y)), y_BxTxD)
    return y_BxTxD, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) / micro, sown)
