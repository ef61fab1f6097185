"""Properties of single families of Transformers: positions, and heads that cannot be loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch", reason="the test extra brings it")
pytest.importorskip("transformers", reason="the test extra brings it")

import test_convert
import torch
import transformers
from test_convert_faults import copy_directory, load_error

from transformer import build_model, load_hf, save_hf
from transformer.convert import FAMILIES
from transformer.convert.hf import _tensors
from transformer.model.positions.content import log_buckets

CASES, saved_model = test_convert.CASES, test_convert.saved_model
padded_sequences = test_convert.padded_sequences


@pytest.mark.parametrize("family", CASES)
def test_gradients_equal_transformers(saved_model, family):
    """Our gradients, renamed and reshaped as weights are, equal PyTorch's."""
    generates = lambda case: any(x in case[0] for x in ("ForM", "ForC", "LMHead", "MT"))
    model, folder = saved_model(*next(filter(generates, CASES[family])))
    config, params = load_hf(folder)
    rng = np.random.default_rng(0)
    ids = rng.integers(4, test_convert.VOCAB - 2, (len(config.sides), 2, 9))
    weights = rng.standard_normal((2, 9, test_convert.VOCAB)).astype(np.float32)
    loss = lambda params: jnp.sum(build_model(config).apply(params, *ids) * weights)
    ours = dict(_tensors(FAMILIES[family], config, jax.jit(jax.grad(loss))(params)))
    target = {"decoder_input_ids": torch.tensor(ids[-1])} if config.is_encoder_decoder else {}
    model.zero_grad()
    torch.sum(model(torch.tensor(ids[0]), **target).logits * torch.tensor(weights)).backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    compared = theirs.keys() & ours.keys()
    assert len(compared) > 0.6 * len(theirs), sorted(theirs.keys() - ours.keys())
    largest = {name: float(x.abs().max()) for name, x in theirs.items()}
    for name in compared:  # the gradients of key biases are 0, up to rounding
        atol = 1e-3 * largest[name] + 1e-6 * max(largest.values())
        np.testing.assert_allclose(ours[name], theirs[name], atol=atol, err_msg=name)


@pytest.mark.parametrize("family", ["roberta", "camembert"])
def test_padding_on_both_sides_equals_transformers(saved_model, family):
    """Transformers counts positions from the first token that is not the pad token."""
    model, folder = saved_model(*CASES[family][0])
    config, params = load_hf(folder, scan_layers=False)
    ids, mask = padded_sequences(config.pad_id)
    ids, mask = np.roll(ids, 3, axis=1), np.roll(mask, 3, axis=1)
    ids, mask = ids[1:], mask[1:]
    assert not mask[:, :3].any() and not mask[:, -1].any()
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    with torch.no_grad():
        expected = model(torch.tensor(ids), attention_mask=torch.tensor(mask).long()).logits
    ours = build_model(config).apply(params, ids, padding_mask=mask, positions=positions)
    np.testing.assert_allclose(ours[mask], expected.numpy()[mask], atol=1e-4)


def test_m2m_100_counts_positions_from_the_first_real_token(saved_model, tmp_path):
    """Older files contain its sinusoids, which Transformers computes instead of reading."""
    model, folder = saved_model(*CASES["m2m_100"][0])
    old = {"model.encoder.embed_positions.weights": torch.ones(42, 32)}
    extra = copy_directory(folder, tmp_path / "x", alter=lambda tensors: tensors.update(old))
    config, params = load_hf(extra, scan_layers=False)
    ids, mask = (np.roll(x, 3, axis=1)[1:] for x in padded_sequences(config.pad_id))
    target = np.full((2, 4), 7)
    tensor = lambda x: torch.tensor(np.ascontiguousarray(x))
    with torch.no_grad():
        expected = model(
            tensor(ids), attention_mask=tensor(mask).long(), decoder_input_ids=tensor(target)
        ).logits
    positions = np.maximum(np.cumsum(mask, 1) - 1, 0)
    options = {"source_padding_mask": mask, "source_positions": positions}
    ours = build_model(config).apply(params, ids, target, **options)
    np.testing.assert_allclose(ours, expected.numpy(), atol=1e-4)


def test_unused_pooler_is_ignored_and_unsupported_heads_raise(saved_model, tmp_path):
    """Classifiers of RoBERTa on the hub often have a pooler, which Transformers ignores."""
    _, folder = saved_model(*CASES["roberta"][4])
    pooler = {"roberta.pooler.dense.weight": torch.ones(32, 32)}
    extra = copy_directory(folder, tmp_path / "x", alter=lambda tensors: tensors.update(pooler))
    jax.tree.map(np.testing.assert_array_equal, load_hf(extra)[1], load_hf(folder)[1])
    _, folder = saved_model("DistilBertForSequenceClassification", CASES["distilbert"][0][1])
    assert load_error(folder).startswith("pre_classifier: distilbert classifies sequences with a")


