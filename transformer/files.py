"""Atomic file writes, and one-line errors for full disks and damaged files."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformer.errors import UserError, from_os_error

_DISK_FAULTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), ("the disk is full", "free some space")),
    errno.EFBIG: ("a file is larger than this process may write", "raise the limit (ulimit -f)"),
}


def data_home() -> Path:
    """The folder in which corpora, token stores and mirrors of buckets are cached."""
    return Path(os.environ.get("TRANSFORMER_DATA") or Path.home() / ".cache" / "transformer")


@contextlib.contextmanager
def disk_errors(path) -> Iterator[None]:
    """Turns a full disk or an exceeded file size limit into a UserError that names `path`. Files
    and checkpoints are renamed into place when they are complete, so earlier ones stay intact."""
    try:
        yield
    except Exception as e:  # native libraries raise other types with the system's message
        for number, (fault, fix) in _DISK_FAULTS.items():
            if getattr(e, "errno", None) == number or os.strerror(number) in str(e):
                way_out = f"earlier files are intact: {fix} and start again"
                raise UserError(f"{path}: {fault}; {way_out}") from None
        raise


def check_disk_space(folder: Path, needed: int, what: str) -> None:
    """Raises UserError if `needed` bytes of `what` do not fit on the disk of `folder`."""
    while not folder.exists():
        folder = folder.parent
    if (free := shutil.disk_usage(folder).free) < needed:
        problem = f"the disk has {free / 1e6:,.1f} MB left, but {what} takes {needed / 1e6:,.1f} MB"
        raise UserError(f"{folder}: {problem}; free some space and start again")


@contextlib.contextmanager
def new_folder(folder: Path, keep: bool = False) -> Iterator[Path]:
    """Yields an empty folder, which is renamed to `folder` (missing or empty) if the body succeeds;
    else nothing is left. With `keep`, one that another process has made meanwhile is kept."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.")
    with disk_errors(folder), scratch as unfinished:
        new = Path(unfinished) / folder.name
        new.mkdir()
        yield new
        if not (keep and folder.exists()):
            new.rename(folder)


def write_atomic(file: Path, content: str | bytes) -> None:
    """Writes `content`, text as UTF-8, atomically. Writes directly to special files (pipes)."""
    data, file = content.encode("utf-8") if isinstance(content, str) else content, file.resolve()
    if file.exists() and not file.is_file():
        file.open("wb", buffering=0).write(data)
        return
    scratch = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with disk_errors(file):
            scratch.write_bytes(data)
            scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def write_json(file: Path, content) -> None:
    """Writes `content` as JSON, indented by 2, atomically."""
    write_atomic(file, json.dumps(content, indent=2) + "\n")


def read_json(file: Path) -> dict:
    """Reads a JSON file that holds an object. Raises UserError if it is damaged or unreadable."""
    data = read_bytes(file)
    try:
        content = json.loads(data.decode("utf-8"))
        json.dumps(content, ensure_ascii=False).encode("utf-8")  # no half of a surrogate pair
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file}: damaged ({e})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: damaged (not a JSON object)")
    return content


def read_bytes(file: Path) -> bytes:
    """Returns the content of a file. Raises UserError if it is unreadable."""
    try:
        return file.read_bytes()
    except OSError as e:
        raise from_os_error(e, f"{file}: cannot be read ({e.strerror or e})") from None
