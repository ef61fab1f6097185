"""Reading prepared text: order, hosts, mixtures, damaged shards and other layouts."""

import dataclasses
import json
import shutil
from pathlib import Path

import grain
import numpy as np
import pytest
from prepared_texts import HERE, OBJECTIVES, experiment, job, prepared, reader, texts, written

from transformer.config import Experiment
from transformer.data.config import TokenizerConfig
from transformer.data.pipeline import open_data
from transformer.data.preparation.prepare import prepare
from transformer.data.records import verify
from transformer.errors import UserError
from transformer.mapping import from_mapping


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
    monkeypatch.setitem(data.stores[""].index["shards"][0], "take", 3 * 10**9)
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


@pytest.mark.parametrize("name", ["tokenizer.model", "valid.0.ids.npy", "test.jsonl"])
def test_other_damaged_files_are_found(texts, prepared, tmp_path, name):
    shutil.copytree(prepared, tmp_path / "out")
    (tmp_path / "out" / name).write_bytes(b"other")
    with pytest.raises(UserError, match=f"{name}: missing, or altered since it was prepared"):
        verify(tmp_path / "out")
    if name == "tokenizer.model":
        with pytest.raises(UserError, match="the tokenizer is missing, or another than that of"):
            open_data(reader(experiment(texts), tmp_path / "out"))


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
    with pytest.raises(UserError, match="data.tokenizer: a new one is not the tokenizer"):
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
