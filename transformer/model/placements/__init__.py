"""Norm placements: where a sublayer's norms stand, and what goes with them. Each is one small class."""

from transformer.model.placements.base import PLACEMENTS, Placement

__all__ = ["PLACEMENTS", "Placement"]
