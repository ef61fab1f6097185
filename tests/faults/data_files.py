"""Fuzzed data files of every format.

The package must read the same examples as a simple reader, or raise an error of one line that
contains the name of the file.
"""

import codecs
import dataclasses
import gzip
import itertools
import json
import random
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from faults.property import assert_right_or_one_line

from transformer.data import sources

COLUMNS = {
    "text": ("text",),
    "tsv": ("source", "target"),
    "jsonl": ("source", "target"),
    "paired": ("source", "target"),
    "arrayrecord": ("source", "target"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """The files of a text, by name, and how they were made. `seed` and `number` reproduce it."""

    seed: int
    number: int
    format: str
    files: dict[str, bytes]
    made: str
    records: tuple[str, ...] | None = None  # of an ArrayRecord file, before damage

    def __str__(self) -> str:
        shown = {name: content[:60] for name, content in self.files.items()}
        return (
            f"data_files, seed {self.seed}, case {self.number}: {self.format}, {self.made}: {shown}"
        )


def cases(seed: int) -> Iterator[Case]:
    """Yields random cases without end."""
    rng = random.Random(seed)
    for number in itertools.count():
        format = rng.choice(tuple(COLUMNS))
        names = ("a.source", "a.target") if format == "paired" else (f"a.{format}",)
        files, made, records = {}, [], None
        for name in names:
            lines = _lines(rng, format)
            if format == "arrayrecord":
                content, how, records = _records(lines), "records", tuple(lines)
            else:
                content, how = _joined(rng, lines)
            content, damage = _damaged(rng, content)
            if format != "arrayrecord" and rng.random() < 0.2:
                content, name = _compressed(rng, content), f"{name}.gz"
            files[name] = content
            made.append(f"{how}, {damage}")
        yield Case(seed, number, format, files, "; ".join(made), records)


def check(case: Case) -> str | None:
    """Checks that `sources.read` returns what `expected` returns, and raises where that is None.

    Its error must contain the name of a file. A damaged ArrayRecord file may always be refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name, content in case.files.items():
            (Path(folder) / name).write_bytes(content)
        path = ",".join(str(Path(folder) / name) for name in case.files)

        def read():
            examples = list(sources.read(case.format, path, columns=COLUMNS[case.format]))
            if wanted is None and case.records is None:
                raise AssertionError(f"read {str(examples)[:200]}, but the file is malformed")
            assert examples == wanted, f"read {str(examples)[:200]}, not {str(wanted)[:200]}"

        wanted = expected(case)
        message = assert_right_or_one_line(case, read)
        if message is not None:
            assert any(name in message for name in case.files), (
                f"{case}: no file name in: {message}"
            )
            damaged_record = case.records is not None and "damaged" in case.made
            assert wanted is None or damaged_record, f"{case}: refused, but well-formed: {message}"
        return message


def expected(case: Case) -> list[tuple[str, ...]] | None:
    """Returns the examples by the definition of each format, read from the contents in memory.

    Returns None if a file is malformed or contains no example.
    """
    try:
        if case.records is not None:
            return _nonempty([_from_json(record) for record in case.records])
        texts = [_decoded(name, content) for name, content in case.files.items()]
        lines = [_split(text) for text in texts]
        if case.format == "text":
            examples = [(line,) for line in lines[0] if line.strip()]
        elif case.format == "tsv":
            examples = [
                tuple(map(str.strip, line.split("\t")[:2])) for line in lines[0] if line.strip()
            ]
        elif case.format == "paired":
            if len(lines[0]) != len(lines[1]):
                return None
            examples = [(a.strip(), b.strip()) for a, b in zip(*lines, strict=True)]
        else:
            examples = [_from_json(line) for line in lines[0] if line.strip()]
    except (ValueError, OSError, EOFError, KeyError, RecursionError):
        return None
    if any(len(example) != len(COLUMNS[case.format]) for example in examples):
        return None
    return _nonempty(examples)


def _nonempty(examples: list[tuple[str, ...]]) -> list[tuple[str, ...]] | None:
    return [example for example in examples if all(text.strip() for text in example)] or None


def _decoded(name: str, content: bytes) -> str:
    try:
        content = gzip.decompress(content) if name.endswith(".gz") else content
    except zlib.error as e:
        raise ValueError from e
    text = content.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    if "\0" in text:
        raise ValueError("NUL")
    return text


def _split(text: str) -> list[str]:
    lines = text.split("\n")
    return [line.rstrip("\r") for line in (lines if lines[-1] else lines[:-1])]


def _from_json(line: str) -> tuple[str, ...]:
    """Returns the two fields. Each occurs in the record once and is a string or an integer."""
    seen = []

    def unique_fields(pairs):
        seen.extend(pairs)
        if len(dict(pairs)) < len(pairs):
            raise ValueError("duplicate field")
        return dict(pairs)

    record = json.loads(line, object_pairs_hook=unique_fields)
    if not isinstance(record, dict):
        raise ValueError("not an object")
    fields = tuple(record[name] for name in ("source", "target"))
    if not all(isinstance(x, str | int) and not isinstance(x, bool) for x in fields):
        raise ValueError("not text")
    for text in map(str, fields):
        text.encode("utf-8")  # fails for half of a surrogate pair
    return tuple(map(str, fields))


WORDS = (
    "cat",
    "dog",
    "é",
    "日本",
    "🙂",
    "a b",
    "  x ",
    "\u2028",
    "\x0b",
    "\x85",
    "\ufeff",
    "'",
    '"',
    "\\",
    "\r",
    "\x1c",
    "\u00a0",
)
BLANK = ("", " ", "\u00a0", "\t", "\u3000 ")


def _text(rng: random.Random) -> str:
    if rng.random() < 0.15:
        return rng.choice(BLANK)
    if rng.random() < 0.01:
        return "long " * 50_000
    return " ".join(rng.choices(WORDS, k=rng.randrange(1, 5)))


def _lines(rng: random.Random, format: str) -> list[str]:
    count = rng.choice((0, 1, 2, 3, 8))
    if format in ("jsonl", "arrayrecord"):
        return [_json(rng) for _ in range(count)]
    if format == "tsv":
        ragged = rng.random() < 0.2
        columns = lambda: rng.choice((1, 2, 3, 4)) if ragged else rng.choice((2, 2, 3))
        return [
            "\t".join(_text(rng).replace("\t", " ") for _ in range(columns())) for _ in range(count)
        ]
    return [_text(rng) for _ in range(count)]


def _json(rng: random.Random) -> str:
    """Returns a JSON record, which is malformed or unusual with a probability of 6%."""
    record = {"source": _text(rng), "target": _text(rng), "other": 1}
    plain = json.dumps(record, ensure_ascii=rng.random() < 0.5)
    odd = (
        json.dumps(
            record | {"source": rng.choice((None, True, 1.5, 7, [], {}, float("nan"), 10**30))}
        ),
        json.dumps({"source": "a"}),
        json.dumps([record]),
        json.dumps(rng.choice((None, 1, "text", []))),
        '{"source": "a", "source": "b", "target": "c"}',
        '{"source": "\\ud800", "target": "c"}',
        '{"source": "\\u0000x", "target": "c"}',
        '{"source": ' + "9" * 5000 + ', "target": "c"}',
        '{"source": ' + "[" * 5000 + "}",
        "oops",
        plain[:-1],
        plain + plain,
        "",
        " ",
    )
    return rng.choice(odd) if rng.random() < 0.06 else plain


def _joined(rng: random.Random, lines: list[str]) -> tuple[bytes, str]:
    """Returns the lines as the content of a file, and a description of line ends and encoding."""
    end = rng.choice(("\n", "\n", "\r\n", "mixed"))
    ends = [rng.choice(("\n", "\r\n", "\n\n")) if end == "mixed" else end for _ in lines]
    if ends and rng.random() < 0.3:
        ends[-1] = ""
    text = "".join(map(str.__add__, lines, ends))
    encoding = rng.choice(
        ("utf-8",) * 12 + ("utf-8-sig",) * 4 + ("utf-16", "utf-16-le", "latin-1", "utf-32")
    )
    return text.encode(encoding, "replace"), f"{end!r} {encoding}"


def _records(lines: list[str]) -> bytes:
    from array_record.python.array_record_module import ArrayRecordWriter

    with tempfile.NamedTemporaryFile(suffix=".arrayrecord") as file:
        writer = ArrayRecordWriter(file.name, "group_size:1")
        for line in lines:
            writer.write(line.encode())
        writer.close()
        return Path(file.name).read_bytes()


INSERTED = (
    b"\0", b"\xff", b"\xef\xbb\xbf", b"\n", b"\t", b"\r", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80",
)  # fmt: skip


def _damaged(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    position = rng.randrange(len(content) + 1)
    kind = rng.choice(("whole",) * 8 + ("cut", "flipped", "inserted", "empty"))
    if kind == "cut":
        content = content[:position]
    elif kind == "flipped" and content:
        content = (
            content[: position - 1]
            + bytes([content[position - 1] ^ (1 << rng.randrange(8))])
            + content[position:]
            if position
            else content
        )
    elif kind == "inserted":
        content = content[:position] + rng.choice(INSERTED) + content[position:]
    elif kind == "empty":
        content = b""
    return content, kind if kind == "whole" else f"damaged: {kind}"


def _compressed(rng: random.Random, content: bytes) -> bytes:
    packed = gzip.compress(content, mtime=0)
    return rng.choice(
        (
            packed,
            packed,
            packed,
            packed[: rng.randrange(len(packed))],
            packed + b"\0\0",
            packed + b"x",
            packed + packed,
            content,
        )
    )
