"""Padding and special tokens, compared with Transformers.

Every token is real unless the caller passes a mask. Special tokens are properties of a vocabulary,
and are kept in config.json.
"""

import dataclasses
import json
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, small, tokens
from test_architectures import HF_FAMILIES, small as small_architecture

from transformer import UserError, architecture, build_model, load_hf, save_hf
from transformer.convert import FAMILIES
from transformer.decoding.beam import beam_search
from transformer.decoding.sampling import sample
from transformer.model.special_tokens import SPECIAL_TOKENS

torch = pytest.importorskip("torch", reason="the test extra brings it")
transformers = pytest.importorskip("transformers", reason="the test extra brings it")

SIZES = {
    "vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 24, "num_key_value_heads": 2,
    "bos_token_id": 7, "eos_token_id": 8,
}  # fmt: skip
BOTH = {
    "vocab_size": 31, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "max_position_embeddings": 24, "bos_token_id": 0,
    "eos_token_id": 2,
}  # fmt: skip
DECODERS = {
    "GPT2LMHeadModel": {
        "vocab_size": 9, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24,
        "bos_token_id": 7, "eos_token_id": 8,
    },
    "LlamaForCausalLM": SIZES,
    "MistralForCausalLM": SIZES,
    "Qwen2ForCausalLM": SIZES,
    "Qwen3ForCausalLM": SIZES | {"head_dim": 8},
    "GPTNeoXForCausalLM": {k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
}  # fmt: skip
ENCODER_DECODERS = {
    "T5ForConditionalGeneration": {
        "vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
        "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1,
    },
    "MarianMTModel": BOTH | {"pad_token_id": 30, "decoder_start_token_id": 30},
    "BartForConditionalGeneration": BOTH | {"pad_token_id": 1, "decoder_start_token_id": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def converted_model(tmp_path_factory):
    """Returns get(class of Transformers) -> (its model, our config, our parameters, its folder)."""
    models = {}

    def get(name: str):
        if name not in models:
            cls, folder = getattr(transformers, name), tmp_path_factory.mktemp("hf")
            torch.manual_seed(8)
            model = cls(cls.config_class(**(DECODERS | ENCODER_DECODERS)[name])).eval()
            with torch.no_grad():
                for key, p in model.named_parameters():
                    # Marian's position embeddings are sinusoids.
                    if not (name.startswith("Marian") and "embed_positions" in key):
                        p.add_((0.1 if name.startswith("T5") else 0.3) * torch.randn_like(p))
            model.save_pretrained(folder)
            models[name] = model, *load_hf(folder, scan_layers=False), folder
        return models[name]

    return get


def full_of_zeros(vocab: int, length: int = 12) -> np.ndarray:
    x = np.random.default_rng(0).integers(0, vocab, (2, length))
    x[:, ::2] = 0
    return x


@pytest.mark.parametrize("name", DECODERS)
def test_without_a_pad_token_zero_is_a_real_token(converted_model, name):
    model, config, params, _ = converted_model(name)
    x = full_of_zeros(9)
    with torch.no_grad():
        expected = model(torch.tensor(x)).logits.numpy()
    apply = jax.jit(build_model(config).apply)
    assert config.pad_id is None
    as_padding = np.asarray(apply(params, x, padding_mask=x != 0))
    assert np.abs(as_padding - expected)[:, 1::2].max() > 0.1
    np.testing.assert_allclose(apply(params, x), expected, atol=1e-4)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_decoder_reads_start_and_pad_tokens_as_real_tokens(converted_model, name):
    """The start token may be the pad token, and pad tokens may occur within the text."""
    model, config, params, _ = converted_model(name)
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    assert (config.decoder_start_id, config.pad_id) == (start, pad)
    source = np.random.default_rng(1).integers(3, 30, (2, 7))
    target = np.concatenate([np.full((2, 1), start), source[:, 1:6]], axis=1)
    source[0, 3] = target[1, 4] = pad
    inputs = {"input_ids": source, "decoder_input_ids": target}
    inputs |= {
        "attention_mask": np.ones_like(source),
        "decoder_attention_mask": np.ones_like(target),
    }
    with torch.no_grad():
        expected = model(**{name: torch.tensor(x) for name, x in inputs.items()}).logits.numpy()
    apply = jax.jit(build_model(config).apply)
    masks = {"source_padding_mask": source != pad, "padding_mask": target != pad}
    assert np.abs(np.asarray(apply(params, source, target, **masks)) - expected).max() > 0.1
    np.testing.assert_allclose(apply(params, source, target), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "beams"), [("GPT2LMHeadModel", 1), ("LlamaForCausalLM", 1), ("GPT2LMHeadModel", 3)]
)
def test_generation_can_produce_token_zero(converted_model, name, beams):
    model, config, params, _ = converted_model(name)
    x, max_new = full_of_zeros(8, 5), 8
    with torch.no_grad():
        expected = model.generate(
            torch.tensor(x),
            attention_mask=torch.ones(2, 5),
            max_new_tokens=max_new,
            do_sample=False,
            num_beams=beams,
            length_penalty=0.0,
            pad_token_id=8,
            eos_token_id=8,
        ).numpy()[:, 5:]
    assert (expected == 0).any()
    module, limits = build_model(config), jnp.full(2, max_new)
    if beams == 1:
        keys = jax.random.split(jax.random.key(0), 2)
        run = lambda p, x: sample(module, p, x, limits, keys, max_new=max_new)
    else:
        run = lambda p, x: beam_search(
            module, p, x, limits, beam_size=beams, alpha=0.0, max_new=max_new
        )[0][:, 0]
    generated = np.asarray(jax.jit(run)(params, x))
    np.testing.assert_array_equal(generated[:, : expected.shape[1]], expected)
    assert (generated[:, expected.shape[1] :] == 8).all()


def test_bart_special_tokens_round_trip(converted_model, tmp_path):
    _, config, params, folder = converted_model("BartForConditionalGeneration")
    assert (config.pad_id, config.bos_id, config.eos_id, config.decoder_start_id) == (1, 0, 2, 2)
    save_hf(tmp_path / "out", config, params)
    original, saved = (
        json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "out")
    )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        assert saved[name] == original[name]
    assert load_hf(tmp_path / "out", scan_layers=False)[0] == config


def test_generation_begins_with_the_start_token(converted_model):
    """The caller passes neither T5's start token nor its end-of-sequence token."""
    model, config, params, _ = converted_model("T5ForConditionalGeneration")
    source, module = np.random.default_rng(1).integers(3, 30, (1, 6)), build_model(config)
    with torch.no_grad():
        expected = model.generate(torch.tensor(source), max_new_tokens=5, do_sample=False).numpy()[
            0, 1:
        ]
    keys, limits = jax.random.split(jax.random.key(0), 1), jnp.full(1, 5)
    generated = sample(module, params, None, limits, keys, max_new=5, source_BxS=source)
    np.testing.assert_array_equal(np.asarray(generated)[0, : len(expected)], expected)
    without_start = build_model(dataclasses.replace(config, decoder_start_id=None))
    with pytest.raises(UserError, match=r"prompt: None.* set model\.decoder_start_id"):
        sample(without_start, params, None, limits, keys, max_new=5, source_BxS=source)


SPECIAL_IDS = [
    {},
    {"pad_id": 5, "bos_id": 6, "eos_id": 7},
    {"pad_id": 0, "bos_id": 0, "eos_id": (7, 0, 9)},
    {"eos_id": 0},
]


@pytest.mark.parametrize("special_ids", SPECIAL_IDS, ids=str)
@pytest.mark.parametrize(
    "name",
    ["bert_base", "modernbert_base", "gpt2", "bloom_560m", "t5_small", "bart_base", "marian",
     "opt_125m", "pythia_70m", "llama2_7b", "mistral_7b", "qwen2_0.5b", "qwen3_0.6b", "gemma2_2b"],
)  # fmt: skip
def test_special_tokens_round_trip_through_config_json(name, special_ids):
    """None stays None, although Transformers has defaults for absent fields."""
    config = small_architecture(name)
    start = {"decoder_start_id": 4} if config.is_encoder_decoder and special_ids else {}
    config = dataclasses.replace(config, d_ff=4 * config.d_model, **special_ids, **start)
    family = FAMILIES[HF_FAMILIES[name.split("_")[0]]]
    hf_fields = json.loads(json.dumps(family.their_config(config)))
    tensors = frozenset(weight.theirs for weight in family.all_weights(config))
    loaded = family.our_config(hf_fields, tensors)
    assert {field: getattr(loaded, field) for field in SPECIAL_TOKENS} == {
        field: getattr(config, field) for field in SPECIAL_TOKENS
    }
    hf_config = getattr(transformers, family.architecture).config_class(**hf_fields)
    as_list = lambda ids: list(ids) if isinstance(ids, tuple) else ids
    for field, name in (
        ("pad_id", "pad_token_id"),
        ("bos_id", "bos_token_id"),
        ("eos_id", "eos_token_id"),
    ):
        assert getattr(hf_config, name, None) == as_list(getattr(config, field))


def test_special_token_defaults_match_transformers():
    for family in FAMILIES.values():
        hf_config = getattr(transformers, family.architecture).config_class()
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        defaults = {name: getattr(hf_config, name, None) for name in names}
        assert family.special_tokens == {
            name: token for name, token in defaults.items() if token is not None
        }


def test_special_tokens_outside_the_vocabulary_are_read_as_null():
    hf_fields = json.loads(
        transformers.GPT2Config(vocab_size=61, n_embd=16, n_head=2).to_json_string()
    )
    convert = lambda **overrides: FAMILIES["gpt2"].our_config(hf_fields | overrides, frozenset())
    with pytest.warns(
        UserWarning,
        match="eos_token_id = 50256 is outside the vocabulary of 61 tokens; read as null",
    ):
        assert convert().eos_id is None
    assert convert(bos_token_id=0, eos_token_id=[3]).eos_id == 3
    assert convert(bos_token_id=0, eos_token_id=[3, 0]).eos_id == (3, 0)
    for value in ("x", True, 1.5):
        with pytest.raises(
            UserError, match="config.json: pad_token_id = .* must be a token ID or null"
        ):
            convert(pad_token_id=value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pad_id": 37}, "model.pad_id: 37 is not in a vocabulary of 37 tokens"),
        ({"bos_id": -1}, "model.bos_id: -1 is not in a vocabulary"),
        ({"eos_id": (1, 40)}, "model.eos_id: 40 is not in a vocabulary"),
        ({"eos_id": 1.5}, r"model.eos_id: expected int .*, got 1.5"),
        (
            {"decoder_start_id": 0},
            "model.decoder_start_id: 0 has no effect without an encoder and a decoder",
        ),
    ],
)
def test_invalid_special_tokens_raise(fields, message):
    with pytest.raises(UserError, match=message):
        small("decoder", **fields)
    assert small("encoder_decoder", decoder_start_id=0).decoder_start_id == 0
    assert small("decoder", eos_id=[3]).eos_id == 3 and small("decoder").eos_id is None


