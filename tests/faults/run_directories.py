"""Fuzzed run directories: a trained run with one damaged file.

Each reader must return what it returns for the intact run, or raise an error of one line.
"""

import dataclasses
import functools
import itertools
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from faults.property import assert_right_or_one_line

from transformer.config_io import load_experiment
from transformer.data.pipeline import open_data
from transformer.data.tokenizer import load_tokenizer
from transformer.lab import report, results, verdict
from transformer.mapping import apply_overrides, to_mapping
from transformer.parallel.mesh import start, use
from transformer.runs import rundir
from transformer.runs.evaluate import _check_text, load_trained
from transformer.runs.loop import train
from transformer.runs.metrics import read_metrics

SMOKE = Path(__file__).parent.parent.parent / "experiments" / "smoke.py"

FILES = ("config.json", "manifest.json", "metrics.jsonl", "test.json", "tokenizer.model")


@dataclasses.dataclass(frozen=True)
class Case:
    """A file, its damage and its new content. `seed` and `number` reproduce the case."""

    seed: int
    number: int
    file: str
    damage: str
    content: bytes | None = None

    def __str__(self) -> str:
        shown = None if self.content is None else self.content[:80]
        return (
            f"run_directories, seed {self.seed}, case {self.number}: "
            f"{self.file} {self.damage} {shown}"
        )


def cases(seed: int) -> Iterator[Case]:
    """Yields random cases without end."""
    rng, intact = random.Random(seed), run_directory()
    for number in itertools.count():
        file = rng.choice(FILES)
        yield Case(seed, number, file, *_damage(rng, (intact / file).read_bytes()))


