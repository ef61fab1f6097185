"""Masked language modeling and span corruption: rates, targets, and recovery of the text."""

import numpy as np
import pytest
from test_objectives import CASES, data_of, experiment

from transformer.data.pipeline import open_data


def first_segment(batch, row=0):
    """(inputs, targets, weights) of the first segment of a sequence."""
    in_segment = batch["segments"][row] == 1
    return (
        batch["inputs"][row][in_segment],
        batch["targets"][row][in_segment],
        batch["weights"][row][in_segment],
    )


def test_masking_is_80_10_10_of_15_percent(text):
    data = data_of(text, "masked")
    tokenizer, batches = data.tokenizer, data.batches("train")
    counts = np.zeros(5)
    for step in range(60):
        batch = batches[step]
        special = np.isin(batch["targets"], (tokenizer.bos, tokenizer.eos)) | (
            batch["segments"] == 0
        )
        chosen, inputs, targets = batch["weights"] > 0, batch["inputs"], batch["targets"]
        np.testing.assert_array_equal(inputs[~chosen], targets[~chosen])
        assert not (chosen & special).any()
        masked, unchanged = chosen & (inputs == tokenizer.vocab_size), chosen & (inputs == targets)
        counts += [
            (~special).sum(),
            chosen.sum(),
            masked.sum(),
            unchanged.sum(),
            (chosen & ~masked & ~unchanged).sum(),
        ]
        assert np.isin(inputs[chosen & ~masked], tokenizer.text_ids).all()
    candidates, chosen, masked, unchanged, swapped = counts
    assert chosen / candidates == pytest.approx(0.15, abs=0.02)
    assert masked / chosen == pytest.approx(0.8, abs=0.03)
    assert unchanged / chosen == pytest.approx(0.1, abs=0.03)
    assert swapped / chosen == pytest.approx(0.1, abs=0.03)


def test_whole_word_masking_never_splits_words(text):
    whole, plain = data_of(text, "masked words"), data_of(text, "masked", packing=False)
    assert plain.tokenizer.sha256 == whole.tokenizer.sha256

    def count_split_words(data):
        count = 0
        for step in range(20):
            batch = data.batches("train")[step]
            for row in range(8):
                _, ids, weights = first_segment(batch, row)
                word = np.cumsum(data.tokenizer.starts_word[ids])[1:-1]
                count += sum(len(set(weights[1:-1][word == w])) > 1 for w in set(word))
        return count

    assert count_split_words(whole) == 0
    assert count_split_words(plain) > 10


def test_whole_word_masking_keeps_the_rate(text):
    data = data_of(text, "masked words")
    ids = np.asarray(data.stores[""].texts("train", 0).ids[:120], np.int32)
    objective = data.config.objective
    word_tokens = (ids != data.tokenizer.eos).sum()
    word_sizes = np.diff(np.flatnonzero(np.append(data.tokenizer.starts_word[ids], True)))
    assert word_sizes.max() > 2  # long words could exceed the rate
    target_counts = [
        objective.corrupt(ids, data.tokenizer, np.random.default_rng(i))[1].sum() for i in range(50)
    ]
    assert max(target_counts) <= round(0.15 * word_tokens)
    assert np.mean(target_counts) / word_tokens == pytest.approx(0.15, abs=0.008)


def test_next_sentence_labels_match_the_texts(text, tmp_path):
    """Each text repeats its number and counts, so that a long enough part identifies the text."""
    (tmp_path / "text.txt").write_text(
        "".join(" ".join(f"{i:03d} {j}" for j in range(9)) + "\n" for i in range(150))
    )
    objective, family, model, data_fields = CASES["next sentence"]
    data = open_data(
        experiment(
            tmp_path,
            objective,
            family,
            {**model, "vocab_size": 285},
            **data_fields | {"length": 23},
        )
    )
    tokenizer, labels, different_texts = data.tokenizer, [], 0
    texts = {f"{i:03d}": " ".join(f"{i:03d} {j}" for j in range(9)) for i in range(150)}
    for step in range(20):
        batch = data.batches("train")[step]
        for row in range(8):
            _, ids, _ = first_segment(batch, row)
            types = batch["token_types"][row][: len(ids)]
            a, b = ids[types == 0], ids[types == 1]
            assert a[0] == tokenizer.bos and a[-1] == b[-1] == tokenizer.eos
            assert np.all(np.diff(types) >= 0) and len(a) > 2 and len(b) > 1
            labels.append(int(batch["labels"][row]))
            texts_with = lambda ids: {
                number for number, t in texts.items() if tokenizer.decode(ids).strip() in t
            }
            if labels[-1] == 0:
                assert texts_with(np.concatenate([a[1:-1], b[:-1]]))
            # Only parts that are long enough identify their text.
            elif len(texts_with(a[1:-1])) == len(texts_with(b[:-1])) == 1:
                different_texts += 1
                assert texts_with(a[1:-1]) != texts_with(b[:-1])
    assert np.mean(labels) == pytest.approx(0.5, abs=0.12) and different_texts > 20
    assert (batch["label_weights"] == 1).all()


def fill_sentinels(inputs, targets, sentinels, eos):
    """Returns the text: the inputs, with each sentinel replaced by its span from the targets."""
    spans, current = {}, None
    for token in targets.tolist():
        if token in sentinels:
            current = spans.setdefault(token, [])
        elif token != eos or current is None:
            current.append(token)
        elif token == eos:
            current.append(eos)
    spans[last_sentinel(targets, sentinels)].pop()  # the eos that ends the targets
    out = []
    for token in inputs.tolist()[:-1]:
        out += spans[token] if token in sentinels else [token]
    return out


