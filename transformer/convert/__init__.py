"""Weights in and out: Hugging Face directories. Foreign names live in this folder alone, a table per family."""

from transformer.convert.hf import FAMILIES, load_hf, open_hf, save_hf

__all__ = ["FAMILIES", "load_hf", "open_hf", "save_hf"]
