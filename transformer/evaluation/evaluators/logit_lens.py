"""The logit lens: predictions from the residual stream after each layer."""

import jax.numpy as jnp

from transformer.evaluation.evaluators.base import EVALUATORS, NEEDS_TOKENS, OneBatch
from transformer.evaluation.inside import streams
from transformer.evaluation.subject import Metrics, Snapshot, Subject, token_losses


@EVALUATORS.register("logit_lens")
class LogitLens(OneBatch):
    """Predictions as if the stack ended after each layer (nostalgebraist 2020), on one batch."""

    in_training = True
    metric_prefixes = ("lens",)

    def why_not(self, task):
        return None if task.objective.predicts_tokens else NEEDS_TOKENS

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields lens/loss/LAYER and lens/agrees/LAYER.

        The model's final norm and head predict tokens from the residual stream after this layer.
        `loss` is the loss of these predictions in nats per token, on one batch. `agrees` is the
        share of tokens for which the most likely token is that of the model.
        """

        def lens(params, batch):
            (h_BxTxE, head), sown, batch = subject.watch(params, batch, "streams")
            weights = batch["weights"]

            def predict(h_BxTxE, head):
                """Returns (loss of each token, most likely token)."""

                def of_chunk(h, targets):
                    logits_BxTxV = head(h)
                    return token_losses(logits_BxTxV, targets), jnp.argmax(logits_BxTxV, axis=-1)

                return subject.in_chunks(of_chunk, h_BxTxE, batch["targets"])

            final, out = predict(h_BxTxE, head)[1], {}
            for layer, h_and_head in enumerate(streams(subject, params, sown["streams"])):
                losses, predicted = predict(*h_and_head)
                total = jnp.maximum(jnp.sum(weights), 1.0)
                agrees = jnp.sum((predicted == final) * weights) / total
                out[layer] = jnp.sum(losses * weights) / total, agrees
            return out

        by_layer = subject.program(self, lens)(snapshot.params, subject.batch)
        for layer, (loss, agrees) in by_layer.items():
            yield f"lens/loss/{layer:02d}", float(loss)
            yield f"lens/agrees/{layer:02d}", float(agrees)
