"""Runs: run directory, checkpoints, resumption, training loop, metrics and evaluation."""
