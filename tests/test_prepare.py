"""Preparing text: what is written, and how an interrupted preparation continues."""

import collections
import dataclasses
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from prepared_texts import HERE, OBJECTIVES, experiment, job, prepared, reader, texts, written

from transformer.data import sources, split
from transformer.data.pipeline import open_data
from transformer.data.preparation import stages
from transformer.data.preparation.job import distribute
from transformer.data.preparation.prepare import prepare
from transformer.data.records import decode, encode
from transformer.errors import UserError


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_batches_equal_those_of_the_text(texts, tmp_path, objective):
    """With the same held-out files and tokenizer, and one shard."""
    held_out = str(texts / ("held_out.tsv" if "seq2seq" in objective else "held_out.txt"))
    files = {"valid": held_out, "test": held_out, "held_out": 1000}
    raw = experiment(texts, objective, **files)
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(open_data(raw).tokenizer.content)
    raw = experiment(texts, objective, **files, tokenizer={"path": str(tokenizer)})
    prepare(job(raw, tmp_path / "out", keep_duplicates=True))
    expected = open_data(raw)
    data = open_data(reader(raw, tmp_path / "out"))
    sequences = expected._sequences("", "train"), data._sequences("", "train")
    count = len(sequences[0].lengths)
    assert count == len(sequences[1].lengths) > 20
    assert sequences[0].report == sequences[1].report
    for i in range(count):
        both = [x.segments(i, lambda i=i: np.random.default_rng(i)) for x in sequences]
        for a, b in zip(*both, strict=True):
            fields = a.token_fields(), b.token_fields()
            assert fields[0].keys() == fields[1].keys()
            for name in fields[0]:
                np.testing.assert_array_equal(fields[0][name], fields[1][name])
            assert (a.source is None) == (b.source is None)
            if a.source is not None:
                np.testing.assert_array_equal(a.source, b.source)
    for part in ("valid", "test"):
        pairs = zip(expected.batches(part).stream(), data.batches(part).stream(), strict=True)
        assert all(np.array_equal(a[k], b[k]) for a, b in pairs for k in a)
        assert data.examples(part) == expected.examples(part)
    assert {**data.meta["train"], "sha256": ""} == {**expected.meta["train"], "sha256": ""}


def test_every_text_is_read_once_unless_it_repeats_or_is_held_out(texts, tmp_path):
    config = experiment(texts, "seq2seq", length=128)
    columns = ("source", "target")
    raw = list(sources.read("tsv", str(texts / "[0-9].tsv"), columns=columns))
    assert len(set(raw)) < len(raw) == 600
    prepare(job(config, tmp_path / "out", shard_mb=1))
    train = written(config, tmp_path / "out")
    data = open_data(reader(config, tmp_path / "out"))
    held_out = {part: data.examples(part) for part in ("valid", "test")}
    keys = lambda examples, side: {split.normalize(example[side]) for example in examples}
    assert len(set(train)) == len(train)
    for part in ("valid", "test"):
        assert len(keys(held_out[part], 0)) == 40
        for side in (0, 1):
            assert not keys(held_out[part], side) & keys(train, side)
    others = {side: keys(held_out["valid"] + held_out["test"], side) for side in (0, 1)}
    left_out = {x for x in raw if any(split.normalize(x[s]) in others[s] for s in (0, 1))}
    assert set(train) == set(raw) - left_out
    assert left_out > {*held_out["valid"], *held_out["test"]}, "no pair shares its target"
    # The share does not depend on the order of files and lines.
    again = job(config, tmp_path / "again")
    prepare(dataclasses.replace(again, files=again.files[::-1]))
    other = open_data(reader(config, tmp_path / "again"))
    assert sorted(other.examples("test")) == sorted(held_out["test"])


