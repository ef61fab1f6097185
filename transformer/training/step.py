"""The model's outputs on a batch, and the training and evaluation steps, for all objectives.

Shape suffixes: B batch, T length, E width of the token head's input.

The loss, a sum over the global batch / its weights, depends on neither mesh nor micro-batches."""

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn, struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from transformer.data.config import Task
from transformer.data.objectives.base import Loss
from transformer.model import positions
from transformer.model.attention_backends import record
from transformer.model.config import ModelConfig
from transformer.model.embedding import Head
from transformer.model.masks import zigzag
from transformer.parallel.sharding import BATCH, BATCH_AXES
from transformer.training import loss as losses
from transformer.training.state import TrainState

_METHODS = {("tokens",): "features", ("labels",): "classify", ("tokens", "labels"): "both"}
"""Predicted heads -> the method of the model (model/network.py) that runs them."""

_OPTIONS = {
    "positions": "positions", "segments": "segment_ids", "source_positions": "source_positions",
    "source_segments": "source_segment_ids", "prefix": "prefix_mask", "token_types": "token_types",
}  # fmt: skip
"""Field of a batch -> option of the model."""


@struct.dataclass
class ModelOutputs:
    """The model's outputs, as inputs of the losses. Those without targets in the batch are None."""

    hidden_BxTxE: jax.Array | None  # input of the token head
    head: Head | None  # the map from [..., E] to logits, [..., V]
    label_logits: jax.Array | None  # [B, C] or [B, T, C]
    smoothing: float = struct.field(pytree_node=False, default=0.0)
    z_loss: float = struct.field(pytree_node=False, default=0.0)
    chunks: int = struct.field(pytree_node=False, default=1)

    def token_loss(self, targets_BxT: jax.Array, weights_BxT: jax.Array) -> losses.Sums:
        """Computes the cross-entropy of tokens without holding all logits at once (loss.py)."""
        operands = (self.hidden_BxTxE, self.head, targets_BxT, weights_BxT)
        return losses.cross_entropy(*operands, self.smoothing, self.z_loss, self.chunks)

    def label_loss(self, labels: jax.Array, weights: jax.Array) -> losses.Sums:
        """Computes the cross-entropy of classes, one per sequence or one per token."""
        assert self.label_logits is not None
        return losses.label_sums(self.label_logits, labels, weights, self.smoothing)

    def span_loss(self, ends_Bx2: jax.Array, candidates_BxT: jax.Array) -> losses.Sums:
        """Computes the cross-entropy of the ends of spans, from logits [B, T, 2]."""
        assert self.label_logits is not None
        return losses.span_sums(self.label_logits, ends_Bx2, candidates_BxT, self.smoothing)


def run_model(
    model: nn.Module, params, batch: dict, task: Task, mesh: Mesh, *,
    dropout_key: jax.Array | None = None, dropout_rate: jax.Array | None = None,
    smoothing: float = 0.0, z_loss: float = 0.0, watch: Sequence[str] = (),
) -> tuple[ModelOutputs, dict, Mapping]:  # fmt: skip
    """Runs the model on a batch. Returns the outputs, the batch in the mesh's order of positions,
    and the collections of `watch` (model/modules.py) in which something was sown. A `dropout_key`
    turns on dropout, as in training. `dropout_rate` overrides the config's rate."""
    order, predicts = order_of(task.model, mesh), task.objective.predicts
    batch = arrange(dict(batch), order, mesh)
    options = {option: batch[field] for field, option in _OPTIONS.items() if field in batch}
    if "source" in batch:
        options["source_order"] = "contiguous"
    options |= {"order": order, "method": _METHODS[predicts], "mutable": list(watch)}
    options |= {"dropout_rate": dropout_rate, "deterministic": dropout_key is None}
    options["rngs"] = None if dropout_key is None else {"dropout": dropout_key}
    tokens = [batch[field] for field in ("source", "inputs") if field in batch]
    results, sown = model.apply(params, *tokens, **options)
    features, labels = results if len(predicts) == 2 else (results, results)
    hidden, head = features if "tokens" in predicts else (None, None)
    batch_size, length = batch["inputs"].shape
    chunks = losses.auto_chunks(batch_size, length, task.model.vocab_size, mesh)
    labels = labels if "labels" in predicts else None
    return ModelOutputs(hidden, head, labels, smoothing, z_loss, chunks), batch, sown


def order_of(config: ModelConfig, mesh: Mesh) -> str:
    """Returns the order of a decoder's positions: "zigzag", or "contiguous" (unchanged). Zigzag
    order gives all devices the same work under a causal mask. It is used where the mesh shards
    sequences and the position schemes' scores depend on the query and the key alone."""
    decodes = "decoder" in config.sides and not config.num_labels
    in_order = bool(config.canon) or any(mixer.in_order for mixer in config.mixers_of())
    if mesh.shape["context"] == 1 or not decodes or in_order:
        return "contiguous"
    pairwise = all(positions.build(layer.position).pairwise for layer in config.layers("decoder"))
    return "zigzag" if pairwise and not config.prefix_lm else "contiguous"


