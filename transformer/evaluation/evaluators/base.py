"""The interface of evaluators. A new evaluator is a class in a file of this package."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from transformer.data.config import Task
from transformer.errors import UserError
from transformer.evaluation.evaluators import EVALUATORS, Kind
from transformer.evaluation.subject import Metrics, Snapshot, Subject
from transformer.output import count

NEEDS_TOKENS = "requires target tokens, but data.objective predicts only classes"


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A measurement of a model. A config may set its fields: `dict(name="probe", examples=64)`."""

    name: ClassVar[str]  # the registered name, by which a config selects the evaluator
    in_training: ClassVar[bool] = True  # measure during training, too, not just in `evaluate`
    metric_prefixes: ClassVar[tuple[str, ...]] = ()  # besides `name`, as in test/context/...
    kinds: ClassVar[Mapping[str, Kind]] = {}  # part of a name -> unit, direction (units.py)
    profiles: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # figures, as in lab/profiles.py

    def error(self, problem: str) -> UserError:
        """Returns an error about the evaluator's options."""
        return UserError(f"train.evaluators: {self.name}: {problem}")

    def why_not(self, task: Task) -> str | None:
        """Returns why the evaluator cannot measure an experiment ("requires ..."), or None."""
        return None

    def measured_text(self, task: Task) -> str:
        """Returns the part of the text that is measured, in words, or "" for all."""
        return ""

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields (name, value). Names begin with `name` or with one of `metric_prefixes`."""
        raise NotImplementedError


class OneBatch(Evaluator):
    """An evaluator that measures one batch."""

    def measured_text(self, task):
        return f"one batch of {count(task.data.batch_size, 'sequence')}"


def measure(subject: Subject, snapshot: Snapshot, in_training: bool) -> dict[str, float | str]:
    """Returns the metrics and texts of all evaluators, or of those that run `in_training`."""
    metrics: dict[str, float | str] = {}
    for spec in subject.config.train.evaluators:
        evaluator = EVALUATORS.build(spec)
        if evaluator.in_training or not in_training:
            metrics |= evaluator.measure(subject, snapshot)
    return metrics


def measures(specs, metric: str):
    """Returns the evaluator that yields a metric such as test/context/000128, or None."""
    part, evaluators = f"{metric}/".split("/")[1], map(EVALUATORS.build, specs)
    return next((x for x in evaluators if part in (x.name, *x.metric_prefixes)), None)
