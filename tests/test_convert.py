"""Weights in and out: our logits against those of PyTorch, on models that Transformers creates here; and back, exactly."""

import copy
import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from transformer import build_model, load_hf, save_hf
from transformer.convert import FAMILIES
from transformer.convert.family import meaning
from transformer.convert.fields import field
from transformer.errors import UserError
from transformer.model.cache import empty_cache

torch = pytest.importorskip("torch", reason="the test extra brings it")
transformers = pytest.importorskip("transformers", reason="the test extra brings it")
import safetensors.torch  # noqa: E402
from faults import hf_directories  # noqa: E402

VOCAB = 61
ENCODERS_AND_DECODERS = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
}
MODERN = ENCODERS_AND_DECODERS | {
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
LLAMA = ENCODERS_AND_DECODERS | {
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2,
    "forced_eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 40,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
T5 = {
    "d_model": 32,
    "d_kv": 6,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
ROPE = {"rope_theta": 5000.0, "original_max_position_embeddings": 16}

CASES = {
    "bert": [
        ("BertForPreTraining", ENCODERS_AND_DECODERS),
        ("BertForMaskedLM", ENCODERS_AND_DECODERS | {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-3}),
        ("BertForMaskedLM", ENCODERS_AND_DECODERS | {"tie_word_embeddings": False, "hidden_act": "gelu_new"}),
        ("BertForSequenceClassification", ENCODERS_AND_DECODERS | {"num_labels": 5}),
        ("BertForSequenceClassification", ENCODERS_AND_DECODERS),  # of two labels, which config.json does not say
        ("BertForTokenClassification", ENCODERS_AND_DECODERS | {"num_labels": 5}),
        ("BertModel", ENCODERS_AND_DECODERS),
    ],
    "modernbert": [
        ("ModernBertForMaskedLM", MODERN | {"local_attention": 6, "num_hidden_layers": 7}),
        ("ModernBertForMaskedLM", MODERN | {
            "local_attention": 4, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
            "hidden_activation": "silu", "classifier_activation": "silu", "tie_word_embeddings": False, "norm_eps": 1e-3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        }),
    ],
    "gpt2": [
        ("GPT2LMHeadModel", GPT2),
        ("GPT2LMHeadModel", GPT2 | {"n_inner": 40, "activation_function": "relu", "scale_attn_weights": False, "layer_norm_epsilon": 1e-3}),
        ("GPT2LMHeadModel", GPT2 | {"tie_word_embeddings": False, "activation_function": "gelu"}),
    ],
    "bloom": [
        ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "pad_token_id": 3}),
        ("BloomForCausalLM", {"hidden_size": 36, "n_layer": 2, "n_head": 6, "pad_token_id": 3, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False}),
    ],
    "t5": [
        ("T5ForConditionalGeneration", T5),
        ("T5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
        ("T5ForConditionalGeneration", T5 | {
            "feed_forward_proj": "gated-silu", "num_decoder_layers": 2, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "layer_norm_epsilon": 1e-3,
        }),
    ],
    "bart": [
        ("BartForConditionalGeneration", BART),
        ("BartForConditionalGeneration", BART | {"scale_embedding": True, "activation_function": "relu"}),
        ("BartForConditionalGeneration", BART | {"tie_word_embeddings": False}),
    ],
    "marian": [
        ("MarianMTModel", BART | {"activation_function": "swish", "scale_embedding": True, "pad_token_id": 60, "decoder_start_token_id": 60}),
        ("MarianMTModel", BART | {"activation_function": "relu", "decoder_layers": 1}),
        ("MarianMTModel", BART | {"tie_word_embeddings": False}),
    ],
    "opt": [
        ("OPTForCausalLM", {"hidden_size": 32, "num_hidden_layers": 3, "ffn_dim": 48, "num_attention_heads": 4, "max_position_embeddings": 40, "word_embed_proj_dim": 32}),
        ("OPTForCausalLM", {"hidden_size": 32, "num_hidden_layers": 3, "ffn_dim": 48, "num_attention_heads": 4, "max_position_embeddings": 40,
                            "word_embed_proj_dim": 20, "do_layer_norm_before": False}),
        ("OPTForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 2, "max_position_embeddings": 40,
                            "word_embed_proj_dim": 32, "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"}),
        ("OPTForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 48, "num_attention_heads": 2, "max_position_embeddings": 40,
                            "word_embed_proj_dim": 32, "_remove_final_layer_norm": True}),
    ],
    "gpt_neox": [
        ("GPTNeoXForCausalLM", ENCODERS_AND_DECODERS),
        ("GPTNeoXForCausalLM", ENCODERS_AND_DECODERS | {
            "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
            "rope_parameters": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        }),
        ("GPTNeoXForCausalLM", ENCODERS_AND_DECODERS | {
            "tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0, "partial_rotary_factor": 1.0},
        }),
    ],
    "llama": [
        ("LlamaForCausalLM", LLAMA),
        ("LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1, "head_dim": 12, "hidden_act": "gelu"}),
        ("LlamaForCausalLM", LLAMA | {"mlp_bias": True, "rms_norm_eps": 1e-3, "rope_parameters": ROPE | {
            "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        }}),
        ("LlamaForCausalLM", LLAMA | {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "rope_theta": 100.0}}),
        ("LlamaForCausalLM", LLAMA | {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0,
                                                                 "attention_factor": 1.3, "truncate": False, "rope_theta": 50.0}}),
        ("LlamaForCausalLM", LLAMA | {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "linear", "factor": 2.5}}),
        ("LlamaForCausalLM", LLAMA | {"max_position_embeddings": 12, "rope_parameters": {"rope_theta": 100.0, "rope_type": "dynamic", "factor": 2.0}}),
    ],
    "mistral": [
        ("MistralForCausalLM", LLAMA | {"sliding_window": 5, "head_dim": 10}),
        ("MistralForCausalLM", LLAMA | {"sliding_window": None}),
    ],
    "qwen2": [
        ("Qwen2ForCausalLM", LLAMA),
        ("Qwen2ForCausalLM", LLAMA | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3, "tie_word_embeddings": True}),
    ],
    "qwen3": [
        ("Qwen3ForCausalLM", LLAMA | {"head_dim": 12}),
        ("Qwen3ForCausalLM", LLAMA | {"attention_bias": True, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}),
    ],
    "gemma2": [
        ("Gemma2ForCausalLM", LLAMA | {"head_dim": 12, "sliding_window": 5}),
        ("Gemma2ForCausalLM", LLAMA | {
            "head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 30, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        }),
        ("Gemma2ForCausalLM", LLAMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}),
    ],
}  # fmt: skip
"""Family -> (class, options that are not its defaults)."""

FLAT = [
    pytest.param(family, *case, id=f"{family}-{i}")
    for family, cases in CASES.items()
    for i, case in enumerate(cases)
]


def theirs(name: str, options: dict, seed: int = 0):
    """A model of Transformers with every parameter and buffer of its file moved off its initial value."""
    cls = getattr(transformers, name)
    config = cls.config_class(vocab_size=VOCAB, **options)
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    model = cls(config).eval().float()
    # Marian's sinusoids are a buffer of its own. T5 does not scale its attention: with large weights it is ill-conditioned.
    fixed, noise = (
        ("embed_positions" if name.startswith("Marian") else None),
        0.1 if name.startswith("T5") else 0.3,
    )
    with torch.no_grad():
        for key, x in model.state_dict().items():
            if x.is_floating_point() and not (fixed and fixed in key):
                x.add_(noise * torch.randn_like(x))
        if name.startswith(("Bart", "Marian")):  # both sides read one table, tied or not
            for side in (model.model.encoder, model.model.decoder):
                side.embed_tokens.weight.copy_(model.model.shared.weight)
        if name.startswith("BertFor") and hasattr(model, "cls"):
            model.cls.predictions.bias.copy_(
                model.cls.predictions.decoder.bias
            )  # one of two is unused when they are not tied
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(family, case) -> (their model, its folder), made once."""
    made = {}

    def get(name, options):
        key = json.dumps([name, options], sort_keys=True)
        if key not in made:
            folder, model = tmp_path_factory.mktemp("hf"), theirs(name, options)
            model.save_pretrained(folder)
            made[key] = model, folder
        return made[key]

    return get


def rows(pad_id: int, batch: int = 3, length: int = 21, seed: int = 0):
    """Tokens of unequal lengths, padded on the right, and their mask."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(4, VOCAB - 2, (batch, length))
    lengths = [length, length - 5, 7][:batch]
    mask = np.arange(length)[None] < np.asarray(lengths)[:, None]
    return np.where(mask, ids, pad_id), mask


def both_logits(model, config, params, name):
    """(ours, theirs, which of them are of real tokens)."""
    ids, mask = rows(config.pad_id)
    given, ours = {"padding_mask": mask}, build_model(config)
    tensor = lambda x: torch.tensor(np.asarray(x))
    with torch.no_grad():
        if config.two_sides:
            target, target_mask = rows(config.pad_id, length=13, seed=1)
            target[:, 0] = model.config.decoder_start_token_id
            out = model(
                tensor(ids),
                attention_mask=tensor(mask).long(),
                decoder_input_ids=tensor(target),
                decoder_attention_mask=tensor(target_mask).long(),
            )
            found = ours.apply(
                params, ids, target, source_padding_mask=mask, padding_mask=target_mask
            )
            return found, out.logits.numpy(), target_mask
        more = {}
        if config.token_types:
            types = np.random.default_rng(3).integers(0, config.token_types, ids.shape)
            more, given = {"token_type_ids": tensor(types)}, given | {"token_types": types}
        out = model(tensor(ids), attention_mask=tensor(mask).long(), **more)
    if name == "BertModel":
        return ours.apply(params, ids, **given), out.pooler_output.numpy(), np.ones(len(ids), bool)
    if name == "BertForPreTraining":
        labels = ours.apply(params, ids, **given, method="classify")
        np.testing.assert_allclose(labels, out.seq_relationship_logits.numpy(), atol=1e-4)
        return ours.apply(params, ids, **given), out.prediction_logits.numpy(), mask
    found = ours.apply(params, ids, **given)
    return found, out.logits.numpy(), mask if found.ndim == 3 else np.ones(len(ids), bool)


@pytest.mark.parametrize(("family", "name", "options"), FLAT)
def test_logits_equal_theirs(saved, family, name, options, record_property):
    model, folder = saved(name, options)
    config, params = load_hf(folder)
    found, wanted, real = both_logits(model, config, params, name)
    assert np.abs(wanted[real]).max() > 0.1
    difference = float(np.abs(np.asarray(found)[real] - wanted[real]).max())
    record_property("difference", difference)
    print(
        f"\n{family:<12} {name:<32} largest difference {difference:.1e} of logits up to {np.abs(wanted).max():.1f}"
    )
    assert difference < 1e-4


@pytest.mark.parametrize(("family", "name", "options"), FLAT)
def test_round_trip_is_exact(saved, tmp_path, family, name, options):
    model, folder = saved(name, options)
    config, params = load_hf(folder)
    save_hf(tmp_path / "out", config, params, family=family)
    again, back = load_hf(tmp_path / "out")
    assert meaning(again) == meaning(config)
    jax.tree.map(np.testing.assert_array_equal, params, back)
    loaded = type(model).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    for key, x in model.state_dict().items():
        np.testing.assert_array_equal(loaded.state_dict()[key].numpy(), x.numpy(), err_msg=key)


@pytest.mark.parametrize(
    "family",
    [
        "gpt2",
        "bloom",
        "opt",
        "gpt_neox",
        "llama",
        "mistral",
        "qwen3",
        "gemma2",
        "t5",
        "bart",
        "marian",
    ],
)
def test_decoding_with_a_cache_equals_theirs(saved, family):
    """Greedy, from prompts of unequal length, padded on the left (or sources, padded on the right)."""
    model, folder = saved(
        *CASES[family][-1 if family == "t5" else 0]
    )  # their T5 caches as many layers as its encoder has
    config, params = load_hf(folder)
    ours, new = build_model(config), 9
    ids, mask = rows(config.pad_id, length=11)
    both = config.two_sides
    if not both:
        ids, mask = ids[:, ::-1], mask[:, ::-1]
    tensor = lambda x: torch.tensor(np.ascontiguousarray(x))
    keep = {
        "do_sample": False,
        "num_beams": 1,
        "eos_token_id": None,
        "forced_eos_token_id": None,
        "forced_bos_token_id": None,
    }
    with torch.no_grad():
        out = model.generate(
            tensor(ids), attention_mask=tensor(mask).long(), max_new_tokens=new, pad_token_id=config.pad_id,
            return_dict_in_generate=True, output_logits=True, **keep,
        )  # fmt: skip
    written, wanted = out.sequences.numpy()[:, -new:], np.stack([x.numpy() for x in out.logits], 1)
    start = np.full((len(ids), 1), model.config.decoder_start_token_id) if both else ids
    encoder = (
        build_model(config).apply(params, ids, padding_mask=mask, method="encode") if both else ()
    )
    where = np.ones_like(start, bool) if both else mask
    cache = empty_cache(config, len(ids), start.shape[1] + new)
    at = np.maximum(np.cumsum(where, 1) - 1, 0)
    step = jax.jit(
        lambda x, cache, at, real, encoder: ours.apply(
            params, x, cache, *encoder, positions=at, padding_mask=real, method="decode"
        )
    )
    logits, cache = step(start, cache, at, where, encoder)
    found = []
    for i in range(new):
        found.append(np.asarray(logits[:, -1]))
        at = at[:, -1:] + 1
        encoder = (None, encoder[1]) if both else ()
        logits, cache = step(written[:, i : i + 1], cache, at, np.ones_like(at, bool), encoder)
    assert np.abs(wanted[:, 1:] - wanted[:, :-1]).max() > 1e-2
    np.testing.assert_allclose(np.stack(found, 1), wanted, atol=1e-4)


def test_every_family_is_tested():
    assert CASES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", ["gemma2", "llama", "t5"])
def test_any_layout_reads_the_same(saved, name):
    _, folder = saved(*CASES[name][0])
    config, params = load_hf(folder)
    other, unrolled = load_hf(folder, scan_layers=False)
    assert config.scan_layers
    assert not other.scan_layers
    assert jax.tree.structure(params) != jax.tree.structure(unrolled)
    ids = (rows(0)[0],) * (1 + (config.two_sides))
    a, b = (build_model(c).apply(p, *ids) for c, p in ((config, params), (other, unrolled)))
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_bfloat16_and_shards(saved, tmp_path, monkeypatch):
    model, _ = saved(*CASES["llama"][0])
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    config, params = load_hf(tmp_path / "sharded")
    want = {key: x.float().numpy() for key, x in half.state_dict().items()}
    np.testing.assert_array_equal(
        params["params"]["embedding"]["embedding"], want["model.embed_tokens.weight"]
    )
    assert params["params"]["embedding"]["embedding"].dtype == np.float32
    monkeypatch.setattr("transformer.convert.hf.SHARD_BYTES", 20_000)
    save_hf(tmp_path / "ours", config, params)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = type(model).from_pretrained(tmp_path / "ours")
    for key, x in want.items():
        np.testing.assert_array_equal(again.state_dict()[key].numpy(), x)
    kept, _ = load_hf(tmp_path / "sharded", param_dtype="bfloat16")
    assert kept.param_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True cannot be expressed"),
        ("gpt2", {"activation_function": "mish"}, "activation_function = 'mish' is nothing we can build; we know"),
        ("gpt2", {"some_new_switch": 3}, "some_new_switch = 3 is no field of a gpt2 model"),
        ("gpt2", {"model_type": "gpt3"}, "model_type: no 'gpt3'; did you mean 'gpt2'"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ("bart", {"decoder_ffn_dim": 64}, "decoder_ffn_dim = 64 cannot be expressed: both sides share"),
        ("marian", {"decoder_vocab_size": 99}, "decoder_vocab_size = 99"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}}, "rope_parameters.mscale = 0.7"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
        ("modernbert", {"classifier_bias": True}, "classifier_bias = True"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj = 'gated-tanh'"),
        ("gpt_neox", {"hidden_act": "relu6"}, "hidden_act = 'relu6'"),
        ("opt", {"activation_function": "tanh"}, "activation_function = 'tanh'"),
        ("llama", {"intermediate_size": 50}, "mlp.gate_proj.weight: its shape is 48 x 32, but config.json asks for 50 x 32"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 cannot be expressed: Transformers ignores it"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor = 0.5 cannot be expressed"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}}, "no rope_parameters.high_freq_factor"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 9}}, "no rope_parameters.factor"),
        ("llama", {"rope_parameters": {"rope_type": "default", "factor": 2.0}}, "rope_parameters.factor = 2.0 is no field of a llama"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}},
         "rope_parameters.original_max_position_embeddings = 9 cannot be expressed"),
        ("qwen2", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "rope_parameters.full_attention = .* is no field"),
        ("modernbert", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters = .* has 'factor', which is no kind"),
        ("modernbert", {"classifier_activation": "relu"}, "classifier_activation = 'relu' cannot be expressed"),
        ("gpt_neox", {"rope_theta": 500.0}, "rope_theta = 500.0 is no field of a gpt_neox model"),
        ("gpt2", {"is_causal": False}, "is_causal = False cannot be expressed"),
        ("gpt2", {"num_attention_heads": 2}, "n_head = 4 contradicts num_attention_heads = 2"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types = .* is no field of a mistral model"),
        ("qwen2", {"layer_types": ["full_attention"] * 3}, "layer_types = .* has 3 entries for 4 layers"),
        ("gpt2", {"eos_token_id": "x"}, "eos_token_id = 'x' must be the id of a token or null"),
        ("bart", {"pad_token_id": [1]}, r"pad_token_id = \[1\] must be the id of a token or null"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is out of bounds; at most 10,000"),
        ("llama", {"hidden_size": -32}, "hidden_size = -32 is too small; it must be more than 0"),
        ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' must be a number"),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps = None must be a number"),
        ("llama", {"num_attention_heads": True}, "num_attention_heads = True must be a whole number"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping = 0 is too small"),
        ("bert", {"hidden_act": ["gelu"]}, r"hidden_act = \['gelu'\] must be a string"),
        ("t5", {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no' must be true or false or null"),
        ("llama", {"num_hidden_layers": 5}, r"missing: model\.layers\.4\.input_layernorm\.weight"),
        ("llama", {"num_hidden_layers": 3}, r"left over.*model\.layers\.3\.input_layernorm\.weight"),
    ],
)  # fmt: skip
def test_what_cannot_be_expressed_is_refused_by_name(saved, tmp_path, family, change, message):
    _, folder = saved(*CASES[family][0])
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message) as error:
        load_hf(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "change", "field"),
    [
        ("llama", {"norm_placement": "post"}, "norm_placement"),
        ("llama", {"position": "alibi"}, "position"),
        ("gpt2", {"norm": "rmsnorm"}, "norm"),
        ("gpt2", {"window": 4}, "window"),
        ("t5", {"logit_soft_cap": 3.0}, "logit_soft_cap"),
    ],
)
def test_what_they_cannot_express_is_refused_by_name(saved, tmp_path, family, change, field):
    _, folder = saved(*CASES[family][0])
    config, _ = load_hf(folder)
    config = dataclasses.replace(config, **change)
    with pytest.raises(UserError, match=f"model.{field}: .* cannot be expressed by {family}"):
        save_hf(tmp_path / "out", config, {"params": {}}, family=family)
    assert not list(tmp_path.iterdir())


def test_a_padding_sign_of_minus_one_is_none(saved, tmp_path):
    """As the first Llama's config.json has it."""
    _, folder = saved(*CASES["llama"][0])
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": -1}))
    assert load_hf(tmp_path)[0] == load_hf(folder)[0]


def test_damaged_and_missing_files(saved, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_hf(tmp_path)
    _, folder = saved(*CASES["gpt2"][0])
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:200])
    with pytest.raises(UserError, match=r"model\.safetensors: damaged"):
        load_hf(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    theirs = json.loads((folder / "config.json").read_text())
    for content, message in {
        "{": "config.json: damaged",
        "[1]": "config.json: damaged (no JSON object)",
        "[" * 100_000: "config.json: damaged",
        json.dumps({"model_type": ["gpt2"]}): "model_type: no \"['gpt2']\"",
        json.dumps(theirs | {"n_embd": "x"}): "config.json: n_embd = 'x' must be a whole number",
        json.dumps(theirs | {"n_embd": None}): "config.json: n_embd = None must be a whole number",
        json.dumps(theirs | {"n_head": [2]}): "config.json: n_head = [2] must be a whole number",
    }.items():
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=re.escape(message)):
            load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(theirs))
    for content in ("[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(content)
        with pytest.raises(UserError, match=r"index\.json: damaged"):
            load_hf(tmp_path)


def copied(folder, target, change=lambda config: None, alter=lambda tensors: None):
    """A copy of a directory with another config.json and other tensors."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(config)
    alter(tensors)
    (target / "config.json").write_text(json.dumps(config))
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def refusal(folder, **fields):
    """The message with which a directory is refused: one line."""
    with pytest.raises(UserError) as error:
        load_hf(folder, **fields)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("family", "name", "shapes"),
    [
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", ("128 x 32", "32 x 128")),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", ("96 x 32", "32 x 96")),
        ("gpt2", "transformer.wte.weight", ("32 x 61", "61 x 32")),
        ("llama", "model.layers.2.self_attn.k_proj.weight", ("32 x 16", "16 x 32")),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", ("32 x 96", "96 x 32")),
        ("marian", "final_logits_bias", ("61 x 1", "1 x 61")),
        ("t5", "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", ("4 x 32", "32 x 4")),
    ],
)  # fmt: skip
def test_a_transposed_tensor_is_refused(saved, tmp_path, family, name, shapes):
    _, folder = saved(*CASES[family][0])
    turned = copied(
        folder, tmp_path / "x", alter=lambda tensors: tensors.update({name: tensors[name].T})
    )
    found, asked = shapes
    assert refusal(turned) == f"{name}: its shape is {found}, but config.json asks for {asked}"


def test_a_square_matrix_in_more_axes_is_refused(saved, tmp_path):
    """The right number of elements, which numpy would reshape without a word."""
    _, folder = saved(*CASES["llama"][0])
    name = "model.layers.0.self_attn.q_proj.weight"
    for i, shape in enumerate([(1024,), (1, 32, 32), (16, 64)]):

        def alter(tensors, shape=shape):
            tensors[name] = tensors[name].reshape(shape)

        message = refusal(copied(folder, tmp_path / str(i), alter=alter))
        assert message.startswith(f"{name}: its shape is {' x '.join(map(str, shape))}, but")


@pytest.mark.parametrize(
    ("family", "case"),
    [("bert", 1), ("modernbert", 0), ("gpt2", 0), ("bloom", 0), ("t5", 0), ("bart", 0), ("bart", 2), ("marian", 2), ("opt", 0),
     ("gpt_neox", 2), ("gemma2", 0)],
)  # fmt: skip
def test_a_copy_is_dropped_if_it_is_one(saved, tmp_path, family, case):
    """Tied output layers, tables that two sides share: tensors that may be in a file, and are not read."""
    _, folder = saved(*CASES[family][case])
    config, _ = load_hf(folder)
    copies = [one for one in FAMILIES[family].copies(config) if one.compared]
    assert copies

    def added(x):
        x.update({one.theirs: x[one.of].clone() for one in copies})

    assert load_hf(copied(folder, tmp_path / "equal", alter=added))[0] == config
    for i, one in enumerate(copies):

        def other(x, one=one):
            x[one.theirs] = x[one.of].clone()
            x[one.theirs].reshape(-1)[-1] += 1e-3

        def cut(x, one=one):
            x[one.theirs] = x[one.of][:-1].clone()

        for alter in (other, cut)[: 2 - (i > 0)]:
            message = refusal(copied(folder, tmp_path / f"{alter.__name__}{i}", alter=alter))
            assert message.startswith(f"{one.theirs} and {one.of} hold different numbers")


def test_sinusoids_in_a_file_must_be_those_of_the_formula(saved, tmp_path):
    _, folder = saved(*CASES["marian"][0])
    name = "model.encoder.embed_positions.weight"
    marian = transformers.models.marian.modeling_marian.MarianSinusoidalPositionalEmbedding
    table = marian(40, 32).create_weight()
    same = copied(folder, tmp_path / "same", alter=lambda x: x.update({name: table}))
    assert load_hf(same)[0] == load_hf(folder)[0]
    half = copied(folder, tmp_path / "half", alter=lambda x: x.update({name: table.half()}))
    load_hf(half)
    other = copied(folder, tmp_path / "other", alter=lambda x: x.update({name: table + 0.01}))
    assert refusal(other) == f"{name}: holds other numbers than the formula gives"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "holds a NaN or an infinite number"),
        (float("-inf"), "holds a NaN or an infinite number"),
        (torch.int64, "holds numbers of type I64"),
        (torch.int8, "holds numbers of type I8"),
        (torch.bool, "holds numbers of type BOOL"),
        (1e300, "holds a NaN or an infinite number"),  # of a float64, which float32 does not hold
    ],
)
def test_numbers_that_are_no_parameters_are_refused(saved, tmp_path, value, message):
    _, folder = saved(*CASES["llama"][0])
    name = "model.layers.3.mlp.up_proj.weight"

    def alter(tensors):
        if isinstance(value, torch.dtype):
            tensors[name] = tensors[name].to(value)
        else:
            tensors[name] = tensors[name].double() if value == 1e300 else tensors[name]
            tensors[name][1, 2] = value

    assert refusal(copied(folder, tmp_path / "x", alter=alter)).startswith(f"{name}: {message}")


@pytest.mark.parametrize(
    "entry", ["../outside.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "..", "", "."]
)
def test_a_weight_map_stays_in_its_directory(saved, tmp_path, entry):
    _, folder = saved(*CASES["gpt2"][0])
    here = copied(folder, tmp_path / "here")
    (here / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"transformer.wte.weight": entry}}
    (here / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"weight_map names {entry!r}, which is not a file of this directory" in refusal(here)


def test_shards_that_are_links_and_shards_that_disagree(saved, tmp_path):
    """The hub's cache keeps files elsewhere, under the names of their hashes."""
    model, folder = saved(*CASES["llama"][0])
    model.save_pretrained(tmp_path / "blobs", max_shard_size="20KB")
    cache, index = tmp_path / "snapshot", "model.safetensors.index.json"
    cache.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (cache / file.name).symlink_to(file)
    jax.tree.map(np.testing.assert_array_equal, load_hf(cache)[1], load_hf(folder)[1])
    (cache / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert f"both model.safetensors and {index}; delete the one" in refusal(cache)
    (cache / "model.safetensors").unlink()
    table = json.loads((cache / index).read_text())
    files = sorted(set(table["weight_map"].values()))
    table["weight_map"]["model.norm.weight"] = files[0]
    (cache / index).unlink()
    (cache / index).write_text(json.dumps(table))
    assert "disagree about model.norm.weight" in refusal(cache)
    table["weight_map"] = {}
    (cache / index).write_text(json.dumps(table))
    assert "weight_map names no tensor" in refusal(cache)
    table["weight_map"] = {"model.norm.weight": "absent.safetensors"}
    (cache / index).write_text(json.dumps(table))
    assert "no absent.safetensors, which" in refusal(cache)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_field_that_is_left_out_has_the_default_of_their_class(family):
    one, cls = FAMILIES[family], transformers.CONFIG_MAPPING[family]
    tensors = frozenset({"cls.predictions.bias"})
    ours = lambda given: one.our_config(given, tensors)
    theirs = {f.name: f.default for f in dataclasses.fields(cls)}
    empty = ours({})
    for name, default in theirs.items():
        if isinstance(default, bool | int | float | str | None):
            assert ours({name: default}) == empty, name
    read = {name: field(default).default for name, default in one.fields.items()}
    for name in (read.keys() & theirs.keys()) - {"num_decoder_layers"}:
        assert read[name] == theirs[name], name
    for name in ("rope_theta", "rotary_emb_base") if "rope_scaling" in read else ():
        assert read.get(name, cls.default_theta) == cls.default_theta
    assert ours({"vocab_size": 70_000}) != empty


def test_gemma_caps_its_logits_unless_told_not_to(saved, tmp_path):
    _, folder = saved(*CASES["gemma2"][0])
    caps = ("final_logit_softcapping", "attn_logit_softcapping")
    bare = copied(folder, tmp_path / "bare", change=lambda c: [c.pop(name) for name in caps])
    config, _ = load_hf(bare)
    assert (config.logit_soft_cap, config.attention_soft_cap) == (30.0, 50.0)
    assert config == load_hf(folder)[0]
    nulls = lambda c: c.update(dict.fromkeys(caps))
    config, _ = load_hf(copied(folder, tmp_path / "nulls", change=nulls))
    assert (config.logit_soft_cap, config.attention_soft_cap) == (0.0, 0.0)


def test_damaged_directories(tmp_path):
    """A seeded slice of the faults of `faults.hf_directories`: each is refused in one line, or gives the logits of Transformers."""
    names = ("bert-labels", "gpt2")
    sources = {name: hf_directories.save(name, tmp_path / name) for name in names}
    told = []
    for seed in range(50):
        target = tmp_path / str(seed)
        name, _ = hf_directories.mutate_any(sources, target, seed)
        told.append(hf_directories.judge(name, target, compare=seed % 5 == 4))
    kinds = [one.partition(":")[0] for one in told]
    assert kinds.count("refused") > 20
    assert kinds.count("equal") > 1
