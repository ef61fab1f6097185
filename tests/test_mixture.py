"""Mixtures of texts: exact shares, phases, epochs, hosts, held-out losses and errors."""

import collections
import dataclasses
import importlib.util
from fractions import Fraction
from pathlib import Path

import jax
import numpy as np
import pytest

from transformer import load_experiment
from transformer.config import Experiment
from transformer.data.mixture import Turns, of_temperature
from transformer.data.pipeline import open_data
from transformer.decoding.config import DecodingConfig
from transformer.errors import UserError
from transformer.mapping import from_mapping

LETTERS = {"wiki": "abcdefgh", "code": "stuvwxyz"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two texts without a common letter, of 300 and 120 documents."""
    folder, rng = tmp_path_factory.mktemp("mixture"), np.random.default_rng(0)
    for (name, letters), count in zip(LETTERS.items(), (300, 120), strict=True):
        word = lambda letters=letters: "".join(rng.choice(list(letters), rng.integers(2, 6)))
        lines = [" ".join(word() for _ in range(rng.integers(4, 12))) for _ in range(count)]
        (folder / f"{name}.txt").write_text("\n".join(lines))
    return folder


def experiment(files, wiki=(), code=(), model_fields=(), steps=20, **data) -> Experiment:
    entry = lambda name, more: {"name": name, "train": str(files / f"{name}.txt")} | dict(more)
    entries = [entry("wiki", wiki or {"weight": 3}), entry("code", code or {"weight": 1})]
    fields = {"format": "text", "objective": "causal_lm", "length": 16, "batch_size": 8}
    model = {"family": "decoder", "vocab_size": 310, "d_model": 16, "num_heads": 2}
    return from_mapping(
        Experiment,
        {
            "model": {**model, "max_length": 32, **dict(model_fields)},
            "data": fields | {"mixture": entries, "held_out": 20} | data,
            "train": {"steps": steps},
        },
    )


def is_code(data, row: np.ndarray) -> bool:
    """Whether a sequence is of the source "code". Asserts that it is of one source."""
    pieces = row[(row >= 4) & (row < data.tokenizer.vocab_size)]  # without special tokens
    text = set(data.tokenizer.decode(pieces))
    (source,) = [name for name, letters in LETTERS.items() if text & set(letters)]
    return source == "code"


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 0, 2), (0.1, 0.2, 0.3, 0.4), (1e-3, 1, 1)])
def test_turns_are_exact(weights):
    """Any first n sequences contain the shares of the sources, up to their number."""
    turns = Turns([(0, [Fraction(repr(weight)) for weight in weights])])
    shares, seen = np.array(weights) / sum(weights), [0] * len(weights)
    for n in range(1000):
        source, number = turns(n)
        assert number == seen[source]
        seen[source] += 1
        assert turns.counts(n + 1) == seen
        assert np.abs(np.array(seen) - shares * (n + 1)).max() < len(weights)
    far = 10**13 + 7
    counts = turns.counts(far)
    assert sum(counts) == far
    exact = [Fraction(repr(w)) * far / sum(Fraction(repr(x)) for x in weights) for w in weights]
    assert all(abs(a - b) < len(weights) for a, b in zip(counts, exact, strict=True))


def test_weights_change_at_a_step(files):
    """The second source has no part in the first steps. Its share is then exact, too."""
    config = experiment(files, {"weight": 1}, {"weight": ((0, 0.0), (5, 3.0))})
    data = open_data(config)
    batches = data.batches("train")
    counts = [sum(is_code(data, row) for row in batches[step]["targets"]) for step in range(12)]
    assert counts == [0] * 5 + [6] * 7
    sequences = {
        name: x.num_sequences for name, x in zip(data.stores, batches._sources, strict=True)
    }
    expected = {"wiki": (40 + 14) / sequences["wiki"], "code": 42 / sequences["code"]}
    assert batches.epochs(12) == pytest.approx(expected)


def test_every_epoch_of_a_source_has_each_sequence_once_in_a_new_order(files):
    data = open_data(experiment(files))
    batches, rows = data.batches("train"), []
    count = batches._sources[1].num_sequences
    for step in range(count + 1):  # two rows of "code" in each batch: two epochs
        targets = batches[step]["targets"]
        rows += [row.tobytes() for row in targets if is_code(data, row)]
    epochs = rows[:count], rows[count : 2 * count]
    assert epochs[0] != epochs[1]
    assert collections.Counter(epochs[0]) == collections.Counter(epochs[1])
    assert len(set(epochs[0])) == count


def test_batches_depend_on_seed_and_step_alone(files):
    """Any process builds its part of any batch, in any order."""
    data, again = open_data(experiment(files)), open_data(experiment(files))
    batches = data.batches("train")
    streamed = list(batches.stream(3, 6))
    halves = [data.batches("train", lambda n, h=h: np.arange(n // 2) + h * n // 2) for h in (0, 1)]
    jax.tree.map(np.testing.assert_array_equal, streamed[2], again.batches("train")[5])
    joined = jax.tree.map(lambda a, b: np.concatenate([a, b]), halves[0][5], halves[1][5])
    jax.tree.map(np.testing.assert_array_equal, streamed[2], joined)
    other = open_data(from_mapping(Experiment, {**vars(experiment(files)), "seed": 1}))
    assert (other.batches("train")[5]["targets"] != streamed[2]["targets"]).any()


def test_temperature_moves_weights_from_sizes_to_equality(files):
    by_size, flat = (of_temperature([800, 200], t) for t in (1.0, 1e6))
    assert by_size == [1, Fraction(1, 4)]
    assert np.allclose(list(map(float, flat)), 1, atol=1e-4)
    assert float(of_temperature([800, 200], 2.0)[1]) == pytest.approx(0.5)
    plain = {"name": "wiki"}, {"name": "code"}
    data = open_data(experiment(files, *plain, mixture_temperature=2.0))
    tokens = {name: store.meta["train"]["tokens"] for name, store in data.stores.items()}
    share = np.sqrt(tokens["code"]) / (np.sqrt(tokens["code"]) + np.sqrt(tokens["wiki"]))
    counts = data.batches("train")._turns.counts(10_000)
    assert counts[1] == pytest.approx(10_000 * share, abs=2)


def test_held_out_text_of_every_source(files):
    """Each batch is of one source, and the first batches contain some of each."""
    data = open_data(experiment(files))
    assert len(data.examples("valid")) == 40
    assert data.meta["valid"]["examples"] == 40
    for part in ("valid", "test"):
        batches = data.batches(part)
        sources = [batches.source_of(i) for i in range(len(batches))]
        assert {"wiki", "code"} == set(sources[:2]) if len(sources) > 2 else set(sources)
        for i, source in enumerate(sources):
            batch = batches[i]
            full = batch["weights"].sum(1) > 0
            assert all(is_code(data, row) == (source == "code") for row in batch["targets"][full])


def test_sources_may_have_their_own_objectives(files):
    model = {"family": "encoder_decoder"}
    config = experiment(
        files, {"weight": 1}, {"weight": 1, "objective": "prefix_lm"}, model, 20,
        objective={"name": "span_corruption", "sentinels": 8},
    )  # fmt: skip
    data = open_data(config)
    batch = data.batches("train")[0]
    sources = [is_code(data, row) for row in np.hstack([batch["source"], batch["targets"]])]
    sentinels = batch["targets"] >= data.tokenizer.vocab_size
    assert {True, False} == set(sources)
    np.testing.assert_array_equal(sentinels.any(1), np.logical_not(sources))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"wiki": {"weight": -1}}, "data.mixture.weight: -1.0 must be a number"),
        ({"wiki": {"weight": ((5, 1.0),)}}, r"data.mixture.weight: \(\(5.0, 1.0\),\) must be"),
        ({"wiki": {"weight": ()}}, r"data.mixture.weight: \(\) must be a number"),
        ({"wiki": {"weight": ((),)}}, r"data.mixture.weight: \(\(\),\) must be a number"),
        ({"tokenizer": {"pad_id": 5}}, "data.tokenizer.pad_id: applies only to an existing"),
        ({"wiki": {"weight": 0}, "code": {"weight": 0}}, "all weights are 0 at step 0"),
        ({"code": {"max_epochs": 1}}, "'code' has no weight; set a weight in each source"),
        ({"mixture_temperature": 2.0}, "'wiki' has a weight and a temperature"),
        ({"wiki": {"name": "code", "weight": 1}}, "two sources are named 'code'"),
        ({"wiki": {"weight": 1, "length": 8}}, "data.mixture.length: a source cannot set this"),
        ({"wiki": {"weight": 1, "train": ""}}, "data.corpus or data.train: set one of them"),
        ({"wiki": {"weight": 1, "format": "pdf"}}, r"data.format: .*\(source 'wiki' of data.mix"),
        ({"train": "x.txt"}, "data.train: each source of data.mixture names its own text"),
        ({"packing": False, "buckets": (8, 16)}, "data.buckets: a mixture has sequences of one"),
        ({"wiki": {"weight": 1, "objective": "masked_lm"}}, "data.objective: 'masked_lm' trains"),
        ({"wiki": {"weight": 1, "objective": "ul3"}}, "data.objective: unknown value 'ul3'"),
    ],
)  # fmt: skip
def test_bad_mixtures_are_refused_in_one_line(files, changes, message):
    with pytest.raises(UserError, match=message) as error:
        open_data(experiment(files, **changes))
    assert "\n" not in str(error.value)


def test_the_objective_of_the_run_predicts_tokens(files):
    labels = {"num_labels": 2, "pooling": "last"}
    tokens = {"weight": 1, "objective": "causal_lm"}
    with pytest.raises(UserError, match="data.objective: 'classification' predicts labels"):
        experiment(files, tokens, tokens, labels, objective="classification", packing=False)


def test_temperature_needs_sources():
    with pytest.raises(UserError, match=r"data\.mixture_temperature: 2\.0 has no effect without"):
        from_mapping(Experiment, {
            "model": {"family": "decoder", "vocab_size": 300},
            "data": {"train": "a.txt", "format": "text", "mixture_temperature": 2.0},
        })  # fmt: skip


def test_a_run_reports_the_loss_of_each_source(files, tmp_path, capfd):
    from transformer import evaluate
    from transformer.runs.loop import train
    from transformer.runs.metrics import read_metrics

    config = experiment(files, steps=3)
    train(config, tmp_path)
    assert "epochs of wiki, 0." in capfd.readouterr().err
    (line,) = [line for line in read_metrics(tmp_path) if "eval/loss" in line]
    assert line["eval/loss/wiki"] != line["eval/loss/code"]
    batches, tokens = open_data(config).batches("valid"), collections.Counter()
    for i in range(len(batches)):
        tokens[batches.source_of(i)] += batches[i]["weights"].sum()
    mean = sum(line[f"eval/loss/{name}"] * count for name, count in tokens.items())
    assert line["eval/loss"] == pytest.approx(mean / tokens.total(), rel=1e-5)
    tested = evaluate(tmp_path)
    assert tested.keys() >= {"loss/wiki", "loss/code", "bits_per_byte"}
    assert tested["loss/wiki"] == pytest.approx(line["eval/loss/wiki"], rel=0.1)


def test_a_run_that_repeats_a_source_too_often_is_refused(files, tmp_path):
    from transformer.runs.loop import train

    message = "max_epochs: 2, but the run reads source 'code' .* times; lower its weight or"
    with pytest.raises(UserError, match=message):
        train(experiment(files, code={"weight": 1, "max_epochs": 2}, steps=500), tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_translation_beside_other_text(files, tmp_path):
    """Only the pairs are translated. Evaluators and decoding belong to the run, not a source."""
    from transformer import evaluate
    from transformer.runs.loop import train

    lines = (files / "wiki.txt").read_text().splitlines()
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    pairs = {"train": str(tmp_path / "pairs.tsv"), "format": "tsv", "weight": 1}
    code = {"weight": 1, "objective": {"name": "span_corruption", "sentinels": 8}}
    config = experiment(
        files, pairs, code, {"family": "encoder_decoder", "max_length": 96}, steps=2,
        objective="seq2seq", length=96, batch_size=8,
    )  # fmt: skip
    evaluators = ({"name": "translation", "sentences": 2},)
    train_config = dataclasses.replace(config.train, evaluators=evaluators)
    decoding = DecodingConfig(beam_size=2, max_extra=1)
    config = dataclasses.replace(config, train=train_config, decoding=decoding)
    train(config, tmp_path / "run")
    assert evaluate(tmp_path / "run", "valid")["sentences"] == 20


def test_mixture_of_the_experiment_for_a_pod(tmp_path, monkeypatch):
    """experiments/scale/web.py generates its text. Its last tenth has other shares."""
    file = Path(__file__).parent.parent / "experiments" / "scale" / "web.py"
    spec = importlib.util.spec_from_file_location("web", file)
    spec.loader.exec_module(web := importlib.util.module_from_spec(spec))
    monkeypatch.chdir(tmp_path)
    web.write(web.FOLDER, documents=60)
    config = load_experiment(f"{file}:small", {"data.held_out": 5, "data.tokenizer.kind": "char"})
    batches = open_data(config).batches("train")
    assert batches[0]["targets"].shape == (16, 64)
    sizes = [source.num_sequences for source in batches._sources]
    count = lambda steps: np.array(list(batches.epochs(steps).values())) * sizes
    assert count(180) == pytest.approx(np.array([0.8, 0.15, 0.05]) * 180 * 16, abs=3)
    assert count(200) - count(180) == pytest.approx(np.array([0.4, 0.3, 0.3]) * 20 * 16, abs=6)
