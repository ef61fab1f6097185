"""What a run can be measured by beside its loss; chosen by `train.evaluators`, and nothing of it is computed where it is not asked for.

Each takes its options (kinds.py), a Subject and what it is At, and yields (name, number). Names end with a layer or a place where there
are several.
"""

from collections.abc import Callable
from typing import Any

from transformer.evaluation import kinds
from transformer.evaluation.depth import depth_profile
from transformer.evaluation.inside import attention, logit_lens, order
from transformer.evaluation.losses import extrapolation, loss_by_position, loss_with
from transformer.evaluation.probes import probe
from transformer.evaluation.subject import At, Found, Subject
from transformer.evaluation.translation import bleu_by_length

EVALUATORS: dict[type, Callable[[Any, Subject, At], Found]] = {
    kinds.LossByPosition: loss_by_position,
    kinds.Extrapolation: extrapolation,
    kinds.LossWith: loss_with,
    kinds.DepthProfile: depth_profile,
    kinds.Attention: attention,
    kinds.LogitLens: logit_lens,
    kinds.Order: order,
    kinds.Probe: probe,
    kinds.BleuByLength: bleu_by_length,
}


def measure(subject: Subject, at: At, during: bool) -> dict[str, float]:
    """All that the config asks for; in training, what is asked for then."""
    found: dict[str, float] = {}
    for spec in subject.config.train.evaluators:
        kind = kinds.build(spec)
        if kind.during or not during:
            found |= EVALUATORS[type(kind)](kind, subject, at)
    return found
