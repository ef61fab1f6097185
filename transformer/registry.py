"""Registries of the classes that a config chooses by name, and the plugins that extend them.

A registry imports the modules of its package at the first lookup. A new file in the package
therefore needs no other change, and the base module never imports the modules that depend on it.

Plugins are code outside this package. An experiment file, or a module that it imports, registers a
class with the same decorator as this package does, such as `@transformer.SCHEMES.register("name")`.
A run directory keeps a copy in `plugins/`, so that every later command finds the class. Installed
packages have entry points in the group `transformer.plugins` (docs/extending/index.md)."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar, dataclass_transform

import jax

from transformer.checks import coerce, in_float32, plain, type_hints
from transformer.errors import UserError, look_up, nearest
from transformer.files import write_atomic

C = TypeVar("C", bound=type)
_frozen_dataclass = dataclasses.dataclass(frozen=True)
_files: dict[str, tuple[Path, set[str]]] = {}
"""Hash -> (file, names), of the files outside this package that registered classes."""


class Registry(Mapping[str, type]):
    """Name -> class, for the config field `field`. Modules of `package` define the classes."""

    def __init__(
        self, field: str, package: str, is_option: Callable = lambda field: True,
        as_dataclass: Callable[[type], type] = _frozen_dataclass,
    ):  # fmt: skip
        """`is_option`: whether a config may set a field. `as_dataclass`: decorates the classes."""
        self._field, self._package, self._is_option = field, package, is_option
        self._as_dataclass = as_dataclass
        self._classes: dict[str, type] = {}
        self._origins: dict[str, str] = {}  # the hashes of files outside this package
        self._is_loaded = False

    @dataclass_transform(frozen_default=True)
    def register(self, name: str) -> Callable[[C], C]:
        """Returns a decorator that registers a class as `name` and makes it a dataclass of options.
        A new definition replaces the old. Raises UserError if another class has the name."""
        file = sys._getframe(1).f_globals.get("__file__")

        def add(cls: C) -> C:
            if "__dataclass_fields__" not in vars(cls):
                cls = self._as_dataclass(cls)
            known, is_ours = self._classes.get(name), cls.__module__.startswith("transformer.")
            origin = "" if is_ours else _record(file, name)
            same_class = known and known.__qualname__ == cls.__qualname__
            same_origin = origin == self._origins.get(name) != ""
            if known and not (same_class and (known.__module__ == cls.__module__ or same_origin)):
                by = f"{known.__module__}.{known.__qualname__}"
                problem = f"{name!r} is already registered, by {by}"
                raise UserError(f"{self._field}: {problem}; choose another name")
            self._classes[name], self._origins[name] = cls, origin
            cls.name = name  # type: ignore[attr-defined]
            return cls

        return add

    def build(self, spec: str | Mapping):
        """Builds the object of `"name"` or `dict(name="name", option=value)`. Raises UserError."""
        field, settings = self._field, {"name": spec} if isinstance(spec, str) else dict(spec)
        name = settings.pop("name", "")
        if not isinstance(name, str):
            way_out = nearest(str(name), self)
            raise UserError(f"{field}.name: {plain(name)!r} is not a name; {way_out}")
        cls = look_up(self._all, name, field)
        options = {f.name for f in dataclasses.fields(cls) if self._is_option(f)}
        for key, value in settings.items():
            if key not in options:
                way_out = nearest(key, options) if options else "it takes no options"
                raise UserError(f"{field}: {name!r} has no option {key!r}; {way_out}")
            path = f"{field}.{key}"
            settings[key] = coerce(value, type_hints(cls)[key], path)
            if isinstance(settings[key], float) and not math.isfinite(settings[key]):
                raise UserError(f"{path}: {value} is not a finite number")
            in_float32(path, settings[key])
        return cls(**settings)

    @property
    def _all(self) -> dict[str, type]:
        if not self._is_loaded:
            folder = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(folder.__path__, f"{self._package}."):
                importlib.import_module(module.name)
            self._is_loaded = True
            load_installed()
        return self._classes

    def __getitem__(self, name: str) -> type:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)


def _record(file: str | None, name: str) -> str:
    """Records that `file` registers a class as `name`. Returns the hash of the file. Returns "" for
    an installed package, and for a class known to this interpreter only."""
    if not file or not Path(file).is_file() or "site-packages" in Path(file).parts:
        return ""
    sha256 = _hash(Path(file))
    _files.setdefault(sha256, (Path(file), set()))[1].add(name)
    return sha256


@functools.cache
def load_installed() -> None:
    """Imports the entry points of installed packages, once."""
    for entry in importlib.metadata.entry_points(group="transformer.plugins"):
        try:
            entry.load()
        except Exception as e:
            name = entry.dist.name if entry.dist else entry.name
            what = f"plugin {entry.value!r} of package {name!r} cannot be imported"
            raise UserError(f"{what} ({type(e).__name__}: {e}); repair it, or uninstall it") from e


def save_plugins(folder: Path, settings) -> None:
    """Copies files that `settings` name to `folder/plugins`. Raises UserError if one changed."""
    used = set(jax.tree.leaves(settings))
    for file in [x for x, names in _files.values() if names & used]:
        copy = folder / "plugins" / file.name
        if copy.exists() and copy.read_bytes() != file.read_bytes():
            problem = f"{file} has changed since it was copied to {copy}"
            raise UserError(f"--workdir: {problem}; restore it, or choose another directory")
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(copy, file.read_bytes())


def load_plugins(folder: Path) -> None:
    """Imports the files in `folder/plugins`, unless this process has already imported them."""
    for file in (x for x in sorted((folder / "plugins").glob("*.py")) if _hash(x) not in _files):
        spec = importlib.util.spec_from_file_location(f"plugin_{_hash(file)[:12]}", file)
        try:
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except UserError:
            for other in (x for x, _ in _files.values() if x.name == file.name):
                problem = f"{other} has changed since it was copied to {file}"
                raise UserError(f"{problem}; restore it, or choose another directory") from None
            raise
        except Exception as e:
            problem = f"{file}: cannot be imported ({type(e).__name__}: {e})"
            package = "make it a package with an entry point (docs/extending/index.md)"
            raise UserError(f"{problem}; install what it imports, or {package}") from e


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
