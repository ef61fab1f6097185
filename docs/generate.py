"""Writes the tables of the manual that come from the code.

    python docs/generate.py            rewrite them in place
    python docs/generate.py --check    exit with 1 if one of them is out of date

A page marks the place of a table with `<!-- generated: NAME -->` and `<!-- end -->`.
"""

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

FOLDER = Path(__file__).parent
BENCHMARKS = FOLDER.parent / "experiments" / "benchmarks"
MARKED = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [list(head), ["---"] * len(list(head)), *map(list, rows)]
    escaped = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def summary(item) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join((inspect.getdoc(item) or "").split("\n\n")[0].split())


def comments(cls: type) -> dict[str, str]:
    """The comment of each field of a dataclass: behind it, or in the lines above it."""
    source = inspect.getsource(cls)
    notes: dict[int, str] = {}
    own_line: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            notes[token.start[0]] = token.string.lstrip("# ").strip()
            if not token.line[: token.start[1]].strip():
                own_line.add(token.start[0])
    lines = source.splitlines()
    starts = {}
    for number, line in enumerate(lines, 1):
        if match := re.match(r"    (\w+): ", line):
            starts[match[1]] = number
    by_field = {}
    for field in dataclasses.fields(cls):
        if field.name not in starts:  # inherited
            continue
        first = above = starts[field.name]
        while above - 1 in own_line:
            above -= 1
        last, depth = first, 0
        while True:
            code = re.sub(r"#.*", "", lines[last - 1])
            depth += sum(code.count(x) for x in "([{") - sum(code.count(x) for x in ")]}")
            if depth <= 0:
                break
            last += 1
        after = last
        while after + 1 in own_line and lines[after].startswith("     "):
            after += 1
        text = " ".join(notes[n] for n in range(above, after + 1) if n in notes)
        kind = typing.get_type_hints(cls)[field.name]
        values = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
        if not all(value in text for value in values):
            text = ": ".join(filter(None, (" | ".join(filter(None, values)), text)))
        by_field[field.name] = text
    return by_field


def default_of(field: dataclasses.Field) -> str:
    """The default of a field as one writes it."""
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is dataclasses.MISSING else "see below"
    if dataclasses.is_dataclass(field.default):
        return "see below"
    return f"`{field.default!r}`"


def fields(cls: type) -> str:
    notes = comments(cls)
    return table(
        ("field", "default", "meaning"),
        ((f"`{f.name}`", default_of(f), notes.get(f.name, "")) for f in dataclasses.fields(cls)),
    )


def options(cls: type, is_option: Callable = lambda field: True) -> str:
    """`name=default` of the options of a choice."""
    return ", ".join(f"`{f.name}={f.default!r}`" for f in dataclasses.fields(cls) if is_option(f))


def choices(
    registry: Mapping[str, type], *extra: tuple[str, Callable], is_option=lambda f: True
) -> str:
    """A table of a registry: name, summary, further columns, options."""
    return table(
        ("name", "what it is", *(title for title, _ in extra), "options"),
        (
            (f"`{name}`", summary(cls), *(cell(cls) for _, cell in extra), options(cls, is_option))
            for name, cls in sorted(registry.items())
        ),
    )


def _positions() -> str:
    from transformer.model.positions import SCHEMES, Position

    names = "embed project rotate distance_bias bias score value terms".split()
    overrides = lambda cls, name: getattr(cls, name) is not getattr(Position, name)
    hooks = lambda cls: ", ".join(f"`{x}`" for x in names if overrides(cls, x)) or "nothing"
    return choices(SCHEMES, ("hooks", hooks), is_option=lambda f: f.metadata.get("option", False))


