"""Token mixers, used only through the interface of `Mixer`. To add one, add a file here."""

from transformer.model.mixers.base import MIXERS, Context, Mixer

__all__ = ["MIXERS", "Context", "Mixer"]
