"""Evaluators of each layer: sizes in the residual stream, and predictions from it."""

import collections

import jax
import jax.numpy as jnp

from transformer.evaluation.evaluators.base import EVALUATORS, NEEDS_TOKENS, Metrics, OneBatch
from transformer.evaluation.subject import Snapshot, Subject, streams
from transformer.model.config import ModelConfig
from transformer.model.layout import by_layer, flatten, part, split_layer_path, sublayer_of, where
from transformer.training.step import batch_sums


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
