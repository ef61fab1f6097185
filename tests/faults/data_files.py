"""Fuzzed data files of every format: the texts are those that a simple reader gives, or one line names the file."""

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

from faults.property import right_or_one_line

from transformer.data import sources

COLUMNS = {"text": ("text",), "tsv": ("source", "target"), "jsonl": ("source", "target"), "paired": ("source", "target"),
           "arrayrecord": ("source", "target")}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """The files of one text, by name, and how they were made; `seed` and `number` name it."""

    seed: int
    number: int
    format: str
    files: dict[str, bytes]
    made: str
    records: tuple[str, ...] | None = None  # of an ArrayRecord file before it was damaged

    def __str__(self) -> str:
        shown = {name: content[:60] for name, content in self.files.items()}
        return (
            f"data_files, seed {self.seed}, case {self.number}: {self.format}, {self.made}: {shown}"
        )


def cases(seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    for number in itertools.count():
        format = draw.choice(tuple(COLUMNS))
        names = ("a.source", "a.target") if format == "paired" else (f"a.{format}",)
        files, made, records = {}, [], None
        for name in names:
            lines = _lines(draw, format)
            if format == "arrayrecord":
                content, how, records = _records(lines), "records", tuple(lines)
            else:
                content, how = _joined(draw, lines)
            content, damage = _damaged(draw, content)
            if format != "arrayrecord" and draw.random() < 0.2:
                content, name = _compressed(draw, content), f"{name}.gz"
            files[name] = content
            made.append(f"{how}, {damage}")
        yield Case(seed, number, format, files, "; ".join(made), records)


def check(case: Case) -> None:
    """`sources.read` gives what `expected` does, and fails only where that does, with the file's name."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in case.files.items():
            (Path(folder) / name).write_bytes(content)
        path = ",".join(str(Path(folder) / name) for name in case.files)

        def read():
            found = list(sources.read(case.format, path, columns=COLUMNS[case.format]))
            if wanted is None and case.records is None:
                raise AssertionError(f"read {str(found)[:200]}, but it is malformed")
            assert found == wanted, f"read {str(found)[:200]}, not {str(wanted)[:200]}"

        wanted = expected(case)
        message = right_or_one_line(case, read)
        if message is not None:
            assert any(name in message for name in case.files), f"{case}: names no file: {message}"
            damaged_record = case.records is not None and "damaged" in case.made
            assert wanted is None or damaged_record, f"{case}: refused, but well-formed: {message}"


def expected(case: Case) -> list[tuple[str, ...]] | None:
    """The examples, by the definition of each format, of whole files in memory; None if a file is malformed or there is no example."""
    try:
        if case.records is not None:
            return _kept([_of_json(record) for record in case.records])
        texts = [_decoded(name, content) for name, content in case.files.items()]
        lines = [_split(text) for text in texts]
        if case.format == "text":
            rows = [(line,) for line in lines[0] if line.strip()]
        elif case.format == "tsv":
            rows = [
                tuple(map(str.strip, line.split("\t")[:2])) for line in lines[0] if line.strip()
            ]
        elif case.format == "paired":
            if len(lines[0]) != len(lines[1]):
                return None
            rows = [(a.strip(), b.strip()) for a, b in zip(*lines, strict=True)]
        else:
            rows = [_of_json(line) for line in lines[0] if line.strip()]
    except (ValueError, OSError, EOFError, KeyError, RecursionError):
        return None
    if any(len(row) != len(COLUMNS[case.format]) for row in rows):
        return None
    return _kept(rows)


def _kept(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]] | None:
    return [row for row in rows if all(text.strip() for text in row)] or None


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


def _of_json(line: str) -> tuple[str, ...]:
    """The two fields, each in the record once, each a text or an integer."""
    seen = []

    def once(pairs):
        seen.extend(pairs)
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a field twice")
        return dict(pairs)

    record = json.loads(line, object_pairs_hook=once)
    if not isinstance(record, dict):
        raise ValueError("no object")
    row = tuple(record[name] for name in ("source", "target"))
    if not all(isinstance(x, str | int) and not isinstance(x, bool) for x in row):
        raise ValueError("no text")
    for text in map(str, row):
        text.encode("utf-8")  # fails for half of a surrogate pair
    return tuple(map(str, row))


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


def _text(draw: random.Random) -> str:
    if draw.random() < 0.15:
        return draw.choice(BLANK)
    if draw.random() < 0.01:
        return "long " * 50_000
    return " ".join(draw.choices(WORDS, k=draw.randrange(1, 5)))


def _lines(draw: random.Random, format: str) -> list[str]:
    count = draw.choice((0, 1, 2, 3, 8))
    if format in ("jsonl", "arrayrecord"):
        return [_json(draw) for _ in range(count)]
    if format == "tsv":
        ragged = draw.random() < 0.2
        columns = lambda: draw.choice((1, 2, 3, 4)) if ragged else draw.choice((2, 2, 3))
        return [
            "\t".join(_text(draw).replace("\t", " ") for _ in range(columns()))
            for _ in range(count)
        ]
    return [_text(draw) for _ in range(count)]


def _json(draw: random.Random) -> str:
    """A record, in one case of four an odd one."""
    record = {"source": _text(draw), "target": _text(draw), "other": 1}
    plain = json.dumps(record, ensure_ascii=draw.random() < 0.5)
    odd = (
        json.dumps(
            record | {"source": draw.choice((None, True, 1.5, 7, [], {}, float("nan"), 10**30))}
        ),
        json.dumps({"source": "a"}),
        json.dumps([record]),
        json.dumps(draw.choice((None, 1, "text", []))),
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
    return draw.choice(odd) if draw.random() < 0.06 else plain


def _joined(draw: random.Random, lines: list[str]) -> tuple[bytes, str]:
    """The lines as a file."""
    end = draw.choice(("\n", "\n", "\r\n", "mixed"))
    ends = [draw.choice(("\n", "\r\n", "\n\n")) if end == "mixed" else end for _ in lines]
    if ends and draw.random() < 0.3:
        ends[-1] = ""
    text = "".join(map(str.__add__, lines, ends))
    encoding = draw.choice(
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


def _damaged(draw: random.Random, content: bytes) -> tuple[bytes, str]:
    at = draw.randrange(len(content) + 1)
    kind = draw.choice(("whole",) * 8 + ("cut", "flipped", "inserted", "empty"))
    if kind == "cut":
        content = content[:at]
    elif kind == "flipped" and content:
        content = (
            content[: at - 1] + bytes([content[at - 1] ^ (1 << draw.randrange(8))]) + content[at:]
            if at
            else content
        )
    elif kind == "inserted":
        content = (
            content[:at]
            + draw.choice(
                (
                    b"\0",
                    b"\xff",
                    b"\xef\xbb\xbf",
                    b"\n",
                    b"\t",
                    b"\r",
                    b"\x80",
                    b"\xc0\xaf",
                    b"\xed\xa0\x80",
                )
            )
            + content[at:]
        )
    elif kind == "empty":
        content = b""
    return content, kind if kind == "whole" else f"damaged: {kind}"


def _compressed(draw: random.Random, content: bytes) -> bytes:
    packed = gzip.compress(content, mtime=0)
    return draw.choice(
        (
            packed,
            packed,
            packed,
            packed[: draw.randrange(len(packed))],
            packed + b"\0\0",
            packed + b"x",
            packed + packed,
            content,
        )
    )
