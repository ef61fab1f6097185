"""Fuzzed command-line overrides, `--config.KEY=VALUE`.

Each case must build an experiment or raise an error of one line. Half of the cases set fields to
values from the experiments, or to numbers near these. Such values are often valid, alone or
together. The other half uses misspelled keys and unusual values.
"""

import dataclasses
import functools
import itertools
import random
import typing
from collections.abc import Iterator
from pathlib import Path

from faults.combinations import OPTIONS
from faults.property import assert_right_or_one_line

from transformer.config import Choice, Experiment
from transformer.config_io import load_experiment
from transformer.errors import UserError
from transformer.mapping import apply_overrides, from_mapping, to_mapping
from transformer.runs.rundir import flatten_fields

EXPERIMENTS = Path(__file__).parent.parent.parent / "experiments"


@dataclasses.dataclass(frozen=True)
class Case:
    """The overrides of a command. `seed` and `number` reproduce the case."""

    seed: int
    number: int
    overrides: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        shown = ", ".join(f"{key[:120]!r}: {value[:120]!r}" for key, value in self.overrides)
        return f"overrides, seed {self.seed}, case {self.number}: {{{shown}}}"


def cases(seed: int) -> Iterator[Case]:
    """Yields random cases without end."""
    rng, keys = random.Random(seed), [*_keys(Experiment)]
    for number in itertools.count():
        count = rng.choice((1, 1, 1, 2, 3))
        pair = _plausible if rng.random() < 0.5 else _strange
        yield Case(seed, number, tuple(pair(rng, keys) for _ in range(count)))


def check(case: Case) -> str | None:
    """Checks that the experiment has the values that were set, or that the error is one line.

    The experiment must also be unchanged by `to_mapping` and `from_mapping`.
    """

    def build():
        config = apply_overrides(_base(), dict(case.overrides))
        tree = to_mapping(config)
        assert from_mapping(Experiment, tree) == config, (
            "to_mapping and from_mapping changed the experiment"
        )
        fields = flatten_fields(tree)
        for key, value in dict(case.overrides).items():
            overlaps_another = any(
                f"{a}.".startswith(f"{b}.")
                for other in set(dict(case.overrides)) - {key}
                for a, b in ((key, other), (other, key))
            )
            if overlaps_another:
                continue
            for used_value in _used().get(key, ()):
                same = value != _spelled(used_value) or fields.get(key, used_value) == used_value
                assert same, f"{key} is {fields[key]!r}"

    return assert_right_or_one_line(case, build) and "refused in one line"


def _plausible(rng: random.Random, keys: list[str]) -> tuple[str, str]:
    """Returns a field and a value that some experiment sets, or a number near this value."""
    key = rng.choice(list(_used()))
    value = rng.choice(_used()[key])
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
        value = rng.choice((-value, value + 1, value - 1, value * 2, value / 2, value // 2, 0, -1))
    return key, _spelled(value)


def _spelled(value) -> str:
    return value if isinstance(value, str) else repr(value)


def _strange(rng: random.Random, keys: list[str]) -> tuple[str, str]:
    return _key(rng, keys), _value(rng)


@functools.cache
def _used() -> dict[str, list]:
    """Returns the values of each field in the experiments and in the options of combinations."""
    used: dict[str, list] = {
        f"model.{name}": [list(value) if isinstance(value, tuple) else value for value in values]
        for name, values in OPTIONS.items()
    }
    for file in sorted(EXPERIMENTS.rglob("*.py")):
        try:
            tree = flatten_fields(to_mapping(load_experiment(str(file))))
        except UserError:  # a benchmark is not an experiment
            continue
        for key, value in tree.items():
            if value not in used.setdefault(key, []):
                used[key].append(value)
    return used


@functools.cache
def _base() -> Experiment:
    return load_experiment(str(EXPERIMENTS / "smoke.py"))


def _keys(kind, prefix: str = "") -> Iterator[str]:
    """Yields the dotted name of each field and section, and names of options of each choice."""
    for name, field in typing.get_type_hints(kind).items():
        yield prefix + name
        if dataclasses.is_dataclass(field):
            yield from _keys(field, f"{prefix}{name}.")
        elif field == Choice:
            yield from (f"{prefix}{name}.{option}" for option in ("name", "theta", "rate", "base"))


def _key(rng: random.Random, keys: list[str]) -> str:
    """Returns the name of a field, or one that is misspelled, too deep, truncated or unusual."""
    key = rng.choice(keys)
    parts, position = key.split("."), rng.randrange(len(key))
    return rng.choice(
        (
            key,
            key,
            key,
            key,
            key,
            key[:position] + rng.choice("abcxyz_.-") + key[position:],
            key[:position] + key[position + 1 :],
            ".".join(parts[::-1]),
            f"{key}.{rng.choice(keys)}",
            f"{key}.{rng.choice(('name', 'x', '0', '', 'name.x'))}",
            ".".join(parts[:-1]),
            parts[-1],
            key.upper(),
            key + rng.choice(("é", "\n", " ", "\0", "\udcff", "\x1b[31m")),
            "." * rng.randrange(4),
            key * rng.randrange(200),
        )
    )


SPELLED = (
    "", " ", "0", "1", "-1", "2", "64", "1e3", "1.5", "-0.0", "nan", "inf", "-inf", "1e999",
    "-1e999", "1e-400", "1_000", "0x10", "0b2", "007", "9" * 30, "9" * 400, "9" * 5000,
    "0x" + "f" * 5000, "2147483647", "2147483648", "9223372036854775808", "1j", "true", "False",
    "NONE", "...", "[", "]", "()", "[]", "{}", "(,)", "[1, 2]", "1,2", ",", "1,,2", "{'a': 1}",
    "{'name': 'rotary'}", "{'name': {'name': 1}}", "{1: 2}", "{1, 2}", "{[]: 1}",
    "{'name': 'rotary', 'theta': 1e999}", "[[[[[[1]]]]]]", "[{}]", "[{'name': 'order'}]",
    "{'name': 'order', 'x': {}}", "b'x'", "f'{1}'", "'", "''", "'\\d'", "'\\ud800'", "\\", "\\x00",
    "a\nb", "a\tb", "a\0b", "\udcff\udcfe", "é", "日本語", "🙂", "\u202e", "\ufeff1",
    "\uff11", "\u00bd", "1if", "0_0_", "lambda: 1", "__import__('os')", "1" + "+1" * 3000,
    "(" * 150, "[" * 3000, "-" * 3000 + "1", "not " * 500 + "1", "{" * 99 + "}" * 99, "x" * 10_000,
    "rotary", "pre", "post", "encoder", "decoder", "seq2seq", "causal_lm", "adamw", "cosine",
    "/etc", "http://x", "a:b", "%s", "{x}",
)  # fmt: skip
"""Values that are valid for some field, or almost valid."""


def _value(rng: random.Random) -> str:
    generated = (
        str(rng.randrange(-5, 5000)),
        repr(rng.uniform(-2, 2)),
        repr(10 ** rng.uniform(-320, 308)),
        "".join(rng.choices("01289eE.+-_xjJ", k=rng.randrange(1, 12))),
        "".join(rng.choices("()[]{}'\",:ab1 \\\n", k=rng.randrange(1, 30))),
        "".join(chr(rng.randrange(1, 0x2FFF)) for _ in range(rng.randrange(1, 9))),
        rng.choice(SPELLED) + rng.choice(SPELLED[:60]),
    )
    return rng.choice((rng.choice(SPELLED), rng.choice(generated)))
