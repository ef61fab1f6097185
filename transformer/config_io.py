"""Experiments from files, mappings and the command line; and back to plain JSON.

An experiment file says only what differs from the defaults of config.py. An unknown key or a value of another type is a
UserError that names the field, the value and the nearest right one.
"""

import contextlib
import dataclasses
import importlib.util
import inspect
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path

from ml_collections import ConfigDict

from transformer.config import Experiment
from transformer.errors import UserError, nearest
from transformer.files import read_json
from transformer.mapping import build, from_mapping, override, thaw
from transformer.sweeps import Grid, Sweep


def load_experiment(
    file: str, overrides: Mapping[str, str] = types.MappingProxyType({})
) -> Experiment:
    """The experiment of `FILE.py[:ARG][:ARM]`, with dotted overrides (`{"model.d_model": "256"}`) on top.

    FILE.py defines `get_config()` or `get_config(arg)` and returns a ConfigDict (or a dict); ARM is one of its `sweep()`, or
    `sweep(arg)`. A `config.json` of a run is read too.
    """
    return build(Experiment, load_tree(file), overrides)


def load_tree(file: str) -> dict:
    """What an experiment file says, as nested dicts."""
    name = file.partition(":")[0]
    if Path(name).suffix == ".json":
        return thaw(from_mapping(Experiment, read_json(_existing(name))))
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
            override(tree, key, text, Experiment)
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
        return thaw(given)

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
        override(tree, key, value, Experiment, "sweep: ")


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
