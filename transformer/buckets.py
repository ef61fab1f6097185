"""Run directories in a bucket (gs://): a local folder, the mirror, that is kept equal to it.

Objects can neither be appended to nor renamed. So a process works on local files, and `sync` makes
both sides equal: it uploads what has changed here, and downloads what has changed in the bucket. If
a file has changed on both sides, the bucket's version stays. Two kinds of files are not copied:
Orbax reads and writes checkpoints in the bucket, whose folders are empty in the mirror, and claims
(claims.py) are objects. A mirror's path contains its URL; all processes of a machine share it."""

import contextlib
import fcntl
import functools
import math
import os
import re
import sqlite3
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformer.errors import TemporaryError, UserError, from_extra
from transformer.files import data_home, read_bytes, write_atomic

INTERVAL = 30.0  # seconds between synchronizations while a process works on a mirror
COMPLETE = "commit_success.txt"  # the object that Orbax writes last in a checkpoint

_opened: dict[Path, threading.Event] = {}  # mirror -> set when its synchronization ends
_absolute = functools.cache(Path.resolve)  # a relative path is that of the first use


def local_path(name: str | os.PathLike) -> Path:
    """Returns the mirror of a gs:// URL, and other paths as they are."""
    url = shown(os.fspath(name))
    if not url.startswith("gs://"):
        return Path(url)
    bucket, _, path = url.removeprefix("gs://").strip("/").partition("/")
    if not bucket or {"", ".", ".."} & set(path.split("/")) or set("#?[]") & set(path):
        way_out = "write gs://BUCKET/FOLDER, without # ? [ ]"
        raise UserError(f"{url}: not a folder in a bucket; {way_out}")
    return root() / bucket / path


def open_folder(name: str | os.PathLike) -> Path:
    """Returns `local_path(name)`. A mirror is synchronized now and then until `closing` ends.
    Raises UserError if the bucket cannot be read."""
    mirror = local_path(name)
    sync(mirror)
    if url_of(mirror) and mirror not in _opened:
        _opened[mirror] = stopped = threading.Event()
        threading.Thread(target=_keep_in_sync, args=(mirror, stopped), daemon=True).start()
    return mirror


def _keep_in_sync(mirror: Path, stopped: threading.Event) -> None:
    while not stopped.wait(INTERVAL):
        try:
            sync(mirror)
        except Exception as e:  # the last synchronization raises it
            print(f"{shown(e)}; trying again every {INTERVAL:.0f} s", file=sys.stderr)


@contextlib.contextmanager
def closing() -> Iterator[None]:
    """Synchronizes all open mirrors for the last time. An error of the body precedes theirs."""
    errors = []
    try:
        yield
    finally:
        while _opened:
            mirror, stopped = _opened.popitem()
            stopped.set()
            try:
                sync(mirror)
            except UserError as e:
                errors.append(e)
    if errors:
        raise errors[0]


def root() -> Path:
    """The folder of all mirrors."""
    return _absolute(data_home()) / "buckets"


def url_of(path: Path) -> str | None:
    """Returns the gs:// URL of a path in a mirror, None for other paths."""
    url = shown(path)
    return url if url.startswith("gs://") else None


def shown(text: object) -> str:
    """Returns a text in which URLs replace the paths of mirrors."""
    return str(text).replace(f"{root()}/", "gs://")


class _State(NamedTuple):
    """A file when both sides were equal."""

    generation: int  # of the object
    size: int
    mtime_ns: int  # of the file

    @classmethod
    def of(cls, file: Path, generation: int) -> "_State | None":
        with contextlib.suppress(FileNotFoundError):
            return cls(generation, (stat := file.stat()).st_size, stat.st_mtime_ns)
        return None


