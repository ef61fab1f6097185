"""What `train.evaluators` asks for."""

from transformer.evaluation.evaluators import EVALUATORS
from transformer.evaluation.subject import At, Subject


def measure(subject: Subject, at: At, during: bool) -> dict[str, float]:
    """All that the config asks for; in training, what is asked for then."""
    found: dict[str, float] = {}
    for spec in subject.config.train.evaluators:
        evaluator = EVALUATORS.build(spec)
        if evaluator.during or not during:
            found |= evaluator.measure(subject, at)
    return found


def measures(specs, metric: str):
    """Which of these evaluators a metric comes from: test/context/000128; None: none of them."""
    part = f"{metric}/".split("/")[1]
    built = map(EVALUATORS.build, specs)
    return next((one for one in built if part in (one.name, *one.others)), None)
