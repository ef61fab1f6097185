"""Loads and saves models as Hugging Face directories. Names of Transformers' configs and tensors
occur only in this package, in one table per family."""

from transformer.convert.hf import FAMILIES, load_hf, open_hf, save_hf

__all__ = ["FAMILIES", "load_hf", "open_hf", "save_hf"]
