"""The pages on extending: their files and diffs are applied to a copy of the repository."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

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


RUN_ALL = """
import json, sys, pytest
sys.exit(max(pytest.main(arguments) for arguments in json.loads(sys.argv[1])))
"""


def test_worked_examples_pass_their_tests(tmp_path):
    """One copy has all examples, so they also work together. One process runs their commands."""
    for name in ("transformer", "tests", "experiments"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    commands = []
    for page in PAGES:
        before = len(commands)
        for block in BLOCK.finditer(page.read_text()):
            how, kind, text = block["how"] or "", block["kind"], block["text"]
            if how.startswith("file "):
                (tmp_path / how.removeprefix("file ")).write_text(text)
            elif kind == "diff":
                apply(text, tmp_path)
            elif text.startswith("python -m pytest"):
                commands.append(
                    [*shlex.split(text.replace("\\\n", ""))[3:], "-p", "no:cacheprovider"]
                )
        assert len(commands) > before, page
    for command in (["check", "."], ["format", "--check", "."]):
        ruff = subprocess.run(
            [sys.executable, "-m", "ruff", *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert ruff.returncode == 0, ruff.stdout
    result = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(commands)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-2000:]
    assert result.stdout.count("[100%]") == len(commands) == len(PAGES) == 7
