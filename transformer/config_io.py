"""Reads experiments and sweeps from files, and applies the overrides of the command line."""

import contextlib
import importlib.util
import inspect
import re
import sys
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ml_collections import ConfigDict

from transformer.config import Experiment
from transformer.errors import UserError, nearest
from transformer.files import read_json
from transformer.mapping import build, from_mapping, override, to_mapping
from transformer.registry import load_plugins
from transformer.sweeps import Grid, Sweep

NOTHING: Mapping[str, str] = types.MappingProxyType({})


def load_experiment(file: str, overrides: Mapping[str, str] = NOTHING) -> Experiment:
    """Loads the experiment of `FILE.py[:ARG][:ARM]`, with overrides like {"model.d_model": "256"}.
    FILE.py defines `get_config()` or `get_config(arg)`, which returns a ConfigDict or a dict. ARM
    is an arm of its `sweep()` or `sweep(arg)`. `file` may also be the `config.json` of a run."""
    return build(Experiment, load_tree(file), overrides)


def load_tree(file: str) -> dict:
    """Returns the settings of an experiment file as nested dicts."""
    name = file.partition(":")[0]
    if Path(name).suffix == ".json":
        load_plugins(_existing(name).parent)
        return to_mapping(from_mapping(Experiment, read_json(Path(name))))
    experiment_file = _open(file)
    with _errors_in(experiment_file.path):
        tree = experiment_file.tree()
        if arm := experiment_file.arm:
            arms = experiment_file.sweep().arms
            if arm not in arms:
                problem = f"the sweep() of {str(experiment_file.path)!r} has no arm {arm!r}"
                raise UserError(f"--config: {problem}; {nearest(arm, arms)}")
            change(tree, arms[arm])
        return tree


def load_arms(file: str, overrides: Mapping = NOTHING) -> tuple[Sweep, dict[str, Experiment]]:
    """Loads a file's sweep and the experiments of its arms, baseline first, with `overrides`."""
    experiment_file, experiments = _open(file), {}
    if experiment_file.arm:
        raise UserError(f"--config: {file!r} names one arm; leave out :{experiment_file.arm}")
    with _errors_in(experiment_file.path):
        sweep = experiment_file.sweep()
    for key in overrides:
        if varied := [x for x in sweep.fields if key == x or key.startswith(x + ".")]:
            raise UserError(f"--config.{key}: the sweep varies {varied[0]}; change it in sweep()")
    if "seed" in overrides:
        raise UserError("--config.seed: the sweep has its own seeds; change Sweep(seeds=...)")
    for arm, changes in sweep.arms.items():
        tree = load_tree(file)
        for key, text in overrides.items():
            override(tree, key, text, Experiment)
        change(tree, changes)
        try:
            experiments[arm] = from_mapping(Experiment, tree)
        except UserError as e:
            raise UserError(f"sweep: arm {arm!r}: {e}") from None
    return sweep, experiments


class _File(NamedTuple):
    """An experiment file, an arm, and an argument for `get_config` and `sweep` if they take one."""

    path: Path
    module: types.ModuleType
    arg: str
    arm: str

    def tree(self) -> dict:
        kinds = Experiment | Mapping | ConfigDict
        return to_mapping(self._call("get_config", kinds, "a ConfigDict or a dict"))

    def sweep(self) -> Sweep:
        if not hasattr(self.module, "sweep"):
            problem = f"{str(self.path)!r} defines no sweep(), as experiments/ablation.py does"
            raise UserError(f"--config: {problem}; see docs/sweeps.md")
        sweep = self._call("sweep", Sweep | Grid, "a Sweep or a Grid")
        return Sweep(sweep) if isinstance(sweep, Grid) else sweep

    def _call(self, name: str, kinds, expected: str):
        function = getattr(self.module, name)
        takes_arg = self.arg and inspect.signature(function).parameters
        result = function(self.arg) if takes_arg else function()
        if not isinstance(result, kinds):
            returned = f"{name}() of {str(self.path)!r} returns {result!r}"
            raise UserError(f"--config: {returned}; {expected} is expected")
        return result


def _open(file: str) -> _File:
    """Opens FILE.py[:ARG][:ARM]. FILE.py:ARM is valid if get_config() takes no argument."""
    name, *parts = file.split(":")
    path = _existing(name)
    with _errors_in(path):
        spec = importlib.util.spec_from_file_location(f"experiment_{path.stem}", path.absolute())
        if spec is None or spec.loader is None:
            raise UserError(f"--config: {str(path)!r} is neither a Python file nor a config.json")
        # Dataclasses with `from __future__ import annotations` read it.
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if not hasattr(module, "get_config"):
            raise UserError(f"--config: {name!r} defines no get_config()")
        takes_arg = bool(inspect.signature(module.get_config).parameters)
    if parts and not takes_arg and not hasattr(module, "sweep"):
        way_out = f"leave out :{':'.join(parts)}"
        raise UserError(f"--config: {name!r} takes no argument and has no sweep(); {way_out}")
    if len(parts) > takes_arg + hasattr(module, "sweep"):
        form = f"FILE.py{':ARG' * takes_arg}{':ARM' * hasattr(module, 'sweep')}"
        raise UserError(f"--config: {file!r}; the form is {form}")
    arg = parts.pop(0) if takes_arg and parts else ""
    if arg and arg not in (arguments := getattr(module, "ARGUMENTS", (arg,))):
        raise UserError(f"--config: {name!r} takes no {arg!r}; {nearest(arg, arguments)}")
    return _File(path, module, arg, parts[0] if parts else "")


def change(tree: dict, changes: Mapping[str, object]) -> None:
    """Applies the changes of an arm to the settings."""
    for key, value in changes.items():
        override(tree, key, value, Experiment, "sweep: ")


def _existing(name: str) -> Path:
    if not Path(name).is_file():
        raise UserError(f"no file {name!r}; the shipped experiments are in experiments/")
    return Path(name)


@contextlib.contextmanager
def _errors_in(path: Path) -> Iterator[None]:
    """Turns any error in an experiment file into a UserError of one line with the line number."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as e:
        trace = traceback.extract_tb(e.__traceback__)
        frames = [frame for frame in trace if Path(frame.filename) == path.absolute()]
        line = getattr(e, "lineno", None) or (frames[-1].lineno if frames else 0)
        text = str(e).splitlines()[0] if str(e) else ""
        # A ConfigDict keeps the type of a field, so a name cannot become a dict with options.
        if field := re.match(r"Could not override field '(\w+)'", text):
            text += f"; set {field[1]!r} once, where its section is created"
        raise UserError(f"--config: {path}:{line}: {type(e).__name__}: {text}") from e
