"""Statistics of each attention head."""

from collections.abc import Iterator

import jax
import numpy as np

from transformer.checks import plain
from transformer.evaluation.evaluators.base import EVALUATORS, Metrics, OneBatch, Snapshot, Subject
from transformer.evaluation.subject import SELF_ATTENTION_ONLY, as_documents
from transformer.model.config import ModelConfig
from transformer.model.layout import by_layer


@EVALUATORS.register("attention")
class AttentionStatistics(OneBatch):
    """Statistics of each attention head, on one batch.

    Weights are recomputed from queries and keys, so the model may use any attention backend."""

    def why_not(self, task):
        if not task.model.observes("heads"):
            return f"requires attention heads; model.mixer = {plain(task.model.mixer)!r} has none"

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields attention/STATISTIC/SIDE/LAYER/SUBLAYER/HEAD (model/attention_statistics.py):
        entropy, weight on the first and on the previous token, mean distance, largest logit. In
        decoders, `induction` (Olsson et al. 2022) is `repeated` on a random sequence and a copy."""
        model, params = subject.config.model, snapshot.params
        heads = lambda params, batch: subject.watch(params, batch, "heads")[1]["heads"]
        statistics = subject.program("attention", heads)
        for statistic, location, value in _by_head(model, statistics(params, subject.batch)):
            crosses = "/cross_attention/" in location
            if statistic != "repeated" and not (statistic in SELF_ATTENTION_ONLY and crosses):
                yield f"attention/{statistic}/{location}", value
        if model.family == "decoder":
            repeated = statistics(params, _repeated_tokens(subject))
            for statistic, location, value in _by_head(model, repeated):
                if statistic == "repeated":
                    yield f"attention/induction/{location}", value


def _by_head(config: ModelConfig, heads: dict) -> Iterator[tuple[str, str, float]]:
    """Yields (STATISTIC, SIDE/LAYER/SUBLAYER/HEAD, value)."""
    for side, layer, path_in_layer, statistics in by_layer(config, jax.device_get(heads)):
        location = f"{side}/{layer:02d}/{path_in_layer.removesuffix('/heads')}"
        for statistic, values in statistics.items():
            for head, value in enumerate(values):
                yield statistic, f"{location}/{head:02d}", float(value)


def _repeated_tokens(subject: Subject) -> dict[str, jax.Array]:
    """Returns a batch of random text tokens. The second half of each sequence repeats the first."""
    batch = subject.data.batches(subject.part)[0]
    count, length = batch["inputs"].shape
    half = np.random.default_rng(0).choice(subject.data.tokenizer.text_ids, (count, length // 2))
    inputs = np.concatenate([half, half, batch["inputs"][:, 2 * (length // 2) :]], axis=1)
    return as_documents(subject, batch, inputs)
