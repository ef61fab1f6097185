"""Experiments from files, mappings and the command line; and back to plain JSON.

An experiment file says only what differs from the defaults of config.py. An unknown key or a value of another type is a
UserError that names the field, the value and the nearest right one.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import inspect
import traceback
import types
import typing
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from ml_collections import ConfigDict

from transformer.checks import table_of
from transformer.config import Choice, Experiment, ModelConfig
from transformer.errors import UserError, nearest
from transformer.files import read_json
from transformer.sweeps import Grid, Sweep


def from_mapping(cls, given: Mapping, path: str = ""):
    """The dataclass `cls` from a (nested) mapping. Raises UserError for unknown keys and values of another type."""
    if isinstance(given, cls):
        return given
    given = _thaw(given)
    if not isinstance(given, Mapping):
        raise UserError(f"{path.rstrip('.') or 'config'}: expected {table_of(cls)}, got {given!r}")
    fields = typing.get_type_hints(cls)
    for key in given:
        if key not in fields:
            raise UserError(f"{path}{key}: no such field; {_way_out(key, fields)}")
    inner = lambda key, value: (
        from_mapping(fields[key], value, f"{path}{key}.")
        if dataclasses.is_dataclass(fields[key])
        else value
    )
    return cls(**{key: inner(key, value) for key, value in given.items()})


def _way_out(key: str, fields: Mapping) -> str:
    """For a field that is not here: where in an experiment it is, if it is somewhere else; or what is here of a like name."""
    tables = [
        (name, kind)
        for name, kind in typing.get_type_hints(Experiment).items()
        if dataclasses.is_dataclass(kind)
    ]
    paths = [key] if key in typing.get_type_hints(Experiment) else []
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


def load_experiment(
    file: str, overrides: Mapping[str, str] = types.MappingProxyType({})
) -> Experiment:
    """The experiment of `FILE.py[:ARG][:ARM]`, with dotted overrides (`{"model.d_model": "256"}`) on top.

    FILE.py defines `get_config()` or `get_config(arg)` and returns a ConfigDict (or a dict); ARM is one of its `sweep()`, or
    `sweep(arg)`. A `config.json` of a run is read too.
    """
    return _with_overrides(load_tree(file), overrides)


def apply_overrides(config: Experiment, overrides: Mapping[str, str]) -> Experiment:
    """The experiment with dotted fields changed, checked as if it had been written so."""
    return _with_overrides(_thaw(config), overrides)


def _with_overrides(tree: dict, overrides: Mapping[str, str]) -> Experiment:
    for key, text in overrides.items():
        override(tree, key, text)
    return from_mapping(Experiment, tree)


def load_tree(file: str) -> dict:
    """What an experiment file says, as nested dicts."""
    name = file.partition(":")[0]
    if Path(name).suffix == ".json":
        return _thaw(from_mapping(Experiment, read_json(_existing(name))))
    found = _open(file)
    with _faults_of(found.path):
        tree = found.tree()
        if found.arm:
            arms = found.sweep().arms
            if found.arm not in arms:
                raise UserError(
                    f"--config: the sweep() of {str(found.path)!r} has no arm {found.arm!r}; {nearest(found.arm, arms)}"
                )
            change(tree, arms[found.arm])
        return tree


def load_sweep(file: str) -> Sweep:
    """What an experiment file varies. Raises UserError if it says nothing of it."""
    found = _open(file)
    if found.arm:
        raise UserError(
            f"--config: {file!r} names one arm, and all are asked for; leave out :{found.arm}"
        )
    with _faults_of(found.path):
        return found.sweep()


def load_arms(
    file: str, overrides: Mapping[str, str] = types.MappingProxyType({})
) -> tuple[Sweep, dict[str, Experiment]]:
    """The sweep of an experiment file, and its arms' experiments, the baseline first; `overrides` are of all of them."""
    sweep, found = load_sweep(file), {}
    for key in overrides:
        if same := [field for field in sweep.fields if key == field or key.startswith(field + ".")]:
            raise UserError(
                f"--config.{key}: the sweep varies {same[0]}; leave it out, or change sweep()"
            )
    if "seed" in overrides:
        raise UserError("--config.seed: the sweep has its own seeds; change Sweep(seeds=...)")
    for arm, changes in sweep.arms.items():
        tree = load_tree(file)
        for key, text in overrides.items():
            override(tree, key, text)
        change(tree, changes)
        try:
            found[arm] = from_mapping(Experiment, tree)
        except UserError as e:
            raise UserError(f"sweep: arm {arm!r}: {e}") from None
    return sweep, found


