"""Text held out by a fraction of hashes: all texts of a mixture agree, prepared or not."""

import dataclasses

import numpy as np
import pytest
from prepared_texts import experiment, job, reader, texts

from transformer.config import Experiment
from transformer.data import split
from transformer.data.pipeline import open_data
from transformer.data.preparation.prepare import prepare
from transformer.errors import UserError
from transformer.mapping import from_mapping

PAIRS = "seq2seq unpacked"


def keys(examples, side: int = 0) -> set[str]:
    return {split.normalize(example[side]) for example in examples}


def trained(store) -> list[tuple[str, ...]]:
    sides = [store.texts("train", side) for side in range(len(store.examples("valid")[0]))]
    return [tuple(store.tokenizer.decode(x[i]) for x in sides) for i in range(len(sides[0]))]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Three files: texts 0 to 599, texts 300 to 899 in capitals, pairs of texts 0 to 399."""
    folder, rng = tmp_path_factory.mktemp("mixed"), np.random.default_rng(0)
    line = lambda: " ".join("".join(rng.choice(list("abcdefg"), 4)) for _ in range(6))
    lines = [line() for _ in range(900)]
    (folder / "small.txt").write_text("\n".join(lines[:600]))
    (folder / "capitals.txt").write_text("\n".join(x.upper() for x in lines[300:]))
    pairs = [f"{a}!\t{a[::-1]}" for a in lines[:400]]
    (folder / "pairs.tsv").write_text("\n".join(pairs))
    return folder


def mixture(folder, held_out, **data) -> Experiment:
    text = lambda name: {"name": name, "train": str(folder / f"{name}.txt"), "format": "text"}
    pairs = {"train": str(folder / "pairs.tsv"), "format": "tsv", "objective": "seq2seq"}
    sources = [text("small"), text("capitals"), {"name": "pairs"} | pairs]
    fields = {"length": 64, "batch_size": 8, "objective": "causal_lm", "held_out": held_out}
    fields |= {"tokenizer": {"kind": "char"}, "mixture": [x | {"weight": 1} for x in sources]}
    model = {"family": "decoder", "vocab_size": 310, "d_model": 16, "num_heads": 2}
    return from_mapping(Experiment, {"model": model, "data": fields | data})


def leaks(data) -> int:
    """Held-out texts of any source that any source reads in training, on the side of the source."""
    stores = data.stores.values()
    held_out = set.union(*(keys(s.examples(p)) for s in stores for p in ("valid", "test")))
    return len(held_out & set.union(*(keys(trained(store)) for store in stores)))


def test_no_source_of_a_mixture_reads_what_another_holds_out(mixed):
    data = open_data(mixture(mixed, 0.1))
    assert leaks(open_data(mixture(mixed, 60))) > 20, "the texts share nothing"
    assert leaks(data) == 0
    for part in ("valid", "test"):
        counts = [len(store.examples(part)) for store in data.stores.values()]
        assert np.all(np.abs(np.array(counts) - [60, 60, 40]) < 25), counts
    # Nor is a held-out text, or the partner of one, read on the other side of a pair.
    store = data.stores["pairs"]
    held_out = store.examples("valid") + store.examples("test")
    assert not keys(held_out, 1) & keys(trained(store), 1)
    assert not any(split.hash64(text) < 0.2 * 2**64 for text in keys(trained(store), 1))


def test_text_that_is_added_does_not_change_the_split():
    texts = [(f"text {i}",) for i in range(1000)]
    parts, fewer = split.by_hash(texts, 0.05), split.by_hash(texts[:700], 0.05)
    assert parts[:700] == fewer
    assert 20 < parts.count("test") < 80 and 20 < parts.count("valid") < 80
    assert split.assign(texts, 50)[:700] != split.assign(texts[:700], 35), "counts are no different"


@pytest.mark.parametrize("objective", ["causal_lm", PAIRS])
def test_prepared_text_holds_out_the_same(texts, tmp_path, objective):
    config = experiment(texts, objective, held_out=0.08)
    prepare(job(config, tmp_path / "out", keep_duplicates=True))
    raw, data = open_data(config), open_data(reader(config, tmp_path / "out"))
    for part in ("valid", "test"):
        assert len(raw.examples(part)) > 20
        assert sorted(raw.examples(part)) == sorted(data.examples(part))
    counts = {**raw.meta["train"], "sha256": ""}
    assert counts == {**data.meta["train"], "sha256": ""}
    other = open_data(experiment(texts, objective, held_out=0.05))
    assert other.meta["train"]["examples"] > counts["examples"]


def test_a_fraction_for_one_split(texts, tmp_path):
    """Validation text has its own file. What the fraction would give it is not read at all."""
    valid = str(texts / "held_out.txt")
    both, one = (experiment(texts, held_out=0.08, **x) for x in ({}, {"valid": valid}))
    prepare(job(one, tmp_path / "out", keep_duplicates=True))
    data, own = open_data(both), open_data(one)
    prepared = open_data(reader(one, tmp_path / "out"))
    assert keys(own.examples("valid")) != keys(data.examples("valid"))
    for text in (own, prepared):
        assert sorted(text.examples("test")) == sorted(data.examples("test"))
        assert len(text.examples("valid")) == 30
        assert text.meta["train"]["examples"] == data.meta["train"]["examples"]


def test_fractions_that_cannot_be_held_out_raise(texts, tmp_path):
    for value, message in [
        (0, "data.held_out: 0 must be more than 0"),
        (0.5, "data.held_out: 0.5 is not a fraction between 0 and 0.5"),
        (2.5, "data.held_out: 2.5 is not a fraction"),
        (float("nan"), "data.held_out: nan must be more than 0"),
    ]:
        with pytest.raises(UserError, match=message):
            experiment(texts, held_out=value)
    few = experiment(texts, held_out=1e-6)
    prepare(job(few, tmp_path / "out"))
    for config in (few, reader(few, tmp_path / "out")):
        with pytest.raises(UserError, match="valid split has no sequence .* or data.held_out"):
            open_data(config).batches("valid")
    whole = dataclasses.replace(few.data, held_out=40.0)
    assert whole.held_out == 40 and isinstance(whole.held_out, int)
