"""Seeded fuzzers.

Each module has `cases(seed)`, an endless iterator of cases, and `check(case)`, which raises
AssertionError with a description that reproduces the case.
"""
