"""Sensitivity of a model to the order of tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer.evaluation.evaluators.base import EVALUATORS, Metrics, OneBatch, Snapshot, Subject
from transformer.evaluation.subject import as_documents


@EVALUATORS.register("order")
class Order(OneBatch):
    """Change of the last prediction of a sequence when the tokens before it are permuted.

    Measured on one batch. It is zero for a model that ignores the order of tokens."""

    def why_not(self, task):
        if task.model.is_encoder_decoder or not task.objective.predicts_tokens:
            return "requires a single-stack model with target tokens"

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields order/kl: sum of p log(p / q) at the last position, in nats, mean over sequences.
        p is the prediction for the original sequence, q that after a permutation of the tokens
        before the last. Each sequence is read as one document."""

        def last_log_probs(params, batch):
            (h_BxTxE, head), _, batch = subject.watch(params, batch)
            at_last = batch["positions"] == jnp.max(batch["positions"], axis=1, keepdims=True)
            h_Bx1xE = jnp.sum(jnp.where(at_last[..., None], h_BxTxE, 0), axis=1, keepdims=True)
            return jax.nn.log_softmax(head(h_Bx1xE)[:, 0])

        batch = subject.data.batches(subject.part)[0]
        count, length = batch["inputs"].shape
        full = np.flatnonzero((batch["segments"] > 0).all(axis=1))
        if not len(full):
            raise self.error("needs a sequence without padding; set data.packing=True")
        chosen = np.resize(full, count)  # repeated if few are full, to keep the batch's shape
        inputs = batch["inputs"][chosen]
        permutation = np.random.default_rng(0).permutation(length - 1)
        permuted = np.concatenate([inputs[:, permutation], inputs[:, -1:]], axis=1)
        batch = {name: x[chosen] for name, x in batch.items() if not name.startswith("label")}
        run = subject.program(self, last_log_probs)
        batches = [as_documents(subject, batch, tokens) for tokens in (inputs, permuted)]
        logp, logq = (np.asarray(run(snapshot.params, x)) for x in batches)
        yield "order/kl", float(np.mean(np.sum(np.exp(logp) * (logp - logq), axis=-1)[: len(full)]))
