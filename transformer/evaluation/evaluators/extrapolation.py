"""Loss in sequences longer than those of training."""

import dataclasses

from transformer.checks import at_least
from transformer.evaluation import losses
from transformer.evaluation.evaluators.base import EVALUATORS, Evaluator, Metrics, Snapshot, Subject


@EVALUATORS.register("extrapolation")
class Extrapolation(Evaluator):
    """Loss of a language model in sequences of 1, 2, 4, ..., `times` training lengths.

    The sequences do not overlap. With `sliding`, the loss is also measured in overlapping
    sequences, whose last tokens alone count; the tokens before them are context. See Press et al.
    (2022).
    """

    in_training = False
    metric_prefixes = ("extrapolation_sliding", "context")

    times: int = 16  # a power of two
    tokens: int = 65536  # per length, from the start of the text; 0: all
    sliding: bool = True

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "times")
        at_least("train.evaluators", self, 0, "tokens")
        if self.times & (self.times - 1):
            raise self.error(f"times: {self.times} must be a power of two")
        if self.times == 1 and not self.sliding:
            raise self.error("sliding: False has no effect with times=1; leave it out")

    @property
    def multiples(self) -> tuple[int, ...]:
        """1, 2, 4, ..., times."""
        return tuple(2**n for n in range(self.times.bit_length()))

    def why_not(self, task):
        if task.model.family != "decoder" or not task.objective.scores_every_token:
            return "requires a decoder that predicts every token (causal_lm)"
        model, longest = task.model, task.data.length * self.times
        if longest > model.max_length and model.position_table:
            problem = f"reads sequences of data.length * times = {longest} tokens"
            end = f"ends at model.max_length = {model.max_length}"
            why = f"the table of model.position = {model.position_table!r} {end}"
            return f"{problem}, but {why}; lower times, or raise model.max_length"

    def measured_text(self, task):
        return f"the first {self.tokens:,} tokens" if self.tokens else ""

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields three metrics for each LENGTH.

        extrapolation/LENGTH: nats per token in sequences of this length that do not overlap.

        context/LENGTH: mean number of tokens before each token in them. It is half the length if
        texts are that long, and less if several texts share a sequence.

        extrapolation_sliding/LENGTH: nats per token in overlapping sequences, which start one
        training length apart. Only the last training length of each counts. Tokens at the start of
        the text have less context.
        """
        config, length = subject.config, subject.config.data.length
        for times in self.multiples:
            longer = length * times
            if (model := losses.reading(config.model, longer)) is None:
                break  # the model has a parameter per position, up to max_length
            train = dataclasses.replace(config.train, accumulate=1, evaluators=())
            devices = subject.mesh.size
            count = max(config.data.batch_size // times // devices, 1) * devices
            overlaps = {"extrapolation": 0}
            if self.sliding and times > 1:
                overlaps["extrapolation_sliding"] = longer - length
            for name, overlap in overlaps.items():
                sizes = {"length": longer, "batch_size": count, "eval_overlap": overlap}
                data = dataclasses.replace(config.data, buckets=(), **sizes)
                max_batches = -(-self.tokens // (count * (longer - overlap))) if self.tokens else 0
                at_length = dataclasses.replace(config, data=data, model=model, train=train)
                longer_subject = subject.with_config(at_length)
                mean, context = losses.mean(longer_subject, snapshot, max_batches)
                yield f"{name}/{longer:06d}", mean
                if not overlap:
                    yield f"context/{longer:06d}", context
