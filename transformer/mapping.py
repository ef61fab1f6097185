"""Conversion of configs to nested mappings, as in config.json, and back."""

import ast
import dataclasses
import typing
import warnings
from collections.abc import Mapping

from transformer.checks import Choice, table_of
from transformer.errors import UserError, nearest


def from_mapping(cls, values: Mapping, path: str = "", root: type | None = None):
    """Builds the dataclass `cls` from a nested mapping. `path` precedes field names in errors.
    `root` is searched for a misplaced field. Raises UserError for unknown keys and wrong types."""
    values, root = to_mapping(values), root or cls
    if not isinstance(values, Mapping):
        raise UserError(f"{path.rstrip('.') or 'config'}: expected {table_of(cls)}, got {values!r}")
    fields = typing.get_type_hints(cls)
    if unknown := [key for key in values if key not in fields]:
        raise UserError(f"{path}{unknown[0]}: no such field; {way_out(unknown[0], fields, root)}")
    configs = {key for key in values if dataclasses.is_dataclass(fields[key])}
    inner = lambda key: from_mapping(fields[key], values[key], f"{path}{key}.", root)
    return cls(**{key: inner(key) if key in configs else x for key, x in values.items()})


def way_out(key: str, fields: Mapping, root: type) -> str:
    """Returns a hint for an unknown field: its place in `root`, or else the nearest of `fields`."""
    paths, configs = [], [("", root)]
    for path, kind in configs:  # grows while it is iterated: configs are nested
        inner = _fields(kind)
        configs += [(f"{path}{x}.", of) for x, of in inner.items() if dataclasses.is_dataclass(of)]
        paths += [f"{path}{key}"] if key in inner else []
    return f"use {' or '.join(paths)}" if paths else nearest(key, fields)


def to_mapping(value):
    """Returns a config or a ConfigDict as nested dicts and lists, ready for JSON."""
    if dataclasses.is_dataclass(value):
        return {f.name: to_mapping(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "items"):
        return {key: to_mapping(item) for key, item in value.items()}
    return [to_mapping(item) for item in value] if isinstance(value, (tuple, list)) else value


def apply_overrides(config, overrides: Mapping[str, str]):
    """Returns the config with dotted fields changed. The result is validated as usual."""
    return build(type(config), to_mapping(config), overrides)


def build(cls, tree: dict, overrides: Mapping[str, object], prefix: str = "--config."):
    """Builds the dataclass `cls` from nested dicts and overrides like {"model.d_model": "256"}.
    `prefix` precedes their fields in errors."""
    for key, value in overrides.items():
        override(tree, key, value, cls, prefix)
    return from_mapping(cls, tree)


def override(tree: dict, dotted: str, value, root: type, prefix: str = "--config.") -> None:
    """Sets the field `dotted` in the nested dicts of a config, to a parsed value if it is a string.
    `prefix` precedes the field in errors. Raises UserError for an unknown field."""
    cls, *parents, last = root, *dotted.split(".")
    node, path = tree, ""
    for key in parents:
        path += key
        fields = {key: Choice} if cls is Choice else _fields(cls)
        if key not in fields:
            if not fields:
                raise UserError(f"{prefix}{dotted}: {path} has no fields; set the whole list")
            raise UserError(f"{prefix}{path}: no such field; {way_out(key, fields, root)}")
        if cls is Choice and key == "name":
            raise UserError(f"{prefix}{dotted}: {path} is a single value without fields")
        default = {} if cls is Choice else {f.name: f.default for f in dataclasses.fields(cls)}[key]
        cls = fields[key]
        if cls is Choice and isinstance(chosen := node.get(key, default), str):
            node[key] = {"name": chosen}  # "rotary" becomes dict(name="rotary", ...)
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise UserError(f"{prefix}{dotted}: {path} is a single value without fields")
        path += "."
    fields = _fields(cls)
    if fields and last not in fields:
        raise UserError(f"{prefix}{dotted}: no such field; {way_out(last, fields, root)}")
    if dataclasses.is_dataclass(fields.get(last)):
        hint = f"set one of them: {dotted}.{next(iter(typing.get_type_hints(fields[last])))}"
        raise UserError(f"{prefix}{dotted}: a mapping of fields; {hint}")
    node[last] = _parse(value, fields.get(last)) if isinstance(value, str) else to_mapping(value)


def _fields(cls) -> dict[str, type]:
    return typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}


def _parse(text: str, kind):
    if kind is str or (text.lower() == "none" and type(None) not in typing.get_args(kind)):
        return text
    if typing.get_origin(kind) is tuple and not text.startswith(("(", "[")):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return tuple(_parse(part, typing.get_args(kind)[0]) for part in parts)
    spelled = {"true": "True", "false": "False", "none": "None"}.get(text.lower(), text)
    try:
        with warnings.catch_warnings(action="ignore"):  # of text such as "1if" or invalid escapes
            return ast.literal_eval(spelled)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text  # not a literal, or nested too deeply for Python's parser
