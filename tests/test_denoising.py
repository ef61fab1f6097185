"""Masked words and corrupted spans: what is hidden, how often, and that it can be put back."""

import numpy as np
import pytest
from test_objectives import CASES, data_of, experiment

from transformer.data.pipeline import open_data


def asked(batch, row=0):
    """Of one row: (read, targets, weights) of its first segment."""
    here = batch["segments"][row] == 1
    return batch["inputs"][row][here], batch["targets"][row][here], batch["weights"][row][here]


def test_masking_is_80_10_10_of_15_percent(text):
    data = data_of(text, "masked")
    tokenizer, batches = data.tokenizer, data.batches("train")
    counts = np.zeros(5)
    for step in range(60):
        batch = batches[step]
        special = np.isin(batch["targets"], (tokenizer.bos, tokenizer.eos)) | (
            batch["segments"] == 0
        )
        chosen, read, was = batch["weights"] > 0, batch["inputs"], batch["targets"]
        np.testing.assert_array_equal(read[~chosen], was[~chosen])
        assert not (chosen & special).any()
        masked, kept = chosen & (read == tokenizer.vocab_size), chosen & (read == was)
        counts += [
            (~special).sum(),
            chosen.sum(),
            masked.sum(),
            kept.sum(),
            (chosen & ~masked & ~kept).sum(),
        ]
        assert np.isin(read[chosen & ~masked], tokenizer.text_ids).all()
    candidates, chosen, masked, kept, swapped = counts
    assert chosen / candidates == pytest.approx(0.15, abs=0.02)
    assert masked / chosen == pytest.approx(0.8, abs=0.03)
    assert kept / chosen == pytest.approx(0.1, abs=0.03)
    assert swapped / chosen == pytest.approx(0.1, abs=0.03)


def test_whole_words_are_asked_for_whole(text):
    whole, plain = data_of(text, "masked words"), data_of(text, "masked", packing=False)
    assert plain.tokenizer.sha256 == whole.tokenizer.sha256

    def torn(data):
        found = 0
        for step in range(20):
            batch = data.batches("train")[step]
            for row in range(8):
                _, ids, weights = asked(batch, row)
                word = np.cumsum(data.tokenizer.starts_word[ids])[1:-1]
                found += sum(len(set(weights[1:-1][word == w])) > 1 for w in set(word))
        return found

    assert torn(whole) == 0
    assert torn(plain) > 10


def test_whole_words_are_asked_for_at_the_same_rate(text):
    data = data_of(text, "masked words")
    ids, objective = np.asarray(data.store.texts("train", 0).ids[:120], np.int32), data.objective
    inner = (ids != data.tokenizer.eos).sum()
    sizes = np.diff(np.flatnonzero(np.append(data.tokenizer.starts_word[ids], True)))
    assert sizes.max() > 2  # words that may be too much
    asked_for = [
        objective.corrupt(ids, data.tokenizer, np.random.default_rng(i))[1].sum() for i in range(50)
    ]
    assert max(asked_for) <= round(0.15 * inner)
    assert np.mean(asked_for) / inner == pytest.approx(0.15, abs=0.008)


def test_two_sentences_follow_each_other_or_not(text, tmp_path):
    """Every text says its own number, again and again, and counts."""
    (tmp_path / "text.txt").write_text(
        "".join(" ".join(f"{i:03d} {j}" for j in range(9)) + "\n" for i in range(150))
    )
    objective, family, model, given = CASES["next sentence"]
    data = open_data(
        experiment(
            tmp_path, objective, family, {**model, "vocab_size": 285}, **given | {"length": 23}
        )
    )
    tokenizer, labels, apart = data.tokenizer, [], 0
    whole = {f"{i:03d}": " ".join(f"{i:03d} {j}" for j in range(9)) for i in range(150)}
    for step in range(20):
        batch = data.batches("train")[step]
        for row in range(8):
            _, ids, _ = asked(batch, row)
            types = batch["token_types"][row][: len(ids)]
            a, b = ids[types == 0], ids[types == 1]
            assert a[0] == tokenizer.bos and a[-1] == b[-1] == tokenizer.eos
            assert np.all(np.diff(types) >= 0) and len(a) > 2 and len(b) > 1
            labels.append(int(batch["labels"][row]))
            holds = lambda ids: {n for n, t in whole.items() if tokenizer.decode(ids).strip() in t}
            if labels[-1] == 0:
                assert holds(np.concatenate([a[1:-1], b[:-1]]))
            elif (
                len(holds(a[1:-1])) == len(holds(b[:-1])) == 1
            ):  # long enough to say whose they are
                apart += 1
                assert holds(a[1:-1]) != holds(b[:-1])
    assert np.mean(labels) == pytest.approx(0.5, abs=0.12) and apart > 20
    assert (batch["label_weights"] == 1).all()


