"""Update rules, which turn a gradient into the direction of a step (see base.py)."""

from transformer.registry import Registry

OPTIMIZERS = Registry("optimizer.name", __name__)