def sync(mirror: Path) -> None:
    """Makes a mirror, or a folder in it, equal to the bucket. Has no effect on other paths."""
    if url_of(mirror) is None:
        return
    mirror.mkdir(parents=True, exist_ok=True)
    with _bucket_errors(mirror), (root() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one thread of this machine at a time
        with contextlib.closing(_database()) as database:
            for _ in range(3):  # again if another machine has just written or deleted an object
                if _sync(mirror, database):
                    break


def _database() -> sqlite3.Connection:
    database = sqlite3.connect(root() / "synced.db", isolation_level=None)
    database.execute("CREATE TABLE IF NOT EXISTS synced (name PRIMARY KEY, g, size, mtime)")
    return database


def _sync(mirror: Path, database: sqlite3.Connection) -> bool:
    """Returns whether both sides are equal now."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    folder, equal = _blob(mirror), True
    fields = "items(name,generation),nextPageToken"
    listed = folder.bucket.list_blobs(prefix=f"{folder.name}/", fields=fields)
    objects = {x.name.removeprefix(f"{folder.name}/"): x for x in listed}
    _mark_checkpoints(mirror, objects)
    files = {x.relative_to(mirror).as_posix() for x in mirror.rglob("*") if x.is_file()}
    first = f"{mirror.relative_to(root())}/"
    query = "SELECT name, g, size, mtime FROM synced WHERE name >= ? AND name < ?"
    rows = database.execute(query, (first, first[:-1] + "0")).fetchall()  # "0" follows "/"
    known = {name.removeprefix(first): _State(*state) for name, *state in rows}
    for name in sorted(filter(_is_copied, known.keys() | objects.keys() | files)):
        there, before = objects.get(name), known.get(name)
        unchanged = (there and there.generation) == (before and before.generation)
        transfer = _upload if unchanged and name in files else _download
        try:
            state = transfer(there, mirror / name, before)
        except (NotFound, PreconditionFailed):
            equal = False
            continue
        if state is None:
            database.execute("DELETE FROM synced WHERE name = ?", (first + name,))
        elif state != before:
            database.execute("REPLACE INTO synced VALUES (?, ?, ?, ?)", (first + name, *state))
    return equal


def _is_copied(name: str) -> bool:
    """Returns whether a file is copied: checkpoints, claims and unfinished files are not."""
    parts = name.split("/")
    is_claim = parts[-1] == "lock" or (parts[-2:-1] == ["claims"] and not name.endswith(".failed"))
    of_checkpoint = re.search(r"(^|/)(checkpoints|damaged)/\d", name)
    is_folder = {"", ".", ".."} & set(parts)  # an object that stands for a folder
    return not (is_claim or of_checkpoint or is_folder or name.endswith(".tmp"))


def _upload(_, file: Path, before: _State | None) -> _State | None:
    """Writes a file to the bucket unless it is unchanged."""
    generation = before.generation if before else 0
    state = _State.of(file, generation)  # before reading: what is appended meanwhile is a change
    if state not in (None, before):
        blob = _blob(file)
        blob.upload_from_string(read_bytes(file), if_generation_match=generation)
        state = state._replace(generation=blob.generation)
    return state


def _download(blob, file: Path, before: _State | None) -> _State | None:
    """Writes an object to its file, or deletes the file of a deleted object."""
    content = blob and blob.download_as_bytes(if_generation_match=blob.generation)
    here = _State.of(file, before.generation if before else 0)
    if here and blob and read_bytes(file).startswith(content):  # after an upload without an answer
        same = here._replace(generation=blob.generation)
        return same if here.size == len(content) else _upload(blob, file, same._replace(size=-1))
    if here not in (None, before):
        reason = "it has changed here and in the bucket; the bucket's version replaces this one"
        print(f"{shown(file)}: {reason}", file=sys.stderr)
    if blob is None:
        file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.removedirs(file.parent)
        return None
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, content)
    return _State.of(file, blob.generation)


def _mark_checkpoints(mirror: Path, objects: Mapping[str, Any]) -> None:
    """Makes an empty folder for each complete checkpoint, and removes the others."""
    complete = {mirror / name for name in objects if name.endswith(f"/{COMPLETE}")}
    steps = {file.parent for file in complete if file.parent.parent.name == "checkpoints"}
    for step in steps:
        step.mkdir(parents=True, exist_ok=True)
    for folder in mirror.rglob("checkpoints"):
        for step in set(folder.iterdir()) - steps:
            with contextlib.suppress(OSError):  # not a folder, or not empty
                os.removedirs(step)


def delete(path: Path) -> None:
    """Deletes a file and, in a mirror, its object. A file that is only missing is copied again."""
    if path.exists():
        path.unlink()
        if url_of(path):
            write_if(path, None, None)
            with contextlib.closing(_database()) as database:
                name = path.relative_to(root()).as_posix()
                database.execute("DELETE FROM synced WHERE name = ?", (name,))


def check_bucket(path: Path) -> None:
    """Raises UserError unless this process may see what Orbax reads when it deletes checkpoints."""
    if url := url_of(path):
        with _bucket_errors(path):
            _client().get_bucket(url.split("/")[2])


def read(path: Path) -> tuple[bytes | None, int, float]:
    """Returns content, generation and time of the object of a path; (None, 0, -inf) without one."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    with _bucket_errors(path):
        while (blob := _blob(path).bucket.get_blob(_blob(path).name)) is not None:
            with contextlib.suppress(NotFound, PreconditionFailed):  # it has just changed
                content = blob.download_as_bytes(if_generation_match=blob.generation)
                return content, blob.generation, blob.updated.timestamp()
    return None, 0, -math.inf


def write_if(path: Path, content: str | None, generation: int | None) -> bool:
    """Writes the object of a path, or deletes it (None), if it has this generation: 0 if it must
    not exist, None for any. Returns whether it did, also in a request whose answer was lost."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    with _bucket_errors(path), contextlib.suppress(NotFound, PreconditionFailed):
        if content is None:
            _blob(path).delete(if_generation_match=generation)
        else:
            _blob(path).upload_from_string(content, if_generation_match=generation)
        return True
    return content is not None and read(path)[0] == content.encode()


def _blob(path: Path):
    """Returns the object of a path in a mirror, without reading it."""
    bucket, _, name = path.relative_to(root()).as_posix().partition("/")
    return _client().bucket(bucket).blob(name)


@functools.cache
def _client():
    from google.cloud import storage

    return storage.Client(project=None)


@contextlib.contextmanager
def _bucket_errors(path: Path) -> Iterator[None]:
    """Turns errors of credentials, permissions and the network into UserError."""
    with from_extra("gcs", "gs:// needs"):
        from google.api_core.exceptions import ClientError, GoogleAPIError
        from google.auth.exceptions import DefaultCredentialsError, GoogleAuthError
        from requests.exceptions import RequestException
    try:
        yield
    except (GoogleAPIError, GoogleAuthError, RequestException, sqlite3.Error) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0][:200]
        kind = UserError if isinstance(e, ClientError | DefaultCredentialsError) else TemporaryError
        raise kind(f"{shown(path)}: no access to the bucket ({reason})") from None
