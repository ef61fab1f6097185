"""A pipeline: layers spread over devices along "stage", micro-batches passed from one to the next (Huang et al. 2019, "GPipe").

Shape suffixes: M micro-batches, b rows of one, T length, D d_model; S stages, R rounds, L layers (or periods of layers).

With R rounds the schedule is circular (Narayanan et al. 2021, "interleaved"): stage s holds in round r the layers from (r S + s) L / (R S)
on, and what leaves the last stage enters the first again. Parameters are stacked [R, L / R] (or [L], in one round), so that a stage's
are a slice. The share of turns in which a stage is idle is (S - 1) / (M R + S - 1).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from transformer.model.sharding import axis_of, constrain

Layers = Callable[..., tuple[jax.Array, object]]
"""layers(params, x_bxTxD, shared, same, key) -> (x_bxTxD, what they sowed, stacked): those of one stage in one round."""


def why_not(batch: int, micro: int, rounds: int) -> str | None:
    """Why so many rows cannot go through in `micro` parts; None if they can."""
    _, stages = axis_of("layers")
    if batch % micro:
        return f"{batch} rows do not divide into {micro} micro-batches"
    return f"{micro} micro-batches for {stages} stages" if rounds > 1 and micro < stages else None


def of(tree, i: jax.Array | int):
    """The i-th of what is stacked."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), tree)


def pipelined(
    layers: Layers, params, x_BxTxD, shared, same, key: jax.Array | None, micro: int, rounds: int
):
    """(the stream after all layers, what they sowed: stacked as they are, averaged over micro-batches). `params` are stacked;
    `shared` are arrays [B, ...]; `same` what is the same for all rows."""
    axis, stages = axis_of("layers")
    # Row r goes to micro-batch r mod M, so that devices keep their own rows.
    cut = lambda x: jnp.moveaxis(x.reshape(-1, micro, *x.shape[1:]), 1, 0)
    params = params if rounds > 1 else jax.tree.map(lambda x: x[None], params)
    ring = [(i, (i + 1) % stages) for i in range(stages)]

    def stage(params, waiting_MxbxTxD, shared, same, key):
        """One stage's part, turn by turn. In turn t it has unit t - s in hand: micro-batch m of round r is unit r M + m."""
        s = jax.lax.axis_index(axis)

        def turn(carry, t):
            waiting, handed_bxTxD, sown = carry
            unit = t - s
            works, r, m = (
                (unit >= 0) & (unit < micro * rounds),
                unit // micro % rounds,
                unit % micro,
            )
            own_key = None if key is None else jax.random.fold_in(key, (r * stages + s) * micro + m)
            x_bxTxD = jnp.where(s == 0, of(waiting, m), handed_bxTxD)
            y_bxTxD, found = layers(of(params, r), x_bxTxD, of(shared, m), same, own_key)
            add = lambda total, x: total.at[r].add(jnp.where(works, x, 0))
            sown = jax.tree.map(add, sown, found)
            handed_bxTxD = jax.lax.ppermute(y_bxTxD, axis, ring)
            back = t - (stages - 1)  # the unit that the first stage gets from the last
            keep = (s == 0) & (back >= 0)
            waiting = waiting.at[back % micro].set(
                jnp.where(keep, handed_bxTxD, of(waiting, back % micro))
            )
            return (waiting, handed_bxTxD, sown), None

        _, found = jax.eval_shape(
            layers, of(params, 0), waiting_MxbxTxD[0], of(shared, 0), same, key
        )
        sown = jax.tree.map(lambda x: jnp.zeros((rounds, *x.shape), x.dtype), found)
        start = (waiting_MxbxTxD, jnp.zeros_like(waiting_MxbxTxD[0]), sown)
        (done_MxbxTxD, _, sown), _ = jax.lax.scan(
            turn, start, jnp.arange(micro * rounds + stages - 1)
        )
        return jax.lax.psum(jnp.where(s == 0, done_MxbxTxD, 0), axis), sown

    by_stage = P(None, axis)
    run = jax.shard_map(
        stage,
        in_specs=(by_stage, P(), P(), P(), P()),
        out_specs=(P(), by_stage),
        axis_names={axis},
        check_vma=False,
    )
    y_MxbxTxD, sown = run(params, cut(x_BxTxD), jax.tree.map(cut, shared), same, key)
    y_BxTxD = constrain(
        jnp.moveaxis(y_MxbxTxD, 0, 1).reshape(x_BxTxD.shape),
        ("batch", "length", "activation_embed"),
    )
    return y_BxTxD, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]) / micro, sown)
