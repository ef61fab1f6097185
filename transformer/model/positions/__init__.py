"""Position schemes, used only through the hooks of `Position`. To add one, add a file here."""

from transformer.model.positions.base import SCHEMES, Pair, Position, StackFacts, Terms, build

__all__ = ["SCHEMES", "Pair", "Position", "StackFacts", "Terms", "build"]
