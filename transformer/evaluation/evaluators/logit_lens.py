"""What the head would say of the stream behind each layer."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from transformer.evaluation.evaluators.base import (
    EVALUATORS,
    NO_TOKENS,
    At,
    Found,
    OneBatch,
    Subject,
)
from transformer.evaluation.inside import streams
from transformer.evaluation.subject import token_losses


@EVALUATORS.register("logit_lens")
@dataclasses.dataclass(frozen=True)
class LogitLens(OneBatch):
    """What the head would say if the stack ended behind each layer (nostalgebraist 2020), on one batch: its loss, and how often it says what
    the last layer says."""

    during: ClassVar[bool] = True
    others: ClassVar[tuple[str, ...]] = ("lens",)

    def why_not(self, task):
        return None if task.objective.asks_for_tokens else NO_TOKENS

    def measure(self, subject: Subject, at: At) -> Found:
        """lens/loss/LAYER, nats per token of one batch read from the stream behind that layer by the model's own last norm and head;
        lens/agrees/LAYER, the share of tokens of which it says what the model says."""

        def look(params, batch):
            (h_BxTxE, head), told, batch = subject.watch(params, batch, "streams")
            asked = batch["weights"]

            def says(h_BxTxE, head):
                """(loss of each token, what is said of it)."""

                def one(h, targets):
                    logits_BxTxV = head(h)
                    return token_losses(logits_BxTxV, targets), jnp.argmax(logits_BxTxV, axis=-1)

                return subject.in_chunks(one, h_BxTxE, batch["targets"])

            last, out = says(h_BxTxE, head)[1], {}
            for layer, read in enumerate(streams(subject, params, told["streams"])):
                losses, said = says(*read)
                total = jnp.maximum(jnp.sum(asked), 1.0)
                out[layer] = (
                    jnp.sum(losses * asked) / total,
                    jnp.sum((said == last) * asked) / total,
                )
            return out

        for layer, (loss, agrees) in subject.program(self, look)(at.params, subject.batch).items():
            yield f"lens/loss/{layer:02d}", float(loss)
            yield f"lens/agrees/{layer:02d}", float(agrees)
