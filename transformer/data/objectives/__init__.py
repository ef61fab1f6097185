"""What a model is asked to learn: one family of objectives to a file (base.py says what one is)."""

from transformer.registry import Registry

OBJECTIVES = Registry("data.objective", __name__)
