"""Token mixers: the sublayer in which tokens read each other. One object each, known to the rest of the code only by its hooks.

A new mixer is a new file in this folder.
"""

from transformer.model.mixers.base import MIXERS, Context, Mixer

__all__ = ["MIXERS", "Context", "Mixer"]
