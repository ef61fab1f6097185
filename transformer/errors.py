"""Mistakes a person can mend. The command line prints them as one line and exits with code 2."""

import difflib
import os
import re
from collections.abc import Iterable

LONGEST = 500
"""Characters of a message. The middle of a longer one is left out: the field is at its start, the way out at its end."""


class UserError(ValueError):
    """Something outside the code is wrong: a config, a file, a machine. The message is one line and names the way out."""

    def __init__(self, message: str):
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """The message without line breaks and control characters, and with at most LONGEST characters."""
    message = re.sub(r"\s*\n\s*", " ", message.strip())
    spell = lambda c: c if c.isprintable() else c.encode("unicode_escape").decode()
    message = "".join(map(spell, message))
    if len(message) <= LONGEST:
        return message
    half = (LONGEST - 5) // 2
    return f"{message[:half]} ... {message[-half:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelled name: `did you mean 'd_model'?`, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"there is: {', '.join(known)}"


def look_up(table: dict, name: str, what: str):
    """`table[name]`, or a UserError that names the nearest entry."""
    if name not in table:
        raise UserError(f"{what}: no {name!r}; {nearest(str(name), table)}")
    return table[name]


def tracebacks() -> bool:
    """Whether the person asks for every traceback, also those of faults that one line describes."""
    return os.environ.get("TRANSFORMER_TRACEBACKS", "") not in ("", "0")
