"""Errors that a user can fix. The command line prints one line and exits with the error's code."""

import contextlib
import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator

LONGEST = 500
"""Maximum characters of a message. Longer ones lose the middle: field and fix are at the ends."""

_TEMPORARY = {getattr(errno, name, None) for name in (
    "EAGAIN", "EBUSY", "ECONNABORTED", "ECONNREFUSED", "ECONNRESET", "EHOSTUNREACH", "EIO",
    "ENETDOWN", "ENETUNREACH", "ENOTCONN", "EPIPE", "EREMOTEIO", "ESTALE", "ETIMEDOUT",
)} - {None}  # fmt: skip


class UserError(ValueError):
    """An error that a user can fix, in a config, a file or a machine: one line that names a fix."""

    exit_code = 2

    def __init__(self, message: str):
        """Replaces line breaks and control characters, and cuts the message to LONGEST."""
        message = re.sub(r"\s*\n\s*", " ", message.strip())
        escape = lambda c: c if c.isprintable() else c.encode("unicode_escape").decode()
        message, half = "".join(map(escape, message)), (LONGEST - 5) // 2
        is_short = len(message) <= LONGEST
        super().__init__(message if is_short else f"{message[:half]} ... {message[-half:]}")


class TemporaryError(UserError):
    """A fault of another process, a network or a disk, after which launchers start a run again."""

    exit_code = 1


@contextlib.contextmanager
def from_extra(name: str, what: str) -> Iterator[None]:
    """Turns a failed import of a package of the extra `name` into a UserError: `what` needs it."""
    try:
        yield
    except ImportError:
        raise UserError(f"{what} the extra [{name}]: pip install -e '.[{name}]'") from None


def from_os_error(error: OSError, message: str) -> UserError:
    """Returns the error to raise: a TemporaryError if the network or a disk failed."""
    return (TemporaryError if error.errno in _TEMPORARY else UserError)(message)


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a misspelled name: `did you mean 'd_model'?`, or all valid names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"choose from: {', '.join(known)}"


def look_up(table: dict, name: str, what: str):
    """Returns `table[name]`. Raises UserError with the nearest name if there is no such entry."""
    if name not in table:
        raise UserError(f"{what}: unknown value {name!r}; {nearest(str(name), table)}")
    return table[name]


def tracebacks() -> bool:
    """Returns whether TRANSFORMER_TRACEBACKS requests a traceback for every error."""
    return os.environ.get("TRANSFORMER_TRACEBACKS", "") not in ("", "0")
