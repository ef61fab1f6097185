"""The loss of a text: its means, and the loss of each token for evaluators that break it down.
Shape suffixes: B batch, T length, V vocabulary."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np

from transformer.data.batching import Stream
from transformer.evaluation.subject import Snapshot, Subject
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten
from transformer.model.network import abstract_params
from transformer.parallel.sharding import Share
from transformer.training.loss import Sums
from transformer.training.step import main_loss_name, means


def evaluate_loss(
    eval_step: Callable, params, batches: Stream, share: Share, *, max_batches=0, text=None
) -> dict[str, float]:
    """Evaluates `batches`, or the first `max_batches`. Returns means over tokens or labels:

        loss             -log p(target), nats per token
        perplexity       exp(loss), per token
        accuracy         share of targets that are the most likely token
        bits_per_byte    total nats / log 2 / bytes of the UTF-8 text
        word_perplexity  exp(total nats / words); words are whitespace-separated tokens plus line
                         ends, the published count for WikiText
        loss/SOURCE      the loss on the text of one source of a mixture

    bits_per_byte and word_perplexity need `text`: counts of the batches' text, for language models.
    With both tokens and labels as targets, all are means over tokens, and `labels_loss` and
    `labels_accuracy` are added. Main losses other than cross-entropy return just their means."""
    totals = {}  # by source of a mixture
    count = min(max_batches or len(batches), len(batches))
    for step, batch in enumerate(batches.stream(0, count)):
        # Reading the sums orders the steps: concurrent steps could deadlock, each waiting for a
        # collective of the other. The total is in float64: float32 cannot count over 2^24 tokens.
        sums = jax.tree.map(np.float64, eval_step(params, share.place(batch)))
        source = batches.source_of(step)
        totals[source] = jax.tree.map(np.add, totals[source], sums) if source in totals else sums
    total = jax.tree.map(lambda *parts: sum(parts), *totals.values())
    metrics = {name: float(value) for name, value in means(total).items()}
    metrics |= {f"loss/{source}": float(means(x)["loss"]) for source, x in totals.items() if source}
    main = total[main_loss_name(total)]
    if not isinstance(main, Sums):
        return metrics
    metrics["perplexity"] = math.exp(min(metrics["loss"], 700))
    nll = float(main.nll)
    if text is not None:
        metrics["bits_per_byte"] = nll / math.log(2) / text["bytes"]
        metrics["word_perplexity"] = math.exp(min(nll / text["words"], 700))
    return metrics


def reading(model: ModelConfig, length: int) -> ModelConfig | None:
    """Returns the model with max_length >= `length`, or None if that changes parameter shapes."""
    longest = max(length, model.max_length)
    positions = model.random_positions and max(longest, model.random_positions)
    longer = dataclasses.replace(model, max_length=longest, random_positions=positions)
    return longer if length <= model.max_length or shapes(longer) == shapes(model) else None


def shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each parameter, by path."""
    return {path: x.shape for path, x in flatten(abstract_params(model)).items()}


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
        hidden, _, batch = subject.watch(params, batch)
        nll_BxT, _ = subject.predict(*hidden, batch["targets"])
        return nll_BxT * batch["weights"], batch["positions"], batch["weights"]

    batches = subject.data.batches(subject.part, subject.share.sequences)
    count = min(filter(None, (max_batches, subject.max_batches, len(batches))), default=0)
    run = subject.program("losses", losses)
    for batch in batches.stream(0, count):
        result = run(snapshot.params, subject.share.place(batch))
        yield tuple(map(np.asarray, jax.device_get(result)))
