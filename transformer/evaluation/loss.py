"""Token-weighted loss, perplexity and accuracy; bits per byte and word perplexity for language models."""

import math
from collections.abc import Callable

import jax
from jax.sharding import NamedSharding

from transformer.data.batching import Batches
from transformer.training.loss import Sums


def evaluate_loss(
    eval_step: Callable, params, batches: Batches, rows: NamedSharding, *, most: int = 0, text: dict | None = None
) -> dict[str, float]:
    """Every row of `batches` once (or the first `most` batches), as means over tokens:

    loss        -log p(target), nats per token
    perplexity  exp(loss), per token
    accuracy    share of targets that are the most likely token

    With `text` (the counts of the text these rows cover), for language models:

    bits_per_byte    all nats / log 2 / bytes of the UTF-8 text
    word_perplexity  exp(all nats / words); words are whitespace tokens plus line ends, the published count of WikiText
    """
    total = Sums.zero()
    count = min(most or len(batches), len(batches))
    for batch in batches.stream(0, count):
        total = jax.tree.map(lambda a, b: a + b, total, eval_step(params, jax.device_put(batch, rows)))
    nll, correct, weight = (float(x) for x in (total.nll, total.correct, total.weight))
    found = {"loss": nll / weight, "perplexity": math.exp(min(nll / weight, 700)), "accuracy": correct / weight}
    if text is not None:
        found["bits_per_byte"] = nll / math.log(2) / text["bytes"]
        found["word_perplexity"] = math.exp(min(nll / text["words"], 700))
    return found
