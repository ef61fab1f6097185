"""Checks that the files of a run are part of the commit that a launcher copies."""

import ast
import subprocess
import sys
from pathlib import Path

from shell import ROOT, mistake, option


def uncommitted() -> list[str]:
    """Returns the files with changes that are not committed, relative to ROOT."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=all"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return [line[3:] for line in lines]


def check_files(command: list[str], changed: list[str]) -> None:
    """Exits with code 2 if the run reads files that are not copied. Reports other changes.

    The run reads the experiment file, the modules next to it that it imports, and text. A path of
    text is refused if it exists here outside of the commit.
    """
    config = option(command, "--config").partition(":")[0]
    needed, texts = [config] if config else [], []
    for file in needed:
        if not (ROOT / file).is_file():
            continue
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules = [f"{name.replace('.', '/')}.py" for name in names]
            found = [m for name in modules for m in (name, str(Path(file).parent / name))]
            needed += [m for m in found if (ROOT / m).is_file() and m not in needed]
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts += [node.value] if node.value.startswith(("/", "~")) else []
    if missing := [file for file in needed if file in changed]:
        mistake(
            f"--config: {missing[0]} has changes that are not committed, so it would not travel"
        )
    texts += [option(command, f"--config.data.{part}") for part in ("train", "valid", "test")]
    for text in filter(None, texts):
        path = Path(text).expanduser()
        if (path if path.is_absolute() else ROOT / path).exists():
            mistake(f"text: {text!r} is a path of this machine; copy it to a bucket, gs://...")
    names = changed[:5] + [f"and {len(changed) - 5} more"] * (len(changed) > 5)
    if names:
        print(f"launch: uncommitted changes are not copied: {', '.join(names)}", file=sys.stderr)
