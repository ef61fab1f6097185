"""Optimizer, state, step, loop, checkpoints, metrics."""
