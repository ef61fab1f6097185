"""What a metric counts, and which way is better, by its name."""

import dataclasses

from transformer.errors import UserError


@dataclasses.dataclass(frozen=True)
class Kind:
    """`unit` for a person; whether `higher` is better; whether other tokens (another tokenizer) would give another number."""

    unit: str
    higher: bool
    of_tokens: bool


KINDS = {
    **dict.fromkeys(
        ("loss", "loss_with", "loss_by_position", "extrapolation", "extrapolation_sliding"),
        Kind("nats per token", False, True),
    ),
    "perplexity": Kind("per token", False, True),
    "accuracy": Kind("of tokens", True, True),
    "agrees": Kind("of tokens", True, True),
    "tokens": Kind("of tokens", True, True),  # probe/tokens
    "bits_per_byte": Kind("bits per byte", False, False),
    "word_perplexity": Kind("per word", False, False),
    "exact": Kind("of answers", True, False),
    **dict.fromkeys(("bleu", "bleu_one_reference", "bleu_by_length"), Kind("BLEU", True, False)),
    **dict.fromkeys(("chrf", "chrf_one_reference"), Kind("chrF", True, False)),
    "labels_loss": Kind("nats per label", False, False),
    "labels_accuracy": Kind("of labels", True, False),
    "kl": Kind("nats", False, True),
}
"""By a part of the name: test/bleu, test/lens/loss/003."""

OF_LABELS = {
    "loss": KINDS["labels_loss"],
    "accuracy": KINDS["labels_accuracy"],
    "perplexity": Kind("per label", False, False),
}
"""Where no tokens are asked for, as of a classifier."""


def kind(metric: str, asks_for_tokens: bool = True) -> Kind | None:
    """Of a metric, by the last part of its name that says; None: not known."""
    known = KINDS if asks_for_tokens else KINDS | OF_LABELS
    return next((known[part] for part in reversed(metric.split("/")) if part in known), None)


def of_tokens(metric: str, asks_for_tokens: bool = True) -> bool:
    """Whether other tokens would give another number."""
    found = kind(metric, asks_for_tokens)
    return found is not None and found.of_tokens


def unit(metric: str, asks_for_tokens: bool = True) -> str:
    """What a number of this name counts; "" where that is not known."""
    found = kind(metric, asks_for_tokens)
    return found.unit if found else ""


def higher_is_better(metric: str, said: bool | None) -> bool:
    """As it is `said`, or else as the name says. Raises UserError where neither says."""
    found = kind(metric)
    if said is None and found is None:
        raise UserError(
            f"sweep: metric {metric!r}: say which way is better: Sweep(..., higher_is_better=True) or False; compare --higher-is-better or --lower-is-better"
        )
    return found.higher if said is None else said
