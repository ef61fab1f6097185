"""What the order of tokens is worth to a model."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from transformer.errors import UserError
from transformer.evaluation.evaluators.base import EVALUATORS, At, Found, OneBatch, Subject


@EVALUATORS.register("order")
@dataclasses.dataclass(frozen=True)
class Order(OneBatch):
    """What the order of tokens is worth to the model: how far its prediction at the last place of a row moves when all tokens before it are put
    in another order, on one batch. Who is blind to order does not notice."""

    during: ClassVar[bool] = True

    def why_not(self, task):
        if task.model.two_sides or not task.objective.asks_for_tokens:
            return "is of models of one stack that are asked for tokens"

    def measure(self, subject: Subject, at: At) -> Found:
        """order/kl: sum of p log(p / q) at the last place of a row, mean over rows, in nats; p as the tokens stand, q with all tokens before the last
        in another order. Rows are read as one document each."""

        def last(params, batch):
            (h_BxTxE, head), _, batch = subject.watch(params, batch)
            at_last = batch["positions"] == jnp.max(batch["positions"], axis=1, keepdims=True)
            return jax.nn.log_softmax(
                head(jnp.sum(jnp.where(at_last[..., None], h_BxTxE, 0), axis=1, keepdims=True))[
                    :, 0
                ]
            )

        whole = {
            name: np.array(x)
            for name, x in subject.data.batches(subject.part)[0].items()
            if name not in ("prefix", "labels", "label_weights")
        }
        rows, length = whole["inputs"].shape
        full = np.flatnonzero((whole["segments"] > 0).all(axis=1))
        if not len(full):
            raise UserError(
                "train.evaluators: order needs a row that is full of tokens; set data.packing=True"
            )
        chosen = np.resize(
            full, rows
        )  # those again where they are fewer, for a batch of the same shape
        inputs, there = whole["inputs"][chosen], np.random.default_rng(0).permutation(length - 1)
        logs = []
        for tokens in (inputs, np.concatenate([inputs[:, there], inputs[:, -1:]], axis=1)):
            batch = {name: x[chosen] for name, x in whole.items()} | {
                "inputs": tokens,
                "segments": np.ones_like(inputs),
            }
            batch["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), inputs.shape)
            here = subject.share.rows(rows)
            logs.append(
                np.asarray(
                    subject.program(self, last)(
                        at.params, subject.share.place({name: x[here] for name, x in batch.items()})
                    )
                )
            )
        yield (
            "order/kl",
            float(np.mean(np.sum(np.exp(logs[0]) * (logs[0] - logs[1]), axis=-1)[: len(full)])),
        )
