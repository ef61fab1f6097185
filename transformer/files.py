"""Files that are whole or absent, and what a full disk or a damaged file says."""

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from transformer.errors import UserError


@contextlib.contextmanager
def disk_faults(path) -> Iterator[None]:
    """A full disk as one line that names `path`. Files and checkpoints are renamed into place when they are whole, so what
    was saved before is untouched."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as e:
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(e):
            raise UserError(
                f"{path}: the disk is full; what was saved before is whole: free some space and start again"
            ) from None
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
    """A JSON file that holds an object; UserError if it is damaged."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise UserError(f"{file}: damaged ({e})") from None
    if not isinstance(found, dict):
        raise UserError(f"{file}: damaged (no JSON object)")
    return found
