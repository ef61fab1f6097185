"""Evaluators, each yielding (name, value)."""
