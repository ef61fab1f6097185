"""Runs the evaluators in `train.evaluators`."""

from transformer.evaluation.evaluators import EVALUATORS
from transformer.evaluation.subject import At, Subject


def measure(subject: Subject, at: At, during: bool) -> dict[str, float]:
    """Returns the metrics of the evaluators in the config.

    With `during`, only those evaluators run that are measured during training.
    """
    metrics: dict[str, float] = {}
    for spec in subject.config.train.evaluators:
        evaluator = EVALUATORS.build(spec)
        if evaluator.during or not during:
            metrics |= evaluator.measure(subject, at)
    return metrics


def measures(specs, metric: str):
    """Returns the evaluator that yields a metric such as test/context/000128, or None."""
    part = f"{metric}/".split("/")[1]
    evaluators = map(EVALUATORS.build, specs)
    return next(
        (evaluator for evaluator in evaluators if part in (evaluator.name, *evaluator.others)), None
    )
