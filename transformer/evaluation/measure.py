"""Runs the evaluators in `train.evaluators`."""

from transformer.evaluation.evaluators import EVALUATORS
from transformer.evaluation.subject import Snapshot, Subject


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
    part = f"{metric}/".split("/")[1]
    for evaluator in map(EVALUATORS.build, specs):
        if part in (evaluator.name, *evaluator.metric_prefixes):
            return evaluator
    return None
