"""Position schemes: how a model represents the order of tokens.

The rest of the code uses a scheme only through the hooks of `Position`. To add a scheme, add a file
to this package.
"""

from transformer.model.positions.base import SCHEMES, Pair, Position, StackFacts, Terms, build

__all__ = ["SCHEMES", "Pair", "Position", "StackFacts", "Terms", "build"]
