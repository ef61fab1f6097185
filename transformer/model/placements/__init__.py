"""Norm placements: where the norms of a sublayer are. Each placement is one small class."""

from transformer.model.placements.base import PLACEMENTS, Placement

__all__ = ["PLACEMENTS", "Placement"]
