"""The structure of the code: packages import in one direction, files and functions are small."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transformer"

ORDER = (
    "version", "errors", "output", "limits", "checks", "files", "buckets", "claims", "registry",
    "mapping", "model", "parallel", "convert", "data", "training", "decoding", "evaluation",
    "units", "sweeps", "config", "config_io", "runs", "planning", "lab", "api", "harness", "verbs",
    "cli", "__main__",
)  # fmt: skip
"""The modules and packages of `transformer`. Each imports only itself and those before it."""


def module(path: Path) -> str:
    """Returns the module of a file: transformer/model/masks.py -> transformer.model.masks."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[: -1 if parts[-1] == "__init__" else None])


FILES = {module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """Returns the modules of the package that a file imports, at its top or within functions."""
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer"):
            full_names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= {name if name in FILES else node.module for name in full_names}
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names if alias.name.startswith("transformer")}
    return modules


def test_packages_import_in_one_direction():
    rank = {name: i for i, name in enumerate(ORDER)}
    upward = []
    for name, path in FILES.items():
        if name == "transformer":
            continue  # the package imports its public names lazily
        package = name.split(".")[1]
        for imported in imports(path) - {"transformer"}:
            if rank[imported.split(".")[1]] > rank[package]:
                upward.append(f"{name} imports {imported}")
    assert not upward


def test_imports_have_no_cycles():
    graph = {name: imports(path) for name, path in FILES.items() if name != "transformer"}
    done, cycles = set(), []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            cycles.append(" -> ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for imported in sorted(graph.get(name, ())):
                visit(imported, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert not cycles


@pytest.mark.parametrize("folder", ["transformer", "launch", "experiments", "tests"])
def test_files_and_functions_are_small(folder):
    """No file over 400 lines, no function of 60 lines or more, with its decorators."""
    too_large = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text, relative = path.read_text(), path.relative_to(ROOT)
        if (lines := text.count("\n")) > 400:
            too_large.append(f"{relative}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                above = [] if folder == "tests" else node.decorator_list  # in tests, the cases
                first = min(x.lineno for x in (node, *above))
                lines = node.end_lineno - first + 1
                too_large += [f"{relative}: {node.name} has {lines} lines"] if lines >= 60 else []
    assert not too_large
