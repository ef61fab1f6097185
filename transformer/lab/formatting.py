"""Formats means, intervals and p values as text."""

import functools
import math

from transformer.lab.statistics import Difference, Mean


def number(x: float, half: float = math.nan, sign: str = "") -> str:
    """Formats a number, with its sign if `sign` is "+", and with the decimals that show two digits
    of the half-width. Without an interval: three decimals, or two digits of a small x."""
    if math.isnan(x):
        return "-"
    scale = half if math.isfinite(half) and half > 0 else min(abs(x) or 0.01, 0.01)
    return f"{x:{sign},.{max(0, 1 - math.floor(math.log10(scale)))}f}"


signed = functools.partial(number, sign="+")


def spell(value: Mean) -> str:
    """Formats `mean ± half-width of the 95 % interval`, or `mean [low, high]` if it is clipped."""
    if value.count < 2:
        return f"{number(value.mean)} (one seed)" if value.count else "-"
    shown = max(value.half, abs(value.mean) / 10**4) if value.half else 0.0  # six digits or fewer
    if value.high - value.low < (2 - 1e-9) * value.half:
        ends = ", ".join(number(x, shown) for x in (value.low, value.high))
        return f"{number(value.mean, shown)} [{ends}]"
    return f"{number(value.mean, shown)} ± {number(value.half, shown)}"


def p_value(p: float) -> str:
    """Formats a p value: `p = 0.012`, for example."""
    if math.isnan(p):
        return "p undefined"
    if p < 0.001:
        return "p < 0.001"
    return f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def both_p(versus: Difference) -> str:
    """Formats the p value of a comparison and, if it differs, the corrected one."""
    return f"{p_value(versus.alone)}, corrected " * (versus.alone != versus.p) + p_value(versus.p)


def spell_range(value: Mean, abs_value: bool = False) -> str:
    """Formats the bounds of an interval, with signs or as absolute values."""
    low, high = sorted((abs(value.low), abs(value.high))) if abs_value else (value.low, value.high)
    spell_number = number if abs_value else signed
    return f"{spell_number(low, value.half)}, {spell_number(high, value.half)}"
