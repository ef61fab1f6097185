"""Position schemes: one object each, known to the rest of the code only by its hooks. A new scheme is a new small file."""

from transformer.model.positions.base import SCHEMES, Pair, Position, StackFacts, build

__all__ = ["SCHEMES", "Pair", "Position", "StackFacts", "build"]
