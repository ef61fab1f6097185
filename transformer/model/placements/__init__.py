"""Norm placements: where the norms of a sublayer are. Each placement is one small class."""
