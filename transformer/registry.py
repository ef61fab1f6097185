"""Registries of the classes that a config chooses by name.

A registry imports the modules of its package at the first lookup. A new file in the package
therefore needs no other change, and the base module never imports the modules that depend on it.
"""

import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar, dataclass_transform

from transformer import plugins
from transformer.checks import build_choice
from transformer.errors import UserError

C = TypeVar("C", bound=type)


class Registry(Mapping[str, type]):
    """Name -> class, for the config field `field`. Modules of `package` define the classes."""

    def __init__(self, field: str, package: str, is_option: Callable = lambda field: True):
        """`is_option` returns whether a config may set a field of a class."""
        self._field, self._package, self._is_option = field, package, is_option
        self._classes: dict[str, type] = {}
        self._origins: dict[str, str] = {}  # the hashes of files outside this package
        self._is_loaded = False

    @dataclass_transform(frozen_default=True)
    def register(self, name: str) -> Callable[[C], C]:
        """Returns a class decorator that registers a class as `name`, and makes it a dataclass.

        Its fields are the options that a config may set. A new definition of a class replaces the
        old. Raises UserError if another has the name.
        """
        file = sys._getframe(1).f_globals.get("__file__")

        def add(cls: C) -> C:
            if "__dataclass_fields__" not in vars(cls):
                cls = dataclasses.dataclass(frozen=True)(cls)
            known, is_ours = self._classes.get(name), cls.__module__.startswith("transformer.")
            origin = "" if is_ours else plugins.record(file, name)
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
        return build_choice(self._field, self._all, spec, self._is_option)

    @property
    def _all(self) -> dict[str, type]:
        if not self._is_loaded:
            folder = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(folder.__path__, f"{self._package}."):
                importlib.import_module(module.name)
            self._is_loaded = True
            plugins.load_installed()
        return self._classes

    def __getitem__(self, name: str) -> type:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def __repr__(self) -> str:
        return f"<registry of {self._field}: {', '.join(self)}>"
