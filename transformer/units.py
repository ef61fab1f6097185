"""Units, directions and bounds of metrics, by name."""

import math

from transformer.errors import UserError
from transformer.evaluation.evaluators import EVALUATORS, Kind

_LOSSES = ("loss", "loss_with", "loss_by_position", "extrapolation", "extrapolation_sliding")
_SIZES = ("context", "entropy", "distance", "gradient", "stream", "branch", "update")
_POSITIVE, _SHARE, _SCORE = (0.0, math.inf), (0.0, 1.0), (0.0, 100.0)

KINDS = {
    **dict.fromkeys(_LOSSES, Kind("nats per token", False, True, _POSITIVE)),
    "perplexity": Kind("per token", False, True, _POSITIVE),
    # "tokens" is of synthetic tasks: probe/tokens
    **dict.fromkeys(("accuracy", "agrees", "tokens"), Kind("of tokens", True, True, _SHARE)),
    "bits_per_byte": Kind("bits per byte", False, False, _POSITIVE),
    "exact": Kind("of answers", True, False, _SHARE), "kl": Kind("nats", False, True, _POSITIVE),
    "word_perplexity": Kind("per word", False, False, _POSITIVE),
    **dict.fromkeys(
        ("bleu", "bleu_one_reference", "bleu_by_length"), Kind("BLEU", True, False, _SCORE)),
    **dict.fromkeys(("chrf", "chrf_one_reference"), Kind("chrF", True, False, _SCORE)),
    "labels_loss": Kind("nats per label", False, False, _POSITIVE),
    "labels_accuracy": Kind("of labels", True, False, _SHARE),
    **dict.fromkeys(_SIZES, Kind("", None, False, _POSITIVE)),
    **dict.fromkeys(("sink", "previous", "induction"), Kind("", None, False, _SHARE)),
}  # fmt: skip
"""Part of a metric's name -> kind. Examples of names are test/bleu and test/lens/loss/003."""

OF_LABELS = {
    "loss": KINDS["labels_loss"], "accuracy": KINDS["labels_accuracy"],
    "perplexity": Kind("per label", False, False, _POSITIVE),
}  # fmt: skip
"""The kinds that apply instead if no tokens are predicted, as by a classifier."""

UNKNOWN = Kind("", None, False)  # of other metrics


def kind(metric: str, predicts_tokens: bool = True) -> Kind:
    """Returns the kind of a metric, from the last known part of its name, or UNKNOWN."""
    kinds = KINDS | {part: x for cls in EVALUATORS.values() for part, x in cls.kinds.items()}
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
