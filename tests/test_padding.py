"""Every token is real unless the caller says otherwise; special tokens are facts about a vocabulary, and pass through config.json."""

import dataclasses
import json
import pydoc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make, small, tokens
from test_architectures import OF_HF
from test_architectures import small as likeness

from transformer import UserError, architecture, build_model, load_hf, save_hf
from transformer.convert import FAMILIES
from transformer.decoding.beam import beam_search
from transformer.decoding.prefill import prefill
from transformer.decoding.sampling import sample
from transformer.model.special_tokens import SPECIAL_TOKENS

torch = pytest.importorskip("torch", reason="the test extra brings it")
transformers = pytest.importorskip("transformers", reason="the test extra brings it")

SIZES = {
    "vocab_size": 9, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 24, "num_key_value_heads": 2, "bos_token_id": 7, "eos_token_id": 8,
}  # fmt: skip
BOTH = {
    "vocab_size": 31, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 24, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
DECODERS = {
    "GPT2LMHeadModel": {"vocab_size": 9, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "bos_token_id": 7, "eos_token_id": 8},
    "LlamaForCausalLM": SIZES, "MistralForCausalLM": SIZES, "Qwen2ForCausalLM": SIZES, "Qwen3ForCausalLM": SIZES | {"head_dim": 8},
    "GPTNeoXForCausalLM": {k: v for k, v in SIZES.items() if k != "num_key_value_heads"},
}  # fmt: skip
ENCODER_DECODERS = {
    "T5ForConditionalGeneration": {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "pad_token_id": 0,
                                   "decoder_start_token_id": 0, "eos_token_id": 1},
    "MarianMTModel": BOTH | {"pad_token_id": 30, "decoder_start_token_id": 30},
    "BartForConditionalGeneration": BOTH | {"pad_token_id": 1, "decoder_start_token_id": 2},
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A class of Transformers -> (their model, our config, our parameters, its folder)."""
    models = {}

    def get(name: str):
        if name not in models:
            cls, folder = getattr(transformers, name), tmp_path_factory.mktemp("hf")
            torch.manual_seed(8)
            model = cls(cls.config_class(**(DECODERS | ENCODER_DECODERS)[name])).eval()
            with torch.no_grad():
                for key, p in model.named_parameters():
                    if not (
                        name.startswith("Marian") and "embed_positions" in key
                    ):  # its sinusoids
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
def test_without_a_pad_token_zero_is_a_token_like_any_other(made, name):
    model, config, params, _ = made(name)
    x = full_of_zeros(9)
    with torch.no_grad():
        wanted = model(torch.tensor(x)).logits.numpy()
    ours = build_model(config)
    assert config.pad_id is None
    as_padding = np.asarray(ours.apply(params, x, padding_mask=x != 0))
    assert np.abs(as_padding - wanted)[:, 1::2].max() > 0.1
    np.testing.assert_allclose(ours.apply(params, x), wanted, atol=1e-4)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_a_decoder_reads_its_start_token(made, name):
    """Also where that is the pad token, and where pad tokens stand in the text."""
    model, config, params, _ = made(name)
    start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
    assert (config.decoder_start_id, config.pad_id) == (start, pad)
    source = np.random.default_rng(1).integers(3, 30, (2, 7))
    target = np.concatenate([np.full((2, 1), start), source[:, 1:6]], axis=1)
    source[0, 3] = target[1, 4] = pad
    given = {"input_ids": source, "decoder_input_ids": target}
    given |= {
        "attention_mask": np.ones_like(source),
        "decoder_attention_mask": np.ones_like(target),
    }
    with torch.no_grad():
        wanted = model(**{name: torch.tensor(x) for name, x in given.items()}).logits.numpy()
    ours = build_model(config)
    masks = {"source_padding_mask": source != pad, "padding_mask": target != pad}
    assert np.abs(np.asarray(ours.apply(params, source, target, **masks)) - wanted).max() > 0.1
    np.testing.assert_allclose(ours.apply(params, source, target), wanted, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "beams"), [("GPT2LMHeadModel", 1), ("LlamaForCausalLM", 1), ("GPT2LMHeadModel", 3)]
)
def test_zero_can_be_written(made, name, beams):
    model, config, params, _ = made(name)
    x, new = full_of_zeros(8, 5), 8
    with torch.no_grad():
        wanted = model.generate(
            torch.tensor(x), attention_mask=torch.ones(2, 5), max_new_tokens=new, do_sample=False, num_beams=beams,
            length_penalty=0.0, pad_token_id=8, eos_token_id=8,
        ).numpy()[:, 5:]  # fmt: skip
    assert (wanted == 0).any()
    ours, limits = build_model(config), jnp.full(2, new)
    if beams == 1:
        keys = jax.random.split(jax.random.key(0), 2)
        run = lambda p, x: sample(ours, p, x, limits, keys, max_new=new)
    else:
        run = lambda p, x: beam_search(ours, p, x, limits, beam_size=beams, alpha=0.0, max_new=new)[
            0
        ][:, 0]
    found = np.asarray(jax.jit(run)(params["params"], x))
    np.testing.assert_array_equal(found[:, : wanted.shape[1]], wanted)
    assert (found[:, wanted.shape[1] :] == 8).all()


def test_the_start_token_is_not_the_pad_token(made, tmp_path):
    _, config, params, folder = made("BartForConditionalGeneration")
    assert (config.pad_id, config.bos_id, config.eos_id, config.decoder_start_id) == (1, 0, 2, 2)
    save_hf(tmp_path / "out", config, params)
    theirs, back = (json.loads((f / "config.json").read_text()) for f in (folder, tmp_path / "out"))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        assert back[name] == theirs[name]
    assert load_hf(tmp_path / "out", scan_layers=False)[0] == config


def test_generation_begins_with_the_start_token(made):
    """T5's is not said by the caller, nor are its ends."""
    model, config, params, _ = made("T5ForConditionalGeneration")
    source, ours = np.random.default_rng(1).integers(3, 30, (1, 6)), build_model(config)
    with torch.no_grad():
        wanted = model.generate(torch.tensor(source), max_new_tokens=5, do_sample=False).numpy()[
            0, 1:
        ]
    keys, limits = jax.random.split(jax.random.key(0), 1), jnp.full(1, 5)
    found = sample(ours, params["params"], None, limits, keys, max_new=5, source_BxS=source)
    np.testing.assert_array_equal(np.asarray(found)[0, : len(wanted)], wanted)
    bare = build_model(dataclasses.replace(config, decoder_start_id=None))
    with pytest.raises(UserError, match=r"prompt: None.* set model\.decoder_start_id"):
        sample(bare, params["params"], None, limits, keys, max_new=5, source_BxS=source)


SAID = [
    {},
    {"pad_id": 5, "bos_id": 6, "eos_id": 7},
    {"pad_id": 0, "bos_id": 0, "eos_id": (7, 0, 9)},
    {"eos_id": 0},
]


@pytest.mark.parametrize("said", SAID, ids=str)
@pytest.mark.parametrize(
    "name", ["bert_base", "modernbert_base", "gpt2", "bloom_560m", "t5_small", "bart_base", "marian", "opt_125m", "pythia_70m", "llama2_7b",
             "mistral_7b", "qwen2_0.5b", "qwen3_0.6b", "gemma2_2b"],
)  # fmt: skip
def test_special_tokens_pass_through_config_json(name, said):
    """As they are; None stays None, though Transformers has a default where a field is absent."""
    config = likeness(name)
    start = {"decoder_start_id": 4} if config.is_encoder_decoder and said else {}
    config = dataclasses.replace(config, d_ff=4 * config.d_model, **said, **start)
    family = FAMILIES[OF_HF[name.split("_")[0]]]
    theirs = json.loads(json.dumps(family.their_config(config)))
    tensors = frozenset(weight.theirs for weight in family.weights(config))
    back = family.our_config(theirs, tensors)
    assert {f: getattr(back, f) for f in SPECIAL_TOKENS} == {
        f: getattr(config, f) for f in SPECIAL_TOKENS
    }
    read = getattr(transformers, family.architecture).config_class(**theirs)
    listed = lambda ids: list(ids) if isinstance(ids, tuple) else ids
    for ours, name in (
        ("pad_id", "pad_token_id"),
        ("bos_id", "bos_token_id"),
        ("eos_id", "eos_token_id"),
    ):
        assert getattr(read, name, None) == listed(getattr(config, ours))


def test_defaults_are_those_of_transformers():
    for family in FAMILIES.values():
        theirs = getattr(transformers, family.architecture).config_class()
        names = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
        found = {n: getattr(theirs, n, None) for n in names}
        assert family.special_tokens == {n: i for n, i in found.items() if i is not None}


def test_tokens_outside_the_vocabulary_of_a_config_json():
    theirs = json.loads(
        transformers.GPT2Config(vocab_size=61, n_embd=16, n_head=2).to_json_string()
    )
    read = lambda **more: FAMILIES["gpt2"].our_config(theirs | more, frozenset())
    with pytest.warns(
        UserWarning,
        match="eos_token_id = 50256 is outside the vocabulary of 61 tokens; read as null",
    ):
        assert read().eos_id is None
    assert read(bos_token_id=0, eos_token_id=[3]).eos_id == 3
    assert read(bos_token_id=0, eos_token_id=[3, 0]).eos_id == (3, 0)
    for value in ("x", True, 1.5):
        with pytest.raises(
            UserError, match="config.json: pad_token_id = .* must be a token ID or null"
        ):
            read(pad_token_id=value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pad_id": 37}, "model.pad_id: 37 is not in a vocabulary of 37 tokens"),
        ({"bos_id": -1}, "model.bos_id: -1 is not in a vocabulary"),
        ({"eos_id": (1, 40)}, "model.eos_id: 40 is not in a vocabulary"),
        ({"eos_id": 1.5}, r"model.eos_id: expected int .*, got 1.5"),
        (
            {"decoder_start_id": 0},
            "model.decoder_start_id: 0 needs model.family='encoder_decoder', but it is 'decoder'",
        ),
    ],
)
def test_special_tokens_lie_inside_the_vocabulary(fields, message):
    with pytest.raises(UserError, match=message):
        small("decoder", **fields)
    assert small("encoder_decoder", decoder_start_id=0).decoder_start_id == 0
    assert small("decoder", eos_id=[3]).eos_id == 3 and small("decoder").eos_id is None


def test_special_tokens_are_nothing_to_the_model():
    x = tokens(0, 2, 6).at[:, ::2].set(0)
    model, params = make(small("decoder"))
    other = build_model(small("decoder", pad_id=0, bos_id=0, eos_id=0))
    np.testing.assert_array_equal(model.apply(params, x), other.apply(params, x))
    assert architecture("bart_base").pad_id is None


ONES = np.ones((2, 5), np.int32)
FAULTS = {
    "rank 1": ((ONES[0],), {}, r"tokens: expected integers of shape \[B, T\], got int32\[5\]; add the batch axis, tokens\[None\]"),
    "rank 3": ((ONES[None],), {}, r"got int32\[1, 2, 5\]"),
    "float": ((ONES * 1.0,), {}, r"tokens: expected integers of shape \[B, T\], got float64"),
    "list": (([[1, 2]],), {}, "tokens: expected an integer array, got a list"),
    "long": ((np.ones((1, 25), int),), {}, r"a sequence of 25 tokens is longer than model\.max_length = 24"),
    "mask's shape": ((ONES,), {"padding_mask": ONES[:, :4] > 0}, r"padding_mask: shape \[2, 4\] differs from the tokens' shape \[2, 5\]"),
    "mask's rank": ((ONES,), {"padding_mask": ONES[0] > 0}, r"padding_mask: shape \[5\]"),
    "mask's type": ((ONES,), {"padding_mask": ONES * 0.5}, "padding_mask: expected an array of bool, got float64"),
    "segments' type": ((ONES,), {"segment_ids": ONES > 0}, "segment_ids: expected an integer array, got bool"),
    "both masks": ((ONES,), {"padding_mask": ONES > 0, "segment_ids": ONES}, "padding_mask: passed together with segment_ids; pass one"),
    "positions' shape": ((ONES,), {"positions": ONES[:1, :3]}, r"positions: shape \[1, 3\]"),
    "prefix": ((ONES,), {"prefix_mask": ONES > 0}, r"prefix_mask: .*; set model\.prefix_lm=True"),
    "types": ((ONES,), {"token_types": ONES}, r"token_types: passed, but model\.token_types = 0"),
}  # fmt: skip
VALUES = {
    "beyond": ((ONES + 36,), {}, r"tokens: 37 must be between 0 and 36 \(model\.vocab_size = 37\)"),
    "negative": ((ONES - 2,), {}, "tokens: -1 must be between 0 and 36"),
    "mask": ((ONES,), {"padding_mask": 2 * ONES}, "padding_mask: 2 must be between 0 and 1"),
    "segments": ((ONES,), {"segment_ids": -ONES}, "segment_ids: -1 must be at least 0"),
    "positions": ((ONES,), {"positions": 24 * ONES}, r"positions: 24 must be between 0 and 23 \(model\.max_length = 24\)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [*FAULTS, *VALUES])
def test_what_does_not_fit_is_one_line(fault):
    """Shapes and types also under jit, where values are not known."""
    inputs, given, message = (FAULTS | VALUES)[fault]
    model, params = make(small("decoder", position="learned"))
    with pytest.raises(UserError, match=message) as error:
        model.apply(params, *inputs, **given)
    assert "\n" not in str(error.value)
    trace = lambda: jax.eval_shape(
        lambda p, x, given: model.apply(p, x, **given), params, inputs[0], given
    )
    if fault in VALUES:
        trace()
    elif fault != "list":
        with pytest.raises(UserError, match=message.replace("float64", "float32")):
            trace()


def test_what_does_not_fit_in_two_sides_says_which():
    model, params = make(small("encoder_decoder"))
    x = jnp.asarray(ONES)
    for inputs, given, message in (
        ((x[0], x), {}, r"source: expected integers of shape \[B, T\], got int32\[5\]"),
        ((x, x + 36), {}, "target: 37 must be between 0 and 36"),
        ((x, x), {"source_padding_mask": x[:, 1:]}, "padding_mask of the source: shape"),
        (
            (x, x),
            {"segment_ids": x + 1},
            "segment_ids: 2 documents in a sequence, but no source_segment_ids",
        ),
    ):
        with pytest.raises(UserError, match=message):
            model.apply(params, *inputs, **given)
    types = build_model(small("encoder", token_types=2))
    with pytest.raises(
        UserError, match=r"token_types: 2 must be between 0 and 1 \(model\.token_types = 2\)"
    ):
        types.init(jax.random.key(0), x, token_types=x + 1)


def test_prompts_and_caches_that_do_not_fit():
    model, params = make(small("decoder", scan_layers=False))
    x = tokens(0, 2, 4)
    with pytest.raises(
        UserError, match="prompt_mask: padding after a real token; pad prompts on the left"
    ):
        prefill(model, params["params"], x, 8, None, x[:, ::-1] != x[:, :1])
    with pytest.raises(UserError, match=r"cache: 3 slots cannot hold 0 \+ 4 tokens"):
        prefill(model, params["params"], x, 3)


@pytest.mark.parametrize("position", ["learned", "xpos"])
def test_no_cache_is_longer_than_the_positions(position):
    """A table would repeat its last row, and xPos has no factor there."""
    model, params = make(small("decoder", position=position))
    x = tokens(0, 1, 4)
    assert prefill(model, params["params"], x, 24)[0].shape == (1, 37)
    with pytest.raises(UserError, match=r"take 25 tokens, but the positions .* end at 23"):
        prefill(model, params["params"], x, 25)
    model, params = make(small("decoder", position="rotary"))
    assert prefill(model, params["params"], x, 25)[0].shape == (1, 37)


def test_cached_tokens_are_followed():
    """Without positions, what is decoded stands behind what is in the cache."""
    model, params = make(small("decoder", position="learned", scan_layers=False))
    x, cache, found = tokens(0, 2, 6), model.empty_cache(2, 6), []
    step = jax.jit(lambda x, cache: model.apply(params, x, cache, method="decode"))
    for part in (x[:, :2], x[:, 2:4], x[:, 4:]):
        logits, cache = step(part, cache)
        found.append(logits)
    np.testing.assert_allclose(jnp.concatenate(found, 1), model.apply(params, x), atol=3e-5)
    with pytest.raises(UserError, match=r"cache: 6 slots cannot hold 6 \+ 1 tokens"):
        model.apply(params, x[:, :1], cache, method="decode")


def test_the_end_is_said_or_in_the_config():
    plain, params = make(small("decoder", vocab_size=5, scan_layers=False))
    keys, limits, x = jax.random.split(jax.random.key(0), 2), jnp.array([6, 3]), tokens(0, 2, 3, 5)
    config = lambda **fields: build_model(dataclasses.replace(plain.config, **fields))
    run = lambda model, **given: sample(
        model, params["params"], x, limits, keys, max_new=6, **given
    )
    for model, given in ((plain, {}), (config(pad_id=1), {"pad_id": 0})):
        with pytest.raises(UserError, match=r"eos_id: neither given nor in the config"):
            run(model, **given)
    with pytest.raises(UserError, match="suppress_tokens: 5 is not in a vocabulary of 5 tokens"):
        run(plain, eos_id=0, suppress_tokens=(5,))
    free = np.asarray(run(plain, eos_id=4, suppress_tokens=(4,)))
    assert (free[1, 3:] == 4).all() and (free[0] != 4).all()  # without a pad token, eos fills
    first = int(free[0, 1])
    ended = np.asarray(run(config(eos_id=(4, first), pad_id=3), suppress_tokens=(4,)))
    stop = int(np.flatnonzero(free[0] == first)[0])
    assert (ended[0] == [*free[0, : stop + 1], *[3] * (5 - stop)]).all()


def test_a_beam_has_no_room_beyond_max_new():
    model, params = make(small("decoder", vocab_size=9, eos_id=2, scan_layers=False), noise=0.5)
    search = jax.jit(
        lambda limits: beam_search(
            model, params["params"], tokens(0, 2, 3, 9), limits, beam_size=3, alpha=0.6, max_new=4
        )
    )
    for found, wanted in zip(search(jnp.array([9, 4])), search(jnp.array([4, 4])), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_help_says_what_the_defaults_are():
    for family in ("decoder", "encoder_decoder"):
        model = build_model(small(family))
        for text in (pydoc.render_doc(model.apply), pydoc.render_doc(model)):
            for word in (
                "Every token is real unless",
                "padding_mask",
                "segment_ids",
                "positions",
                "deterministic",
                '{"dropout": key}',
            ):
                assert word in text
