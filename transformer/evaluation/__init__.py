"""Evaluation: loss, translation scores, and evaluators that yield (name, value)."""
