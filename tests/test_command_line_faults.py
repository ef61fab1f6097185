"""Small mistakes at the command line and in the data.

Each prints one line on standard error and no traceback. The exit code is 2, or 130 for Ctrl-C.
"""

import errno
import functools
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from transformer import __main__ as process, cli
from transformer.config_io import load_experiment
from transformer.data import sources
from transformer.data.pipeline import open_data
from transformer.errors import LONGEST, UserError
from transformer.files import disk_errors
from transformer.parallel import processes
from transformer.runs.metrics import MetricsLog, read_metrics
from transformer.runs.rundir import load_config, read_manifest
from transformer.verbs import common, generate

ROOT = Path(__file__).parent.parent
SMOKE = str(ROOT / "experiments" / "smoke.py")


@pytest.fixture
def write_file(tmp_path):
    """A function that writes a file with the given content and returns its path."""

    def write(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write


@pytest.mark.parametrize(
    "value",
    [
        "-" * 3000 + "1",
        "[" * 3000,
        "(" * 300 + "1" + ")" * 300,
        "9" * 5000,
        "0x" + "f" * 5000,
        "'\\d'",
        "1if",
        "{[]: 1}",
    ],
)
def test_unparsable_integer_raises(value, recwarn):
    with pytest.raises(UserError, match="^seed: ") as error:
        load_experiment(SMOKE, {"seed": value})
    assert len(str(error.value)) <= LONGEST and not recwarn.list


def test_integer_too_large_for_a_float_field_raises():
    with pytest.raises(UserError, match="optimizer.learning_rate: an integer of 1,329 bits"):
        load_experiment(SMOKE, {"optimizer.learning_rate": "1" + "0" * 400})


@pytest.mark.parametrize("key", ["model.position.name.x", "model.position.name" + ".x" * 200])
def test_override_below_a_single_value_fails_in_one_line(key, capsys):
    assert cli.main(["train", f"--config={SMOKE}", "--workdir=none", f"--config.{key}=1"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "model.position.name is a single value" in error


def test_error_message_is_one_printable_line():
    message = str(UserError("field: bad\n    value\x1b[31m " + "x" * 9000 + " the way out"))
    assert message.startswith("field: bad value\\x1b[31m xxx") and message.endswith("the way out")
    assert len(message) <= LONGEST
    assert str(UserError(message)) == message


@pytest.mark.parametrize("scheme", ["http", "hdfs", "any"])
@pytest.mark.parametrize("field", ["data.train", "data.tokenizer.path"])
def test_unsupported_url_scheme_raises(scheme, field):
    config = load_experiment(
        SMOKE,
        {"data.corpus": "", "data.format": "text", "data.train": SMOKE, field: f"{scheme}://a/b"},
    )
    with pytest.raises(UserError, match=f"'{scheme}://a/b' cannot be read"):
        open_data(config)


def test_missing_tokenizer_raises_despite_cached_text():
    config = load_experiment(SMOKE, {"data.tokenizer.path": "nowhere.model"})
    open_data(load_experiment(SMOKE))  # the same text, without the path
    with pytest.raises(UserError, match="data.tokenizer.path: no file 'nowhere.model'"):
        open_data(config)


PAIRS = ("source", "target")
BOM = b"\xef\xbb\xbf"


def read(format: str, path: str) -> list[tuple[str, ...]]:
    return list(sources.read(format, path, columns=("text",) if format == "text" else PAIRS))


def test_byte_order_mark_is_ignored(write_file):
    record = json.dumps({"source": "a", "target": "b"}).encode()
    assert read("text", write_file("a.txt", BOM + b"one\ntwo\n")) == [("one",), ("two",)]
    assert read("tsv", write_file("a.tsv", BOM + b"a\tb\r\n")) == [("a", "b")]
    assert read("jsonl", write_file("a.jsonl", BOM + record)) == [("a", "b")]
    assert read("jsonl", write_file("a.jsonl.gz", gzip.compress(BOM + record))) == [("a", "b")]
    files = write_file("x.en", BOM + b"a\n"), write_file("x.es", BOM + b"b\n")
    assert read("paired", ",".join(files)) == [("a", "b")]


def test_blank_texts_are_skipped(write_file):
    rows = [("a", "b"), ("", "b"), ("a", " \u3000"), ("\t", "")]
    records = "".join(json.dumps(dict(zip(PAIRS, row, strict=True))) + "\n" for row in rows)
    assert read("jsonl", write_file("a.jsonl", records.encode())) == rows[:1]
    texts = ("\n".join(side).replace("\t", "").encode() for side in zip(*rows, strict=True))
    files = (write_file(name, side) for name, side in zip(("x.en", "x.es"), texts, strict=True))
    assert read("paired", ",".join(files)) == rows[:1]
    with pytest.raises(UserError, match="contains no text"):
        read("jsonl", write_file("b.jsonl", b'{"source": " ", "target": ""}\n'))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("one\n".encode("utf-16"), r":1: not UTF-8 .* but UTF-16; convert the file"),
        (
            "one\n".encode("utf-16-le"),
            r":1: a NUL byte at column 2; convert the file, which is binary or UTF-16",
        ),
        (gzip.compress(b"one\n", mtime=0), r":1: not UTF-8 .* but gzip \(name it \.gz\)"),
        (b"one\ntw\0o\n", r":2: a NUL byte at column 3"),
    ],
)
def test_file_that_is_not_utf8_text_raises(write_file, content, message):
    with pytest.raises(UserError, match=message):
        read("text", write_file("a.txt", content))


def test_duplicate_field_in_a_record_raises(write_file):
    with pytest.raises(UserError, match=r"a\.jsonl:1: two fields 'source' in one object"):
        read("jsonl", write_file("a.jsonl", b'{"source": "a", "source": "b", "target": "c"}\n'))


def test_paired_globs_are_read_file_by_file(write_file, tmp_path):
    for name, text in {"1.en": "a", "2.en": "b", "1.es": "x", "2.es": "y"}.items():
        write_file(name, text.encode())
    assert read("paired", f"{tmp_path}/*.en,{tmp_path}/*.es") == [("a", "x"), ("b", "y")]
    with pytest.raises(UserError, match="matches 2 and 1 files"):
        read("paired", f"{tmp_path}/*.en,{tmp_path}/1.es")


def test_input_may_be_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)  # does not wait for a reader
    os.write(writer, BOM + b"one\r\ntwo\n")
    command = (
        "from transformer.verbs.common import read_lines; "
        f"print(read_lines({str(tmp_path / 'pipe')!r}))"
    )
    reader = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    is_opened = lambda: (
        str(tmp_path / "pipe")
        in {
            os.readlink(link)
            for link in Path(f"/proc/{reader.pid}/fd").iterdir()
            if link.is_symlink()
        }
    )
    while reader.poll() is None and not is_opened():
        time.sleep(0.01)
    os.close(writer)
    out, _ = reader.communicate(timeout=60)
    assert out == "['one', 'two']\n"
    with pytest.raises(UserError, match="^no file"):
        common.read_lines(str(tmp_path))


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_invalid_utf8_at_the_prompt_raises(monkeypatch, errors):
    typed = io.TextIOWrapper(io.BytesIO(b"\xff\xfe\n"), encoding="utf-8", errors=errors)
    monkeypatch.setattr(sys, "stdin", typed)
    with pytest.raises(UserError, match="standard input is not UTF-8"):
        generate.ask("> ")
    with pytest.raises(UserError, match=r"--text is not UTF-8: '\\udcff'"):
        common.check_text("\udcff", "--text")


