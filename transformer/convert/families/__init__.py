"""Families of Transformers. Each module lists its families in `FAMILIES`."""
