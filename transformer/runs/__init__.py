"""Runs: the run directory, checkpoints, resumption, the loop, metrics, and judging a run."""
