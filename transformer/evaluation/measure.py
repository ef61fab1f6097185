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
    evaluators = map(EVALUATORS.build, specs)
    return next((x for x in evaluators if part in (x.name, *x.metric_prefixes)), None)
