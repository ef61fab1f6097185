"""The ablation laboratory: sweeps, what makes arms comparable, comparison, report."""
