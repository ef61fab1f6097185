"""From text to batches: every token occurs once, at its correct position."""

import re

import numpy as np
import pytest

from transformer.config import Experiment, TokenizerConfig
from transformer.data import split, store
from transformer.data.batching import Batches
from transformer.data.objectives.base import pack
from transformer.data.pipeline import open_data
from transformer.data.tokenizer import BOS, EOS, UNK, SentencePiece, train_tokenizer
from transformer.errors import UserError
from transformer.mapping import from_mapping

PAIR = ("source", "target")
ENGLISH = [
    "the cat sat on the mat",
    "a dog ran home",
    "we saw the sea",
    "rain fell all night",
    "the bird sings",
    "she reads a book",
]
SPANISH = [
    "el gato se sentó en la alfombra",
    "un perro corrió a casa",
    "vimos el mar",
    "llovió toda la noche",
    "el pájaro canta",
    "lee un libro",
]


@pytest.fixture
def pairs(tmp_path):
    """300 distinct pairs with some shared sources."""
    lines = [
        f"{e} number {i}.\t{s} número {i}."
        for i in range(50)
        for e, s in zip(ENGLISH, SPANISH, strict=True)
    ]
    # The sources differ from those above only in punctuation.
    lines += [f"{ENGLISH[0]} number {i}!\tel gato {i}" for i in range(20)]
    file = tmp_path / "pairs.tsv"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def experiment(file, **data):
    seq2seq = data.get("objective", "seq2seq") == "seq2seq"
    data = {
        "train": str(file),
        "objective": "seq2seq",
        "length": 32,
        "batch_size": 4,
        "held_out": 20,
        **data,
    }
    model = {
        "family": "encoder_decoder" if seq2seq else "decoder",
        "vocab_size": 300,
        "d_model": 16,
        "num_heads": 2,
        "max_length": 64,
    }
    return from_mapping(Experiment, {"model": model, "data": data, "train": {"steps": 200}})


def decode_segments(batch, tokenizer, field="targets", segments="segments"):
    out = []
    for ids, numbers in zip(batch[field], batch[segments], strict=True):
        out += [tokenizer.decode(ids[numbers == n]) for n in range(1, numbers.max() + 1)]
    return out


@pytest.mark.parametrize("packing", [True, False])
def test_epoch_contains_every_pair_once(pairs, packing):
    data = open_data(
        experiment(
            pairs,
            packing=packing,
            batch_size=1,
            length=64,
            **({} if packing else {"buckets": (16, 32, 64)}),
        )
    )
    batches, tokenizer = data.batches("train"), data.tokenizer
    pairs_in_batches = []
    for step in range(batches.per_epoch):
        batch = batches[step]
        source, target = (
            decode_segments(batch, tokenizer, "source", "source_segments"),
            decode_segments(batch, tokenizer),
        )
        pairs_in_batches += list(zip(source, target, strict=True))
        assert (batch["weights"] == (batch["segments"] > 0)).all()
        for row in range(len(batch["inputs"])):
            for n in range(1, batch["segments"][row].max() + 1):
                in_segment = batch["segments"][row] == n
                assert batch["inputs"][row][in_segment][0] == BOS
                np.testing.assert_array_equal(
                    batch["inputs"][row][in_segment][1:], batch["targets"][row][in_segment][:-1]
                )
                assert batch["targets"][row][in_segment][-1] == EOS
                np.testing.assert_array_equal(
                    batch["positions"][row][in_segment], np.arange(in_segment.sum())
                )
    store = data.stores[""]
    texts = (
        [tokenizer.decode(i) for i in store.texts("train", 0)],
        [tokenizer.decode(i) for i in store.texts("train", 1)],
    )
    expected = list(zip(*texts, strict=True))
    assert sorted(pairs_in_batches) == sorted(expected)


