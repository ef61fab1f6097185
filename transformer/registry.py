"""Registries: what a config chooses by name, from classes that live one to a file.

The modules of a registry's package are imported when something is first looked up, so a new file
there needs no other line of code, and the package's base never imports what is built on it.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping

from transformer.checks import build_choice


class Registry(Mapping[str, type]):
    """Name -> class, for the config field `field`; the classes are defined in modules of `package`."""

    def __init__(
        self,
        field: str,
        package: str,
        is_option: Callable[[dataclasses.Field], bool] = lambda field: True,
    ):
        """`is_option`: which fields of a class a config may set."""
        self._field, self._package, self._is_option = field, package, is_option
        self._classes: dict[str, type] = {}
        self._is_loaded = False

    def register(self, name: str) -> Callable[[type], type]:
        """Class decorator that gives a class its `name`. Raises ValueError if the name is taken."""

        def add(cls: type) -> type:
            known = self._classes.setdefault(name, cls)
            if known.__qualname__ != cls.__qualname__ or known.__module__ != cls.__module__:
                raise ValueError(f"{self._field}: {name!r} is {known.__module__}.{known.__name__}")
            cls.name = name
            return cls

        return add

    def build(self, spec: str | Mapping):
        """The object of a config: `"name"`, or `dict(name="name", option=value)`. Raises UserError."""
        return build_choice(self._field, self._all, spec, self._is_option)

    @property
    def _all(self) -> dict[str, type]:
        if not self._is_loaded:
            folder = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(folder.__path__, f"{self._package}."):
                importlib.import_module(module.name)
            self._is_loaded = True
        return self._classes

    def __getitem__(self, name: str) -> type:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)