def test_file_size_limit_raises(tmp_path):
    for message in ("[Errno 27] File too large", "OUT_OF_RANGE: Failed writing: File too large"):
        raises = pytest.raises(UserError, match=r"run: a file is larger .* \(ulimit -f\)")
        with raises, disk_errors("run"):
            raise ValueError(message)


def test_help_imports_no_jax():
    code = (
        "import sys; from transformer.cli import main\ntry: main(['--help'])\n"
        "except SystemExit: pass\nassert 'jax' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "train an experiment" in result.stdout


def test_interrupt_during_imports_prints_one_line(tmp_path):
    """The process reports that it imports the first module of JAX, and is interrupted there."""
    (tmp_path / "jax.py").write_text(
        "import time\nprint('importing', flush=True)\ntry: time.sleep(60)\n"
        "except BaseException: raise ImportError\n"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "transformer", "evaluate", f"--workdir={tmp_path}"]
    # A shell starts background jobs with SIGINT ignored; the child would inherit this.
    restore_sigint = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    child = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_sigint,
    )
    assert child.stdout.readline() == "importing\n"
    child.send_signal(signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert (child.returncode, error) == (130, "\ninterrupted\n")


def test_dropped_interrupt_is_raised_again(monkeypatch):
    raised = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    handled = []
    process._interrupt_again(handled.append, types.SimpleNamespace(exc_type=ValueError))
    assert len(handled) == 1 and not raised
    process._interrupt_again(handled.append, types.SimpleNamespace(exc_type=KeyboardInterrupt))
    deadline = time.monotonic() + 5
    while not raised and time.monotonic() < deadline:
        pass
    assert raised == [signal.SIGINT] and len(handled) == 1


NOISY_PROGRAM = """
import logging, sys
from transformer.output import suppress_redundant_tracebacks
if {quiet}:
    suppress_redundant_tracebacks()
logging.getLogger("absl").error("a write failed")
logging.getLogger("asyncio").error("Task exception was never retrieved")
class Lost:
    def __init__(self, message): self.message = message
    def __del__(self): raise ValueError(self.message)
Lost("Event loop is closed")
Lost("Encountered error while reading array index: ()")
logging.getLogger("absl").warning("a warning")
logging.getLogger("asyncio").error("another error")
Lost("another exception")
"""


def test_redundant_tracebacks_are_suppressed():
    stderr = {
        quiet: subprocess.run(
            [sys.executable, "-c", NOISY_PROGRAM.format(quiet=quiet)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ).stderr
        for quiet in (True, False)
    }
    for printed in ("a warning\n", "another error\n", "ValueError: another exception\n"):
        assert printed in stderr[True] and printed in stderr[False]
    for suppressed in ("a write failed", "never retrieved", "loop is closed", "array index"):
        assert suppressed not in stderr[True] and suppressed in stderr[False]


def test_lost_process_is_distinguished_from_other_errors():
    assert processes.is_lost_process(
        RuntimeError("FAILED: Gloo AllReduce failed: Connection closed")
    )
    assert not processes.is_lost_process(RuntimeError("INVALID_ARGUMENT: shapes differ"))
    assert processes.is_lost_process(
        ValueError("UNKNOWN: Gloo AllGather failed: Connection closed")
    )
    assert not processes.is_lost_process(ValueError("gloo"))


@pytest.mark.parametrize(
    ("entry", "value"), [("versions", 1), ("devices", {}), ("data", []), ("data", {"test": 3})]
)
def test_manifest_with_wrong_types_is_damaged(tmp_path, entry, value):
    (tmp_path / "manifest.json").write_text(json.dumps({entry: value}))
    with pytest.raises(UserError, match=f"manifest.json: damaged .{entry}.*: expected"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "metrics.jsonl"])
def test_folder_in_place_of_a_run_file_raises(tmp_path, name):
    (tmp_path / name).mkdir()
    reader = {"config.json": load_config, "manifest.json": read_manifest}.get(name, read_metrics)
    with pytest.raises(UserError, match=f"{name}: cannot be read .Is a directory"):
        reader(tmp_path)


def test_a_full_disk_does_not_block_tensorboard(tmp_path, monkeypatch):
    """The event file raises in the thread that writes it, and what was written can be read."""
    log = MetricsLog(tmp_path, 3, tensorboard=True, wandb="", config={})
    log.write(4, loss=2.0)
    log.write_texts(4, {"sample": "text"})
    (events,) = (tmp_path / "tensorboard").iterdir()
    log._board._events.flush()
    assert b"loss" in events.read_bytes() and b"sample/text_summary" in events.read_bytes()

    def fail(data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(log._board._events, "write_event", fail)
    for step in range(5, 40):
        with pytest.raises(OSError, match="No space left"):
            log.write(step, loss=1.0)
