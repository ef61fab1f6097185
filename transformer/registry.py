"""Registries of the classes that a config chooses by name. Each class is in a file of its own.

A registry imports the modules of its package at the first lookup. A new file in the package
therefore needs no other change, and the base module never imports the modules that depend on it.
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping

from transformer.checks import build_choice


class Registry(Mapping[str, type]):
    """Name -> class, for the config field `field`. Modules of `package` define the classes."""

    def __init__(
        self,
        field: str,
        package: str,
        is_option: Callable[[dataclasses.Field], bool] = lambda field: True,
    ):
        """`is_option` returns whether a config may set a field of a class."""
        self._field, self._package, self._is_option = field, package, is_option
        self._classes: dict[str, type] = {}
        self._is_loaded = False

    def register(self, name: str) -> Callable[[type], type]:
        """Returns a class decorator that registers a class and sets its `name`.

        The decorator raises ValueError if the name is taken.
        """

        def add(cls: type) -> type:
            registered = self._classes.setdefault(name, cls)
            if (
                registered.__qualname__ != cls.__qualname__
                or registered.__module__ != cls.__module__
            ):
                raise ValueError(
                    f"{self._field}: {name!r} is already "
                    f"{registered.__module__}.{registered.__name__}"
                )
            cls.name = name
            return cls

        return add

    def build(self, spec: str | Mapping):
        """Builds the object of a spec: `"name"`, or `dict(name="name", option=value)`.

        Raises UserError.
        """
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