def check(case: Case) -> None:
    """Applies the damage and runs each reader of the file. No reader may change the directory."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        shutil.copytree(run_directory(), folder, copy_function=os.link)
        _apply(case, folder)
        before = _content(folder)
        for name, (act, files) in READERS.items():
            if case.file not in files:
                continue
            assert_right_or_one_line(
                f"{case}: {name}", functools.partial(act, folder, case), seconds=20
            )
        after = _content(folder)
        assert before == after, f"{case}: {sorted(before.items() ^ after.items())[:4]} has changed"


def _content(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() if f.is_file() else b"" for f in folder.iterdir()}


def _load_config(folder: Path, case: Case) -> None:
    config = rundir.load_config(folder)
    assert case.file != "config.json" or _same(case, config) or config == _config()


def _same(case: Case, config) -> bool:
    """Returns whether the config agrees with the content of the damaged file, if it has one."""
    tree = json.loads(case.content) if case.content is not None else None
    return tree is None or all(
        to_mapping(config).get(key) == value or isinstance(value, dict | list)
        for key, value in tree.items()
    )


def _check(folder: Path, case: Case) -> None:
    rundir.check(folder, _config())
    assert rundir.load_config(folder) == _config() or not _changes_results(folder)


def _changes_results(folder: Path) -> bool:
    """Returns whether a field that affects results differs from the config of the intact run."""
    configs = (_config(), rundir.load_config(folder))
    old, new = (rundir.flatten_fields(to_mapping(config)) for config in configs)
    return any(old[key] != new[key] for key in old if not key.startswith(rundir.RESUME_FIELDS))


def _check_manifest(folder: Path, case: Case) -> None:
    rundir.is_converted(folder)
    _check_text(folder, _data(), "test")


def _read_tokenizer(folder: Path, case: Case) -> None:
    file = rundir.tokenizer_file(folder)  # raises if the file has changed in any way
    if file is not None:
        load_tokenizer(file).decode(load_tokenizer(file).encode(["a word"])[0])


def _load(folder: Path, case: Case) -> None:
    config = rundir.load_config(folder)
    with use(_mesh()):
        trained = load_trained(folder, config, _mesh())
    assert trained.step == 2


def _metrics(folder: Path, case: Case) -> None:
    for line in read_metrics(folder):
        assert isinstance(line["step"], int)


def _compare(folder: Path, case: Case) -> None:
    other = run_directory().parent / "other"
    judged = verdict.derive_verdict(results.read([folder, other], "eval/loss"))
    with tempfile.TemporaryDirectory() as empty:
        page = report.write(judged, Path(empty)).read_text()
    assert "eval/loss" in page


READERS = {
    "load_config": (_load_config, ("config.json",)),
    "rundir.check": (_check, ("config.json", "manifest.json")),
    "manifest": (_check_manifest, ("manifest.json",)),
    "tokenizer": (_read_tokenizer, ("tokenizer.model",)),
    "load_trained": (_load, ("config.json", "tokenizer.model")),
    "metrics": (_metrics, ("metrics.jsonl",)),
    "compare": (_compare, ("config.json", "manifest.json", "metrics.jsonl", "test.json")),
}
"""Name -> (reader, the files that it reads). A reader takes the folder and the case."""


@functools.cache
def run_directory() -> Path:
    """Returns a tiny run, trained once per process.

    The folder `other` beside it is a copy with another seed.
    """
    folder = Path(tempfile.mkdtemp(prefix="faults-")) / "run"
    with use(_mesh()):
        train(_config(), folder)
    other = shutil.copytree(folder, folder.parent / "other")
    changed = to_mapping(_config()) | {"seed": 1}
    (other / "config.json").write_text(json.dumps(changed))
    for run in (folder, other):
        (run / "test.json").write_text(json.dumps({"step": 2, "part": "test", "loss": 6.5}))
    return folder


@functools.cache
def _config():
    small = {
        "model.d_model": "16", "model.d_ff": "16", "model.num_heads": "2",
        "model.num_decoder_layers": "1", "model.max_length": "16",
        "data.length": "16", "data.batch_size": "2", "mesh.data": "1",
        "train.steps": "2", "train.log_every": "1", "train.eval_batches": "1",
        "train.tensorboard": "False", "optimizer.warmup_steps": "1",
    }  # fmt: skip
    return apply_overrides(load_experiment(str(SMOKE)), small)


@functools.cache
def _mesh():
    return start("auto", _config().mesh)


@functools.cache
def _data():
    return open_data(_config())


OTHER = (
    b"", b" ", b"{}", b"[]", b"null", b"1", b'"text"', b"NaN", b"{", b"[" * 100_000,
    b'{"step": ' + b"9" * 5000 + b"}", b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}", b"\0" * 64,
    b"{}\n{}\n", b'{"step": 1}\n' * 3, b'{"step": true}\n',
    b'{"step": -1, "train/loss": "x"}\n', b'{"step": 1e400, "eval/loss": NaN}\n',
)  # fmt: skip


def _damage(rng: random.Random, content: bytes) -> tuple[str, bytes | None]:
    """Returns a kind of damage and the new content, which is None if the kind has no content."""
    position = rng.randrange(1, len(content))
    kind = rng.choice(
        ("deleted", "cut", "flipped", "other", "value", "value", "key", "folder", "link", "nowhere")
    )
    if kind == "cut":
        return kind, content[:position]
    if kind == "flipped":
        flipped = bytes([content[position] ^ (1 << rng.randrange(8))])
        return kind, content[:position] + flipped + content[position + 1 :]
    if kind == "other":
        return kind, rng.choice(OTHER)
    if kind in ("value", "key"):
        try:
            lines = [json.loads(line) for line in content.splitlines()]
        except ValueError:
            try:
                lines = [json.loads(content)]
            except ValueError:
                return "cut", content[:position]
        _change(rng, rng.choice(lines), kind)
        return kind, "\n".join(map(json.dumps, lines)).encode()
    return kind, None


VALUES = (
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    float("nan"),
    "",
    "text",
    "x" * 5000,
    "\ud800",
    [],
    {},
    [[]],
    {"name": {}},
    {"a": {"b": 1}},
)


def _change(rng: random.Random, tree, kind: str) -> None:
    """Changes a random value of a JSON tree, or removes or renames a random key."""
    while True:
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.7:
            tree = tree[key]
        elif kind == "value" or isinstance(tree, list):
            tree[key] = rng.choice(VALUES)
            return
        else:
            value = tree.pop(key)
            if rng.random() < 0.5:
                tree[f"{key}x"] = value
            return


def _apply(case: Case, folder: Path) -> None:
    file = folder / case.file
    file.unlink()
    if case.damage == "folder":
        file.mkdir()
    elif case.damage == "link":
        file.symlink_to(file.name)  # a link to itself
    elif case.damage == "nowhere":
        file.symlink_to("nowhere")
    elif case.content is not None:
        file.write_bytes(case.content)
