"""Validation that all configs share. Each error is one line with the field, the value and a fix.

`@strict(section, effects)` turns a class into a config, whose types limit its values (limits.py)"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from flax.core import FrozenDict

from transformer.errors import UserError, nearest

Choice = str | FrozenDict  # a name, or a mapping with `name` and the options of the named class
type_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def one_of(field: str, value, names) -> None:
    """Raises UserError unless `value` is one of `names`."""
    if value not in names:
        raise UserError(f"{field}: unknown value {plain(value)!r}; {nearest(str(value), names)}")


class Effect(typing.NamedTuple):
    """The condition under which fields have an effect. `when(config)` returns whether `fields` have
    an effect. `needs` describes the condition as settings, such as "model.norm='layernorm'", or
    gives the reason: "because ...". Fields of nested configs are dotted."""

    fields: tuple[str, ...]
    needs: str
    when: Callable[[Any], bool]


def refuse_without_effect(section: str, config, effects: tuple[Effect, ...], arguments) -> None:
    """Raises UserError for a field without effect that is set in the constructor's `arguments`,
    unless its value is the default or that of `config.resolved` (field -> value)."""
    resolved = getattr(config, "resolved", {})
    for effect in (x for x in effects if not x.when(config)):
        for name in effect.fields:
            *parents, last = name.split(".")
            holder = functools.reduce(getattr, parents, config)
            value, default = getattr(holder, last), type(holder).__dataclass_fields__[last].default
            value = value if "." in name else arguments.get(name, default)
            if value in (default, resolved.get(name, default)):
                continue
            path = f"{section}.{name}" if section else name
            reason = f"{path}: {plain(value)!r} has no effect"
            if effect.needs.startswith("because "):
                raise UserError(f"{reason}, {effect.needs}; leave it out")
            way_out = f"set that, or leave {path} at {plain(resolved.get(name, default))!r}"
            raise UserError(f"{reason} without {effect.needs}; {way_out}")


@typing.dataclass_transform(frozen_default=True)
def strict(section: str, effects: tuple[Effect, ...] = ()):
    """Returns a decorator that makes a class a frozen dataclass, the `section` of an experiment.

    Its constructor raises UserError for an unknown field (with the nearest name), a missing field,
    a field given twice, a value of another type than annotated, a float that float32 cannot hold,
    and a field without effect. Integers may stand for floats, lists for tuples, as in JSON."""

    def decorate(cls):
        cls = dataclasses.dataclass(frozen=True)(cls)
        init = cls.__init__
        fields = {field.name: field for field in dataclasses.fields(cls)}
        path = section and f"{section}."

        @functools.wraps(init)
        def checked(self, *args, **values):
            if len(args) > len(fields):
                problem = f"{len(args)} values for {len(fields)} fields"
                raise UserError(f"{cls.__name__}: {problem}; pass them as FIELD=VALUE")
            positional = dict(zip(fields, args, strict=False))
            if twice := [name for name in positional if name in values]:
                raise UserError(f"{path}{twice[0]}: given twice, also by position; leave one out")
            if unknown := [name for name in values if name not in fields]:
                way_out = nearest(unknown[0], fields)
                raise UserError(f"{cls.__name__}.{unknown[0]}: no such field; {way_out}")
            values = positional | values
            for name, field in fields.items():
                if field.default is dataclasses.MISSING and name not in values:
                    is_section = dataclasses.is_dataclass(type_hints(cls)[name])
                    hint = f"; add the section config.{name} = dict(...)" if is_section else ""
                    raise UserError(f"{path}{name}: must be set{hint}")
            values = {k: coerce(x, type_hints(cls)[k], path + k) for k, x in values.items()}
            init(self, **values)
            for name in fields:
                in_float32(path + name, getattr(self, name))
            refuse_without_effect(section, self, effects, values)

        cls.__init__ = checked
        return cls

    return decorate


def coerce(value, kind, path: str):
    """Converts `value` to the annotated type `kind`. Raises UserError if it does not fit, or if it
    exceeds the limits of an Annotated type. None has no limits."""
    if typing.get_origin(kind) is Annotated:
        value = coerce(value, kind.__origin__, path)
        for limit in kind.__metadata__ if value is not None else ():
            limit(path, value)
        return value
    if isinstance(value, np.generic):
        value = value.item()
    _check_literal(value, path)
    if dataclasses.is_dataclass(kind):
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise UserError(f"{path}: expected {table_of(kind)}, got {value!r}")
        return kind(**value)
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for option in options:
        origin = typing.get_origin(option) or option
        if option is type(None) and value is None:
            return None
        if origin is tuple and isinstance(value, (tuple, list)):
            return tuple(coerce(v, typing.get_args(option)[0], path) for v in value)
        if origin is FrozenDict and isinstance(value, Mapping):
            if str in options and isinstance(value.get("name"), str) and len(value) == 1:
                return value["name"]  # a choice without options
            return _frozen(value)
        if origin is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if origin is Literal:
            one_of(path, value, typing.get_args(option))
            return value
        if origin in (int, bool, str) and type(value) is origin:
            return value
        if origin is int and isinstance(value, float) and value.is_integer():
            return int(value)
    names = " or ".join(map(_type_name, options))
    raise UserError(f"{path}: expected {names}, got {plain(value)!r}")


def in_float32(path: str, value) -> None:
    """Raises UserError for a number that is infinite, 0 or subnormal (flushed to 0) in float32."""
    if isinstance(value, float) and value and math.isfinite(value):
        smallest, largest = (float(getattr(np.finfo(np.float32), name)) for name in ("tiny", "max"))
        if not smallest <= abs(value) <= largest:
            rounded = "0" if abs(value) < 1 else "infinite"
            way_out = f"take a number between {smallest:.1e} and {largest:.1e}"
            raise UserError(f"{path}: {value} is {rounded} in float32; {way_out}")


def table_of(cls) -> str:
    """Describes the mapping that a config expects, for an error message."""
    return f"a mapping of fields, dict({next(iter(type_hints(cls)))}=...)"


def _check_literal(value, path: str) -> None:
    """Raises UserError if `value` is or contains a set, or an integer that a float cannot hold.
    Sets cannot be hashed. Python does not print the largest integers, even in an error message."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_literal(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for item in value:
            _check_literal(item, path)
    elif isinstance(value, (set, frozenset)):
        raise UserError(f"{path}: a set, {value!r}; write a list")
    elif isinstance(value, int) and value.bit_length() > 1023:
        raise UserError(f"{path}: an integer of {value.bit_length():,} bits is too large")


def _frozen(value):
    """Makes a value hashable: mappings become FrozenDicts and lists become tuples, recursively."""
    if isinstance(value, Mapping):
        return FrozenDict({key: _frozen(item) for key, item in value.items()})
    value = value.item() if isinstance(value, np.generic) else value
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _type_name(option) -> str:
    names = {FrozenDict: "a mapping, {'name': ...}", tuple: "a list, (..., ...)"}
    names |= {str: "text", float: "a number", type(None): "None"}
    return names.get(typing.get_origin(option) or option, getattr(option, "__name__", str(option)))


def plain(value):
    """Converts a FrozenDict, or each in a tuple, to a dict, which prints on one line."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return value.unfreeze() if isinstance(value, FrozenDict) else value


def is_zero(number) -> bool:
    """Returns whether `number` is known to be 0. Traced numbers, which vary by run, never are."""
    return isinstance(number, (int, float)) and number == 0
