"""Token mixers: the sublayer that moves information between tokens.

The rest of the code uses a mixer only through the interface of `Mixer`. To add a mixer, add a file
to this package.
"""

from transformer.model.mixers.base import MIXERS, Context, Mixer

__all__ = ["MIXERS", "Context", "Mixer"]
