"""Limits of numbers in configs. They are part of a field's type:

    num_heads: Size = 8
    dropout: Annotated[Rate, at_most(0.9999, "almost nothing would be kept")] = 0.0

checks.py applies them to the values that a config sets. None has no limits, and is written inside:
`Annotated[int | None, at_least(1)]`."""

import math
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np

from transformer.errors import UserError

Limit = Callable[[str, Any], None]  # limit(path, value) raises UserError

LARGEST = 2**31 - 1  # the largest integer in a config: the maximum of int32


def _number(is_large_enough: Callable[[Any], bool], too_small: str) -> Limit:
    def limit(path: str, value) -> None:
        if not is_large_enough(value):  # also NaN
            raise UserError(f"{path}: {value} {too_small}")
        if not math.isfinite(value):
            raise UserError(f"{path}: {value} is not finite")
        if isinstance(value, int) and value > LARGEST:
            raise UserError(f"{path}: {value} is too large; at most {LARGEST:,}")

    return limit


def at_least(minimum) -> Limit:
    """Numbers that are finite, >= minimum and, if integers, <= LARGEST."""
    return _number(lambda value: value >= minimum, f"is too small; at least {minimum}")


def at_most(maximum, why: str = "") -> Limit:
    """Numbers that do not exceed `maximum`. `why` is the reason, for the error."""

    def limit(path: str, value) -> None:
        if value > maximum:
            reason = why and f": {why}"
            raise UserError(f"{path}: {value:,} is too large; at most {maximum:,}{reason}")

    return limit


def _in_unit_interval(path: str, value) -> None:
    if not 0 <= value < 1 or np.float32(value) == 1:
        rounded = ", also in float32" if 0 <= value < 1 else ""
        raise UserError(f"{path}: {value} must lie in [0, 1){rounded}")


POSITIVE = _number(lambda value: value > 0, "must be more than 0")

Size = Annotated[int, at_least(1)]
Count = Annotated[int, at_least(0)]
Positive = Annotated[float, POSITIVE]
NonNegative = Annotated[float, at_least(0)]
Rate = Annotated[float, _in_unit_interval]