def test_held_out_pairs_share_no_sentence_with_training(pairs):
    data = open_data(experiment(pairs))
    lines = [tuple(line.split("\t")) for line in pairs.read_text(encoding="utf-8").splitlines()]
    held_out = set(data.stores[""].examples("valid")) | set(data.stores[""].examples("test"))
    train = [line for line in lines if line not in held_out]
    assert len(train) + len(held_out) == len(lines)
    assert len({s for s, _ in data.stores[""].examples("test")}) >= 20
    for side in (0, 1):
        assert not {split.normalize(p[side]) for p in held_out} & {
            split.normalize(p[side]) for p in train
        }
    with_mat = [e for e in data.stores[""].examples("test") if "mat number" in e[0]] + [
        e for e in data.stores[""].examples("valid") if "mat number" in e[0]
    ]
    numbers = [e[0].rstrip("!.") for e in with_mat]
    # Sources that differ only in punctuation stay in the same split.
    assert all(numbers.count(n) == 2 for n in numbers if int(n.split()[-1]) < 20)


def test_split_depends_only_on_the_text():
    examples = [(f"a {i}", f"b {i % 40}") for i in range(60)]
    splits = split.assign(examples, 8)
    reversed_splits = split.assign(examples[::-1], 8)
    assert splits == reversed_splits[::-1]
    assert set(splits) == {"train", "valid", "test"}


def test_component_larger_than_held_out_stays_in_training():
    examples = [(f"source {i}", "the same") for i in range(500)] + [
        (f"a {i}", f"b {i}") for i in range(100)
    ]
    for k in range(5):
        parts = split.assign([(f"{s} {k}", f"{t} {k}") for s, t in examples], 20)
        assert parts[:500] == ["train"] * 500
        assert parts.count("test") == parts.count("valid") == 20


def test_overlap_of_held_out_files_with_training_is_counted(pairs, tmp_path):
    lines = pairs.read_text(encoding="utf-8").splitlines()
    (tmp_path / "valid.tsv").write_text(
        "\n".join([lines[0].upper(), lines[1].replace(".", "!"), "new\tnuevo"]), encoding="utf-8"
    )
    data = open_data(experiment(pairs, valid=str(tmp_path / "valid.tsv")))
    assert data.stores[""].meta["overlap"] == {"valid": 2}


@pytest.mark.parametrize("packing", [True, False])
def test_every_token_is_a_target_once(tmp_path, packing):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"{e} number {i}" * (1 + i % 9) for i in range(30) for e in ENGLISH))
    data = open_data(
        experiment(
            file, objective="causal_lm", format="text", packing=packing, batch_size=3, length=16
        )
    )
    store, batches = data.stores[""], data.batches("test")
    texts = store.texts("test", 0)
    targets_in_batches = []
    for batch in batches.stream():
        assert batch["inputs"].shape == (3, 16)
        for row in range(3):
            is_target = batch["weights"][row] > 0
            inputs, targets = batch["inputs"][row][is_target], batch["targets"][row][is_target]
            first = np.flatnonzero(np.diff(batch["segments"][row][is_target], prepend=0))
            after_first = np.setdiff1d(np.arange(len(inputs)), first)
            np.testing.assert_array_equal(inputs[after_first], targets[after_first - 1])
            targets_in_batches += targets.tolist()
    assert targets_in_batches == texts.ids.tolist()
    assert len(targets_in_batches) == store.meta["test"]["tokens"]
    starts = sum((b["inputs"] == BOS).sum() for b in batches.stream())
    assert starts == len(texts)


@pytest.mark.parametrize("packing", [True, False])
def test_overlapping_windows_predict_each_token_once_with_context(tmp_path, packing):
    file = tmp_path / "text.txt"
    file.write_text("\n".join(f"{e} number {i}" * (1 + i % 9) for i in range(30) for e in ENGLISH))
    options = dict(objective="causal_lm", format="text", packing=packing, batch_size=3, length=16)
    data, plain = (
        open_data(experiment(file, **options, **more)) for more in ({"eval_overlap": 10}, {})
    )
    texts, targets, least_context = data.stores[""].texts("test", 0), [], {}
    for name, batches in {"overlap": data.batches("test"), "plain": plain.batches("test")}.items():
        contexts = []
        for batch in batches.stream():
            is_target = batch["weights"] > 0
            if name == "overlap":
                targets += batch["targets"][is_target].tolist()
            begins_inside = (
                (batch["positions"] == 0) & (batch["segments"] == 1) & (batch["inputs"] != BOS)
            )
            # The tokens that continue a text from an earlier sequence.
            inside = begins_inside.any(1)[:, None] & (batch["segments"] == 1)
            contexts += batch["positions"][is_target & inside].tolist()
        least_context[name] = min(contexts)
    assert targets == texts.ids.tolist()
    assert least_context == {"overlap": 10, "plain": 0}
    np.testing.assert_array_equal(
        data.batches("train")[0]["weights"], plain.batches("train")[0]["weights"]
    )