def test_special_tokens_do_not_change_logits():
    x = tokens(0, 2, 6).at[:, ::2].set(0)
    model, params = make(small("decoder"))
    with_ids = build_model(small("decoder", pad_id=0, bos_id=0, eos_id=0))
    np.testing.assert_array_equal(model.apply(params, x), with_ids.apply(params, x))
    assert architecture("bart_base").pad_id is None


def test_default_positions_continue_after_the_cache():
    """Without `positions`, decoded tokens follow the tokens in the cache."""
    model, params = make(small("decoder", position="learned", scan_layers=False))
    x, cache, chunks = tokens(0, 2, 6), model.empty_cache(2, 6), []
    step = jax.jit(lambda x, cache: model.apply(params, x, cache, method="decode"))
    for part in (x[:, :2], x[:, 2:4], x[:, 4:]):
        logits, cache = step(part, cache)
        chunks.append(logits)
    np.testing.assert_allclose(jnp.concatenate(chunks, 1), model.apply(params, x), atol=3e-5)
    with pytest.raises(UserError, match=r"cache: 1 tokens do not fit, because 6 of the 6"):
        model.apply(params, x[:, :1], cache, method="decode")


def test_eos_id_comes_from_the_call_or_the_config():
    plain, params = make(small("decoder", vocab_size=5, scan_layers=False))
    keys, limits, x = jax.random.split(jax.random.key(0), 2), jnp.array([6, 3]), tokens(0, 2, 3, 5)
    with_fields = lambda **fields: build_model(dataclasses.replace(plain.config, **fields))
    run = lambda model, **kwargs: sample(model, params, x, limits, keys, max_new=6, **kwargs)
    for model, kwargs in ((plain, {}), (with_fields(pad_id=1), {"pad_id": 0})):
        with pytest.raises(UserError, match=r"eos_id: not set, so no sequence would end"):
            run(model, **kwargs)
    with pytest.raises(UserError, match="suppress_tokens: 5 is not in a vocabulary of 5 tokens"):
        run(plain, eos_id=0, suppress_tokens=(5,))
    free = np.asarray(run(plain, eos_id=4, suppress_tokens=(4,)))
    # Without a pad token, EOS pads the end.
    assert (free[1, 3:] == 4).all() and (free[0] != 4).all()
    end = int(free[0, 1])
    ended = np.asarray(run(with_fields(eos_id=(4, end), pad_id=3), suppress_tokens=(4,)))
    stop = int(np.flatnonzero(free[0] == end)[0])
    assert (ended[0] == [*free[0, : stop + 1], *[3] * (5 - stop)]).all()


def test_beam_search_limits_are_capped_at_max_new():
    model, params = make(small("decoder", vocab_size=9, eos_id=2, scan_layers=False), noise=0.5)
    search = jax.jit(
        lambda limits: beam_search(
            model, params, tokens(0, 2, 3, 9), limits, beam_size=3, alpha=0.6, max_new=4
        )
    )
    for actual, expected in zip(search(jnp.array([9, 4])), search(jnp.array([4, 4])), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_help_states_the_defaults():
    for family in ("decoder", "encoder_decoder"):
        model = build_model(small(family))
        for text in (pydoc.render_doc(model.apply), pydoc.render_doc(model)):
            for phrase in (
                "Every token is real by default",
                "padding_mask",
                "segment_ids",
                "positions",
                "deterministic",
                '{"dropout": key}',
            ):
                assert phrase in text
