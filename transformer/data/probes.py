"""Synthetic tasks with a known computation over a known distance. Text is generated, not read.

They are the data format `data.format="probe"`. A path is TASK:SHORTEST-LONGEST or
TASK:SHORTEST-LONGEST:EXAMPLES, such as "reverse:1-20" or "needle:64-64:50000". The lengths of the
examples are drawn uniformly. A path always yields the same examples. A question and its answer are
a source and a target; with `data.tokenizer.kind="char"`, every character is a token."""

import dataclasses
import hashlib
import re
import string
from collections.abc import Callable, Iterator

import numpy as np

from transformer.errors import UserError, look_up

LETTERS = np.array(list(string.ascii_lowercase))
BRACKETS = {"(": ")", "[": "]", "{": "}"}
DEEPEST = 8
"""Maximum number of open brackets. A stack of bounded depth can hold them."""


def _letters(rng: np.random.Generator, length: int) -> str:
    return "".join(rng.choice(LETTERS, length))


def copy(rng: np.random.Generator, length: int) -> tuple[str, str]:
    """The same letters."""
    letters = _letters(rng, length)
    return letters, letters


def reverse(rng: np.random.Generator, length: int) -> tuple[str, str]:
    """The letters from last to first."""
    letters = _letters(rng, length)
    return letters, letters[::-1]


def sort(rng: np.random.Generator, length: int) -> tuple[str, str]:
    """The letters in the order of the alphabet."""
    letters = _letters(rng, length)
    return letters, "".join(sorted(letters))


def addition(rng: np.random.Generator, length: int) -> tuple[str, str]:
    """The sum of two numbers of `length` digits: 457+268 -> 725."""
    a, b = ("".join(map(str, rng.integers(0, 10, length))) for _ in range(2))
    return f"{a}+{b}", str(int(a) + int(b)).zfill(length)


def induction(rng: np.random.Generator, length: int) -> tuple[str, str]:
    """What followed the last letter where it occurred before: ..xy..x -> y (Olsson et al. 2022)."""
    letters = _letters(rng, max(length - 1, 1))
    query = letters[int(rng.integers(0, len(letters)))]
    return letters + query, (letters + query)[letters.rindex(query) + 1]


def needle(rng: np.random.Generator, length: int) -> tuple[str, str]:
    """The digit after the first occurrence of the last letter, a capital: fjsB4kq...A7..lsB -> 4.
    The text consists of lowercase letters and up to four pairs of a capital and a digit."""
    text, count = list(_letters(rng, length)), max(1, min(4, length // 4))
    positions = rng.choice(max(length // 2, 1), count, replace=False) * 2
    capitals, digits = rng.choice(LETTERS, count, replace=False), rng.integers(0, 10, count)
    for position, capital, digit in zip(positions, capitals, digits, strict=True):
        text[position : position + 2] = [capital.upper(), str(digit)]
    query = int(rng.integers(0, count))
    return "".join(text) + capitals[query].upper(), str(digits[query])


def dyck(rng: np.random.Generator, length: int) -> tuple[str, str]:
    """The brackets that close all open ones, up to eight deep: ([]{( -> )})."""
    text, still_open = [], []
    for position in range(length):
        last_and_closed = position == length - 1 and len(still_open) <= 1
        if not still_open or last_and_closed or (len(still_open) < DEEPEST and rng.random() < 0.5):
            text.append(str(rng.choice(list(BRACKETS))))
            still_open.append(text[-1])
        else:
            text.append(BRACKETS[still_open.pop()])
    return "".join(text), "".join(BRACKETS[bracket] for bracket in reversed(still_open))


TASKS: dict[str, Callable[[np.random.Generator, int], tuple[str, str]]] = {
    task.__name__: task for task in (copy, reverse, sort, addition, induction, needle, dyck)
}
"""task(rng, length) -> (question, answer)."""


@dataclasses.dataclass(frozen=True)
class TaskSpec:
    """The contents of a path: a task, a range of lengths, and a number of examples."""

    task: str
    shortest: int
    longest: int
    examples: int = 20_000

    def draw(self, purpose: str = "") -> Iterator[tuple[str, str]]:
        """Yields (question, answer) pairs, always the same ones for a path and a `purpose`."""
        identity = f"{purpose}{self.task}:{self.shortest}-{self.longest}"
        digest = hashlib.sha256(identity.encode()).digest()
        rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
        for _ in range(self.examples):
            yield TASKS[self.task](rng, int(rng.integers(self.shortest, self.longest + 1)))


def parse(path: str, field: str = "data.train") -> TaskSpec:
    """Parses a path. Raises UserError for an invalid one."""
    if not (match := re.fullmatch(r"(\w+):(\d+)-(\d+)(?::(\d+))?", path)):
        forms = "TASK:SHORTEST-LONGEST or TASK:SHORTEST-LONGEST:EXAMPLES, such as 'reverse:1-20'"
        raise UserError(f"{field}: {path!r} must be {forms}")
    look_up(TASKS, match[1], field)
    shortest, longest = int(match[2]), int(match[3])
    if not 1 <= shortest <= longest:
        raise UserError(f"{field}: {path!r}: must satisfy 1 <= SHORTEST <= LONGEST")
    return TaskSpec(match[1], shortest, longest, *([int(match[4])] if match[4] else []))
