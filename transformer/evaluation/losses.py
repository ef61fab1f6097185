"""The loss of each token of a text, for evaluators that break the loss down.

Shape suffixes: B batch, T length, V vocabulary.
"""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from transformer.evaluation.subject import Snapshot, Subject, token_losses
from transformer.model.config import ModelConfig
from transformer.model.network import abstract_params


def reading(model: ModelConfig, length: int) -> ModelConfig | None:
    """Returns the model with max_length >= `length`, or None if that changes parameter shapes."""
    longest = max(length, model.max_length)
    positions = model.random_positions and max(longest, model.random_positions)
    longer = dataclasses.replace(model, max_length=longest, random_positions=positions)
    return longer if length <= model.max_length or shapes(longer) == shapes(model) else None


def shapes(model: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the shapes of all parameters."""
    return [x.shape for x in jax.tree.leaves(abstract_params(model))]


def mean(subject: Subject, snapshot: Snapshot, max_batches: int = 0) -> tuple[float, float]:
    """Returns (nats per token, mean number of tokens before each token)."""
    total = np.zeros(3)
    for losses, positions, weights in by_token(subject, snapshot, max_batches):
        total += losses.sum(), (positions * weights).sum(), weights.sum()
    return tuple(float(x) for x in total[:2] / max(total[2], 1.0))


def by_token(
    subject: Subject, snapshot: Snapshot, max_batches: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yields for each batch (-log p(target) times its weight, positions, weights), each [B, T]."""

    def losses(params, batch):
        (h_BxTxD, head), _, batch = subject.watch(params, batch)
        of_chunk = lambda h, targets: token_losses(head(h), targets)
        nll_BxT = subject.in_chunks(of_chunk, h_BxTxD, batch["targets"])
        return nll_BxT * batch["weights"], batch["positions"], batch["weights"]

    batches = subject.data.batches(subject.part, subject.share.sequences)
    run = subject.program("losses", losses)
    limits = (max_batches, subject.max_batches, len(batches))
    count = min((limit for limit in limits if limit), default=0)
    for batch in batches.stream(0, count):
        result = run(snapshot.params, subject.share.place(batch))
        yield tuple(map(np.asarray, jax.device_get(result)))