def test_packing_wastes_little_and_never_overflows():
    rng = np.random.default_rng(0)
    a, b = rng.integers(2, 20, 5000), rng.integers(2, 20, 5000)
    rows = pack([a, b], [64, 64])
    assert sorted(np.concatenate(rows).tolist()) == list(range(5000))
    assert max(max(a[r].sum(), b[r].sum()) for r in rows) <= 64
    assert max(a.sum(), b.sum()) / (64 * len(rows)) > 0.88


def test_batches_are_a_function_of_seed_and_step(pairs):
    config = experiment(pairs)
    batches, again = open_data(config).batches("train"), open_data(config).batches("train")
    order = [7, 0, 21, 3]
    for step in order:
        for field, value in batches[step].items():
            np.testing.assert_array_equal(value, again[step][field])
    streamed = list(again.stream(5, 9))
    for k, batch in enumerate(streamed):
        np.testing.assert_array_equal(batch["inputs"], batches[5 + k]["inputs"])
    n = batches.per_epoch
    assert n < 100
    first, second = ([batches[e * n + i]["inputs"].tobytes() for i in range(n)] for e in (0, 1))
    assert first != second
    other = Batches(batches._sequences, length=32, batch_size=4, seed=1)
    assert not np.array_equal(other[0]["inputs"], batches[0]["inputs"])


def test_too_long_pairs_are_dropped_or_cut_and_counted(pairs):
    for policy in ("drop", "cut"):
        data = open_data(experiment(pairs, length=40, too_long=policy, packing=False))
        batches = data.batches("train")
        lengths = np.maximum(
            data.stores[""].texts("train", 0).lengths, data.stores[""].texts("train", 1).lengths
        )
        assert 0 < (lengths > 40).sum() < len(lengths)
        assert list(batches.report.values()) == [(lengths > 40).sum()]
        assert len(batches._sequences.lengths) == (
            len(lengths) if policy == "cut" else (lengths <= 40).sum()
        )
        # A cut text keeps its end.
        assert all((batches[i]["targets"] == EOS).sum() == 4 for i in range(5))


@pytest.mark.parametrize("packing", [True, False])
def test_source_begins_with_bos_within_its_length(pairs, tmp_path, packing):
    plain = open_data(experiment(pairs))
    (tmp_path / "own.model").write_bytes(plain.tokenizer.content)
    tokenizer_fields = {"path": str(tmp_path / "own.model"), "source_bos_id": BOS}
    longest = int(plain.stores[""].texts("train", 0).lengths.max())
    data = open_data(
        experiment(
            pairs, length=longest, too_long="cut", packing=packing, tokenizer=tokenizer_fields
        )
    )
    batches = data.batches("train")
    # BOS takes a position, so texts that only just fit without BOS are cut.
    assert sum(batches.report.values()) > 0
    for step in range(batches.per_epoch):
        batch = batches[step]
        source, segments = batch["source"], batch["source_segments"]
        starts = (segments > 0) & (
            segments != np.roll(segments, 1, axis=1) * (np.arange(longest) > 0)
        )
        np.testing.assert_array_equal(starts, source == BOS)
        assert (source[starts] == BOS).all() and (source == BOS).sum() == (source == EOS).sum() > 0


