"""Synthetic tasks, of which what has to be done, and how far, is known: text is made, not read (`data.format="probe"`).

A path is TASK:SHORTEST-LONGEST or TASK:SHORTEST-LONGEST:EXAMPLES ("reverse:1-20", "needle:64-64:50000"): examples of lengths drawn evenly,
always the same for a path. A question and its answer are a source and a target; every character is a token with
`data.tokenizer.kind="char"`.
"""

import dataclasses
import hashlib
import re
import string
from collections.abc import Callable, Iterator

import numpy as np

from transformer.errors import UserError, look_up

Draw = np.random.Generator
LETTERS = np.array(list(string.ascii_lowercase))
BRACKETS = {"(": ")", "[": "]", "{": "}"}
DEEPEST = 8
"""Of open brackets: what a stack of bounded depth can hold."""


def _letters(draw: Draw, length: int) -> str:
    return "".join(draw.choice(LETTERS, length))


def copy(draw: Draw, length: int) -> tuple[str, str]:
    """The same letters."""
    letters = _letters(draw, length)
    return letters, letters


def reverse(draw: Draw, length: int) -> tuple[str, str]:
    """The letters from last to first."""
    letters = _letters(draw, length)
    return letters, letters[::-1]


def sort(draw: Draw, length: int) -> tuple[str, str]:
    """The letters in the order of the alphabet."""
    letters = _letters(draw, length)
    return letters, "".join(sorted(letters))


def addition(draw: Draw, length: int) -> tuple[str, str]:
    """The sum of two numbers of so many digits: 457+268 -> 725."""
    a, b = ("".join(map(str, draw.integers(0, 10, length))) for _ in range(2))
    return f"{a}+{b}", str(int(a) + int(b)).zfill(length)


def induction(draw: Draw, length: int) -> tuple[str, str]:
    """What followed the last letter when it was there the last time (Olsson et al. 2022): ...xy......x -> y."""
    letters = _letters(draw, max(length - 1, 1))
    asked = letters[int(draw.integers(0, len(letters)))]
    return letters + asked, (letters + asked)[letters.rindex(asked) + 1]


def needle(draw: Draw, length: int) -> tuple[str, str]:
    """The digit behind the capital that is asked for, among letters and up to three other such pairs: fjsB4kq...A7..lsB -> 4."""
    text, count = list(_letters(draw, length)), max(1, min(4, length // 4))
    places = draw.choice(max(length // 2, 1), count, replace=False) * 2
    capitals = draw.choice(LETTERS, count, replace=False)
    digits = draw.integers(0, 10, count)
    for place, capital, digit in zip(places, capitals, digits, strict=True):
        text[place : place + 2] = [capital.upper(), str(digit)]
    asked = int(draw.integers(0, count))
    return "".join(text) + capitals[asked].upper(), str(digits[asked])


def dyck(draw: Draw, length: int) -> tuple[str, str]:
    """What closes the brackets that are open, up to eight deep: ([]{( -> )})."""
    text, still_open = [], []
    for at in range(length):
        last_and_closed = at == length - 1 and len(still_open) <= 1
        if not still_open or last_and_closed or (len(still_open) < DEEPEST and draw.random() < 0.5):
            text.append(str(draw.choice(list(BRACKETS))))
            still_open.append(text[-1])
        else:
            text.append(BRACKETS[still_open.pop()])
    return "".join(text), "".join(BRACKETS[one] for one in reversed(still_open))


TASKS: dict[str, Callable[[Draw, int], tuple[str, str]]] = {
    task.__name__: task for task in (copy, reverse, sort, addition, induction, needle, dyck)
}
"""task(draw, length) -> (question, answer)."""


def look_up_task(field: str, name: str) -> Callable[[Draw, int], tuple[str, str]]:
    """The task of this name. Raises UserError."""
    return look_up(TASKS, name, field)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a path asks for."""

    task: str
    shortest: int
    longest: int
    examples: int = 20_000

    def draw(self, purpose: str = "") -> Iterator[tuple[str, str]]:
        """Questions and answers, always the same; for another purpose others."""
        spelled = f"{purpose}{self.task}:{self.shortest}-{self.longest}"
        draw = np.random.default_rng(
            int.from_bytes(hashlib.sha256(spelled.encode()).digest()[:8], "big")
        )
        make = TASKS[self.task]
        for _ in range(self.examples):
            yield make(draw, int(draw.integers(self.shortest, self.longest + 1)))


def parse(path: str, field: str = "data.train") -> Wanted:
    """What a path asks for. Raises UserError."""
    found = re.fullmatch(r"(\w+):(\d+)-(\d+)(?::(\d+))?", path)
    if not found:
        raise UserError(
            f"{field}: {path!r}; of format 'probe' it is TASK:SHORTEST-LONGEST or TASK:SHORTEST-LONGEST:EXAMPLES, 'reverse:1-20'"
        )
    look_up_task(field, found[1])
    shortest, longest = int(found[2]), int(found[3])
    if not 1 <= shortest <= longest:
        raise UserError(
            f"{field}: {path!r}: lengths from {shortest} to {longest}; they begin at 1 and grow"
        )
    return Wanted(found[1], shortest, longest, *([int(found[4])] if found[4] else []))
