"""Token-weighted loss, perplexity, accuracy; of language models, bits per byte, word perplexity."""

import math
from collections.abc import Callable

import jax
import numpy as np

from transformer.data.batching import Batches
from transformer.parallel.sharding import Share
from transformer.training.loss import Sums
from transformer.training.step import main_loss_name, means


def evaluate_loss(
    eval_step: Callable,
    params,
    batches: Batches,
    share: Share,
    *,
    max_batches: int = 0,
    text: dict | None = None,
) -> dict[str, float]:
    """Evaluates `batches`, or the first `max_batches`. Returns means over tokens or labels:

        loss        -log p(target), nats per token
        perplexity  exp(loss), per token
        accuracy    share of targets that are the most likely token

    With both token and label targets, these are means over tokens, and `labels_loss` and
    `labels_accuracy` are returned as well.

    A main loss that is not a cross-entropy returns its own means, and none of the above.

    With `text` (the counts of the text that `batches` cover), for language models:

        bits_per_byte    total nats / log 2 / bytes of the UTF-8 text
        word_perplexity  exp(total nats / words); words are whitespace-separated tokens plus line
                         ends, the published count for WikiText
    """
    total = None
    count = min(max_batches or len(batches), len(batches))
    for batch in batches.stream(0, count):
        placed = share.place(batch)
        # Reading the sums orders the steps: concurrent steps could deadlock, each waiting for a
        # collective of the other. The total is in float64, because a float32 cannot count more than
        # 2^24 tokens.
        sums = jax.tree.map(np.float64, eval_step(params, placed))
        total = sums if total is None else jax.tree.map(np.add, total, sums)
    metrics = {name: float(value) for name, value in means(total).items()}
    main = total[main_loss_name(total)]
    if not isinstance(main, Sums):
        return metrics
    metrics["perplexity"] = math.exp(min(metrics["loss"], 700))
    nll = float(main.nll)
    if text is not None:
        metrics["bits_per_byte"] = nll / math.log(2) / text["bytes"]
        metrics["word_perplexity"] = math.exp(min(nll / text["words"], 700))
    return metrics