def last_sentinel(targets, sentinels):
    return [t for t in targets.tolist() if t in sentinels][-1]


@pytest.mark.parametrize("case", ["spans", "spans, decoder"])
def test_corrupted_spans_reconstruct_the_text(text, case):
    data = data_of(text, case)
    tokenizer, num_sentinels = data.tokenizer, 12
    top = tokenizer.vocab_size + num_sentinels - 1
    assert top == 379  # the first sentinel has the highest id of the vocabulary
    ids, noise, total = data.stores[""].texts("train", 0).ids.tolist(), 0, 0
    size = data.config.objective.piece(data.config)
    rows = data.config.objective.sequences(data.stores[""], "train", data.config)
    for row in range(30):
        (segment,) = rows.segments(row, lambda row=row: np.random.default_rng(row))
        if case == "spans":
            inputs, targets = segment.source, segment.targets
            assert segment.inputs[0] == tokenizer.bos and (segment.inputs[1:] == targets[:-1]).all()
            # The sequence of the encoder or that of the decoder is full.
            assert len(inputs) == 40 or len(targets) == 16
        else:
            num_inputs = segment.prefix - 1
            inputs, targets = segment.targets[:num_inputs], segment.targets[num_inputs:]
            np.testing.assert_array_equal(
                segment.weights, np.arange(len(segment.targets)) >= num_inputs
            )
            assert len(segment.targets) in (39, 40)
        sentinels = {top - i for i in range(num_sentinels)}
        used = [t for t in inputs.tolist() if t in sentinels]
        assert (
            used
            == [top - i for i in range(len(used))]
            == [t for t in targets.tolist() if t in sentinels]
        )
        text_ids = ids[row * size : (row + 1) * size]
        assert fill_sentinels(inputs, targets, sentinels, tokenizer.eos) == text_ids
        noise, total = noise + len(targets) - len(used) - 1, total + size
    assert noise / total == pytest.approx(0.15, abs=0.03)


def test_denoiser_matches_lengths_and_sentinels_of_t5():
    from transformer.data.objectives.denoising import Denoiser

    spans = Denoiser(0.15, 3.0)
    # As in T5's random_spans_helper, 568 tokens give inputs of 512 and targets of 114.
    assert spans.needs(568) == (512, 114)
    inputs, targets = spans.split(np.arange(1000, 1568), 32_099, 1, np.random.default_rng(0))
    assert (len(inputs), len(targets)) == (512, 114)
    assert [t for t in targets if t > 30_000] == [32_099 - i for i in range(28)]


def test_sentinels_come_from_the_tokenizer_if_it_has_enough(text, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="the test extra brings it")
    tokenizer = tokenizers.SentencePieceUnigramTokenizer()
    special_tokens = ["<pad>", "</s>", "<s>", "<unk>"]
    lines = (text / "text.txt").read_text().splitlines()
    tokenizer.train_from_iterator(
        lines, vocab_size=120, special_tokens=special_tokens, unk_token="<unk>", show_progress=False
    )
    tokenizer.add_special_tokens([f"<extra_id_{i}>" for i in reversed(range(12))])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for sentinels, complete in ((12, True), (13, False)):
        objective = {"name": "span_corruption", "sentinels": sentinels, "mean_length": 2.0}
        data_fields = {"tokenizer": {"path": str(tmp_path / "tokenizer.json")}, "target_length": 16}
        data = open_data(experiment(text, objective, "encoder_decoder", **data_fields))
        size, first = data.tokenizer.vocab_size, data.tokenizer.find("<extra_id_0>")
        num_added = data.config.objective.num_added_tokens(data.tokenizer)
        assert first == size - 1 and num_added == (0 if complete else 13)
        top = first if complete else size + 12
        targets = data.batches("train")[0]["targets"]
        assert targets.max() == top and (targets[:, 0] == top).all()


def test_ul2_mixes_seven_denoisers_with_mode_tokens(text):
    data = data_of(text, "ul2")
    tokenizer, chosen = data.tokenizer, data.config.objective
    rows = chosen.sequences(data.stores[""], "train", data.config)
    first_mode, counts = tokenizer.vocab_size, {0: 0, 1: 0, 2: 0}
    piece_size = data.config.objective.piece(data.config)
    ids = data.stores[""].texts("train", 0).ids.tolist()
    sentinels = {first_mode + 3 + i for i in range(20)}
    for row in range(140):
        (segment,) = rows.segments(row % 20, lambda row=row: np.random.default_rng(row))
        mode = int(segment.source[0]) - first_mode
        counts[mode] += 1
        text_ids = ids[row % 20 * piece_size : (row % 20 + 1) * piece_size]
        if mode == 2:
            assert [*segment.source[1:], *segment.targets] == text_ids
            assert len(segment.targets) == round(piece_size / 4)
        else:
            assert (
                fill_sentinels(segment.source[1:], segment.targets, sentinels, tokenizer.eos)
                == text_ids
            )
    assert counts[0] / 140 == pytest.approx(2 / 7, abs=0.12) and counts[1] / 140 == pytest.approx(
        4 / 7, abs=0.12
    )
    assert len(data.config.objective.denoisers) == 7