def arrange(batch: dict, order: str, mesh: Mesh) -> dict:
    """Shards the batch, with a decoder's positions in `order`; sums over tokens stay the same."""

    def constrain(name: str, x: jax.Array) -> jax.Array:
        if x.ndim > 1 and order == "zigzag" and not name.startswith("source"):
            x = zigzag(x, mesh.shape["context"])
        spec = P(BATCH_AXES, *["context"][: x.ndim - 1])
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return {name: constrain(name, x) for name, x in batch.items()} if mesh.size > 1 else batch


def batch_sums(
    model: nn.Module, params, batch: dict, config: Task, mesh: Mesh, dropout_key=None, **extra
) -> dict[str, Loss]:
    """Computes the objective's losses of one batch, whose fields are those of `data.batching`. In
    training (with a `dropout_key`), the result also contains the routers' auxiliary losses.
    `extra`: `dropout_rate`, `smoothing` and `z_loss` of `run_model`."""
    extra |= {"dropout_key": dropout_key, "watch": ("losses",) if dropout_key is not None else ()}
    outputs, batch, sown = run_model(model, params, batch, config, mesh, **extra)
    sums = config.objective.losses(outputs, batch)
    if sown:
        sums["router"] = losses.RouterSums.of(sown["losses"], _input_tokens(batch))
    return sums


def attention_backends(
    config: Task, model: nn.Module, params, batch: dict, mesh: Mesh
) -> dict[str, str]:
    """Returns each attention backend of a step -> why a preferred one is not used, or ""."""
    key = jax.random.key(0)
    with record() as reasons:
        sums = lambda params, batch: batch_sums(model, params, batch, config, mesh, dropout_key=key)
        jax.eval_shape(sums, params, batch)
    return reasons


def _input_tokens(batch: dict) -> jax.Array:
    """Counts the input tokens of encoder and decoder without padding, at least 1."""
    segments = (x for name, x in batch.items() if name.endswith("segments"))
    return jnp.maximum(sum(jnp.sum(x > 0, dtype=jnp.float32) for x in segments), 1.0)


def make_train_step(
    config: Task, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh,
    shardings: TrainState,
) -> Callable:  # fmt: skip
    """Returns jit((state, batch) -> (state, metrics)) on these shardings. It donates the state."""
    step = training_step(config, model, optimizer, mesh)
    inputs, results = (shardings, NamedSharding(mesh, BATCH)), (shardings, None)
    return jax.jit(step, in_shardings=inputs, out_shardings=results, donate_argnums=0)


def training_step(
    config: Task, model: nn.Module, optimizer: optax.GradientTransformation, mesh: Mesh, *,
    seed: int | jax.Array | None = None, dropout_rate: jax.Array | None = None,
) -> Callable:  # fmt: skip
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
        # The divisor of each loss, over the global batch
        weights = {name: jnp.maximum(w, 1.0) for name, w in config.objective.weights(batch).items()}
        weights["router"] = inputs = _input_tokens(batch)
        sums, grads = _summed(gradients, train.accumulate, state.params, batch, key, weights)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params, ema = optax.apply_updates(state.params, updates), state.ema
        if ema is not None:  # a smaller decay at first, to forget the initial values
            decay = jnp.minimum(train.ema_decay, (1.0 + state.step) / (10.0 + state.step))
            ema = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, ema, params)
        metrics = means(sums) | {
            "objective": sum(part.loss / weights[name] for name, part in sums.items()),
            "tokens": sums[main_loss_name(sums)].weight, "inputs": inputs,
            "grad_norm": optax.tree.norm(grads),
        }  # fmt: skip
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
    """Returns the mean of each metric: `loss` and, of a cross-entropy, `accuracy` of the main loss,
    `labels_loss` and `labels_accuracy` of a label loss beside it, `router_balance` and so on."""
    main = main_loss_name(sums)
    full = lambda name, metric: metric if name == main else f"{name}_{metric}"
    return {full(name, k): x for name, part in sums.items() for k, x in part.means().items()}


def make_eval_step(config: Task, model: nn.Module, mesh: Mesh, placed_params) -> Callable:
    """Returns jit((params, batch) -> the sums of each loss, without smoothing and z-loss)."""
    sums = lambda params, batch: batch_sums(model, params, batch, config, mesh)
    return jax.jit(sums, in_shardings=(placed_params, NamedSharding(mesh, BATCH)))