def filled(read, wrote, sentinels, eos):
    """The text, from what is read and what is written: every sentinel replaced by what stands behind it."""
    spans, current = {}, None
    for token in wrote.tolist():
        if token in sentinels:
            current = spans.setdefault(token, [])
        elif token != eos or current is None:
            current.append(token)
        elif token == eos:
            current.append(eos)
    spans[current_key(wrote, sentinels)].pop()  # the closing eos
    out = []
    for token in read.tolist()[:-1]:
        out += spans[token] if token in sentinels else [token]
    return out


def current_key(wrote, sentinels):
    return [t for t in wrote.tolist() if t in sentinels][-1]


@pytest.mark.parametrize("case", ["spans", "spans, decoder"])
def test_corrupted_spans_put_back_are_the_text(text, case):
    data = data_of(text, case)
    tokenizer, n = data.tokenizer, 12
    top = tokenizer.vocab_size + n - 1
    assert top == 379  # the last id of the vocabulary is the first sentinel
    ids, noise, total = data.store.texts("train", 0).ids.tolist(), 0, 0
    size = data.objective.piece(data.config)
    rows = data.objective.rows(data.store, "train", data.config)
    for row in range(30):
        (segment,) = rows.segments(row, lambda row=row: np.random.default_rng(row))
        if case == "spans":
            read, wrote = segment.source, segment.targets
            assert segment.inputs[0] == tokenizer.bos and (segment.inputs[1:] == wrote[:-1]).all()
            assert len(read) == 40 or len(wrote) == 16  # one side is full
        else:
            cut = segment.prefix - 1
            read, wrote = segment.targets[:cut], segment.targets[cut:]
            np.testing.assert_array_equal(segment.weights, np.arange(len(segment.targets)) >= cut)
            assert len(segment.targets) in (39, 40)
        sentinels = {top - i for i in range(n)}
        order = [t for t in read.tolist() if t in sentinels]
        assert (
            order
            == [top - i for i in range(len(order))]
            == [t for t in wrote.tolist() if t in sentinels]
        )
        assert filled(read, wrote, sentinels, tokenizer.eos) == ids[row * size : (row + 1) * size]
        noise, total = noise + len(wrote) - len(order) - 1, total + size
    assert noise / total == pytest.approx(0.15, abs=0.03)


def test_the_sentinels_of_t5():
    from transformer.data.objectives.denoising import Denoiser

    spans = Denoiser(0.15, 3.0)
    assert spans.needs(568) == (
        512,
        114,
    )  # as T5's random_spans_helper: 568 tokens make inputs of 512, targets of 114
    read, asked = spans.split(np.arange(1000, 1568), 32_099, 1, np.random.default_rng(0))
    assert (len(read), len(asked)) == (512, 114)
    assert [t for t in asked if t > 30_000] == [32_099 - i for i in range(28)]


def test_sentinels_that_a_tokenizer_brings_are_its_own(text, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the test extra brings it")
    tokenizer = tokenizers.SentencePieceUnigramTokenizer()
    signs = ["<pad>", "</s>", "<s>", "<unk>"]
    words = (text / "text.txt").read_text().splitlines()
    tokenizer.train_from_iterator(
        words, vocab_size=120, special_tokens=signs, unk_token="<unk>", show_progress=False
    )
    tokenizer.add_special_tokens([f"<extra_id_{i}>" for i in reversed(range(12))])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for sentinels, brought in ((12, True), (13, False)):
        objective = {"name": "span_corruption", "sentinels": sentinels, "mean_length": 2.0}
        given = {"tokenizer": {"path": str(tmp_path / "tokenizer.json")}, "target_length": 16}
        data = open_data(experiment(text, objective, "encoder_decoder", **given))
        size, first = data.tokenizer.vocab_size, data.tokenizer.find("<extra_id_0>")
        assert first == size - 1 and data.objective.adds(data.tokenizer) == (0 if brought else 13)
        top = first if brought else size + 12
        asked_for = data.batches("train")[0]["targets"]
        assert asked_for.max() == top and (asked_for[:, 0] == top).all()


def test_ul2_has_seven_denoisers_and_says_which(text):
    data = data_of(text, "ul2")
    tokenizer, rows = data.tokenizer, data.objective.rows(data.store, "train", data.config)
    first, seen = tokenizer.vocab_size, {0: 0, 1: 0, 2: 0}
    size = data.objective.piece(data.config)
    ids = data.store.texts("train", 0).ids.tolist()
    sentinels = {first + 3 + i for i in range(20)}
    for row in range(140):
        (segment,) = rows.segments(row % 20, lambda row=row: np.random.default_rng(row))
        mode = int(segment.source[0]) - first
        seen[mode] += 1
        text_ids = ids[row % 20 * size : (row % 20 + 1) * size]
        if mode == 2:
            assert [*segment.source[1:], *segment.targets] == text_ids
            assert len(segment.targets) == round(size / 4)
        else:
            assert filled(segment.source[1:], segment.targets, sentinels, tokenizer.eos) == text_ids
    assert seen[0] / 140 == pytest.approx(2 / 7, abs=0.12) and seen[1] / 140 == pytest.approx(
        4 / 7, abs=0.12
    )
    assert len(data.objective.denoisers) == 7
