"""Files that are whole or absent, and what a full disk or a damaged file says."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformer.errors import UserError

_FULL = "the disk is full; what was saved before is whole: free some space and start again"

_DISK_FAULTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EFBIG: "a file is larger than this process may write; what was saved before is whole: raise the limit (ulimit -f) and start again",
}


@contextlib.contextmanager
def disk_faults(path) -> Iterator[None]:
    """A full disk, or a file beyond the limit of its size, as one line that names `path`. Files and checkpoints are renamed into place
    when they are whole, so what was saved before is untouched."""
    try:
        yield
    except Exception as e:  # of any type: libraries that are not Python give the system's words
        for number, message in _DISK_FAULTS.items():
            if getattr(e, "errno", None) == number or os.strerror(number) in str(e):
                raise UserError(f"{path}: {message}") from None
        raise


def check_room(folder: Path, needed: int, what: str) -> None:
    """Raises UserError if `what` of so many bytes does not fit on the disk of `folder`, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"{folder}: the disk has {free / 1e6:,.1f} MB left, but {what} takes {needed / 1e6:,.1f} MB; free some space and start again"
        )


def write_whole(file: Path, content: str | bytes) -> None:
    """Writes `content` (text as UTF-8) beside the file and renames it into place; nothing is left of it if that fails. What is no
    ordinary file (a pipe, /dev/stdout) is written to as it is."""
    data, file = content.encode("utf-8") if isinstance(content, str) else content, file.resolve()
    if file.exists() and not file.is_file():
        file.open("wb", buffering=0).write(data)
        return
    scratch = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        with disk_faults(file):
            scratch.write_bytes(data)
            scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def read_json(file: Path) -> dict:
    """A JSON file that holds an object; UserError if it is damaged or cannot be read."""
    try:
        found = json.loads(read_bytes(file).decode("utf-8"))
    except UserError:
        raise
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file}: damaged ({e})") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: damaged (no JSON object)")
    return found


def read_bytes(file: Path) -> bytes:
    """The content of a file; UserError if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as e:
        raise UserError(f"{file}: cannot be read ({e.strerror or e})") from None
