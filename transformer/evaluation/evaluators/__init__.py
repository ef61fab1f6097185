"""What a run may be measured by beside its loss: one evaluator to a file (base.py says what one is)."""

from transformer.registry import Registry

EVALUATORS = Registry("train.evaluators", __name__)
