"""The manual: its tables are current, and its code blocks run."""

import importlib.util
import io
import json
import math
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest

from transformer.cli import main
from transformer.config_io import load_arms, load_experiment
from transformer.planning.chips import topology
from transformer.runs.fits import check_divisibility

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
README = ROOT / "README.md"

BLOCK = re.compile(
    r"(?:^<!-- test: (?P<how>[^\n]*) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.M | re.S
)

OUTPUT = ("text", "toctree", "diff")
"""Kinds of blocks that are not code."""


def load_generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_current():
    """`python docs/generate.py` would change nothing. Spaces differ between versions of Python."""
    generate, marked = load_generator(), 0
    plain = lambda text: re.sub(r"[ -]+", " ", text)
    for name, path in PAGES.items():
        page = path.read_text()
        assert plain(generate.generated(page)) == plain(page), name
        marked += len(generate.MARKED.findall(page))
    assert marked >= len(generate.TABLES)


def test_every_config_field_is_documented():
    assert not re.findall(
        r"^\| `\w+` \| [^|]* \|  \|$", PAGES["config_fields.md"].read_text(), re.M
    )


def test_pages_are_listed_and_their_links_resolve():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*") if path.is_file()}
    index = PAGES["index.md"].read_text()
    for name, path in PAGES.items():
        for target in re.findall(r"\]\(([\w/.]+\.(?:md|ipynb))\)", path.read_text()):
            assert os.path.normpath(Path(name).parent / target) in pages, (name, target)
        listed = re.search(rf"^{re.escape(name.removesuffix('.md'))}$", index, re.M)
        assert listed or name == "index.md" or name.startswith("extending/"), name


def test_readme_is_short_and_its_links_resolve():
    assert len(README.read_text().split()) <= 700
    targets = re.findall(r"""[("](docs/[\w/.]+)[)"]""", README.read_text())
    assert "docs/report.png" in targets and all((ROOT / target).is_file() for target in targets)


def test_pages_are_at_most_100_columns_wide():
    """Except rows of tables and the comments that tell how a block is tested."""
    pages = PAGES | {name: ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")}
    lines = [(name, line) for name, path in pages.items() for line in path.read_text().splitlines()]
    wide = [(name, line) for name, line in lines if len(line) > 100]
    assert not [pair for pair in wide if not pair[1].startswith(("|", "<!-- test:"))]


@pytest.mark.parametrize(
    "name", ["README.md", *(name for name in PAGES if not name.startswith("extending/"))]
)
def test_code_blocks_run(name, tmp_path, monkeypatch):
    """Python blocks share a namespace. Commands run with the changes of a comment above them."""
    blocks = list(BLOCK.finditer((PAGES | {"README.md": README})[name].read_text()))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    lines = [line for line in (ROOT / "LICENSE").read_text().splitlines() if line.strip()]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    (tmp_path / "texts").mkdir()
    for number, line in enumerate(lines):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{line}\n{line}")
    (tmp_path / "pairs.tsv").write_text("\n".join(f"{line}\t{line[::-1]}" for line in lines))
    namespace, printed = {}, None
    for block in blocks:
        how, kind, text = block["how"] or "", block["kind"], block["text"]
        if printed is not None and kind == "text":
            assert printed.strip() == text.strip()
        printed = None
        if kind == "python":
            action, _, file = how.partition(" ")
            if action in ("file", "append"):
                with (tmp_path / file).open("a" if action == "append" else "w") as f:
                    f.write(text)
            output = io.StringIO()
            with redirect_stdout(output):
                exec(compile(text, name, "exec"), namespace)
            printed = output.getvalue() or None
        elif kind == "bash":
            run_commands(text, how, monkeypatch)
        else:
            assert kind in OUTPUT, f"{name}: a block of {kind!r} is neither run nor output"


def run_commands(text: str, how: str, monkeypatch) -> None:
    """Runs the commands of a block.

    `how` is "skip (why)"; "parse", which only reads the arguments and the config; "dry-run", which
    appends --dry-run; or "with ARGUMENTS", appended to commands that train or prepare text.
    """
    if how.startswith("skip"):
        return
    for line in text.replace("\\\n", " ").splitlines():
        line = line.split("#")[0].strip()
        *piped, command = line.split(" | ")
        words = [word for word in shlex.split(command) if not word.startswith("XLA_FLAGS")]
        if words[:3] == ["python", "-m", "transformer"]:
            run_verb(words[3:], how, " ".join(piped).removeprefix("echo "), monkeypatch)
        elif words[:1] == ["python"] and how == "dry-run":
            assert words[1].startswith("launch/")
            script = [sys.executable, str(ROOT / words[1]), *words[2:]]
            cut = script.index("--")
            subprocess.run([*script[:cut], "--dry-run", *script[cut:]], cwd=ROOT, check=True)
        else:
            assert words[:2] in ([], ["pip", "install"]), f"{line!r} cannot be run"


def run_verb(words: list[str], how: str, stdin: str, monkeypatch) -> None:
    verb = words[0]
    if how == "parse":

        def only_read(args, overrides):
            if getattr(args, "config", ""):
                configs = {"": load_experiment(args.config, overrides)}
                if verb == "sweep" or getattr(args, "arms", False):
                    configs = load_arms(args.config, overrides)[1]
                for config in configs.values() if verb == "plan" else ():
                    check_that_it_fits(config, topology(args.topology, args.slices).devices)

        monkeypatch.setattr(f"transformer.verbs.{verb}.run", only_read)
    if how.startswith("with ") and (verb in ("train", "sweep") or words[1:2] == ["prepare"]):
        words = [*words, *shlex.split(how.removeprefix("with "))]
    text = shlex.split(stdin)[0] + "\n" if stdin else "Hello\n\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(words) == 0, words


def check_that_it_fits(config, devices: int) -> None:
    """Raises UserError if the batches of an experiment do not divide over so many devices."""
    sizes = config.mesh.sizes
    rest = devices // math.prod(size for size in sizes.values() if size > 0)
    shape = {axis: size if size > 0 else rest for axis, size in sizes.items()}
    assert math.prod(shape.values()) == devices, shape
    check_divisibility(config, SimpleNamespace(shape=shape))


def test_tour_notebook_runs(tmp_path, monkeypatch, capsys):
    """Its cells, in order, with fewer training steps.

    The last stored output does not depend on the machine.
    """
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    cells = json.loads((DOCS / "tour.ipynb").read_text())["cells"]
    namespace = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            capsys.readouterr()
            code = "".join(cell["source"]).replace("600", "60")
            exec(compile(code, "tour.ipynb", "exec"), namespace)
    assert len(namespace["losses"]) == 60 and namespace["losses"][-1] < namespace["losses"][0]
    assert capsys.readouterr().out == "".join(cells[-1]["outputs"][0]["text"])
