"""Readers: files of any supported format to examples, one at a time.

An example is a tuple of strings: (text,) or (source, target). Paths are local or gs:// (etils.epath); a path may be a
glob; lines of a file that ends in .gz are decompressed as they are read. Every fault names its file and line.

Text is UTF-8, with or without a byte order mark. Lines end in LF or CRLF. An example with a blank text is skipped in every format.
"""

import contextlib
import fnmatch
import gzip
import json
import re
import zlib
from collections.abc import Iterator

from etils import epath

from transformer.data import probes
from transformer.data.paths import as_path
from transformer.errors import UserError

Example = tuple[str, ...]


def read(
    format: str, path: str, fields: tuple[str, ...] = (), columns: tuple[str, ...] = ("text",)
) -> Iterator[Example]:
    """Examples of as many strings as `columns`, which are the names of `fields` too, unless given. Raises UserError for a missing or empty
    file and for a malformed line."""
    fields = fields or columns
    count = 0
    if format == "huggingface":
        examples = _huggingface(path, fields)
    elif format == "paired":
        examples = _paired(path)
    elif format == "probe":
        examples = probes.parse(path).draw()
    else:
        reader = {"tsv": _tsv, "text": _text, "jsonl": _jsonl, "arrayrecord": _arrayrecord}[format]
        examples = (example for file in expand(path) for example in reader(file, fields))
    for example in examples:
        if len(example) != len(columns):
            raise UserError(
                f"data.format: {format!r} gives {len(example)} text(s) an example, but the objective needs {', '.join(columns)}; see data.objective"
            )
        if all(text.strip() for text in example):
            count += 1
            yield example
    if not count:
        raise UserError(f"data: {path} holds no text")


def patterns(format: str, path: str) -> list[str]:
    """The paths or globs in a path of this format: two of "paired", else one."""
    if format != "paired":
        return [path]
    names = [name.strip() for name in path.split(",")]
    if len(names) != 2 or not all(names):
        raise UserError(f"data: format 'paired' needs two paths with a comma between, got {path!r}")
    return names


def expand(pattern: str) -> list[epath.Path]:
    """The files of a path or glob, sorted."""
    path = as_path(pattern, "data")
    if not any(c in path.name for c in "*?["):
        if not path.exists():
            raise UserError(f"data: no file {pattern}")
        if path.is_dir():
            raise UserError(f"data: {pattern} is a folder; name its files: {pattern.rstrip('/')}/*")
        return [path]
    files = (
        sorted(f for f in path.parent.iterdir() if fnmatch.fnmatch(f.name, path.name))
        if path.parent.exists()
        else []
    )
    if not files:
        raise UserError(f"data: no file matches {pattern}")
    return files


