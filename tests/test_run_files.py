"""The files of a run: atomic writes, full disks, damaged metrics, and runs of other versions."""

import errno
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from transformer import cli, registry
from transformer.config import TokenizerConfig
from transformer.config_io import load_experiment
from transformer.data.tokenizer import SentencePiece, train_tokenizer
from transformer.errors import TemporaryError, UserError
from transformer.mapping import to_mapping
from transformer.model.positions import SCHEMES
from transformer.runs.rundir import has_checkpoint, load_config, read_manifest, tokenizer_file
from transformer.version import __version__


def test_damaged_metrics_lines_are_skipped(tmp_path):
    from transformer.runs.metrics import read_metrics

    valid = [{"step": 1, "a": 1.0}, {"step": 2, "a": 2.0}]
    lines = [
        json.dumps(valid[0]).encode(),
        b"[1]",
        b"\xff\xfe",
        b'{"a": 1}',
        b'{"step": 1, "a": 1000000000000000000000}',
        b'{"step": true}',
        b"{",
        json.dumps(valid[1]).encode(),
        b'{"st',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert read_metrics(tmp_path) == valid


def test_insufficient_disk_space_raises_before_writing(run_config, tmp_path, monkeypatch):
    from transformer import files
    from transformer.runs.loop import train

    monkeypatch.setattr(
        files.shutil,
        "disk_usage",
        lambda folder: files.shutil._ntuple_diskusage(10**9, 10**9, 1000),
    )
    with pytest.raises(
        UserError, match=r"the disk has 0.0 MB left, but a checkpoint takes 0.\d MB"
    ):
        train(run_config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_failed_atomic_write_keeps_the_old_file(tmp_path, monkeypatch):
    import errno

    from transformer.files import write_atomic

    def write_to_full_disk(self, content):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    write_atomic(tmp_path / "a.txt", "old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write_to_full_disk)
        with pytest.raises(UserError, match=r"a\.txt: the disk is full"):
            write_atomic(tmp_path / "a.txt", "new")
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("a.txt", "old")]


def test_atomic_write_supports_pipes_and_links(tmp_path):
    import os
    import threading

    from transformer.files import write_atomic

    os.mkfifo(tmp_path / "pipe")
    contents = []
    reader = threading.Thread(target=lambda: contents.append((tmp_path / "pipe").read_text()))
    reader.start()
    write_atomic(tmp_path / "pipe", "answers")
    reader.join()
    assert contents == ["answers"] and (tmp_path / "pipe").is_fifo()
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomic(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"


def test_full_disk_raises_user_error(tmp_path):
    import errno

    from safetensors import SafetensorError

    from transformer.files import disk_errors

    with pytest.raises(UserError, match="the disk is full"), disk_errors("x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    message = "Error while serializing: I/O error: No space left on device (os error 28)"
    with pytest.raises(UserError, match="the disk is full"), disk_errors("x"):
        raise SafetensorError(message)
    with pytest.raises(ValueError, match="another"), disk_errors("x"):
        raise ValueError("another")


def test_run_of_another_version_raises_and_names_the_version(run_config, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(to_mapping(run_config)))
    for version in (__version__, __version__ + ".dev1"):
        (tmp_path / "manifest.json").write_text(json.dumps({"transformer": version}))
        assert load_config(tmp_path) == run_config
    (tmp_path / "manifest.json").write_text(json.dumps({"transformer": "0.1.0"}))
    with pytest.raises(
        UserError, match=r"version 0\.1\.0 of this package wrote .*; read it with that"
    ):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ESTALE, "Stale file handle", "f"), 1),
        (OSError(errno.EACCES, "Permission denied", "f"), 2),
        (TemporaryError("process 1 of 2 did not connect"), 1),
        (UserError("data.length: 0 is too small"), 2),
    ],
)
def test_only_mistakes_exit_with_code_2(error, code, monkeypatch, capsys):
    """Launchers start a run again after exit code 1."""

    def fail(args, overrides):
        raise error

    monkeypatch.setattr("transformer.verbs.data.run", fail)
    assert cli.main(["data"]) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_changed_plugin_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(SCHEMES, "_classes", dict(SCHEMES))
    code = "import transformer\n\n@transformer.SCHEMES.register('changed_plugin')\n"
    code += "class Changed(transformer.Position):\n    number = {}\n"

    def run_file(file, number):
        file.parent.mkdir(exist_ok=True)
        file.write_text(code.format(number))
        spec = importlib.util.spec_from_file_location("experiment", file)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))

    run_file(tmp_path / "experiment.py", 1)
    registry.save_plugins(tmp_path / "run", {"position": "changed_plugin"})
    registry.load_plugins(tmp_path / "run")
    (tmp_path / "run" / "plugins" / "experiment.py").write_text(code.format(2))
    with pytest.raises(UserError, match=r"experiment.py has changed since it was copied to "):
        registry.load_plugins(tmp_path / "run")


