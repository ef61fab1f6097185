"""Training objectives, with one family of objectives per file (base.py defines the interface)."""

from transformer.registry import Registry

OBJECTIVES = Registry("data.objective", __name__)
