"""Units, directions and bounds of metrics, by name."""

import math

from transformer.errors import UserError
from transformer.evaluation.evaluators import EVALUATORS, Kind

_LOSSES = ("loss", "loss_with", "loss_by_position", "extrapolation", "extrapolation_sliding")

KINDS = {
    **dict.fromkeys(_LOSSES, Kind("nats per token", False, True)),
    "perplexity": Kind("per token", False, True),
    # "tokens" is of synthetic tasks: probe/tokens
    **dict.fromkeys(("accuracy", "agrees", "tokens"), Kind("of tokens", True, True)),
    "bits_per_byte": Kind("bits per byte", False, False), "exact": Kind("of answers", True, False),
    "word_perplexity": Kind("per word", False, False), "kl": Kind("nats", False, True),
    **dict.fromkeys(("bleu", "bleu_one_reference", "bleu_by_length"), Kind("BLEU", True, False)),
    **dict.fromkeys(("chrf", "chrf_one_reference"), Kind("chrF", True, False)),
    "labels_loss": Kind("nats per label", False, False),
    "labels_accuracy": Kind("of labels", True, False),
}  # fmt: skip
"""Part of a metric's name -> kind. Examples of names are test/bleu and test/lens/loss/003."""

OF_LABELS = {
    "loss": KINDS["labels_loss"], "accuracy": KINDS["labels_accuracy"],
    "perplexity": Kind("per label", False, False),
}  # fmt: skip
"""The kinds that apply instead if no tokens are predicted, as by a classifier."""

UNKNOWN = Kind("", None, False)  # of other metrics

BOUNDS = {
    **dict.fromkeys(
        (*_LOSSES, "kl", "perplexity", "bits_per_byte", "word_perplexity", "context", "entropy",
         "distance", "gradient", "stream", "branch", "update"), (0.0, math.inf)),
    **dict.fromkeys(
        ("accuracy", "agrees", "tokens", "exact", "sink", "previous", "induction"), (0.0, 1.0)),
    **dict.fromkeys(("bleu", "bleu_one_reference", "bleu_by_length"), (0.0, 100.0)),
    **dict.fromkeys(("chrf", "chrf_one_reference"), (0.0, 100.0)),
}  # fmt: skip
"""Part of a metric's name -> its least and greatest possible value."""


def bounds(metric: str) -> tuple[float, float]:
    """Returns the bounds of a metric, from the last known part of its name."""
    parts = (BOUNDS[part] for part in reversed(metric.split("/")) if part in BOUNDS)
    return next(parts, (-math.inf, math.inf))


def kind(metric: str, predicts_tokens: bool = True) -> Kind:
    """Returns the kind of a metric, from the last known part of its name, or UNKNOWN."""
    kinds = {part: x for cls in EVALUATORS.values() for part, x in cls.kinds.items()} | KINDS
    kinds |= {} if predicts_tokens else OF_LABELS
    return next((kinds[part] for part in reversed(metric.split("/")) if part in kinds), UNKNOWN)


def higher_is_better(metric: str, declared: bool | None) -> bool:
    """Returns the declared direction, or that of the metric's name. Raises UserError if unknown."""
    higher = kind(metric).higher if declared is None else declared
    if higher is None:
        file = "set Sweep(..., higher_is_better=True) or False"
        way_out = f"{file}, or pass --higher-is-better or --lower-is-better to compare"
        raise UserError(f"sweep: metric {metric!r}: its direction is unknown; {way_out}")
    return higher