def test_odd_file_names_are_read_once(texts, tmp_path):
    """A name with brackets is not a pattern again, in raw files and in the output."""
    lines = (texts / "0.txt").read_text().splitlines()
    lines += lines[:7]
    for name, some in (("a[1].txt", lines[:100]), ("a1.txt", lines[100:])):
        (tmp_path / name).write_text("\n".join(some))
    fields = {"length": 64, "held_out": 5}
    fields["tokenizer"] = {"kind": "char", "character_coverage": 1.0}
    train = str(tmp_path / "a*.txt")
    config = experiment(texts, "causal_lm unpacked", **fields, train=train)
    made = prepare(job(config, tmp_path / "o [1],x*"))
    assert {x for (x,) in written(config, tmp_path / "o [1],x*")} < set(lines)
    assert sum(made["dropped"].values()) + made["examples"] == len(lines)
    assert made["dropped"]["repeat another"] == len(lines) - len(set(lines)) >= 7
    assert made["dropped"]["held out"] >= 10
    pairs = [(f"{tmp_path}/p[{i}].{side}", [f"{i} {side} x"]) for i in (1, 2) for side in "ab"]
    for name, some in pairs:
        Path(name).write_text("\n".join(some))
    both = f"{tmp_path}/p*.a,{tmp_path}/p*.b"
    files = sources.files("paired", both)
    read = [x for file in files for x in sources.examples("paired", file, (), ("s", "t"))]
    assert read == [("1 a x", "1 b x"), ("2 a x", "2 b x")]
    (tmp_path / "q,.a").write_text("x")
    (tmp_path / "q,.b").write_text("x")
    with pytest.raises(UserError, match="q,.a: a comma separates two files"):
        sources.files("paired", f"{tmp_path}/q?.a,{tmp_path}/q?.b")


def test_shard_whose_examples_are_all_too_long(texts, tmp_path):
    config = experiment(texts, "seq2seq", too_long="drop", length=4)
    with pytest.raises(UserError, match="data: no text is left for training"):
        prepare(job(config, tmp_path / "out"))


