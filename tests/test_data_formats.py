"""Reading text files of every format, and the errors for malformed files."""

import gzip
import importlib
import json
import re
import sys

import pytest
from etils.epath import backend
from test_data import ENGLISH, PAIR, SPANISH, experiment

from transformer.config import DataConfig, TokenizerConfig
from transformer.data import sources, store
from transformer.data.pipeline import open_data
from transformer.errors import UserError


def test_every_format_reads_the_same_pairs(tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    pairs = list(zip(ENGLISH, SPANISH, strict=True))
    (tmp_path / "a.tsv").write_text(
        "".join(f"{a}\t{b}\textra\n" for a, b in pairs[:3]), encoding="utf-8"
    )
    (tmp_path / "b.tsv").write_text(
        "".join(f"{a}\t{b}\r\n" for a, b in pairs[3:]), encoding="utf-8"
    )
    (tmp_path / "x.en").write_text("\n".join(ENGLISH), encoding="utf-8")
    (tmp_path / "x.es").write_text("\n".join(SPANISH), encoding="utf-8")
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps({"en": a, "es": b, "n": 1}) + "\n" for a, b in pairs), encoding="utf-8"
    )
    writer = ArrayRecordWriter(str(tmp_path / "x.array_record"), "group_size:1")
    for a, b in pairs:
        writer.write(json.dumps({"en": a, "es": b}).encode())
    writer.close()
    read = lambda format, path, *fields: list(sources.read(format, path, fields, PAIR))
    assert read("tsv", f"{tmp_path}/*.tsv") == pairs
    assert read("tsv", f"{tmp_path}/*.tsv", "1", "0") == [pair[::-1] for pair in pairs]
    assert read("paired", f"{tmp_path}/x.en,{tmp_path}/x.es") == pairs
    assert read("jsonl", f"{tmp_path}/x.jsonl", "en", "es") == pairs
    assert read("arrayrecord", f"{tmp_path}/x.array_record", "en", "es") == pairs
    assert list(sources.read("text", f"{tmp_path}/x.en")) == [(e,) for e in ENGLISH]
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress((tmp_path / "x.jsonl").read_bytes()))
    assert read("jsonl", f"{tmp_path}/*.jsonl.gz", "en", "es") == pairs