@dataclasses.dataclass(frozen=True)
class _File:
    """An experiment file and what was asked of it. `arg` goes to `get_config` and to `sweep`, where they take one."""

    path: Path
    module: types.ModuleType
    arg: str
    arm: str

    def tree(self) -> dict:
        given = self._call("get_config")
        if not isinstance(given, Experiment | Mapping | ConfigDict):
            raise UserError(
                f"--config: get_config() of {str(self.path)!r} returns {given!r}; a ConfigDict or a dict is expected"
            )
        return _thaw(given)

    def sweep(self) -> Sweep:
        if not hasattr(self.module, "sweep"):
            raise UserError(
                f"--config: {str(self.path)!r} defines no sweep(), as experiments/ablation.py does; see transformer/sweeps.py"
            )
        given = self._call("sweep")
        given = Sweep(given) if isinstance(given, Grid) else given
        if not isinstance(given, Sweep):
            raise UserError(
                f"--config: sweep() of {str(self.path)!r} returns {given!r}; a Sweep or a Grid is expected"
            )
        return given

    def _call(self, name: str):
        function = getattr(self.module, name)
        return (
            function(self.arg)
            if self.arg and inspect.signature(function).parameters
            else function()
        )


def _open(file: str) -> _File:
    """FILE.py, FILE.py:ARG, FILE.py:ARG:ARM; FILE.py:ARM where get_config() takes no argument."""
    name, *given = file.split(":")
    path = _existing(name)
    with _faults_of(path):
        module = _module(path)
        if not hasattr(module, "get_config"):
            raise UserError(f"--config: {name!r} defines no get_config()")
        takes = bool(inspect.signature(module.get_config).parameters)
    if given and not takes and not hasattr(module, "sweep"):
        raise UserError(
            f"--config: {name!r} takes no argument and has no sweep(); leave out :{':'.join(given)}"
        )
    if len(given) > takes + hasattr(module, "sweep"):
        raise UserError(
            f"--config: {file!r}; it is FILE.py{':ARG' * takes}{':ARM' * hasattr(module, 'sweep')}"
        )
    arg = given.pop(0) if takes and given else ""
    if arg and arg not in (known := getattr(module, "ARGUMENTS", (arg,))):
        raise UserError(f"--config: {name!r} takes no {arg!r}; {nearest(arg, known)}")
    return _File(path, module, arg, given[0] if given else "")


def change(tree: dict, changes: Mapping[str, object]) -> None:
    """Sets the fields that an arm changes."""
    for key, value in changes.items():
        override(tree, key, value, "sweep: ")


def _existing(name: str) -> Path:
    if not Path(name).is_file():
        raise UserError(f"--config: no file {name!r}; experiments/ holds the shipped ones")
    return Path(name)


def _module(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path.absolute())
    if spec is None:
        raise UserError(f"--config: {str(path)!r} is no Python file and no config.json")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _faults_of(path: Path) -> Iterator[None]:
    """What goes wrong in an experiment file as one line that names its line."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as e:
        here = [
            frame
            for frame in traceback.extract_tb(e.__traceback__)
            if Path(frame.filename) == path.absolute()
        ]
        line = getattr(e, "lineno", None) or (here[-1].lineno if here else 0)
        raise UserError(
            f"--config: {path}:{line}: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        ) from e


def _thaw(value):
    """ConfigDicts and dataclasses as plain dicts, in which what a model derives from other fields is derived again."""
    if isinstance(value, ModelConfig):
        tree = to_mapping(value)
        derived = {"d_head": value.d_model // value.num_heads, "num_kv_heads": value.num_heads}
        return tree | {field: 0 for field, size in derived.items() if tree[field] == size}
    if dataclasses.is_dataclass(value):
        return {f.name: _thaw(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "items"):
        return {key: _thaw(item) for key, item in value.items()}
    return [_thaw(item) for item in value] if isinstance(value, (tuple, list)) else value


def override(tree: dict, dotted: str, value, said: str = "--config.") -> None:
    """Sets one dotted key to a value, or to what the command line's text means; the types are checked when the dataclasses are built.
    Raises UserError for a field that there is not, named as it was `said`."""
    cls, *parents, last = Experiment, *dotted.split(".")
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
                f"{said}{path}: no such field; {_way_out(key, fields)}"
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
        raise UserError(f"{said}{dotted}: no such field; {_way_out(last, fields)}")
    if dataclasses.is_dataclass(fields.get(last)):
        raise UserError(
            f"{said}{dotted}: a table of fields; set one of them: {dotted}.{next(iter(typing.get_type_hints(fields[last])))}"
        )
    node[last] = _parse(value, fields.get(last)) if isinstance(value, str) else _thaw(value)


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
