"""Readers that stream examples from files of any supported format.

An example is a tuple of strings: (text,) or (source, target). Paths are local or gs://
(etils.epath) and may be globs. Files in .gz or .zst are decompressed. Errors name file and line.

Text is UTF-8, with or without byte order mark. Lines end in LF or CRLF. Readers skip blank text."""

import collections
import contextlib
import fnmatch
import functools
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from transformer.data import probes
from transformer.errors import UserError, from_extra, from_os_error

Example = tuple[str, ...]

_SIGNATURES = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "gzip (name it .gz)"}


def read(
    format: str, path: str, fields: tuple[str, ...] = (), columns: tuple[str, ...] = ("text",)
) -> Iterator[Example]:
    """Yields examples with one string for each of `columns`. `fields` defaults to `columns`. Raises
    UserError for a missing or empty file and for a malformed line."""
    example = None
    for example in examples(format, path, fields, columns):
        yield example
    if example is None:
        raise UserError(f"data: {path} contains no text")


def examples(
    format: str, path: str, fields: tuple[str, ...], columns: tuple[str, ...]
) -> Iterator[Example]:
    """The same for a path that may contain no text."""
    fields = fields or columns
    if format == "huggingface":
        found = _huggingface(path, fields)
    elif format == "paired":
        found = _paired(path)
    elif format == "probe":
        found = probes.parse(path).draw()
    else:
        found = (example for file in expand(path) for example in _READERS[format](file, fields))
    for example in found:
        if len(example) != len(columns):
            needs = f"but data.objective needs {', '.join(columns)}"
            raise UserError(f"data.format: {format!r} yields {len(example)} text(s), {needs}")
        if all(text.strip() for text in example):
            yield example


def files(format: str, path: str) -> list[str]:
    """The paths, each readable alone, of the files (or the pairs, if "paired") in `path`."""
    if format == "paired":
        pairs = _pairs(path)
        for file in itertools.chain.from_iterable(pairs):
            if "," in str(file):
                raise UserError(f"data: {file}: a comma separates two files; rename the file")
        return [f"{source},{target}" for source, target in pairs]
    return [path] if format == "huggingface" else [str(file) for file in expand(path)]


def patterns(format: str, path: str) -> list[str]:
    """The paths or globs in a path of this format: two for "paired", otherwise one."""
    if format != "paired":
        return [path]
    names = [name.strip() for name in path.split(",")]
    if len(names) != 2 or not all(names):
        raise UserError(f"data: format 'paired' needs two paths separated by a comma, got {path!r}")
    return names


def as_path(text: str, field: str) -> epath.Path:
    """The path of `text`. Raises UserError for `field` if no installed package can read it."""
    scheme, separator, _ = text.partition("://")
    if "\0" in text:
        raise UserError(f"{field}: {text!r} contains a NUL character; remove it")
    try:
        path = epath.Path(text)
        if separator:
            path.exists()  # imports the package that reads the bucket
    except KeyError:
        raise UserError(f"{field}: {text!r} cannot be read; use a local path or gs://") from None
    except ImportError as e:
        needs = "the extra [gcs]: pip install -e '.[gcs]'" if scheme == "gs" else f"a package ({e})"
        raise UserError(f"{field}: {text} needs {needs}") from None
    return path


def expand(pattern: str, field: str = "data") -> list[epath.Path]:
    """Returns the files of a path or glob, sorted. Raises UserError for `field` without any."""
    path = as_path(pattern, field)
    if not any(c in path.name for c in "*?[") or path.exists():
        if not path.exists():
            where = "" if path.is_absolute() else f"; the path is relative to {Path.cwd()}"
            raise UserError(f"{field}: no file {pattern!r}{where}")
        if path.is_dir():
            raise UserError(f"{field}: {pattern!r} is a folder; name its files: FOLDER/*")
        return [path]
    siblings = path.parent.iterdir() if path.parent.exists() else ()
    files = sorted(file for file in siblings if fnmatch.fnmatch(file.name, path.name))
    if not files:
        raise UserError(f"{field}: no file matches {pattern!r}; correct the pattern")
    return files


