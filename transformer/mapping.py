"""Configs as nested mappings, and back: what a config.json holds."""

import ast
import dataclasses
import typing
import warnings
from collections.abc import Mapping

from transformer.checks import Choice, table_of
from transformer.errors import UserError, nearest


def from_mapping(cls, given: Mapping, path: str = "", root: type | None = None):
    """The dataclass `cls` from a (nested) mapping. `root` is the outermost dataclass, in which a
    misplaced field is looked up. Raises UserError for unknown keys and values of another type."""
    if isinstance(given, cls):
        return given
    given, root = thaw(given), root or cls
    if not isinstance(given, Mapping):
        raise UserError(f"{path.rstrip('.') or 'config'}: expected {table_of(cls)}, got {given!r}")
    fields = typing.get_type_hints(cls)
    for key in given:
        if key not in fields:
            raise UserError(f"{path}{key}: no such field; {way_out(key, fields, root)}")
    inner = lambda key, value: (
        from_mapping(fields[key], value, f"{path}{key}.", root)
        if dataclasses.is_dataclass(fields[key])
        else value
    )
    return cls(**{key: inner(key, value) for key, value in given.items()})


def way_out(key: str, fields: Mapping, root: type) -> str:
    """Where in `root` a field is that `fields` lack; if nowhere, the nearest name in `fields`."""
    top = typing.get_type_hints(root)
    tables = [(name, kind) for name, kind in top.items() if dataclasses.is_dataclass(kind)]
    paths = [key] if key in top else []
    for path, kind in tables:  # grows: tables hold tables
        inner = typing.get_type_hints(kind)
        tables += [
            (f"{path}.{name}", one) for name, one in inner.items() if dataclasses.is_dataclass(one)
        ]
        paths += [f"{path}.{key}"] if key in inner else []
    return f"it is {' or '.join(paths)}" if paths else nearest(key, fields)


def to_mapping(config) -> dict:
    """Plain nested dicts and lists, ready for JSON; `from_mapping` reads them back."""
    if dataclasses.is_dataclass(config):
        return {f.name: to_mapping(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {key: to_mapping(value) for key, value in config.items()}
    return [to_mapping(item) for item in config] if isinstance(config, (tuple, list)) else config


def thaw(value):
    """ConfigDicts and configs as plain dicts."""
    if dataclasses.is_dataclass(value):
        return to_mapping(value)
    if hasattr(value, "items"):
        return {key: thaw(item) for key, item in value.items()}
    return [thaw(item) for item in value] if isinstance(value, (tuple, list)) else value


def apply_overrides(config, overrides: Mapping[str, str]):
    """The config with dotted fields changed, checked as if it had been written so."""
    return build(type(config), thaw(config), overrides)


def build(cls, tree: dict, overrides: Mapping[str, str]):
    """The dataclass `cls` from nested dicts, with dotted fields changed (`{"model.d_model": "256"}`)."""
    for key, text in overrides.items():
        override(tree, key, text, cls)
    return from_mapping(cls, tree)


def override(tree: dict, dotted: str, value, root: type, said: str = "--config.") -> None:
    """Sets one dotted key to a value, or to what the command line's text means; the types are checked when the dataclasses are built.
    Raises UserError for a field that there is not, named as it was `said`."""
    cls, *parents, last = root, *dotted.split(".")
    node, path = tree, ""
    for key in parents:
        path += key
        fields = (
            {key: Choice}
            if cls is Choice
            else typing.get_type_hints(cls)
            if dataclasses.is_dataclass(cls)
            else {}
        )
        if key not in fields:
            raise UserError(
                f"{said}{path}: no such field; {way_out(key, fields, root)}"
                if fields
                else f"{said}{dotted}: {path} has no fields"
            )
        if cls is Choice and key == "name":
            raise UserError(f"{said}{dotted}: {path} is a single value, it has no fields")
        default = {} if cls is Choice else {f.name: f.default for f in dataclasses.fields(cls)}[key]
        cls = fields[key]
        if cls is Choice and isinstance(chosen := node.get(key, default), str):
            node[key] = {"name": chosen}  # position="rotary" becomes dict(name="rotary", theta=...)
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise UserError(f"{said}{dotted}: {path} is a single value, it has no fields")
        path += "."
    fields = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    if fields and last not in fields:
        raise UserError(f"{said}{dotted}: no such field; {way_out(last, fields, root)}")
    if dataclasses.is_dataclass(fields.get(last)):
        raise UserError(
            f"{said}{dotted}: a table of fields; set one of them: {dotted}.{next(iter(typing.get_type_hints(fields[last])))}"
        )
    node[last] = _parse(value, fields.get(last)) if isinstance(value, str) else thaw(value)


def _parse(text: str, kind):
    """The value that a command line's text means for a field of that type."""
    if kind is str or (text.lower() == "none" and type(None) not in typing.get_args(kind)):
        return text
    if typing.get_origin(kind) is tuple and not text.startswith(("(", "[")):
        return tuple(
            _parse(part.strip(), typing.get_args(kind)[0])
            for part in text.split(",")
            if part.strip()
        )
    spelled = {"true": "True", "false": "False", "none": "None"}.get(text.lower(), text)
    try:
        with warnings.catch_warnings(action="ignore"):  # of "1if", or of an escape there is not
            return ast.literal_eval(spelled)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text  # no literal, or one nested too deeply for Python's parser