def _lines(file: epath.Path) -> Iterator[tuple[int, str]]:
    """(line number from 1, line without its end), strict UTF-8 without the byte order mark."""
    number = 0
    with contextlib.ExitStack() as opened:
        try:
            stream = opened.enter_context(file.open("rb"))
            if file.suffix == ".gz":
                stream = opened.enter_context(gzip.open(stream))
            for number, line in enumerate(stream, 1):
                yield number, _decode(line, f"{file}:{number}", first=number == 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as e:
            raise UserError(
                f"{file}: damaged or cut off behind line {number} ({e}); fetch it again"
            ) from None
        except OSError as e:
            raise UserError(f"{file}: cannot be read ({e.strerror or e})") from None


_SIGNATURES = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip (name it .gz)"}


def _decode(line: bytes, where: str, first: bool) -> str:
    """A line as text. `first`: the first line of its file, which may begin with a byte order mark."""
    try:
        text = line.decode("utf-8-sig" if first else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as e:
        kind = _SIGNATURES.get(line[:2] if first else b"")
        raise UserError(
            f"{where}: not UTF-8 (byte {line[e.start]:#04x} at column {e.start + 1})"
            f"{f' but {kind}' if kind else ''}; convert the file"
        ) from None
    if "\0" in text:
        raise UserError(
            f"{where}: a NUL byte at column {line.index(0) + 1}; a binary file, or UTF-16: convert it"
        )
    return text


def _text(file: epath.Path, fields) -> Iterator[Example]:
    """One document a line; empty lines are skipped."""
    for _, line in _lines(file):
        if line.strip():
            yield (line,)


def _tsv(file: epath.Path, fields) -> Iterator[Example]:
    """Source, tab, target; further columns are ignored unless `fields` gives other column numbers (from 0)."""
    chosen = all(field.isdigit() for field in fields)
    columns = [int(field) for field in fields] if chosen else range(len(fields))
    for number, line in _lines(file):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) <= max(columns):
            wanted = (
                f"{max(columns) + 1} columns (data.fields)" if chosen else ", tab, ".join(fields)
            )
            raise UserError(
                f"{file}:{number}: expected {wanted}; found {len(cells) - 1} tab(s) in {line[:60]!r}"
            )
        yield tuple(cells[c].strip() for c in columns)


def _paired(path: str) -> Iterator[Example]:
    """Two files, line by line; or two globs, file by file. Raises UserError for two files in whose
    names the wildcards stand for different text, and for a file without a partner."""
    sources, targets = map(_by_wildcards, patterns("paired", path))
    for (one, source), (other, target) in zip(sources, targets, strict=False):
        if one != other and one and other:
            raise UserError(
                f"data: {path}: {source.name} and {target.name} are no pair: the wildcards stand "
                f"for {'/'.join(one)!r} and {'/'.join(other)!r}; add the missing file, or change "
                "the globs"
            )
    if len(sources) != len(targets):
        alone = max(sources, targets, key=len)[min(len(sources), len(targets))][1]
        raise UserError(
            f"data: {path} matches {len(sources)} and {len(targets)} files, and {alone.name} has "
            "no partner; 'paired' needs as many of each"
        )
    for (_, source), (_, target) in zip(sources, targets, strict=True):
        yield from _lines_of_two(source, target)


def _by_wildcards(pattern: str) -> list[tuple[tuple[str, ...], epath.Path]]:
    """The files of a path or glob, each with the texts that its wildcards stand for, in the order
    of these texts. `[x]` is x, and no wildcard."""
    parts = re.split(r"(\*|\?|\[(?!.\])!?\]?[^\]]*\])", as_path(pattern, "data").name)
    inner = [fnmatch.translate(part)[len("(?s:") : -len(r")\Z")] for part in parts]
    inner[1::2] = [f"({wildcard})" for wildcard in inner[1::2]]
    named = re.compile("".join(inner), re.DOTALL)
    return sorted((named.fullmatch(file.name).groups(), file) for file in expand(pattern))


def _lines_of_two(source: epath.Path, target: epath.Path) -> Iterator[Example]:
    left, right = _lines(source), _lines(target)
    number = 0
    for number, text in left:
        other = next(right, None)
        if other is None:
            raise UserError(f"{target}: ends after line {number - 1}, but {source} goes on")
        yield text.strip(), other[1].strip()
    if next(right, None) is not None:
        raise UserError(f"{source}: ends after line {number}, but {target} goes on")


def _record(text: str, fields, where: str) -> Example:
    try:
        record = json.loads(text, object_pairs_hook=_unambiguous)
    except _Twice as e:
        raise UserError(f"{where}: two fields {e.args[0]!r} in one object") from None
    except (ValueError, RecursionError):  # a number of too many digits, braces in braces in braces
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object: {text[:60]!r}")
    return tuple(_field(record, field, where) for field in fields)


class _Twice(Exception):
    """A name that occurs twice in one JSON object, where Python would take the last."""


def _unambiguous(pairs: list[tuple[str, object]]) -> dict:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(next(name for name in names if names.count(name) > 1))
    return record


def _field(record: dict, field: str, where: str) -> str:
    """`record["a"]["b"]` for the field "a.b"; it must be text. An integer, the number of a class, is read as its digits."""
    value = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            there = ", ".join(value) if isinstance(value, dict) else "no further field"
            raise UserError(f"{where}: no field {field!r}; there is: {there}; set data.fields")
        value = value[key]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # the number of a class
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field!r} is {json.dumps(value)[:40]}, not text")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise UserError(
            f"{where}: field {field!r} holds half of a surrogate pair, which is no character"
        )
    return value


def _jsonl(file: epath.Path, fields) -> Iterator[Example]:
    """One JSON object a line."""
    for number, line in _lines(file):
        if line.strip():
            yield _record(line, fields, f"{file}:{number}")


def _arrayrecord(file: epath.Path, fields) -> Iterator[Example]:
    """Each record a JSON object or, with one field, plain UTF-8 text."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(file))
    if not reader.ok():
        raise UserError(f"{file}: no ArrayRecord file, or one that was cut off")
    for number in range(reader.num_records()):
        try:
            text = reader.read().decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{file}: record {number} is not UTF-8") from None
        except RuntimeError as e:
            raise UserError(
                f"{file}: damaged at record {number} ({str(e).splitlines()[0][:80]})"
            ) from None
        yield (
            _record(text, fields, f"{file}: record {number}")
            if text.startswith("{") or len(fields) > 1
            else (text,)
        )


def _huggingface(path: str, fields) -> Iterator[Example]:
    """`organisation/name[/subset]:split`, or a folder written by `save_to_disk`."""
    try:
        import datasets
    except ImportError:
        raise UserError(
            "data.format 'huggingface' needs the extra [hf]: pip install -e '.[hf]'"
        ) from None
    name, _, split = path.partition(":")
    if epath.Path(name).exists():
        dataset = datasets.load_from_disk(name)
        dataset = (
            dataset[split or "train"] if isinstance(dataset, datasets.DatasetDict) else dataset
        )
    else:
        repository, _, subset = name.rpartition("/") if name.count("/") > 1 else (name, "", "")
        dataset = datasets.load_dataset(repository, subset or None, split=split or "train")
    for number, row in enumerate(dataset):
        yield tuple(_field(row, field, f"{path}: row {number}") for field in fields)
