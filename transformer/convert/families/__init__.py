"""Families of Transformers, one or several to a file: each module lists its own in FAMILIES."""
