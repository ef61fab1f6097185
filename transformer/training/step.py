"""One training step and one evaluation step, the same for every family and objective.

The loss is the sum over tokens divided by the sum of weights over the global batch, whatever the number of micro-batches
or devices.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding

from transformer.config import Experiment
from transformer.model.attention_backends import record
from transformer.parallel.context import arrange, order_of
from transformer.parallel.sharding import BATCH
from transformer.training.loss import RouterSums, Sums, auto_chunks, cross_entropy, label_sums
from transformer.training.state import TrainState


def asked(batch: dict) -> tuple[str, ...]:
    """What a batch asks for: tokens, labels, or both."""
    return tuple(name for name in ("targets", "labels") if name in batch)


def outputs(
    model: nn.Module, params, batch: dict, order: str, dropout_key=None, watch: Sequence[str] = ()
):
    """(what the model makes of a batch whose tokens stand in that order: (features, head), labels' logits, or both; the collections of
    `watch`, where it sowed something)."""
    given = {"positions": batch["positions"], "segment_ids": batch["segments"], "order": order}
    given["deterministic"] = dropout_key is None
    tokens = (batch["inputs"],)
    if "source" in batch:
        tokens = (batch["source"], batch["inputs"])
        given |= {
            "source_positions": batch["source_positions"],
            "source_segment_ids": batch["source_segments"],
        }
        given["source_order"] = "rows"
    if "prefix" in batch:
        given["prefix_mask"] = batch["prefix"]
    if "token_types" in batch:
        given["token_types"] = batch["token_types"]
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    method = {("targets",): "features", ("labels",): "classify", ("targets", "labels"): "both"}[
        asked(batch)
    ]
    return model.apply(
        {"params": params}, *tokens, **given, rngs=rngs, method=method, mutable=list(watch)
    )


def batch_sums(
    model: nn.Module,
    params,
    batch: dict,
    config: Experiment,
    mesh: Mesh,
    *,
    dropout_key=None,
    smoothing=0.0,
    z_loss=0.0,
) -> dict[str, Sums | RouterSums]:
    """The loss's sums over one batch (fields as in `data.batching`) for each thing it asks for: tokens, labels, or both; and
    for the routers of experts, while training."""
    asks, order = asked(batch), order_of(config.model, mesh)
    batch = arrange(batch, order, mesh)
    found, sown = outputs(
        model, params, batch, order, dropout_key, ("losses",) if dropout_key is not None else ()
    )
    features, logits = found if len(asks) == 2 else (found, found)
    sums = {}
    if "targets" in asks:
        chunks = auto_chunks(*batch["targets"].shape, config.model.vocab_size, mesh)
        sums["tokens"] = cross_entropy(
            *features, batch["targets"], batch["weights"], smoothing, z_loss, chunks
        )
    if "labels" in asks:
        sums["labels"] = label_sums(logits, batch["labels"], batch["label_weights"], smoothing)
    if sown:
        sums["router"] = RouterSums.of(sown["losses"], _weights(batch)["router"])
    return sums


def attention_backends(
    config: Experiment, model: nn.Module, params, batch: dict, mesh: Mesh
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


def _weights(batch: dict) -> dict[str, jax.Array]:
    """How much is asked for, of each thing."""
    names = {"tokens": "weights", "labels": "label_weights"}
    total = {name: jnp.sum(batch[field]) for name, field in names.items() if field in batch}
    total["router"] = jnp.sum(batch["segments"] > 0).astype(jnp.float32)
    return {name: jnp.maximum(weight, 1.0) for name, weight in total.items()}


def make_train_step(
    config: Experiment,
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
    config: Experiment, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh
) -> Callable:
    """(state, batch) -> (state, metrics)."""
    train, count = config.train, config.train.accumulate

    def gradients(params, batch, key, weights) -> tuple[dict[str, Sums], dict]:
        def loss(params):
            sums = batch_sums(
                model, params, batch, config, mesh, dropout_key=key, smoothing=train.label_smoothing, z_loss=train.z_loss
            )  # fmt: skip
            return sum(one.loss / weights[name] for name, one in sums.items()), sums

        grads, sums = jax.grad(loss, has_aux=True)(params)
        return sums, grads

    def step(state: TrainState, batch):
        key, weights = (
            jax.random.fold_in(jax.random.key(config.seed + 1), state.step),
            _weights(batch),
        )
        if count == 1:
            sums, grads = gradients(state.params, batch, key, weights)
        else:
            # Row r goes to micro-batch r mod count, so that every device keeps its own rows.
            micro = jax.tree.map(
                lambda x: jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0), batch
            )
            add = lambda total, one: (
                jax.tree.map(
                    jnp.add,
                    total,
                    gradients(state.params, one[0], jax.random.fold_in(key, one[1]), weights),
                ),
                None,
            )
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), micro)
            sums = jax.eval_shape(gradients, state.params, one, key, weights)[0]
            zero = (
                jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums),
                jax.tree.map(jnp.zeros_like, state.params),
            )
            (sums, grads), _ = jax.lax.scan(add, zero, (micro, jnp.arange(count)))
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


def main_thing(sums: dict[str, Sums]) -> str:
    """What a run is first of all judged by: tokens, where it is asked for any."""
    return "tokens" if "tokens" in sums else "labels"


def means(sums: dict[str, Sums]) -> dict:
    """loss and accuracy of the main thing asked for; `labels_loss` and `labels_accuracy` where labels are asked for beside it; what
    routers of experts report, as `router_balance` and so on."""
    main = main_thing(sums)
    return {
        ("" if name == main else f"{name}_") + k: x
        for name, one in sums.items()
        for k, x in one.means().items()
    }


def make_eval_step(config: Experiment, model: nn.Module, mesh: Mesh, placed_params) -> Callable:
    """jit(params, batch) -> Sums of each thing asked for, without smoothing or z-loss."""
    rows = NamedSharding(mesh, BATCH)
    return jax.jit(
        lambda params, batch: batch_sums(model, params, batch, config, mesh),
        in_shardings=(placed_params, rows),
    )