def _backends() -> str:
    """Which attention backends compute each position scheme."""
    from transformer.model.positions import SCHEMES

    on_gpus = [row for run in _runs() if run["machine"]["platform"] == "gpu" for row in run["rows"]]
    of_flash = [row for row in on_gpus if row.get("backend") == "flash"]
    passed = {row.get("position") for row in of_flash if row["status"] == "passed"}

    def row(name: str, scheme) -> tuple[str, ...]:
        plain_logits = not scheme.acts_on_logits
        plain, pairwise = "tested on CPUs", "tested on CPUs" if scheme.pairwise else "no"
        on_tpu = "fused; interpreted and compiled" if plain_logits or scheme.has_terms else "no"
        on_gpu = "fused; interpreted" if plain_logits or scheme.is_distance_bias else "no"
        same = "none" if scheme.hooks <= {"embed"} else name  # for an attention backend
        on_gpu += "; run" if on_gpu != "no" and same in passed else ""
        return (f"`{name}`", plain, pairwise, pairwise, on_tpu, on_gpu)

    header = ("scheme", "`reference`", "`blockwise`", "`ring`", "`flash` (TPU)", "`flash` (GPU)")
    return table(header, (row(name, cls()) for name, cls in sorted(SCHEMES.items())))


def _accelerators() -> str:
    """The results of experiments/benchmarks/accelerator.py on all machines that have run it."""
    sys.path.insert(0, str(BENCHMARKS))
    import accelerator

    return accelerator.table(_runs(), accelerator.headline())


def _runs() -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted(BENCHMARKS.glob("machines/*.json"))]


PLAN = re.compile(
    r" machine +(?P<machine>\S+): (?P<chips>\d+) x TPU (?P<chip>\w+), (?P<room>[\d.]+ GiB).*?"
    r" mesh +(?P<mesh>[^\n]+).*? peak of [\d.]+ GiB +(?P<peak>[\d.]+ GiB).*?"
    r" step +(?P<step>[\d.]+ m?s).*? bound by +(?P<bound>\w+).*?MFU at most (?P<mfu>[\d.]+)%",
    re.DOTALL,
)
MEASURED = {  # by MaxText
    ("decoder_8b", "v6e"): "45.5 % (v6e, 256)",
    ("decoder_70b", "v5p"): "65.4 % (Llama 2, length 4,096)",
    ("decoder_405b", "v5p"): "38.6 % (v6e, 256)",
    ("mixture_8x7b", "v5p"): "52.6 %",
}


def _scale() -> str:
    """The plans in the docstrings of experiments/scale/."""
    rows = []
    for file in sorted((FOLDER.parent / "experiments" / "scale").glob("*.py")):
        for plan in PLAN.finditer(file.read_text()):
            machine, chip, mesh = plan["machine"], plan["chip"], plan["mesh"].replace(" x ", ", ")
            peak, measured = (
                f"{plan['peak']} of {plan['room']}",
                MEASURED.get((file.stem, chip), ""),
            )
            time = f"{plan['step']}, {plan['bound']}"
            row = (f"`{file.stem}`", machine, mesh, peak, time, f"{plan['mfu']} %", measured)
            rows.append(row)
    head = ("file", "machine", "mesh", "peak HBM per device", "minimum step time, bound by")
    return table((*head, "maximum MFU", "MFU measured by MaxText"), rows)


def _placements() -> str:
    from transformer.model.placements.base import PLACEMENTS, Placement

    plain = {f.name: f.default for f in dataclasses.fields(Placement)}
    options = [f for f in dataclasses.fields(Placement) if f.name != "warmup_hint"]
    parts = lambda cls: ", ".join(
        f"`{f.name}`" for f in options if getattr(cls, f.name) != plain[f.name]
    )
    presets = table(
        ("name", "formula", "parts"),
        (
            (f"`{name}`", summary(cls), parts(cls) or "none")
            for name, cls in sorted(PLACEMENTS.items())
        ),
    )
    notes = comments(Placement)
    every = table(
        ("part", "default", "meaning"),
        ((f"`{f.name}`", default_of(f), notes[f.name]) for f in options),
    )
    return f"{presets}\nThe parts:\n\n{every}"


def _parametrizations() -> str:
    from transformer.model.parametrizations.base import PARAMETRIZATIONS, ROLES, Parametrization

    names = table(
        ("name", "definition"),
        ((f"`{name}`", summary(cls)) for name, cls in sorted(PARAMETRIZATIONS.items())),
    )
    notes = {role: note.removeprefix("multipliers of ") for role, note in _notes(Parametrization)}
    roles = table(("role", "parameters"), ((f"`{role}`", notes[role]) for role in ROLES))
    return f"{names}\nThe roles of parameters:\n\n{roles}"


