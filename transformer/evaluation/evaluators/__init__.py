"""Evaluators: measurements of a run beyond its loss, one per file. base.py is their interface."""

import dataclasses

from transformer.registry import Registry


@dataclasses.dataclass(frozen=True)
class Kind:
    """The properties of a metric.

    `unit` is for display. `higher` is true if larger values are better. `of_tokens` is true if the
    value depends on the tokenizer.
    """

    unit: str
    higher: bool
    of_tokens: bool


EVALUATORS = Registry("train.evaluators", __name__)
