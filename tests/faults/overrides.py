"""Fuzzed overrides of the command line, `--config.KEY=VALUE`: the experiment is built, or one line says why not."""

import dataclasses
import functools
import itertools
import random
import typing
from collections.abc import Iterator
from pathlib import Path

from faults.property import right_or_one_line

from transformer.config import Choice, Experiment
from transformer.config_io import apply_overrides, load_experiment

SMOKE = Path(__file__).parent.parent.parent / "experiments" / "smoke.py"


@dataclasses.dataclass(frozen=True)
class Case:
    """Overrides of one command; `seed` and `number` name it."""

    seed: int
    number: int
    overrides: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        shown = ", ".join(f"{key[:120]!r}: {value[:120]!r}" for key, value in self.overrides)
        return f"overrides, seed {self.seed}, case {self.number}: {{{shown}}}"


def cases(seed: int) -> Iterator[Case]:
    draw, keys = random.Random(seed), [*_keys(Experiment)]
    for number in itertools.count():
        count = draw.choice((1, 1, 1, 2, 3))
        yield Case(seed, number, tuple((_key(draw, keys), _value(draw)) for _ in range(count)))


def check(case: Case) -> None:
    """The experiment is an Experiment with the fields that were set, or the error is one line."""

    def build():
        assert isinstance(apply_overrides(_base(), dict(case.overrides)), Experiment)

    right_or_one_line(case, build)


@functools.cache
def _base() -> Experiment:
    return load_experiment(str(SMOKE))


def _keys(kind, prefix: str = "") -> Iterator[str]:
    """The dotted name of every field and table of the config; of a choice also names below it."""
    for name, field in typing.get_type_hints(kind).items():
        yield prefix + name
        if dataclasses.is_dataclass(field):
            yield from _keys(field, f"{prefix}{name}.")
        elif field == Choice:
            yield from (f"{prefix}{name}.{below}" for below in ("name", "theta", "rate", "base"))


def _key(draw: random.Random, keys: list[str]) -> str:
    """A field's name, or one that is misspelled, nested too deeply, cut off or strange."""
    key = draw.choice(keys)
    parts, at = key.split("."), draw.randrange(len(key))
    return draw.choice(
        (
            key, key, key, key, key,
            key[:at] + draw.choice("abcxyz_.-") + key[at:],
            key[:at] + key[at + 1 :],
            ".".join(parts[::-1]),
            f"{key}.{draw.choice(keys)}",
            f"{key}.{draw.choice(('name', 'x', '0', '', 'name.x'))}",
            ".".join(parts[:-1]),
            parts[-1],
            key.upper(),
            key + draw.choice(("é", "\n", " ", "\0", "\udcff", "\x1b[31m")),
            "." * draw.randrange(4),
            key * draw.randrange(200),
        )
    )  # fmt: skip


SPELLED = (
    "", " ", "0", "1", "-1", "2", "64", "1e3", "1.5", "-0.0", "nan", "inf", "-inf", "1e999", "-1e999", "1e-400", "1_000", "0x10", "0b2", "007",
    "9" * 30, "9" * 400, "9" * 5000, "0x" + "f" * 5000, "2147483647", "2147483648", "9223372036854775808", "1j", "true", "False", "NONE", "...",
    "[", "]", "()", "[]", "{}", "(,)", "[1, 2]", "1,2", ",", "1,,2", "{'a': 1}", "{'name': 'rotary'}", "{'name': {'name': 1}}", "{1: 2}", "{1, 2}",
    "{[]: 1}", "{'name': 'rotary', 'theta': 1e999}", "[[[[[[1]]]]]]", "[{}]", "[{'name': 'order'}]", "{'name': 'order', 'x': {}}", "b'x'", "f'{1}'",
    "'", "''", "'\\d'", "'\\ud800'", "\\", "\\x00", "a\nb", "a\tb", "a\0b", "\udcff\udcfe", "é", "日本語", "🙂", "\u202e", "\ufeff1", "\uff11", "\u00bd", "1if",
    "0_0_", "lambda: 1", "__import__('os')", "1" + "+1" * 3000, "(" * 150, "[" * 3000, "-" * 3000 + "1", "not " * 500 + "1", "{" * 99 + "}" * 99,
    "x" * 10_000, "rotary", "pre", "post", "encoder", "decoder", "seq2seq", "causal_lm", "adamw", "cosine", "/etc", "http://x", "a:b", "%s", "{x}",
)  # fmt: skip
"""Values that mean something somewhere, or look as if they did."""


def _value(draw: random.Random) -> str:
    made = (
        str(draw.randrange(-5, 5000)),
        repr(draw.uniform(-2, 2)),
        repr(10 ** draw.uniform(-320, 308)),
        "".join(draw.choices("01289eE.+-_xjJ", k=draw.randrange(1, 12))),
        "".join(draw.choices("()[]{}'\",:ab1 \\\n", k=draw.randrange(1, 30))),
        "".join(chr(draw.randrange(1, 0x2FFF)) for _ in range(draw.randrange(1, 9))),
        draw.choice(SPELLED) + draw.choice(SPELLED[:60]),
    )
    return draw.choice((draw.choice(SPELLED), draw.choice(made)))
