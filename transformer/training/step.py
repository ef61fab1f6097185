"""The training step and the evaluation step, shared by all families and objectives.

The loss, a sum over the global batch / its weights, depends on neither mesh nor micro-batches.
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
    model: nn.Module, params, batch: dict, config: TrainTask, mesh: Mesh, dropout_key=None, **extra
) -> dict[str, Loss]:
    """Computes the objective's losses of one batch, whose fields are those of `data.batching`.

    In training (with a `dropout_key`), the result also contains the routers' auxiliary losses.
    `extra`: `dropout_rate`, `smoothing` and `z_loss` (outputs.py).
    """
    watch = ("losses",) if dropout_key is not None else ()
    task = (model, params, batch, config, mesh)
    model_outputs, batch, sown = outputs.apply(*task, dropout_key=dropout_key, watch=watch, **extra)
    sums = config.objective.losses(model_outputs, batch)
    if sown:
        sums["router"] = RouterSums.of(sown["losses"], _routed(batch))
    return sums


def attention_backends(
    config: TrainTask, model: nn.Module, params, batch: dict, mesh: Mesh
) -> dict[str, str]:
    """Returns each attention backend of a step -> why a preferred one is not used, or ""."""
    key = jax.random.key(0)
    with record() as reasons:
        sums = lambda params, batch: batch_sums(model, params, batch, config, mesh, dropout_key=key)
        jax.eval_shape(sums, params, batch)
    return reasons


def _routed(batch: dict) -> jax.Array:
    """Counts the tokens that the routers dispatch, at least 1."""
    return jnp.maximum(jnp.sum(batch["segments"] > 0).astype(jnp.float32), 1.0)


def _weights(objective: Objective, batch: dict) -> dict[str, jax.Array]:
    """Returns the divisor of each loss over the global batch."""
    weights = {name: jnp.maximum(weight, 1.0) for name, weight in objective.weights(batch).items()}
    return weights | {"router": _routed(batch)}


def make_train_step(
    config: TrainTask,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    shardings: TrainState,
) -> Callable:
    """Returns jit((state, batch) -> (state, metrics)) on these shardings. It donates the state."""
    step = training_step(config, model, optimizer, mesh)
    inputs, results = (shardings, NamedSharding(mesh, BATCH)), (shardings, None)
    return jax.jit(step, in_shardings=inputs, out_shardings=results, donate_argnums=0)


def training_step(
    config: TrainTask,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    seed: int | jax.Array | None = None,
    dropout_rate: jax.Array | None = None,
) -> Callable:
    """Returns (state, batch) -> (state, metrics). A `seed` or `dropout_rate` may be traced."""
    seed = config.seed if seed is None else seed
    train, smoothing = config.train, config.train.label_smoothing
    options = {"dropout_rate": dropout_rate, "smoothing": smoothing, "z_loss": train.z_loss}

    def gradients(params, batch, key, weights) -> tuple[dict[str, Loss], dict]:
        def loss(params):
            sums = batch_sums(model, params, batch, config, mesh, dropout_key=key, **options)
            return sum(part.loss / weights[name] for name, part in sums.items()), sums

        grads, sums = jax.grad(loss, has_aux=True)(params)
        return sums, grads

    def step(state: TrainState, batch):
        key = jax.random.fold_in(jax.random.key(seed + 1), state.step)
        weights = _weights(config.objective, batch)
        sums, grads = _summed(gradients, train.accumulate, state.params, batch, key, weights)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:  # a smaller decay at first, to forget the initial values
            decay = jnp.minimum(train.ema_decay, (1.0 + state.step) / (10.0 + state.step))
            ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
        objective = sum(part.loss / weights[name] for name, part in sums.items())
        metrics = means(sums) | {
            "objective": objective,
            "tokens": sums[main_loss_name(sums)].weight,
            "grad_norm": optax.tree.norm(grads),
        }
        return TrainState(state.step + 1, params, opt_state, ema), metrics

    return step


def _summed(gradients: Callable, count: int, params, batch: dict, key: jax.Array, weights: dict):
    """Returns `gradients` of the batch, summed over `count` sequential micro-batches."""
    if count == 1:
        return gradients(params, batch, key, weights)
    # Sequence r goes to micro-batch r mod count, so that sequences stay on their devices.
    split = lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)
    micro_batches = jax.tree.map(split, batch)

    def add(total, indexed_batch):
        micro_batch, n = indexed_batch
        part = gradients(params, micro_batch, jax.random.fold_in(key, n), weights)
        return jax.tree.map(jnp.add, total, part), None

    micro_batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), micro_batches)
    sums = jax.eval_shape(gradients, params, micro_batch, key, weights)[0]
    zeros = lambda tree: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)
    return jax.lax.scan(add, (zeros(sums), zeros(params)), (micro_batches, jnp.arange(count)))[0]


def main_loss_name(sums: dict[str, Loss]) -> str:
    """Returns the name of the main loss: "tokens", else "labels", else the first by name."""
    own = sorted(name for name in sums if name != "router")
    return next(name for name in ("tokens", "labels", *own) if name in sums)


def means(sums: dict[str, Loss]) -> dict:
    """Returns the mean of each metric.

    The main loss yields `loss` and, if it is a cross-entropy, `accuracy`. A label loss beside it
    yields `labels_loss` and `labels_accuracy`. Routers yield `router_balance` and so on.
    """
    main = main_loss_name(sums)
    return {
        ("" if name == main else f"{name}_") + metric: x
        for name, part in sums.items()
        for metric, x in part.means().items()
    }


def make_eval_step(config: TrainTask, model: nn.Module, mesh: Mesh, placed_params) -> Callable:
    """Returns jit((params, batch) -> the sums of each loss, without smoothing and z-loss)."""
    sums = lambda params, batch: batch_sums(model, params, batch, config, mesh)
    return jax.jit(sums, in_shardings=(placed_params, NamedSharding(mesh, BATCH)))