def test_filters(texts, tmp_path, monkeypatch):
    (tmp_path / "my_filter.py").write_text("def no_a(example):\n    return 'a' not in example[0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = experiment(texts, "causal_lm unpacked", length=64, held_out=10)
    options = {"min_chars": 8, "max_chars": 20, "filter": "my_filter:no_a"}
    prepare(job(config, tmp_path / "out", **options))
    for function, message in [
        ("lambda example: 1", "returned 1; return True or False"),
        ("lambda: True", "raised TypeError: .*takes 0 positional arguments"),
    ]:
        name = f"other_filter_{len(message)}"
        (tmp_path / f"{name}.py").write_text(f"f = {function}\n")
        with pytest.raises(UserError, match=f"--filter: '{name}:f' {message}"):
            prepare(job(config, tmp_path / name, filter=f"{name}:f"))
        (tmp_path / f"{name}.py").write_text("f = lambda example: True\n")
        monkeypatch.delitem(sys.modules, name)
        with pytest.raises(UserError, match="preparation with other content of --filter"):
            prepare(job(config, tmp_path / name, filter=f"{name}:f"))
    raw = {x for i in range(3) for (x,) in sources.read("text", str(texts / f"{i}.txt"))}
    kept = {x for x in raw if 8 <= len(x) <= 20 and "a" not in x}
    data = open_data(reader(config, tmp_path / "out"))
    held_out = {x for part in ("valid", "test") for (x,) in data.examples(part)}
    train = {text for (text,) in written(config, tmp_path / "out")}
    assert train and train | held_out == kept < raw
    # A function without a source file, which is true of texts that are not empty
    prepare(job(config, tmp_path / "all", keep_duplicates=True, filter="builtins:all"))
    counts = collections.Counter(written(config, tmp_path / "all"))
    assert max(counts.values()) == 2


def test_shards_continue_an_interrupted_preparation(texts, tmp_path, monkeypatch):
    """The shards equal those of an uninterrupted preparation. Finished ones are not repeated."""
    config = experiment(texts, "masked_lm")
    monkeypatch.setattr(stages, "MB", 3000)
    whole = job(config, tmp_path / "whole", shard_mb=1)
    assert prepare(whole)["shards"] >= 4
    write = stages.write

    def fails(job, number, folder, **options):
        if number > 1:
            raise OSError("killed")
        return write(job, number, folder, **options)

    started = job(config, tmp_path / "started", shard_mb=1)
    monkeypatch.setattr(stages, "write", fails)
    with pytest.raises(Exception, match="killed"):
        prepare(started)
    finished = list((tmp_path / "started").glob("*.arrayrecord"))
    times = {file.name: file.stat().st_mtime_ns for file in finished}
    assert times
    with pytest.raises(UserError, match="has no index.json, so it is not prepared text"):
        open_data(reader(config, tmp_path / "started"))
    with pytest.raises(UserError, match="unfinished preparation with other min_chars"):
        prepare(dataclasses.replace(started, min_chars=3))
    monkeypatch.setattr(stages, "write", write)
    prepare(started)
    assert times == {name: (tmp_path / "started" / name).stat().st_mtime_ns for name in times}
    content = lambda name: {x.name: x.read_bytes() for x in (tmp_path / name).iterdir()}
    assert content("whole") == content("started")
    with pytest.raises(UserError, match="holds prepared text; name another folder"):
        prepare(started)


def test_what_cannot_be_prepared_raises(texts, prepared, tmp_path, capsys):
    from transformer.cli import main

    output = tmp_path / "out"
    for options, message in [
        ({"shard_mb": 0}, "--shard_mb: 0 must be at least 1"),
        ({"max_chars": -1}, "--max_chars: -1 must be at least 0"),
        ({"filter": "no_such_module:f"}, "--filter: 'no_such_module:f' is not a MODULE:FUNCTION"),
        ({"filter": "json:no"}, "--filter: 'json:no' is not a MODULE:FUNCTION"),
        ({"filter": ":f"}, "--filter: ':f' is not a MODULE:FUNCTION"),
    ]:
        with pytest.raises(UserError, match=message):
            prepare(job(experiment(texts), output, **options))
    assert not output.exists()
    for words, message in [
        (["prepare"], "data prepare needs --config=FILE.py and --output=FOLDER"),
        (["verify"], "data verify needs --output=FOLDER"),
        (["--output=x"], "options are for `data prepare`, and --output also for `data verify`"),
        (["verify", "--output=x", "--min_chars=2"], "data: options are for `data prepare`"),
        (["verify", f"--output={output}"], "has no index.json, so it is not prepared text"),
    ]:
        assert main(["data", *words]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "tokenizer.model").write_text("of something else")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="full is not empty; name another folder"):
        prepare(job(experiment(texts), tmp_path / "full"))
    with pytest.raises(UserError, match="file is not a folder"):
        prepare(job(experiment(texts), tmp_path / "file"))
    with pytest.raises(UserError, match="--beam: '--runner=Foo'"):
        prepare(job(experiment(texts), tmp_path / "beam", beam="--runner=Foo"))
    with pytest.raises(UserError, match="data.tokenizer.path: no file"):
        prepare(job(experiment(texts, tokenizer={"path": "none.model"}), output))
    with pytest.raises(UserError, match="data.max_examples: the whole text is prepared"):
        prepare(job(experiment(texts, max_examples=5), output))
    with pytest.raises(UserError, match="data.held_out: 500 sources in each .* leave no text"):
        prepare(job(experiment(texts, held_out=500), tmp_path / "held_out"))
    with pytest.raises(UserError, match="data: no example passes the filters"):
        prepare(job(experiment(texts), tmp_path / "filtered", min_chars=10**6))
    one = {part: str(texts / "0.txt") for part in ("train", "valid", "test")}
    tokenizer = {"path": str(prepared / "tokenizer.model")}
    config = experiment(texts, **one, held_out=1000, tokenizer=tokenizer)
    with pytest.raises(UserError, match="data: no text is left for training"):
        prepare(job(config, tmp_path / "all_held_out"))
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good\nb\xff\n")
    with pytest.raises(UserError, match=r"bad.txt:2: not UTF-8"):
        prepare(job(experiment(texts, train=str(bad)), output))


def test_records_round_trip():
    rng = np.random.default_rng(0)
    for dtype, sides in ((np.uint16, 1), (np.uint32, 2)):
        high = np.iinfo(dtype).max if dtype == np.uint16 else 2**31 - 1
        sizes = rng.integers(0, 9, (5, sides))
        parts = [tuple(rng.integers(0, high, n).astype(np.int32) for n in row) for row in sizes]
        back = decode(encode(parts, dtype), dtype)
        assert len(back) == 5
        for a, b in zip(parts, back, strict=True):
            assert all(map(np.array_equal, a, b)) and b[0].dtype == np.int32


