"""What the model is asked to learn, one family of objectives a file. A new one is a class with `@register("name")`."""

from transformer.checks import build_choice
from transformer.data.objectives import (
    classification,
    denoising,
    language_model,
    masked_lm,
    seq2seq,
)
from transformer.data.objectives.base import OBJECTIVES, Draw, Objective, Rows, Segment, pack

__all__ = ["OBJECTIVES", "Draw", "Objective", "Rows", "Segment", "build", "pack"]


def build(spec) -> Objective:
    """The objective of a config: `"causal_lm"`, or `dict(name="masked_lm", rate=0.3)`. Raises UserError."""
    return build_choice("data.objective", OBJECTIVES, spec)