def test_parquet_and_zstd(tmp_path, monkeypatch):
    import pyarrow
    from pyarrow import parquet

    columns = {"en": ENGLISH, "es": SPANISH, "n": [1] * len(ENGLISH)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "x.parquet", row_group_size=2)
    pairs = list(zip(ENGLISH, SPANISH, strict=True))
    read = lambda name: list(sources.read("parquet", str(tmp_path / name), ("en", "es"), PAIR))
    assert read("x.parquet") == pairs
    content = (tmp_path / "x.parquet").read_bytes()
    (tmp_path / "y.parquet").write_bytes(content[:-9])
    with pytest.raises(UserError, match=r"y\.parquet: not a Parquet file, or damaged before row 1"):
        read("y.parquet")
    with pytest.raises(UserError, match=r"x\.parquet: row 1: no field 'de'; its fields are en, es"):
        next(sources.read("parquet", str(tmp_path / "x.parquet"), ("de",)))
    lines = "".join(f"{text}\n" for text in ENGLISH).encode()
    compress = lambda text: pyarrow.compress(text, "zstd", asbytes=True)
    frames = compress(lines[:50]) + compress(lines[50:])
    (tmp_path / "x.txt.zst").write_bytes(frames)
    assert list(sources.read("text", f"{tmp_path}/x.txt.zst")) == [(e,) for e in ENGLISH]
    (tmp_path / "y.txt.zst").write_bytes(frames[:-5])
    with pytest.raises(UserError, match=r"y\.txt\.zst: damaged or cut off"):
        list(sources.read("text", f"{tmp_path}/y.txt.zst"))
    (tmp_path / "z.txt.zst").write_bytes(b"no frames")
    with pytest.raises(UserError, match=r"z\.txt\.zst: damaged or cut off"):
        list(sources.read("text", f"{tmp_path}/z.txt.zst"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs pyarrow, which comes with the extra \[prepare\]"):
        list(sources.read("text", f"{tmp_path}/x.txt.zst"))


@pytest.mark.parametrize(
    ("name", "content", "config", "message"),
    [
        ("a.tsv", b"one\ttwo\nthree\n", {}, r"a\.tsv:2: expected source, tab, target"),
        ("a.tsv", b"one\ttwo\nth\xffree\tx\n", {}, r"a\.tsv:2: not UTF-8"),
        ("a.tsv", b"", {}, "contains no text"),
        (
            "a.jsonl",
            b'{"source": "a"}\n',
            {"format": "jsonl"},
            r"a\.jsonl:1: no field 'target'; its fields are source",
        ),
        (
            "a.jsonl",
            b'{"source": null, "target": "b"}\n',
            {"format": "jsonl"},
            r"a\.jsonl:1: field 'source' is null, not text",
        ),
        (
            "a.jsonl",
            b'{"source": "a", "target": "\\ud800"}\n',
            {"format": "jsonl"},
            r"a\.jsonl:1: .* surrogate",
        ),
        ("a.jsonl", b"oops\n", {"format": "jsonl"}, r"a\.jsonl:1: not a JSON object"),
        ("a.txt", b"one\n", {"format": "text"}, "yields 1 text"),
        ("a.tsv", b"one\ttwo\nthree\tfour\n", {}, "leave no text for training; set data.valid"),
        ("a.tsv", b"a\tA\nb\tB\nc\tC\nd\tD\ne\tE\n", {}, "for training; use at most 2, or"),
        ("a.tsv", b"one\ttwo\n", {"format": "paired"}, "two paths separated by a comma"),
        (
            "a.jsonl",
            b'{"source": ' + b"9" * 5000 + b"}\n",
            {"format": "jsonl"},
            r"a\.jsonl:1: an integer has more than 4,300 digits",
        ),
        (
            "a.jsonl",
            b'{"source": ' + b"[" * 99999 + b"}\n",
            {"format": "jsonl"},
            r"a\.jsonl:1: not a JSON object",
        ),
        (
            "a.tsv",
            b"one\ttwo\n",
            {"fields": ("0", "5")},
            r"a\.tsv:1: expected 6 columns \(data.fields\)",
        ),
        (
            "a.tsv.gz",
            gzip.compress(b"one\ttwo\n" * 9, mtime=0)[:-12],
            {},
            r"a\.tsv\.gz: damaged or cut off",
        ),
        ("a.tsv.gz", b"one\ttwo\n", {}, r"a\.tsv\.gz: damaged or cut off after line 0"),
        (
            "a.tsv",
            b"one\ttwo\n" * 99,
            {"format": "arrayrecord"},
            r"a\.tsv: not an ArrayRecord file|contains no text",
        ),
    ],
)
def test_malformed_text_error_names_its_location(tmp_path, name, content, config, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        open_data(experiment(tmp_path / name, **config))


def test_paired_files_of_unequal_length_raise(tmp_path):
    (tmp_path / "x.en").write_text("a\nb\nc\n")
    (tmp_path / "x.es").write_text("a\nb\n")
    for order in ("x.en,x.es", "x.es,x.en"):
        path = ",".join(str(tmp_path / n) for n in order.split(","))
        with pytest.raises(UserError, match=r"ends after line 2"):
            list(sources.read("paired", path, columns=PAIR))


def test_paired_globs_match_files_by_wildcard_values(tmp_path):
    for name in ("a.en", "aB.en", "a_es", "aB_es"):  # sorted, aB_es comes before a_es
        (tmp_path / name).write_text(f"{name} of {name[:-3]}\n")
    read = lambda *globs: list(
        sources.read("paired", ",".join(f"{tmp_path}/{pattern}" for pattern in globs), columns=PAIR)
    )
    all_pairs = [("a.en of a", "a_es of a"), ("aB.en of aB", "aB_es of aB")]
    assert read("*.en", "*_es") == read("a*[.]en", "a*[_]es") == read("a*.?n", "a*_?s") == all_pairs
    assert read("a.en", "a_e?") == all_pairs[:1]  # two single files may have any names


@pytest.mark.parametrize(
    ("globs", "message"),
    [
        (
            ("[abc].en", "[abd].es"),
            "c.en and d.es are not a pair: the wildcards match 'c' and 'd'",
        ),
        (
            ("[bc].en", "[bd]*.es"),
            "b.en and b.es are not a pair: the wildcards match 'b' and 'b/'",
        ),
        (("*.en", "[ab].es"), "matches 3 and 2 files, and c.en has no partner"),
        (("[ac].en", "*.es"), "c.en and b.es are not a pair"),
        (("a.en", "*.es"), "matches 1 and 3 files, and b.es has no partner"),
    ],
)
def test_mismatched_paired_globs_raise(tmp_path, globs, message):
    for name in ("a.en", "b.en", "c.en", "a.es", "b.es", "d.es"):
        (tmp_path / name).write_text("x\n")
    path = ",".join(f"{tmp_path}/{pattern}" for pattern in globs)
    with pytest.raises(UserError, match=re.escape(message)):
        list(sources.read("paired", path, columns=PAIR))


def test_missing_file_and_unmatched_glob_raise(tmp_path):
    for path, message in (
        (tmp_path / "no.tsv", "no file"),
        (tmp_path / "*.tsv", "no file matches"),
    ):
        with pytest.raises(UserError, match=message):
            open_data(experiment(path))


def test_reader_output_is_pinned_to_the_store_version(tmp_path):
    """If a change of the readers makes this test fail, increase VERSION in data/store.py."""
    bom, json_line = "\N{BYTE ORDER MARK}", '{"source": "%s", "target": " e "}\n'
    files = {
        "x.tsv": f"{bom}a\tb\r\n\t\n \tc\n d \t e \tf\n",
        "x.txt": f"{bom}a \n \n\n b\r\n",
        "x.jsonl": bom + json_line % "a" + "\n" + json_line % " " + json_line % "b",
        "1.md": f"{bom}# a\r\n\n b \n", "2.md": " \n",
        "1.en": "a\n\nb\n", "1.es": "c\nd\n\n", "2.en": "e", "2.es": f"{bom}f",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode())
    paths = {
        "tsv": f"{tmp_path}/x.tsv",
        "text": f"{tmp_path}/x.txt",
        "documents": f"{tmp_path}/*.md",
        "jsonl": f"{tmp_path}/x.jsonl",
        "paired": f"{tmp_path}/*.en,{tmp_path}/*.es",
    }
    columns = {"text": ("text",), "documents": ("text",)}
    read = {
        format: list(sources.read(format, path, columns=columns.get(format, PAIR)))
        for format, path in paths.items()
    }
    assert (store.VERSION, read) == (
        4,
        {
            "tsv": [("a", "b"), ("d", "e")],
            "text": [("a ",), (" b",)],
            "documents": [("# a\n\n b ",)],
            "jsonl": [("a", " e "), ("b", " e ")],
            "paired": [("a", "c"), ("e", "f")],
        },
    )


def test_corpora_state_licenses_and_builtin_one_works_offline():
    from transformer.data.corpora import CORPORA, fetch

    _corpus, folder = fetch("pydoc")
    assert "PSF" in (folder / "LICENCE.txt").read_text()
    documents = [
        json.loads(line)["text"] for line in (folder / "train.jsonl").open(encoding="utf-8")
    ]
    assert len("".join(documents)) > 400_000
    assert all(
        c.license and c.attribution and (not c.package or c.sha256[""]) for c in CORPORA.values()
    )
    with pytest.raises(UserError, match="did you mean 'wikitext2'"):
        fetch("wikitext")


def test_invalid_tokenizer_configs_raise():
    for fields, message in [
        ({"character_coverage": 2.0}, "data.tokenizer.character_coverage: 2.0"),
        ({"max_sentences": 0}, "data.tokenizer.max_sentences: 0 is too small"),
        ({"kind": "wordpiece"}, "data.tokenizer.kind"),
    ]:
        with pytest.raises(UserError, match=message):
            TokenizerConfig(**fields)


def test_gs_path_without_the_gcs_extra_raises(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    loaded = importlib.import_module("fsspec.registry")._registry  # by earlier tests
    for name in ("gs", "gcs"):
        monkeypatch.delitem(loaded, name, raising=False)
    backend._FileSystemSpecBackend._get_filesystem.cache_clear()
    with pytest.raises(UserError, match=r"gs://bucket/text.txt needs the extra \[gcs\]"):
        sources.expand("gs://bucket/text.txt")


def test_invalid_data_configs_raise():
    for fields, message in [
        ({"corpus": "pydoc", "buckets": (8, 128)}, "packed or bucketed"),
        ({"corpus": "pydoc", "packing": False, "buckets": (8, 64)}, "end in data.length"),
        ({"corpus": "pydoc", "train": "x"}, "both name a training text"),
        ({"corpus": "pydoc", "too_long": "keep"}, "too_long"),
        (
            {"train": "x"},
            "data.format: 'tsv' has columns, the objective one text; set data.format=",
        ),
        (
            {"train": "x", "format": "prepared", "held_out": 0.05},
            "held_out: 0.05 has no effect without text that is not prepared.* at 1000",
        ),
        ({"corpus": "pydoc", "eval_overlap": -1}, "eval_overlap: -1 is too small"),
        (
            {"corpus": "pydoc", "batch_size": 2**31},
            "batch_size: 2147483648 is too large; at most 2,147,483,647",
        ),
        (
            {"train": "x", "format": "text", "fields": ("a",)},
            "data.fields: .* has no effect without a data.format that has fields",
        ),
        ({"train": "x", "fields": ("²", "1")}, "must be column numbers"),
        ({"train": "x", "fields": ("en", "es")}, "must be column numbers"),
    ]:
        with pytest.raises(UserError, match=message):
            DataConfig(**fields)
