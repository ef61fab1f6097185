"""Prepared text: what is written, how it is read, and faults of damaged or unfinished text."""

import collections
import dataclasses
import json
import shlex
from pathlib import Path

import grain
import numpy as np
import pytest

from transformer.config import Experiment
from transformer.data import sources, split
from transformer.data.config import TokenizerConfig
from transformer.data.pipeline import open_data
from transformer.data.preparation import shards
from transformer.data.preparation.job import Job, distribute
from transformer.data.preparation.prepare import prepare
from transformer.data.records import decode, encode, verify
from transformer.errors import UserError
from transformer.mapping import from_mapping

HERE = "--runner=BundleBasedDirectRunner"
OBJECTIVES = {
    "causal_lm": ("decoder", {}),
    "causal_lm unpacked": ("decoder", {"packing": False}),
    "prefix_lm": ("encoder_decoder", {}),
    "masked_lm": ("encoder", {}),
    "span_corruption": ("encoder_decoder", {}),
    "ul2": ("decoder", {"length": 100}),
    "seq2seq": ("encoder_decoder", {"too_long": "cut"}),
    "seq2seq unpacked": ("decoder", {"too_long": "drop", "packing": False, "length": 96}),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three files of 200 pairs. Every tenth pair occurs twice, and texts differ in case."""
    folder, rng = tmp_path_factory.mktemp("texts"), np.random.default_rng(0)
    word = lambda: "".join(rng.choice(list("abcdefgh"), rng.integers(1, 5)))
    line = lambda: " ".join(word() for _ in range(rng.integers(2, 12)))
    pairs = [(line(), line().upper()) for _ in range(600)]
    for i in range(0, 600, 10):
        pairs[(i + 205) % 600] = pairs[i]
    for i in range(5, 600, 40):  # the same source with another translation
        pairs[i] = (pairs[(i + 2) % 600][0].title(), line())
    for i in range(7, 600, 40):  # the same translation of another source
        pairs[i] = (line(), pairs[(i + 2) % 600][1])
    for i in range(3):
        some = pairs[200 * i : 200 * (i + 1)]
        (folder / f"{i}.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in some))
        (folder / f"{i}.txt").write_text("".join(f"{a}\n" for a, _ in some))
    held_out = [(f"gggggg {a}", f"gggggg {b}") for a, b in pairs[:30]]
    (folder / "held_out.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in held_out))
    (folder / "held_out.txt").write_text("".join(f"{a}\n" for a, _ in held_out))
    return folder


def experiment(texts, objective="causal_lm", **data) -> Experiment:
    name = objective.partition(" ")[0]
    family, fields = OBJECTIVES[objective]
    is_pairs = name == "seq2seq"
    kind = {"format": "tsv"} if is_pairs else {"format": "text"}
    train = {"train": str(texts / ("[0-9].tsv" if is_pairs else "[0-9].txt"))}
    shape = {"objective": name, "length": 32, "batch_size": 8, "tokenizer": {"kind": "char"}}
    model = {"family": family, "vocab_size": 600, "d_model": 16, "num_heads": 2, "max_length": 128}
    prefix = {"prefix_lm": True} if name == "ul2" else {}
    data = {**kind, **train, **shape, **fields, "held_out": 40} | data
    return from_mapping(Experiment, {"model": model | prefix, "data": data})


def job(config: Experiment, output: Path, **options) -> Job:
    files = tuple(sources.files(config.data.format, config.data.train))
    options = {"beam": HERE} | options
    return Job(config.model, config.data, config.seed, files, str(output), **options)


def reader(config: Experiment, output: Path) -> Experiment:
    data = dict(format="prepared", train=str(output), valid="", test="", held_out=1000)
    data |= dict(tokenizer=TokenizerConfig())
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **data))


def written(config: Experiment, output: Path) -> list[tuple[str, ...]]:
    """The texts in the training sequences, in order. Needs sequences with whole texts."""
    data = open_data(reader(config, output))
    records = data._sequences("", "train")
    parts = [part for i in range(len(records.lengths)) for part in records.parts(i)]
    return [tuple(data.tokenizer.decode(ids) for ids in part) for part in parts]


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


def test_filters(texts, tmp_path, monkeypatch):
    (tmp_path / "my_filter.py").write_text("def no_a(example):\n    return 'a' not in example[0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = experiment(texts, "causal_lm unpacked", length=64, held_out=10)
    options = {"min_chars": 8, "max_chars": 20, "filter": "my_filter:no_a"}
    prepare(job(config, tmp_path / "out", **options))
    raw = {x for i in range(3) for (x,) in sources.read("text", str(texts / f"{i}.txt"))}
    kept = {x for x in raw if 8 <= len(x) <= 20 and "a" not in x}
    data = open_data(reader(config, tmp_path / "out"))
    held_out = {x for part in ("valid", "test") for (x,) in data.examples(part)}
    train = {text for (text,) in written(config, tmp_path / "out")}
    assert train and train | held_out == kept < raw
    prepare(job(config, tmp_path / "all", keep_duplicates=True))
    counts = collections.Counter(written(config, tmp_path / "all"))
    assert max(counts.values()) == 2


def test_shards_continue_an_interrupted_preparation(texts, tmp_path, monkeypatch):
    """The shards equal those of an uninterrupted preparation. Finished ones are not repeated."""
    config = experiment(texts, "masked_lm")
    monkeypatch.setattr(shards, "MB", 3000)
    whole = job(config, tmp_path / "whole", shard_mb=1)
    assert prepare(whole)["shards"] >= 4
    write = shards.write

    def fails(job, number, folder, **options):
        if number > 1:
            raise OSError("killed")
        return write(job, number, folder, **options)

    started = job(config, tmp_path / "started", shard_mb=1)
    monkeypatch.setattr(shards, "write", fails)
    with pytest.raises(Exception, match="killed"):
        prepare(started)
    finished = list((tmp_path / "started").glob("*.arrayrecord"))
    times = {file.name: file.stat().st_mtime_ns for file in finished}
    assert times
    with pytest.raises(UserError, match="has no index.json, so it is not prepared text"):
        open_data(reader(config, tmp_path / "started"))
    with pytest.raises(UserError, match="unfinished preparation with other options"):
        prepare(dataclasses.replace(started, min_chars=3))
    monkeypatch.setattr(shards, "write", write)
    prepare(started)
    assert times == {name: (tmp_path / "started" / name).stat().st_mtime_ns for name in times}
    content = lambda name: {x.name: x.read_bytes() for x in (tmp_path / name).iterdir()}
    assert content("whole") == content("started")
    with pytest.raises(UserError, match="holds prepared text; name another folder"):
        prepare(started)


@pytest.fixture(scope="module")
def prepared(texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("prepared") / "out"
    prepare(job(experiment(texts), output))
    return output


def test_order_is_a_permutation_of_each_epoch_for_any_number_of_hosts(texts, prepared):
    config = reader(experiment(texts), prepared)
    data = open_data(config)
    batches = data.batches("train")
    records = data._sequences("", "train")
    count = len(records.lengths)
    steps = range(2 * count // 8 + 1)
    rows = np.concatenate([batches[step]["inputs"] for step in steps])[: 2 * count]
    epochs = [sorted(map(bytes, rows[i * count : (i + 1) * count])) for i in (0, 1)]
    assert epochs[0] == epochs[1] and not np.array_equal(rows[:count], rows[count:])
    assert batches.epochs(count) == {"": 8.0}
    other_seed = open_data(dataclasses.replace(config, seed=1)).batches("train")
    assert not np.array_equal(other_seed[0]["inputs"], batches[0]["inputs"])
    halves = [data.batches("train", lambda n, h=h: np.arange(n)[h::2]) for h in (0, 1)]
    for step in (0, 5):
        for host, half in enumerate(halves):
            for name, x in half[step].items():
                np.testing.assert_array_equal(x, batches[step][name][host::2])
    streamed = batches.stream(3, 5)
    np.testing.assert_array_equal(next(streamed)["inputs"], batches[3]["inputs"])


def test_no_array_grows_with_the_text(texts, prepared, monkeypatch):
    """With an index of 3 billion sequences, as if the one shard were that long."""
    config = reader(experiment(texts), prepared)
    data = open_data(config)
    monkeypatch.setitem(data.store.index["shards"][0], "take", 3 * 10**9)
    ranges = []
    monkeypatch.setattr(grain.MapDataset, "range", lambda n: ranges.append(n) or _Range())
    batches = data.batches("train")
    assert ranges == [3 * 10**9] and batches.epochs(3 * 10**9 // 8) == {"": 1.0}
    assert batches[0]["inputs"].shape == (8, 32)


class _Range:
    seed = shuffle = repeat = lambda self, *args: self
    __getitem__ = lambda self, i: i


def test_mixture_of_prepared_text_and_files_shares_the_tokenizer(texts, prepared):
    base = experiment(texts)
    entries = [
        {"name": "prepared", "format": "prepared", "train": str(prepared), "weight": 1},
        {"name": "files", "train": str(texts / "held_out.txt"), "held_out": 5, "weight": 1},
    ]
    shape = {"format": "text", "objective": "causal_lm", "length": 32, "batch_size": 8}
    model = {"family": "decoder", "vocab_size": 600, "d_model": 16, "num_heads": 2}
    mixed = from_mapping(Experiment, {"model": model, "data": shape | {"mixture": entries}})
    data = open_data(mixed)
    assert {store.tokenizer.content for store in data.stores.values()} == {
        (prepared / "tokenizer.model").read_bytes()
    }
    assert base.data.tokenizer.kind == "char"
    decoded = [data.tokenizer.decode(row.tolist()) for row in data.batches("train")[0]["inputs"]]
    assert 0 < sum("gggggg" in text for text in decoded) < 8


def damage(file: Path, kind: str) -> None:
    content = bytearray(file.read_bytes())
    if kind == "missing":
        file.unlink()
    elif kind == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:  # a byte of the first record
        content[1 << 10] ^= 255
        file.write_bytes(content)


@pytest.mark.parametrize("kind", ["missing", "truncated", "altered"])
def test_damaged_shard_is_named(texts, tmp_path, kind):
    config = experiment(texts)
    prepare(job(config, tmp_path / "out"))
    (file,) = (tmp_path / "out").glob("*.arrayrecord")
    assert verify(tmp_path / "out") == 1
    damage(file, kind)
    reason = {"missing": "missing", "truncated": "bytes instead of", "altered": "damaged"}[kind]
    read = lambda: list(open_data(reader(config, tmp_path / "out")).batches("train").stream(0, 99))
    with pytest.raises(UserError, match=f"{file.name}: .*{reason}.*prepare the text again"):
        read()
    with pytest.raises(UserError, match=f"{file.name}: .*prepare the text again"):
        verify(tmp_path / "out")


def test_other_layouts_and_tokenizers_raise(texts, prepared, tmp_path):
    config = reader(experiment(texts), prepared)
    data = config.data
    change = lambda **new: dataclasses.replace(config, data=dataclasses.replace(data, **new))
    for changes, field in [
        ({"length": 16}, "data.length"),
        ({"packing": False}, "data.packing"),
    ]:
        message = f"{field}: .* was prepared with .*prepare the text again"
        with pytest.raises(UserError, match=message):
            open_data(change(**changes)).batches("train")
    tokenizer = TokenizerConfig(kind="bpe")
    with pytest.raises(UserError, match="data.tokenizer: the tokenizer of prepared text is"):
        open_data(change(tokenizer=tokenizer))
    with pytest.raises(UserError, match="data.train: .*mount the bucket"):
        open_data(change(train="gs://bucket/folder"))
    for name, value in {"max_examples": 5, "reverse": True, "held_out": 3}.items():
        with pytest.raises(UserError, match=f"data.{name}"):
            change(**{name: value})
    with pytest.raises(UserError, match="data.buckets: prepared sequences have one length"):
        change(packing=False, buckets=(16, 32))
    index = json.loads((prepared / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"format": 0}))
    with pytest.raises(UserError, match="has records of format 0, not 1"):
        open_data(change(train=str(tmp_path)))


def test_what_cannot_be_prepared_raises(texts, prepared, tmp_path):
    output = tmp_path / "out"
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
