"""Texts and folders of prepared text, for test_prepare.py and test_prepared.py."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from transformer.config import Experiment
from transformer.data import sources
from transformer.data.config import TokenizerConfig
from transformer.data.pipeline import open_data
from transformer.data.preparation.job import Job
from transformer.data.preparation.prepare import prepare
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


@pytest.fixture(scope="module")
def prepared(texts, tmp_path_factory):
    output = tmp_path_factory.mktemp("prepared") / "out"
    prepare(job(experiment(texts), output))
    return output
