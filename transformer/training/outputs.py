"""The model's outputs on a batch, and the losses from which objectives are composed.

Shape suffixes: B batch, T length, E width of the token head's input.
"""

from collections.abc import Sequence

import jax
from flax import linen as nn, struct
from jax.sharding import Mesh

from transformer.model.embedding import Head
from transformer.parallel.context import arrange, order_of
from transformer.training.config import TrainTask
from transformer.training.loss import Sums, auto_chunks, cross_entropy, label_sums

_METHODS = {("tokens",): "features", ("labels",): "classify", ("tokens", "labels"): "both"}
"""Predicted heads -> the method of the model (model/network.py) that runs them."""

_OPTIONS = {
    "positions": "positions", "segments": "segment_ids", "source_positions": "source_positions",
    "source_segments": "source_segment_ids", "prefix": "prefix_mask", "token_types": "token_types",
}  # fmt: skip
"""Field of a batch -> option of the model."""


@struct.dataclass
class ModelOutputs:
    """The model's outputs on a batch, as inputs of the losses.

    Hidden state and head are None without token targets, label logits without label targets.
    """

    hidden_BxTxE: jax.Array | None
    head: Head | None
    label_logits: jax.Array | None
    smoothing: float = struct.field(pytree_node=False, default=0.0)
    z_loss: float = struct.field(pytree_node=False, default=0.0)
    chunks: int = struct.field(pytree_node=False, default=1)

    def token_loss(self, targets_BxT: jax.Array, weights_BxT: jax.Array) -> Sums:
        """Computes the cross-entropy of tokens without holding all logits at once (loss.py)."""
        operands = (self.hidden_BxTxE, self.head, targets_BxT, weights_BxT)
        return cross_entropy(*operands, self.smoothing, self.z_loss, self.chunks)

    def label_loss(self, labels: jax.Array, weights: jax.Array) -> Sums:
        """Computes the cross-entropy of classes, one per sequence or one per token."""
        return label_sums(self.label_logits, labels, weights, self.smoothing)


def apply(
    model: nn.Module,
    params,
    batch: dict,
    task: TrainTask,
    mesh: Mesh,
    *,
    dropout_key: jax.Array | None = None,
    dropout_rate: jax.Array | None = None,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    watch: Sequence[str] = (),
) -> tuple[ModelOutputs, dict, dict]:
    """Runs the model on a batch.

    Returns the outputs, the batch in the mesh's order of positions, and the collections of `watch`
    (model/watch.py) in which something was sown. A `dropout_key` turns on dropout, as in training.
    `dropout_rate` overrides the config's rate.
    """
    order, predicts = order_of(task.model, mesh), task.objective.predicts
    batch = arrange(dict(batch), order, mesh)
    options = {option: batch[field] for field, option in _OPTIONS.items() if field in batch}
    if "source" in batch:
        options["source_order"] = "contiguous"
    results, sown = model.apply(
        params,
        *(batch[field] for field in ("source", "inputs") if field in batch),
        **options,
        order=order,
        dropout_rate=dropout_rate,
        deterministic=dropout_key is None,
        method=_METHODS[predicts],
        rngs=None if dropout_key is None else {"dropout": dropout_key},
        mutable=list(watch),
    )
    features, labels = results if len(predicts) == 2 else (results, results)
    hidden, head = features if "tokens" in predicts else (None, None)
    chunks = auto_chunks(*batch["inputs"].shape, task.model.vocab_size, mesh)
    labels = labels if "labels" in predicts else None
    return ModelOutputs(hidden, head, labels, smoothing, z_loss, chunks), batch, sown
