"""Update rules, one to a file: what turns a gradient into the direction of a step (base.py says what one is)."""

from transformer.registry import Registry

OPTIMIZERS = Registry("optimizer.name", __name__)
