"""Code outside this package that registers choices: position schemes, mixers, objectives, ...

An experiment file, or a module that it imports, registers a class with the same decorator as this
package does, for example `@transformer.SCHEMES.register("name")`. A run directory keeps a copy of
that file in `plugins/`, so that every later command on the directory finds the class.

An installed package lists a module that registers its classes as an entry point:

    [project.entry-points."transformer.plugins"]
    my_package = "my_package.schemes"
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

import jax

from transformer.errors import UserError
from transformer.files import write_atomic

GROUP = "transformer.plugins"

_files: dict[str, tuple[Path, set[str]]] = {}
"""Hash -> (file, names), of the files outside this package that registered classes."""


def record(file: str | None, name: str) -> str:
    """Records that `file` registers a class as `name`. Returns the hash of the file.

    Returns "" for an installed package, and for a class known to this interpreter only.
    """
    if not file or not Path(file).is_file() or "site-packages" in Path(file).parts:
        return ""
    sha256 = _hash(Path(file))
    _files.setdefault(sha256, (Path(file), set()))[1].add(name)
    return sha256


@functools.cache
def load_installed() -> None:
    """Imports the entry points of installed packages, once."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as e:
            name = entry.dist.name if entry.dist else entry.name
            problem = f"plugin {entry.value!r} of package {name!r} cannot be imported"
            way_out = "repair it, or uninstall the package"
            raise UserError(f"{problem} ({type(e).__name__}: {e}); {way_out}") from e


def save(folder: Path, settings) -> None:
    """Copies files that `settings` name to `folder/plugins`. Raises UserError if one changed."""
    used = set(jax.tree.leaves(settings))
    for file, names in _files.values():
        if not names & used:
            continue
        copy = folder / "plugins" / file.name
        if copy.exists() and copy.read_bytes() != file.read_bytes():
            problem = f"{file} has changed since it was copied to {copy}"
            raise UserError(f"--workdir: {problem}; restore it, or choose another directory")
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(copy, file.read_bytes())


def load(folder: Path) -> None:
    """Imports the files in `folder/plugins`, unless this process has already imported them."""
    for file in sorted((folder / "plugins").glob("*.py")):
        if _hash(file) in _files:
            continue
        spec = importlib.util.spec_from_file_location(f"plugin_{_hash(file)[:12]}", file)
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except UserError:
            for other, _ in _files.values():
                if other.name == file.name:
                    problem = f"{other} has changed since it was copied to {file}"
                    way_out = "restore it, or choose another directory"
                    raise UserError(f"{problem}; {way_out}") from None
            raise
        except Exception as e:
            problem = f"{file}: cannot be imported ({type(e).__name__}: {e})"
            package = "make it a package with an entry point (transformer/plugins.py)"
            raise UserError(f"{problem}; install what it imports, or {package}") from e


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