def _lines(file: epath.Path) -> Iterator[tuple[int, str]]:
    """Yields (line number from 1, line without its end), decoded as strict UTF-8 without BOM."""
    number, name = 0, str(file)  # epath makes it anew at every use
    with contextlib.ExitStack() as opened:
        try:
            stream = opened.enter_context(file.open("rb"))
            if file.suffix == ".gz":
                stream = opened.enter_context(gzip.open(stream))
            elif file.suffix == ".zst":
                with from_extra("prepare", f"{file}: needs pyarrow, which comes with"):
                    import pyarrow
                # Unlike the package zstandard, pyarrow reports a stream that is cut off.
                text = pyarrow.CompressedInputStream(stream, "zstd")
                stream = opened.enter_context(io.BufferedReader(text))
            for number, line in enumerate(stream, 1):
                yield number, _decode(line, f"{name}:{number}", first=number == 1)
        except (EOFError, zlib.error, OSError) as e:
            if isinstance(e, OSError) and e.errno is not None:  # not of gzip or pyarrow
                raise from_os_error(e, f"{file}: cannot be read ({e.strerror or e})") from None
            problem = f"damaged or cut off after line {number} ({e})"
            raise UserError(f"{file}: {problem}; fetch it again") from None


def _decode(line: bytes, where: str, first: bool) -> str:
    """Decodes a line. The `first` line of a file may begin with a byte order mark."""
    try:
        text = line.decode("utf-8-sig" if first else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as e:
        kind = _SIGNATURES.get(line[:2] if first else b"")
        problem = f"not UTF-8 (byte {line[e.start]:#04x} at column {e.start + 1})"
        problem += f" but {kind}" if kind else ""
        raise UserError(f"{where}: {problem}; convert the file") from None
    if "\0" in text:
        way_out = "convert the file, which is binary or UTF-16"
        raise UserError(f"{where}: a NUL byte at column {line.index(0) + 1}; {way_out}")
    return text


def _text(file: epath.Path, fields) -> Iterator[Example]:
    return ((line,) for _, line in _lines(file) if line.strip())


def _document(file: epath.Path, fields) -> Iterator[Example]:
    yield ("\n".join(line for _, line in _lines(file)),)


def _tsv(file: epath.Path, fields) -> Iterator[Example]:
    """Yields the columns of tab-separated lines that `fields` number from 0, or the first ones."""
    by_number = all(field.isdigit() for field in fields)
    columns = [int(field) for field in fields] if by_number else range(len(fields))
    for number, line in _lines(file):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) <= max(columns):
            numbered = f"{max(columns) + 1} columns (data.fields)"
            expected = numbered if by_number else ", tab, ".join(fields)
            found = f"{len(cells) - 1} tab(s) in {line[:60]!r}"
            raise UserError(f"{file}:{number}: expected {expected}; found {found}")
        yield tuple(cells[c].strip() for c in columns)


def _pairs(path: str) -> list[tuple[epath.Path, epath.Path]]:
    """Two files, or the files of two globs whose wildcards match alike."""
    sources, targets = map(_by_wildcards, patterns("paired", path))
    for (source_key, source), (target_key, target) in zip(sources, targets, strict=False):
        if source_key != target_key and source_key and target_key:
            problem = f"{source.name} and {target.name} are not a pair"
            texts = f"{'/'.join(source_key)!r} and {'/'.join(target_key)!r}"
            raise UserError(f"data: {path}: {problem}: the wildcards match {texts}; fix the globs")
    if len(sources) != len(targets):
        unpaired = max(sources, targets, key=len)[min(len(sources), len(targets))][1]
        matches = f"{path} matches {len(sources)} and {len(targets)} files"
        raise UserError(f"data: {matches}, and {unpaired.name} has no partner; add it")
    return [(source, target) for (_, source), (_, target) in zip(sources, targets, strict=True)]


def _paired(path: str) -> Iterator[Example]:
    for source, target in _pairs(path):
        for a, b in itertools.zip_longest(_lines(source), _lines(target)):
            if a is None or b is None:
                short, long, (line, _) = (target, source, a) if a else (source, target, b)
                raise UserError(f"{short}: ends after line {line - 1}, but {long} continues")
            yield a[1].strip(), b[1].strip()


def _by_wildcards(pattern: str) -> list[tuple[tuple[str, ...], epath.Path]]:
    """(texts that the wildcards match, file) for each file, sorted. `[x]` is not a wildcard."""
    if as_path(pattern, "data").exists():
        return [((), as_path(pattern, "data"))]
    parts = re.split(r"(\*|\?|\[(?!.\])!?\]?[^\]]*\])", as_path(pattern, "data").name)
    inner = [fnmatch.translate(part)[len("(?s:") : -len(r")\Z")] for part in parts]
    inner[1::2] = [f"({wildcard})" for wildcard in inner[1::2]]
    name = re.compile("".join(inner), re.DOTALL)
    return sorted((name.fullmatch(file.name).groups(), file) for file in expand(pattern))


