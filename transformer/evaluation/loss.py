"""Token-weighted loss, perplexity and accuracy; bits per byte and word perplexity for language models."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from transformer.data.batching import Batches
from transformer.parallel.sharding import Share
from transformer.training.step import main_thing, means


def evaluate_loss(
    eval_step: Callable,
    params,
    batches: Batches,
    share: Share,
    *,
    most: int = 0,
    text: dict | None = None,
) -> dict[str, float]:
    """Every row of `batches` once (or the first `most` batches), as means over tokens, or over labels:

        loss        -log p(target), nats per token
        perplexity  exp(loss), per token
        accuracy    share of targets that are the most likely token

    Where both tokens and labels are asked for, `labels_loss` and `labels_accuracy` too.

        With `text` (the counts of the text these rows cover), for language models:

        bits_per_byte    all nats / log 2 / bytes of the UTF-8 text
        word_perplexity  exp(all nats / words); words are whitespace tokens plus line ends, the published count of WikiText
    """
    total = None
    count = min(most or len(batches), len(batches))
    for batch in batches.stream(0, count):
        placed = share.place(batch)
        # One after another: nothing else orders two evaluation steps, and the messages of two that ran side by side could cross, each
        # waiting for the other's.
        jax.block_until_ready(total)
        sums = eval_step(params, placed)
        total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    found = {name: float(value) for name, value in means(total).items()}
    found["perplexity"] = math.exp(min(found["loss"], 700))
    nll = float(total[main_thing(total)].nll)
    if text is not None:
        found["bits_per_byte"] = nll / math.log(2) / text["bytes"]
        found["word_perplexity"] = math.exp(min(nll / text["words"], 700))
    return found
