"""Loss by position in the sequence."""

import itertools

import numpy as np

from transformer.checks import at_least
from transformer.evaluation import losses
from transformer.evaluation.evaluators.base import EVALUATORS, NEEDS_TOKENS, Evaluator
from transformer.evaluation.subject import Metrics, Snapshot, Subject


@EVALUATORS.register("loss_by_position")
class LossByPosition(Evaluator):
    """Loss by position in the sequence, in `parts` equal parts. It shows the value of context."""

    in_training = True

    parts: int = 8

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "parts")

    def why_not(self, task):
        return None if task.objective.predicts_tokens else NEEDS_TOKENS

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields loss_by_position/POSITION: nats per token from here to the next POSITION.

        Where several documents share a sequence, positions count within the document.
        """
        data = subject.config.data
        length = data.decoder_length if subject.config.model.is_encoder_decoder else data.length
        edges = np.linspace(0, length, self.parts + 1).astype(int)
        sums = np.zeros((2, length))
        for losses_BxT, positions_BxT, weights_BxT in losses.by_token(subject, snapshot):
            np.add.at(sums[0], positions_BxT, losses_BxT)
            np.add.at(sums[1], positions_BxT, weights_BxT)
        for first, last in itertools.pairwise(edges):
            if weight := sums[1, first:last].sum():
                yield f"loss_by_position/{first:05d}", float(sums[0, first:last].sum() / weight)
