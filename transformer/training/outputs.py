"""What the model makes of a batch, and the losses that an objective composes from it.

Shape suffixes: B batch, T length, E width of what the token head reads.
"""

from collections.abc import Sequence

import jax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh

from transformer.model.embedding import Head
from transformer.parallel.context import arrange, order_of
from transformer.training.config import TrainTask
from transformer.training.loss import Sums, auto_chunks, cross_entropy, label_sums

_METHODS = {("tokens",): "features", ("labels",): "classify", ("tokens", "labels"): "both"}
"""The method of the model (model/network.py) that runs these heads."""


@struct.dataclass
class Outputs:
    """The last hidden state with the token head, and the logits of labels; None where the
    objective predicts none of them."""

    hidden_BxTxE: jax.Array | None
    head: Head | None
    label_logits: jax.Array | None
    smoothing: float = struct.field(pytree_node=False, default=0.0)
    z_loss: float = struct.field(pytree_node=False, default=0.0)
    chunks: int = struct.field(pytree_node=False, default=1)

    def token_loss(self, targets_BxT: jax.Array, weights_BxT: jax.Array) -> Sums:
        """Cross-entropy of tokens; the logits of all are never held at once (loss.py)."""
        given = (self.hidden_BxTxE, self.head, targets_BxT, weights_BxT)
        return cross_entropy(*given, self.smoothing, self.z_loss, self.chunks)

    def label_loss(self, labels: jax.Array, weights: jax.Array) -> Sums:
        """Cross-entropy of classes, one a row or one a token."""
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
) -> tuple[Outputs, dict, dict]:
    """The outputs of a batch, the batch in the order in which the mesh reads it, and the
    collections of `watch` (model/watch.py) where something was sown. With a `dropout_key`, as in
    training; with a `dropout_rate`, at this rate instead of the config's."""
    order = order_of(task.model, mesh)
    batch = arrange(dict(batch), order, mesh)
    predicts = task.objective.predicts
    given = {"positions": batch["positions"], "segment_ids": batch["segments"], "order": order}
    tokens = (batch["inputs"],)
    if "source" in batch:
        tokens = (batch["source"], batch["inputs"])
        given |= {
            "source_positions": batch["source_positions"],
            "source_segment_ids": batch["source_segments"],
            "source_order": "rows",
        }
    if "prefix" in batch:
        given["prefix_mask"] = batch["prefix"]
    if "token_types" in batch:
        given["token_types"] = batch["token_types"]
    if dropout_rate is not None:
        given["dropout_rate"] = dropout_rate
    found, sown = model.apply(
        {"params": params}, *tokens, **given, deterministic=dropout_key is None, method=_METHODS[predicts],
        rngs=None if dropout_key is None else {"dropout": dropout_key}, mutable=list(watch),
    )  # fmt: skip
    features, labels = found if len(predicts) == 2 else (found, found)
    hidden, head = features if "tokens" in predicts else (None, None)
    chunks = auto_chunks(*batch["inputs"].shape, task.model.vocab_size, mesh)
    labels = labels if "labels" in predicts else None
    return Outputs(hidden, head, labels, smoothing, z_loss, chunks), batch, sown
