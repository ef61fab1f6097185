"""Evaluators of each layer: attention heads, sizes in the residual stream, and predictions."""

import collections
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from transformer.checks import plain
from transformer.evaluation.evaluators import EVALUATORS
from transformer.evaluation.evaluators.base import NEEDS_TOKENS, Metrics, OneBatch, Snapshot
from transformer.evaluation.subject import SELF_ATTENTION_ONLY, Subject, as_documents, streams
from transformer.model.config import ModelConfig
from transformer.model.layout import by_layer, flatten, part, split_layer_path, sublayer_of, where
from transformer.training.step import batch_sums


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
            # Random tokens of the text. The second half of each sequence repeats the first.
            batch, tokens = subject.data.batches(subject.part)[0], subject.data.tokenizer.text_ids
            count, length = batch["inputs"].shape
            half = np.random.default_rng(0).choice(tokens, (count, length // 2))
            inputs = np.concatenate([half, half, batch["inputs"][:, 2 * (length // 2) :]], axis=1)
            repeated = statistics(params, as_documents(subject, batch, inputs))
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


@EVALUATORS.register("depth_profile")
class DepthProfile(OneBatch):
    """Sizes of residual stream, branch, gradient and update, by layer and sublayer, on one batch.

    See Xiong et al. (2020) and Liu et al. (2020)."""

    metric_prefixes = ("depth",)

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields depth/SIZE/SIDE/LAYER/SUBLAYER, on one batch. SIZE is one of:

            stream    root mean square of the residual stream that enters the sublayer
            branch    root mean square of the branch, relative to that of the stream it is added to
            gradient  norm of the gradient of the loss with respect to the sublayer's parameters
            update    norm of the next update, relative to that of the parameters (in training)

        `gradient` and `update` are also yielded for each matrix: .../SUBLAYER/MATRIX."""
        config, mesh = subject.config, subject.mesh

        def profile(params, opt_state, batch):
            def loss(params):
                sums = batch_sums(subject.model, params, batch, config, mesh)
                return sum(entry.loss / jnp.maximum(entry.weight, 1.0) for entry in sums.values())

            grads, updates = jax.grad(loss)(params), None
            squares = lambda tree: _squares(config.model, tree)
            if opt_state is not None:
                updates = squares(subject.optimizer.update(grads, opt_state, params)[0])
            _, sown, _ = subject.watch(params, batch, "sizes")
            return sown["sizes"], squares(grads), squares(params), updates

        run = subject.program(self, profile)
        sizes, grads, params, updates = run(snapshot.params, snapshot.opt_state, subject.batch)
        for side, layer, path_in_layer, of_layer in by_layer(config.model, jax.device_get(sizes)):
            location, kept = f"{side}/{layer:02d}/{sublayer_of(path_in_layer)}", of_layer["kept"]
            yield f"depth/stream/{location}", float(of_layer["stream"])
            yield f"depth/branch/{location}", float(of_layer["branch"] / kept) if kept else 1.0
        for location, square in grads.items():
            yield f"depth/gradient/{location}", float(square) ** 0.5
        for location, square in (updates or {}).items():
            relative = (float(square) / max(float(params[location]), 1e-30)) ** 0.5
            yield f"depth/update/{location}", relative


def _squares(config: ModelConfig, tree) -> dict[str, jax.Array]:
    """Returns SIDE/LAYER/SUBLAYER[/MATRIX] -> sum of squares of parameters, without norms."""
    flat, sums = flatten(tree), collections.defaultdict(float)
    for name, (path, index) in where(config, flat).items():
        if location := split_layer_path(name):
            side, layer, (sublayer, *inside) = *location[:2], location[2].split("/")
            if not sublayer.endswith("residual"):
                square = jnp.sum(jnp.square(part(flat[path], index).astype(jnp.float32)))
                for place in (sublayer, *(f"{sublayer}/{matrix}" for matrix in inside[:1])):
                    sums[f"{side}/{layer:02d}/{place}"] += square
    return dict(sums)


@EVALUATORS.register("logit_lens")
class LogitLens(OneBatch):
    """Predictions as if the stack ended after each layer (nostalgebraist 2020), on one batch."""

    metric_prefixes = ("lens",)

    def why_not(self, task):
        return None if task.objective.predicts_tokens else NEEDS_TOKENS

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields lens/loss/LAYER and lens/agrees/LAYER. The model's final norm and head predict
        tokens from the residual stream after this layer. `loss` is that of these predictions, nats
        per token, on one batch. `agrees` is the share of tokens predicted as by the model."""

        def lens(params, batch):
            hidden, sown, batch = subject.watch(params, batch, "streams")
            weights, targets = batch["weights"], batch["targets"]
            final, out = subject.predict(*hidden, targets)[1], {}
            for layer, h_and_head in enumerate(streams(subject, params, sown["streams"])):
                losses, predicted = subject.predict(*h_and_head, targets)
                total = jnp.maximum(jnp.sum(weights), 1.0)
                agrees = jnp.sum((predicted == final) * weights) / total
                out[layer] = jnp.sum(losses * weights) / total, agrees
            return out

        by_layer = subject.program(self, lens)(snapshot.params, subject.batch)
        for layer, (loss, agrees) in by_layer.items():
            yield f"lens/loss/{layer:02d}", float(loss)
            yield f"lens/agrees/{layer:02d}", float(agrees)
