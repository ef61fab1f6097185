"""Evaluators: measurements of a run beyond its loss, one per file. base.py is their interface."""

from transformer.registry import Registry

EVALUATORS = Registry("train.evaluators", __name__)
