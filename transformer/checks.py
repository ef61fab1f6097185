"""What several configs check, each with one line that names the field, the value and the way out."""

import dataclasses
import functools
import math
from collections.abc import Mapping

from flax.core import FrozenDict

from transformer.errors import UserError, look_up, nearest


def one_of(field: str, value, names) -> None:
    """`value` is one of `names`."""
    if value not in names:
        raise UserError(f"{field}: no {plain(value)!r}; {nearest(str(value), names)}")


LARGEST = 2**31 - 1
"""Of a whole number in a config: what an int32 holds."""


def at_least(section: str, config, minimum, *fields: str) -> None:
    """Each of these fields of `config` is a number, not under `minimum` and not beyond all bounds."""
    for field in fields:
        value = getattr(config, field)
        if not value >= minimum:  # a NaN is not
            raise UserError(f"{section}.{field}: {value} is too small; at least {minimum}")
        _bounded(section, field, value)


def positive(section: str, config, *fields: str) -> None:
    """Each of these fields of `config` is a number over zero."""
    for field in fields:
        value = getattr(config, field)
        if not value > 0:
            raise UserError(f"{section}.{field}: {value} must be more than 0")
        _bounded(section, field, value)


def _bounded(section: str, field: str, value) -> None:
    if not math.isfinite(value) or (isinstance(value, int) and value > LARGEST):
        raise UserError(
            f"{section}.{field}: {value} is too large"
            + (f"; at most {LARGEST:,}" if isinstance(value, int) else "; a finite number")
        )


def in_unit_interval(section: str, config, *fields: str) -> None:
    """Each of these fields of `config` is a share under one."""
    for field in fields:
        if not traced(getattr(config, field)) and not 0 <= getattr(config, field) < 1:
            raise UserError(f"{section}.{field}: {getattr(config, field)} must lie in [0, 1)")


def strict(cls):
    """An unknown keyword is a UserError with the nearest name."""
    init, names = cls.__init__, [f.name for f in dataclasses.fields(cls)]

    @functools.wraps(init)
    def checked(self, *args, **fields):
        for name in fields:
            if name not in names:
                raise UserError(f"{cls.__name__}.{name}: no such field; {nearest(name, names)}")
        init(self, *args, **fields)

    cls.__init__ = checked
    return cls


def plain(value):
    """A FrozenDict as the dict it prints as in one line."""
    return value.unfreeze() if isinstance(value, FrozenDict) else value


def build_choice(field: str, table: dict[str, type], spec: str | Mapping, is_option=lambda f: True):
    """What a config chooses from a table of dataclasses: `"rotary"`, or `dict(name="rotary", theta=500_000.0)`."""
    given = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = given.pop("name", "")
    if not isinstance(name, str):
        raise UserError(f"{field}.name: {plain(name)!r} is not a name; {nearest(str(name), table)}")
    cls = look_up(table, name, field)
    options = {f.name: f.default for f in dataclasses.fields(cls) if is_option(f)}
    for key, value in given.items():
        if key not in options:
            way_out = nearest(key, options) if options else "it takes no options"
            raise UserError(f"{field}: {name!r} has no option {key!r}; {way_out}")
        kind = type(options[key])
        if isinstance(value, Mapping) and kind is str:  # a choice within a choice
            given[key] = FrozenDict(value)
        elif isinstance(value, list) and kind is tuple:
            given[key] = tuple(value)
        elif not isinstance(value, (int, float) if kind is float else kind) or isinstance(
            value, bool
        ) != (kind is bool):
            raise UserError(f"{field}.{key}: expected {kind.__name__}, got {plain(value)!r}")
        elif kind is float and not math.isfinite(value):
            raise UserError(f"{field}.{key}: {value} is no finite number")
    return cls(**given)


def is_zero(number) -> bool:
    """Whether it is known to be 0."""
    return not traced(number) and number == 0


def traced(number) -> bool:
    """Whether it is none of Python's but an argument of a program: a number in which the runs of one program differ (lab/together.py)."""
    return not isinstance(number, (int, float))