def _record(text: str, fields, where: str) -> Example:
    try:
        record = json.loads(text, object_pairs_hook=functools.partial(_unambiguous, where))
    except UserError:
        raise
    # These include a number with too many digits, and nesting that is too deep.
    except (ValueError, RecursionError) as e:
        if "digits" in str(e):
            raise UserError(f"{where}: an integer has more than 4,300 digits") from None
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object: {text[:60]!r}")
    return tuple(_field(record, field, where) for field in fields)


def _unambiguous(where: str, pairs: list[tuple[str, object]]) -> dict:
    """Refuses a name that occurs twice in one JSON object. Python would use the last value."""
    counts = collections.Counter(name for name, _ in pairs)
    if twice := [name for name in counts if counts[name] > 1]:
        raise UserError(f"{where}: two fields {twice[0]!r} in one object")
    return dict(pairs)


def _field(record: dict, field: str, where: str) -> str:
    """The text of `record["a"]["b"]` for the field "a.b". An integer is converted to its digits."""
    value = record
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            names = ", ".join(value) if isinstance(value, dict) else "none"
            raise UserError(f"{where}: no field {field!r}; its fields are {names}; set data.fields")
        value = value[key]
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # the index of a class
    if not isinstance(value, str):
        raise UserError(f"{where}: field {field!r} is {json.dumps(value)[:40]}, not text")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise UserError(f"{where}: field {field!r} contains half of a surrogate pair")
    return value


def _jsonl(file: epath.Path, fields) -> Iterator[Example]:
    lines = ((number, line) for number, line in _lines(file) if line.strip())
    return (_record(line, fields, f"{file}:{number}") for number, line in lines)


def _arrayrecord(file: epath.Path, fields) -> Iterator[Example]:
    """Reads records, each of which is a JSON object or, with a single field, plain UTF-8 text."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(file))
    if not reader.ok():
        raise UserError(f"{file}: not an ArrayRecord file, or cut off")
    for number in range(reader.num_records()):
        try:
            text = reader.read().decode("utf-8")
        except UnicodeDecodeError:
            raise UserError(f"{file}: record {number} is not UTF-8") from None
        except RuntimeError as e:
            reason = str(e).splitlines()[0][:80]
            raise UserError(f"{file}: damaged at record {number} ({reason})") from None
        is_json = text.startswith("{") or len(fields) > 1
        yield _record(text, fields, f"{file}: record {number}") if is_json else (text,)


def _parquet(file: epath.Path, fields) -> Iterator[Example]:
    with from_extra("prepare", f"{file}: needs pyarrow, which comes with"):
        from pyarrow import ArrowInvalid, parquet
    number = 0
    try:
        with file.open("rb") as stream:
            batches = parquet.ParquetFile(stream).iter_batches()
            for row in itertools.chain.from_iterable(batch.to_pylist() for batch in batches):
                number += 1
                yield tuple(_field(row, field, f"{file}: row {number}") for field in fields)
    except (ArrowInvalid, OSError) as e:
        problem = "damaged after" if number else "not a Parquet file, or damaged before"
        raise UserError(f"{file}: {problem} row {number or 1} ({e})") from None


_READERS = {
    "tsv": _tsv, "text": _text, "documents": _document, "jsonl": _jsonl, "parquet": _parquet,
    "arrayrecord": _arrayrecord,
}  # fmt: skip


def _huggingface(path: str, fields) -> Iterator[Example]:
    """Reads `organization/name[/subset]:split`, or a folder written by `save_to_disk`."""
    with from_extra("hf", "data.format: 'huggingface' needs"):
        import datasets
    name, _, split = path.partition(":")
    if epath.Path(name).exists():
        dataset = datasets.load_from_disk(name)
        if isinstance(dataset, datasets.DatasetDict):
            dataset = dataset[split or "train"]
    else:
        repository, _, subset = name.rpartition("/") if name.count("/") > 1 else (name, "", "")
        dataset = datasets.load_dataset(repository, subset or None, split=split or "train")
    for number, row in enumerate(dataset):
        yield tuple(_field(row, field, f"{path}: row {number}") for field in fields)
