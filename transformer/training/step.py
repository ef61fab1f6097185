"""One training step and one evaluation step, the same for every family and objective.

The loss is the sum over tokens divided by the sum of weights over the global batch, whatever the number of micro-batches
or devices.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding

from transformer.data.objectives.base import Loss, Objective
from transformer.model.attention_backends import record
from transformer.parallel.sharding import BATCH
from transformer.training import outputs
from transformer.training.config import TrainTask
from transformer.training.loss import RouterSums
from transformer.training.state import TrainState


def batch_sums(
    model: nn.Module,
    params,
    batch: dict,
    config: TrainTask,
    mesh: Mesh,
    *,
    dropout_key=None,
    dropout_rate=None,
    smoothing=0.0,
    z_loss=0.0,
) -> dict[str, Loss]:
    """The losses of one batch (fields as in `data.batching`), as the objective defines them; and,
    in training, what the routers of experts add."""
    watch = ("losses",) if dropout_key is not None else ()
    found, batch, sown = outputs.apply(
        model, params, batch, config, mesh, dropout_key=dropout_key, dropout_rate=dropout_rate, smoothing=smoothing, z_loss=z_loss,
        watch=watch,
    )  # fmt: skip
    sums = config.objective.losses(found, batch)
    if sown:
        sums["router"] = RouterSums.of(sown["losses"], _routed(batch))
    return sums


def attention_backends(
    config: TrainTask, model: nn.Module, params, batch: dict, mesh: Mesh
) -> dict[str, str]:
    """Which inner attention a training step on such a batch runs on, and why not on another one that was wanted (or "")."""
    key = jax.random.key(0)
    with record() as found:
        jax.eval_shape(
            lambda params, batch: batch_sums(model, params, batch, config, mesh, dropout_key=key),
            params,
            batch,
        )
    return found


def _routed(batch: dict) -> jax.Array:
    """How many tokens the routers of experts send somewhere."""
    return jnp.maximum(jnp.sum(batch["segments"] > 0).astype(jnp.float32), 1.0)


def _weights(objective: Objective, batch: dict) -> dict[str, jax.Array]:
    """What each loss of the global batch is divided by."""
    own = {name: jnp.maximum(weight, 1.0) for name, weight in objective.weights(batch).items()}
    return own | {"router": _routed(batch)}


def make_train_step(
    config: TrainTask,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    placed: TrainState,
) -> Callable:
    """jit(state, batch) -> (state, metrics); the old state is given up (donated)."""
    rows, step = NamedSharding(mesh, BATCH), training_step(config, model, optimizer, mesh)
    return jax.jit(
        step, in_shardings=(placed, rows), out_shardings=(placed, None), donate_argnums=0
    )


def training_step(
    config: TrainTask,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    seed: int | jax.Array | None = None,
    dropout_rate: jax.Array | None = None,
) -> Callable:
    """(state, batch) -> (state, metrics). `seed` and `dropout_rate`: in place of the config's; they may be traced."""
    seed = config.seed if seed is None else seed
    train = config.train

    def gradients(params, batch, key, weights) -> tuple[dict[str, Loss], dict]:
        def loss(params):
            sums = batch_sums(
                model, params, batch, config, mesh, dropout_key=key, dropout_rate=dropout_rate, smoothing=train.label_smoothing,
                z_loss=train.z_loss,
            )  # fmt: skip
            return sum(one.loss / weights[name] for name, one in sums.items()), sums

        grads, sums = jax.grad(loss, has_aux=True)(params)
        return sums, grads

    def step(state: TrainState, batch):
        key, weights = (
            jax.random.fold_in(jax.random.key(seed + 1), state.step),
            _weights(config.objective, batch),
        )
        sums, grads = _summed(gradients, train.accumulate, state.params, batch, key, weights)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:  # a short memory at first, so that the initial values are forgotten
            decay = jnp.minimum(train.ema_decay, (1.0 + state.step) / (10.0 + state.step))
            ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
        objective = sum(one.loss / weights[name] for name, one in sums.items())
        metrics = means(sums) | {
            "objective": objective,
            "tokens": sums[main_thing(sums)].weight,
            "grad_norm": optax.tree.norm(grads),
        }
        return TrainState(state.step + 1, params, opt_state, ema), metrics

    return step


def _summed(gradients: Callable, count: int, params, batch: dict, key: jax.Array, weights: dict):
    """`gradients` of the batch, or the sum of those of `count` micro-batches, one after another."""
    if count == 1:
        return gradients(params, batch, key, weights)
    # Row r goes to micro-batch r mod count, so that every device keeps its own rows.
    cut = lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)
    micro = jax.tree.map(cut, batch)

    def add(total, one):
        rows, n = one
        own = gradients(params, rows, jax.random.fold_in(key, n), weights)
        return jax.tree.map(jnp.add, total, own), None

    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), micro)
    sums = jax.eval_shape(gradients, params, rows, key, weights)[0]
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    return jax.lax.scan(add, (zeros(sums), zeros(params)), (micro, jnp.arange(count)))[0]


def main_thing(sums: dict[str, Loss]) -> str:
    """What a run is first of all judged by: tokens, where it is asked for any."""
    return "tokens" if "tokens" in sums else "labels"


def means(sums: dict[str, Loss]) -> dict:
    """loss and accuracy of the main thing asked for; `labels_loss` and `labels_accuracy` where labels are asked for beside it; what
    routers of experts report, as `router_balance` and so on."""
    main = main_thing(sums)
    return {
        ("" if name == main else f"{name}_") + k: x
        for name, one in sums.items()
        for k, x in one.means().items()
    }


def make_eval_step(config: TrainTask, model: nn.Module, mesh: Mesh, placed_params) -> Callable:
    """jit(params, batch) -> Sums of each thing asked for, without smoothing or z-loss."""
    rows = NamedSharding(mesh, BATCH)
    return jax.jit(
        lambda params, batch: batch_sums(model, params, batch, config, mesh),
        in_shardings=(placed_params, rows),
    )
