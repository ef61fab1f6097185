"""The shape of the code: packages import one way, files and functions stay small."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transformer"

ORDER = (
    "version", "errors", "output", "checks", "files", "claims", "plugins", "registry", "mapping", "units", "sweeps",
    "model", "parallel", "convert", "data", "training", "decoding", "evaluation", "config", "config_io", "runs", "planning", "lab",
    "api", "verbs", "cli", "__main__",
)  # fmt: skip
"""The modules and packages of `transformer`; each imports only from itself and from those before it."""


def module(path: Path) -> str:
    """transformer/model/masks.py -> transformer.model.masks."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[: -1 if parts[-1] == "__init__" else None])


FILES = {module(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, at its top or within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformer"):
            whole = {f"{node.module}.{name.name}" for name in node.names}
            found |= {name if name in FILES else node.module for name in whole}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("transformer")}
    return found


def test_packages_import_one_way():
    rank = {name: n for n, name in enumerate(ORDER)}
    upward = []
    for name, path in FILES.items():
        if name == "transformer":
            continue  # gives names out, each imported when it is used
        own = name.split(".")[1]
        for other in imports(path) - {"transformer"}:
            if rank[other.split(".")[1]] > rank[own]:
                upward.append(f"{name} imports {other}")
    assert not upward


def test_no_file_imports_itself_through_others():
    graph = {name: imports(path) for name, path in FILES.items() if name != "transformer"}
    done, circles = set(), []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            circles.append(" -> ".join((*path[path.index(name) :], name)))
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert not circles


@pytest.mark.parametrize("folder", ["transformer", "launch", "experiments", "tests"])
def test_files_and_functions_are_small(folder):
    """No file over 400 lines, no function over 60."""
    large = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text, here = path.read_text(), path.relative_to(ROOT)
        if (lines := text.count("\n")) > 400:
            large.append(f"{here}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                large += [f"{here}: {node.name} has {lines} lines"] if lines > 60 else []
    assert not large
