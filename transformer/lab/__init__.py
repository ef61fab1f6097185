"""Ablation studies: runs the arms of a sweep, checks that they are comparable, reports results."""