def test_config_json_of_a_run_loads_its_plugins(tmp_path, monkeypatch):
    """The plugin is an experiment file whose annotations are text, which dataclasses evaluate."""
    monkeypatch.setattr(SCHEMES, "_classes", dict(SCHEMES))
    monkeypatch.setattr(registry, "_files", {})
    file, run = tmp_path / "own.py", tmp_path / "run"
    file.write_text(
        "from __future__ import annotations\nimport transformer\n"
        "from typing import ClassVar\n\n@transformer.SCHEMES.register('own')\n"
        "class Own(transformer.Position):\n    number: ClassVar[int] = 1\n\n"
        "def get_config():\n    return dict(model=dict(family='decoder', vocab_size=480, "
        "position='own'), data=dict(corpus='pydoc', length=8))\n"
    )
    config = load_experiment(str(file))
    registry.save_plugins(run, to_mapping(config))
    (run / "config.json").write_text(json.dumps(to_mapping(config)))
    monkeypatch.setattr(SCHEMES, "_classes", dict(SCHEMES))
    SCHEMES._classes.pop("own")
    monkeypatch.setattr(registry, "_files", {})
    assert load_experiment(str(run / "config.json")) == config


def test_an_unfinished_checkpoint_is_none(tmp_path):
    (tmp_path / "checkpoints" / "8.orbax-checkpoint-tmp").mkdir(parents=True)
    assert not has_checkpoint(tmp_path)
    (tmp_path / "checkpoints" / "8").mkdir()
    assert has_checkpoint(tmp_path)


def test_entry_point_of_an_installed_package_registers_its_classes(tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs" / "extending" / "index.md").read_text()
    toml = tomllib.loads(re.search(r"```toml\n(.*?)```", page, re.S)[1])
    ((group, entries),) = toml["project"]["entry-points"].items()
    info, package = tmp_path / "my_package-1.0.dist-info", tmp_path / "my_package"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    lines = [f"{name} = {module}\n" for name, module in entries.items()]
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(lines))
    package.mkdir()
    code = "import transformer\n\n@transformer.SCHEMES.register('installed')\n"
    (package / "schemes.py").write_text(code + "class Installed(transformer.Position):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(SCHEMES, "_classes", dict(SCHEMES))
    registry.load_installed.__wrapped__()
    assert SCHEMES["installed"].__module__ == "my_package.schemes"
    (package / "schemes.py").write_text("1 / 0")
    monkeypatch.delitem(sys.modules, "my_package.schemes")
    with pytest.raises(
        UserError,
        match="plugin 'my_package.schemes' of package 'my-package' cannot be imported "
        r"\(ZeroDivisionError: division by zero\); repair it, or uninstall",
    ):
        registry.load_installed.__wrapped__()


def test_damaged_text_files_of_a_run_raise(tmp_path):
    (tmp_path / "manifest.json").write_text('{"commit": "\\ud800"}')
    with pytest.raises(UserError, match=r"manifest\.json: damaged \(.*surrogates not allowed"):
        read_manifest(tmp_path)
    tokenizer = train_tokenizer(TokenizerConfig(kind="bpe"), 275, ["some text"] * 50)
    damaged = bytearray(tokenizer.content)
    damaged[damaged.index(b"<unk>")] ^= 0x80
    with pytest.raises(UserError, match=r"x\.model is damaged \(not UTF-8\)"):
        SentencePiece(bytes(damaged), name="x.model")


def test_replaced_tokenizer_of_a_run_raises(tmp_path):
    """Another tokenizer of the same size would give other ids to the same text."""
    one, other = (
        train_tokenizer(TokenizerConfig(kind="bpe"), 275, [text] * 50)
        for text in ("these are some words", "and quite another text")
    )
    assert one.vocab_size == other.vocab_size and one.encode(["some"]) != other.encode(["some"])
    (tmp_path / one.name).write_bytes(one.content)
    manifest = {"tokenizer_sha256": one.sha256}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert tokenizer_file(tmp_path) == tmp_path / one.name
    (tmp_path / one.name).write_bytes(other.content)
    with pytest.raises(UserError, match=r"tokenizer\.model: damaged or replaced; it is not the"):
        tokenizer_file(tmp_path)
