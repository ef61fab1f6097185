"""Fuzzed overrides of the command line, `--config.KEY=VALUE`: the experiment is built, or one line says why not.

Half of the cases set fields to values that some experiment uses, or to a number near one. These are often valid, alone or
together. The other half misspells keys and sets strange values.
"""

import dataclasses
import functools
import itertools
import random
import typing
from collections.abc import Iterator
from pathlib import Path

from faults.combinations import OPTIONS
from faults.property import right_or_one_line

from transformer.config import Choice, Experiment
from transformer.config_io import load_experiment
from transformer.errors import UserError
from transformer.mapping import apply_overrides, from_mapping, to_mapping
from transformer.runs.rundir import flat

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"


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
        pair = _plausible if draw.random() < 0.5 else _strange
        yield Case(seed, number, tuple(pair(draw, keys) for _ in range(count)))


def check(case: Case) -> str | None:
    """The experiment holds what was set and survives its own spelling, or the error is one line."""

    def build():
        config = apply_overrides(_base(), dict(case.overrides))
        tree = to_mapping(config)
        assert from_mapping(Experiment, tree) == config, "another experiment after to_mapping"
        held = flat(tree)
        for key, value in dict(case.overrides).items():
            related = any(
                f"{a}.".startswith(f"{b}.") for other in set(dict(case.overrides)) - {key} for a, b in ((key, other), (other, key))
            )  # fmt: skip
            if related:
                continue
            for said in _used().get(key, ()):
                same = value != _spelled(said) or held.get(key, said) == said
                assert same, f"{key} is {held[key]!r}"

    return right_or_one_line(case, build) and "refused in one line"


def _plausible(draw: random.Random, keys: list[str]) -> tuple[str, str]:
    """A field and a value that some experiment gives it, or a number that is near."""
    key = draw.choice(list(_used()))
    value = draw.choice(_used()[key])
    if isinstance(value, int | float) and not isinstance(value, bool) and draw.random() < 0.4:
        value = draw.choice((-value, value + 1, value - 1, value * 2, value / 2, value // 2, 0, -1))
    return key, _spelled(value)


def _spelled(value) -> str:
    return value if isinstance(value, str) else repr(value)


def _strange(draw: random.Random, keys: list[str]) -> tuple[str, str]:
    return _key(draw, keys), _value(draw)


@functools.cache
def _used() -> dict[str, list]:
    """The values of every field: those of the experiments, and those that combinations draw from."""
    used: dict[str, list] = {
        f"model.{name}": [list(value) if isinstance(value, tuple) else value for value in values]
        for name, values in OPTIONS.items()
    }
    for file in sorted(EXPERIMENTS.rglob("*.py")):
        try:
            tree = flat(to_mapping(load_experiment(str(file))))
        except UserError:  # a benchmark
            continue
        for key, value in tree.items():
            if value not in used.setdefault(key, []):
                used[key].append(value)
    return used


@functools.cache
def _base() -> Experiment:
    return load_experiment(str(EXPERIMENTS / "smoke.py"))


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