def test_max_examples_and_reverse(pairs):
    plain, reversed_store = (
        open_data(experiment(pairs, max_examples=100, reverse=reverse)).stores[""]
        for reverse in (False, True)
    )
    assert plain.meta["train"]["examples"] == reversed_store.meta["train"]["examples"] == 100
    assert all("number" in source for source, _ in plain.examples("test"))
    assert not any("number" in source for source, _ in reversed_store.examples("test"))


@pytest.mark.parametrize("kind", ["unigram", "bpe", "word"])
def test_trained_tokenizer_is_lossless(kind):
    tokenizer = train_tokenizer(TokenizerConfig(kind=kind), 300, ENGLISH + SPANISH)
    for text in [
        *ENGLISH,
        " two  spaces ",
        "línea\nnueva",
        "日本語 🙂",
        "",
        " \n = Title = \n",
    ]:
        assert tokenizer.decode([*tokenizer.encode([text])[0], EOS, 7, 7]) == text
    assert tokenizer.vocab_size == 300 or kind == "word"
    assert SentencePiece(tokenizer.content).sha256 == tokenizer.sha256
    assert EOS not in tokenizer.encode(["</s> <s>"])[0]


def test_whole_words_are_pieces_and_others_are_unknown():
    config = TokenizerConfig(kind="word", byte_fallback=False)
    tokenizer = train_tokenizer(config, 300, ["the cat sat", "the dog ran"])
    known, unknown = tokenizer.encode(["the dog sat", "the zebra sat"])
    assert [tokenizer.piece(i) for i in known] == ["\u2581the", "\u2581dog", "\u2581sat"]
    assert len(unknown) == 3 and unknown[::2] == known[::2] and unknown[1] == UNK
    assert len(train_tokenizer(config, 9, ["the cat sat", "the dog ran"]).encode(["the"])[0]) == 1


def test_a_text_in_place_of_a_list_of_texts_raises():
    tokenizer = train_tokenizer(TokenizerConfig(), 300, ENGLISH + SPANISH)
    with pytest.raises(UserError, match="texts: 'the red cat' is one text; pass a list of texts"):
        tokenizer.encode("the red cat")
    with pytest.raises(UserError, match="is one text"):
        tokenizer.encode_targets("the red cat")


def test_failed_store_leaves_no_files(pairs, tmp_path):
    from transformer.files import data_home

    config = experiment(pairs)
    before = (
        {f for f in (data_home() / "tokens").glob("*")}
        if (data_home() / "tokens").exists()
        else set()
    )
    with pytest.raises(UserError, match="vocab_size"):
        open_data(
            from_mapping(
                Experiment,
                {"model": {**vars(config.model), "vocab_size": 50_000}, "data": config.data},
            )
        )
    after = {f for f in (data_home() / "tokens").glob("*")}
    assert after == before


def test_store_of_another_version_is_rebuilt(pairs, monkeypatch):
    folder = open_data(experiment(pairs)).stores[""].folder
    assert open_data(experiment(pairs)).stores[""].folder == folder
    monkeypatch.setattr(store, "VERSION", store.VERSION - 1)
    assert open_data(experiment(pairs)).stores[""].folder != folder


def test_invalid_external_tokenizer_raises(pairs, tmp_path):
    import sentencepiece

    foreign = tmp_path / "foreign"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(ENGLISH),
        model_prefix=str(foreign),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    for path, message in (
        (
            f"{foreign}.model",
            r"data\.tokenizer\.pad_id: must be set; .*foreign\.model does not define it",
        ),
        (pairs, "not a SentencePiece model"),
        (tmp_path / "none", "no file"),
    ):
        with pytest.raises(UserError, match=message):
            open_data(experiment(pairs, tokenizer={"path": str(path)}))


def test_normalized_ascii_equals_the_general_rule():
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(0, 128, rng.integers(0, 30)))) for _ in range(3000)]
    for text in [*texts, "", "__", "A_b\x1fC  d"]:
        assert text.isascii() and split.normalize(text + "é").endswith("é")
        general = re.sub(r"[\W_]+", " ", text.casefold()).strip() or text
        assert split.normalize(text) == general
