"""Errors that a user can fix. The command line prints them as one line and exits with code 2."""

import difflib
import os
import re
from collections.abc import Iterable

LONGEST = 500
"""The maximum length of a message in characters.

The middle of a longer message is cut, because the field is at the start and the fix at the end.
"""


class UserError(ValueError):
    """An error that a user can fix: in a config, a file or a machine.

    The message is one line and names a fix.
    """

    def __init__(self, message: str):
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """Returns the message without line breaks and control characters, cut to LONGEST characters."""
    message = re.sub(r"\s*\n\s*", " ", message.strip())
    escape = lambda c: c if c.isprintable() else c.encode("unicode_escape").decode()
    message = "".join(map(escape, message))
    if len(message) <= LONGEST:
        return message
    half = (LONGEST - 5) // 2
    return f"{message[:half]} ... {message[-half:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Returns a hint for a misspelled name: `did you mean 'd_model'?`, or all valid names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there is: {', '.join(known)}"


def look_up(table: dict, name: str, what: str):
    """Returns `table[name]`. Raises UserError with the nearest name if there is no such entry."""
    if name not in table:
        raise UserError(f"{what}: no {name!r}; {nearest(str(name), table)}")
    return table[name]


def tracebacks() -> bool:
    """Returns whether TRANSFORMER_TRACEBACKS requests a traceback for every error."""
    return os.environ.get("TRANSFORMER_TRACEBACKS", "") not in ("", "0")