def test_command_prepares_and_trains(texts, tmp_path, capfd):
    from transformer.cli import main

    file = tmp_path / "experiment.py"
    train = f"train={str(texts / 'one.txt')!r}, format='text'"
    data = f"dict({train}, objective='causal_lm', length=32,"
    file.write_text(
        "import ml_collections\n\n\ndef get_config():\n    config = ml_collections.ConfigDict()\n"
        "    config.model = dict(family='decoder', vocab_size=300, d_model=16, num_heads=2)\n"
        f"    config.data = {data} batch_size=8, held_out=40, tokenizer=dict(kind='char'))\n"
        "    config.train = dict(steps=2, tensorboard=False)\n    return config\n"
    )
    (texts / "one.txt").write_text((texts / "0.txt").read_text())
    output, run = tmp_path / "out", tmp_path / "run"
    options = ["--license=CC0", "--shard_mb=1"]
    assert main(["data", "prepare", f"--config={file}", f"--output={output}", *options]) == 0
    printed = capfd.readouterr()
    assert "sequences in 1 shard(s)" in printed.out and "padding" in printed.out
    assert "--config.data.format=prepared" in printed.out and "INFO" not in printed.err
    leave_out = "--config.data.held_out=1000 --config.data.tokenizer.kind=unigram"
    assert leave_out in printed.out
    card = (output / "card.md").read_text()
    assert "License: CC0" in card and "SHA-256" in card
    assert main(["data", "verify", f"--output={output}"]) == 0
    command = shlex.split(printed.out.partition("read it with ")[2])
    assert main(["train", f"--config={file}", f"--workdir={run}", *command]) == 0
    read = lambda folder: (folder / "tokenizer.model").read_bytes()
    assert read(run) == read(output)


def test_errors_of_worker_processes_take_one_line(texts, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"good\nb\xff\n")
    (tmp_path / "good.txt").write_text("a text\n")
    config = experiment(texts, train=str(tmp_path / "*.txt"))
    with pytest.raises(UserError, match=r"bad.txt:2: not UTF-8") as caught:
        prepare(job(config, tmp_path / "out", beam=""))
    assert "\n" not in str(caught.value)


def test_stages_skip_results_that_exist(texts, tmp_path):
    job_ = job(experiment(texts), tmp_path)

    def task(job, number, folder):
        (folder / "x").write_text("new")
        return folder / "x"

    (tmp_path / "unfinished").mkdir()
    job_.result("some", 1).write_text("old")
    distribute(job_, "some", task, range(3))
    assert [job_.result("some", i).read_text() for i in range(3)] == ["new", "old", "new"]


@pytest.fixture
def bucket(monkeypatch):
    """A bucket of Google Cloud Storage in memory: objects without folders, renames or appends."""
    from etils.epath import backend
    from fsspec.implementations.memory import MemoryFileSystem

    class Bucket(MemoryFileSystem):
        protocol, store, pseudo_dirs = ("gs", "gcs", "memory"), {}, [""]

        @classmethod
        def _strip_protocol(cls, path):
            return str(path).removeprefix("gs://").strip("/")

        def _open(self, path, mode="rb", **options):
            assert "a" not in mode and "+" not in mode, "objects cannot be changed"
            return super()._open(path, mode, **options)

    monkeypatch.setattr(backend.fsspec_backend, "_get_filesystem", lambda name: Bucket())
    return Bucket()


def test_raw_text_and_prepared_text_in_a_bucket(texts, tmp_path, bucket):
    """The content equals that of local folders."""
    local = experiment(texts, "seq2seq")
    prepare(job(local, tmp_path / "out"))
    for i in range(3):
        bucket.pipe(f"gs://texts/raw/{i}.tsv", (texts / f"{i}.tsv").read_bytes())
    remote = experiment(texts, "seq2seq", train="gs://texts/raw/*.tsv")
    made = job(remote, "gs://texts/out")
    assert made.files == tuple(f"gs://texts/raw/{i}.tsv" for i in range(3))
    prepare(made)
    names = {Path(name).name for name in bucket.ls("gs://texts/out", detail=False)}
    assert names == {file.name for file in (tmp_path / "out").iterdir()}
    for name in names - {"card.md"}:
        assert bucket.cat(f"gs://texts/out/{name}") == (tmp_path / "out" / name).read_bytes(), name
