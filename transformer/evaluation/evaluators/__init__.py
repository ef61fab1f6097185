"""Evaluators: measurements of a run beyond its loss. base.py is their interface."""

import dataclasses
import math

from transformer.registry import Registry


@dataclasses.dataclass(frozen=True)
class Kind:
    """The properties of a metric."""

    unit: str  # for display
    higher: bool | None  # larger values are better; None: unknown
    of_tokens: bool  # the value depends on the tokenizer
    bounds: tuple[float, float] = (-math.inf, math.inf)  # the least and greatest possible value


EVALUATORS = Registry("train.evaluators", __name__)