def test_next_sentence_prediction_alone_is_a_classifier(saved_model, tmp_path):
    """Transformers has a class for it, with the equation of a classifier of sequences."""
    model, folder = saved_model("BertForNextSentencePrediction", CASES["bert"][0][1])
    config, params = load_hf(folder)
    ours, expected, real = test_convert.both_logits(model, config, params, type(model).__name__)
    assert expected.shape == (3, 2) and real.all() and np.abs(expected).max() > 0.1
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    save_hf(tmp_path / "out", config, params, family="bert")
    ids = torch.tensor(padded_sequences(0)[0])
    exported = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    np.testing.assert_allclose(exported(ids).logits.detach(), model(ids).logits.detach(), atol=1e-5)


def test_files_of_deberta_v3_have_another_head_and_a_discriminator(saved_model, tmp_path):
    """On the hub, config.json omits `legacy`, and files have tables of absolute positions."""
    options = CASES["deberta-v2"][0][1] | {"legacy": False}

    def load_and_compare(model, folder):
        config, params = load_hf(folder)
        ours, expected, real = test_convert.both_logits(model, config, params, "")
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(ours[real], expected[real], atol=1e-4)
        return config, params

    # Transformers always ties this head.
    load_and_compare(*saved_model("DebertaV2ForMaskedLM", options | {"tie_word_embeddings": False}))
    model, folder = saved_model("DebertaV2ForMaskedLM", options)
    more = {f"mask_predictions.{x}.bias": torch.ones(32) for x in ("dense", "LayerNorm")} | {
        "mask_predictions.dense.weight": torch.ones(32, 32),
        "mask_predictions.LayerNorm.weight": torch.ones(32),
        "mask_predictions.classifier.weight": torch.ones(1, 32),
        "mask_predictions.classifier.bias": torch.ones(1),
        "deberta.embeddings.position_embeddings.weight": torch.ones(40, 32),
    }
    without = lambda config: config.pop("legacy")
    hub = copy_directory(folder, tmp_path / "x", without, lambda tensors: tensors.update(more))
    save_hf(tmp_path / "out", *load_and_compare(model, hub))
    ids = torch.tensor(padded_sequences(0)[0])
    exported = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    assert exported.config.pooler_hidden_act == "gelu"
    np.testing.assert_allclose(exported(ids).logits.detach(), model(ids).logits.detach(), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"relative_attention": False}, "relative_attention = False is not supported"),
        (
            {"position_biased_input": True},
            "position_biased_input = True is not supported",
        ),
        ({"share_att_key": False}, "share_att_key = False is not supported; it must be True"),
        (
            {"pos_att_type": ["c2p"]},
            "pos_att_type = ['c2p'] is not supported; it must be",
        ),
        ({"pos_att_type": 3}, "pos_att_type = 3 must be a string or a list or null"),
        ({"pos_att_type": ["C2P", "p2c"]}, "pos_att_type = ['C2P', 'p2c'] is not supported"),
        ({"norm_rel_ebd": "rms"}, "norm_rel_ebd = 'rms' has 'rms'; use 'none' or 'layer_norm'"),
        ({"conv_kernel_size": 3}, "conv_kernel_size = 3 is not supported; it must be 0"),
        ({"pooler_hidden_act": "relu"}, "pooler_hidden_act = 'relu' is not supported; use one of"),
        (
            {"position_buckets": 5},
            "model.position: 'deberta' with buckets = 5 and max_dist",
        ),
    ],
)
def test_other_variants_of_deberta_raise_an_error(saved_model, tmp_path, change, problem):
    _, folder = saved_model(*CASES["deberta-v2"][0])
    assert problem in load_error(
        copy_directory(folder, tmp_path / "x", lambda config: config.update(change))
    )


def test_buckets_of_deberta_equal_transformers():
    reference = transformers.models.deberta_v2.modeling_deberta_v2.make_log_bucket_position
    sizes = [(b, n) for b in (2, 4, 6, 16, 64, 256) for n in (b // 2 + 2, b + 1, 2 * b, 512, 513)]
    for buckets, longest in sizes:
        distance = np.arange(-longest, longest + 1)
        expected = reference(torch.tensor(distance), buckets, longest).long().numpy()
        clipped = (
            np.clip(x, -buckets, buckets - 1)
            for x in (log_buckets(distance, buckets, longest), expected)
        )
        np.testing.assert_array_equal(*clipped, err_msg=f"{buckets} buckets to {longest}")
    assert len(set(log_buckets(np.arange(512), 256, 512))) == 256  # 0 to 255


def test_sinusoidal_table_must_match_its_formula(saved_model, tmp_path):
    _, folder = saved_model(*CASES["marian"][0])
    name = "model.encoder.embed_positions.weight"
    marian = transformers.models.marian.modeling_marian.MarianSinusoidalPositionalEmbedding
    table = marian(40, 32).create_weight()
    same = copy_directory(
        folder, tmp_path / "same", alter=lambda tensors: tensors.update({name: table})
    )
    assert load_hf(same)[0] == load_hf(folder)[0]
    rounded = copy_directory(
        folder, tmp_path / "half", alter=lambda tensors: tensors.update({name: table.half()})
    )
    load_hf(rounded)
    different = copy_directory(
        folder, tmp_path / "other", alter=lambda tensors: tensors.update({name: table + 0.01})
    )
    assert load_error(different) == f"{name}: differs from the values its formula gives"