def _notes(cls) -> list[tuple[str, str]]:
    """Returns (field, comment with a lower-case beginning and without a full stop)."""
    lower = lambda note: note[0].lower() + note[1:].rstrip(".")
    return [(name, lower(note)) for name, note in comments(cls).items()]


def _mixers() -> str:
    from transformer.model.mixers.base import MIXERS
    from transformer.model.positions import SCHEMES

    def accepted(mixer: type) -> str:
        names = [f"`{name}`" for name, cls in sorted(SCHEMES.items()) if cls().hooks <= mixer.hooks]
        return "all" if len(names) == len(SCHEMES) else ", ".join(names)

    return choices(MIXERS, ("position schemes", accepted))


def _feed_forwards() -> str:
    from transformer.model.feed_forwards.base import FEED_FORWARDS

    return choices(FEED_FORWARDS)


def _objectives() -> str:
    from transformer.data.objectives import OBJECTIVES

    families = lambda cls: ", ".join(f"`{name}`" for name in cls.families)
    return choices(OBJECTIVES, ("families", families))


def _evaluators() -> str:
    from transformer.evaluation.evaluators import EVALUATORS

    return choices(EVALUATORS)


def _config_fields() -> str:
    from transformer.config import Experiment

    parts = []
    hints = typing.get_type_hints(Experiment)
    is_section = lambda f: dataclasses.is_dataclass(hints[f.name])
    plain = [f for f in dataclasses.fields(Experiment) if not is_section(f)]
    for field in dataclasses.fields(Experiment):
        cls = hints[field.name]
        if not dataclasses.is_dataclass(cls):
            continue
        parts.append(f"## {field.name}\n\n{textwrap.fill(summary(cls), 100)}\n\n{fields(cls)}")
        for inner in dataclasses.fields(cls):
            kind = typing.get_type_hints(cls)[inner.name]
            if dataclasses.is_dataclass(kind):
                intro = textwrap.fill(summary(kind), 100)
                parts.append(f"### {field.name}.{inner.name}\n\n{intro}\n\n{fields(kind)}")
    notes = comments(Experiment)
    parts.append(
        "## Other fields\n\n"
        + table(
            ("field", "default", "meaning"),
            ((f"`{f.name}`", default_of(f), notes.get(f.name, "")) for f in plain),
        )
    )
    return "\n".join(parts)


def _architectures() -> str:
    from transformer.model.architectures import ARCHITECTURES

    return textwrap.fill(", ".join(f"`{name}`" for name in ARCHITECTURES), 100) + "\n"


def _hf() -> str:
    from transformer.convert import FAMILIES

    return table(
        ("model type", "class in Transformers", "model.family"),
        ((f"`{name}`", f"`{f.architecture}`", f"`{f.ours}`") for name, f in FAMILIES.items()),
    )


def _command_line() -> str:
    from transformer.cli import VERBS, main

    os.environ["COLUMNS"] = "100"  # the width of help texts
    parts = []
    for verb in VERBS:
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            main([verb, "--help"])
        parts.append(f"## {verb}\n\n```text\n{shown.getvalue().rstrip()}\n```\n")
    return "\n".join(parts)


TABLES = {
    "accelerators": _accelerators,
    "scale": _scale,
    "positions": _positions,
    "backends": _backends,
    "placements": _placements,
    "mixers": _mixers,
    "parametrizations": _parametrizations,
    "feed_forwards": _feed_forwards,
    "objectives": _objectives,
    "evaluators": _evaluators,
    "config_fields": _config_fields,
    "architectures": _architectures,
    "hf": _hf,
    "command_line": _command_line,
}


def generated(page: str) -> str:
    """A page with its tables written anew."""
    return MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", page)


def main() -> int:
    stale = []
    for path in sorted(FOLDER.rglob("*.md")):
        old = path.read_text()
        new = generated(old)
        if new != old:
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(new)
    if "--check" in sys.argv and stale:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
