"""Each page on extending: its files and diffs are applied to a copy of the repository."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import BLOCK, ROOT

PAGES = sorted((ROOT / "docs" / "extending").glob("[!i]*.md"))


def apply(diff: str, copy: Path) -> None:
    """Applies a diff of one hunk, which is found after the text between @@ and @@."""
    path = copy / re.search(r"^\+\+\+ b/(.*)$", diff, re.M)[1]
    anchor = re.search(r"^@@ (.*) @@$", diff, re.M)[1]
    lines = diff.split("@@\n", 1)[1].splitlines()
    old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    text = path.read_text()
    assert text.count(anchor) == 1, f"{path}: {anchor!r}"
    before, after = text.split(anchor)
    assert old in after, f"{path}: {old!r}"
    path.write_text(before + anchor + after.replace(old, new, 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_worked_example_passes_its_tests(page, tmp_path):
    for name in ("transformer", "tests", "experiments"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    commands = []
    for block in BLOCK.finditer(page.read_text()):
        how, kind, text = block["how"] or "", block["kind"], block["text"]
        if how.startswith("file "):
            (tmp_path / how.removeprefix("file ")).write_text(text)
        elif kind == "diff":
            apply(text, tmp_path)
        elif text.startswith("python -m pytest"):
            commands.append(shlex.split(text))
    assert commands
    for _, *arguments in commands:
        result = subprocess.run(
            [sys.executable, *arguments, "-p", "no:cacheprovider"],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stdout[-2000:]
