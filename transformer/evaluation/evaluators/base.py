"""What every evaluator has in common. A new one is a class in a file of this package."""

from typing import ClassVar

from transformer.evaluation.evaluators import EVALUATORS
from transformer.evaluation.subject import At, Found, Subject
from transformer.training.config import TrainTask

__all__ = ["EVALUATORS", "NO_TOKENS", "At", "Evaluator", "Found", "OneBatch", "Subject"]

NO_TOKENS = "is of models that are asked for tokens, and data.objective asks for classes"


class Evaluator:
    """What may be measured. Fields are the options that `train.evaluators` may set:
    `dict(name="extrapolation", times=8)`."""

    name: ClassVar[str]
    """By which a config chooses it, as it is registered."""

    during: ClassVar[bool]
    """Whether it is measured at every evaluation in training, and not in `evaluate` alone."""

    others: ClassVar[tuple[str, ...]] = ()
    """What its metrics are called beside `name`: eval/depth/..., test/context/..."""

    def why_not(self, task: TrainTask) -> str | None:
        """Why it says nothing of such an experiment, to be read behind its name; None if it does."""
        return None

    def reads(self, task: TrainTask) -> str:
        """How much of the text it is measured on; "": all."""
        return ""

    def measure(self, subject: Subject, at: At) -> Found:
        """Yields (name, number). Names begin with `name` or with one of `others`."""
        raise NotImplementedError


class OneBatch(Evaluator):
    """What is measured on one batch."""

    def reads(self, task):
        return f"one batch of {task.data.batch_size} rows"
