"""Conversion of weights to and from Transformers.

Our logits must equal PyTorch's for models that Transformers creates; round trips must be exact.
"""

import copy
import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from hf_cases import CASES, FLAT, VOCAB
from hf_models import make_hf_model

from transformer import build_model, load_hf, save_hf
from transformer.convert import FAMILIES
from transformer.convert.family import meaning
from transformer.convert.special_tokens import NAMES
from transformer.errors import UserError
from transformer.model.cache import empty_cache

torch = pytest.importorskip("torch", reason="the test extra brings it")
transformers = pytest.importorskip("transformers", reason="the test extra brings it")


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A function from (class, options) to (their model, its folder); it creates each once."""
    cases = {}

    def get(name, options):
        key = json.dumps([name, options], sort_keys=True)
        if key not in cases:
            folder, model = tmp_path_factory.mktemp("hf"), make_hf_model(name, options)
            model.save_pretrained(folder)
            cases[key] = model, folder
        return cases[key]

    return get


def padded_sequences(pad_id: int | None, batch: int = 3, length: int = 21, seed: int = 0):
    """Returns sequences of unequal lengths, padded on the right, and their mask."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(4, VOCAB - 2, (batch, length))
    lengths = [length, length - 5, 7][:batch]
    mask = np.arange(length)[None] < np.asarray(lengths)[:, None]
    return np.where(mask, ids, pad_id or 0), mask


def both_logits(model, config, params, name):
    """Returns (our logits, their logits, mask of the logits of real tokens)."""
    ids, mask = padded_sequences(config.pad_id)
    our_inputs, our_model = {"padding_mask": mask}, build_model(config)
    tensor = lambda x: torch.tensor(np.asarray(x))
    with torch.no_grad():
        if config.is_encoder_decoder:
            target, target_mask = padded_sequences(config.pad_id, length=13, seed=1)
            target[:, 0] = config.decoder_start_id
            out = model(
                tensor(ids),
                attention_mask=tensor(mask).long(),
                decoder_input_ids=tensor(target),
                decoder_attention_mask=tensor(target_mask).long(),
            )
            our_logits = our_model.apply(
                params, ids, target, source_padding_mask=mask, padding_mask=target_mask
            )
            return our_logits, out.logits.numpy(), target_mask
        their_inputs = {}
        if config.token_types:
            types = np.random.default_rng(3).integers(0, config.token_types, ids.shape)
            their_inputs, our_inputs = (
                {"token_type_ids": tensor(types)},
                our_inputs | {"token_types": types},
            )
        out = model(tensor(ids), attention_mask=tensor(mask).long(), **their_inputs)
    if name.endswith("Model") and "LMHead" not in name:
        h = out.get("pooler_output") if config.pooler else out.last_hidden_state
        real = np.ones(len(ids), bool) if config.pooler else mask
        return our_model.apply(params, ids, **our_inputs), h.numpy(), real
    if name == "BertForPreTraining":
        labels = our_model.apply(params, ids, **our_inputs, method="classify")
        np.testing.assert_allclose(labels, out.seq_relationship_logits.numpy(), atol=1e-4)
        return our_model.apply(params, ids, **our_inputs), out.prediction_logits.numpy(), mask
    our_logits = our_model.apply(params, ids, **our_inputs)
    if name.endswith("QuestionAnswering"):
        return our_logits, torch.stack([out.start_logits, out.end_logits], dim=-1).numpy(), mask
    return our_logits, out.logits.numpy(), mask if our_logits.ndim == 3 else np.ones(len(ids), bool)


@pytest.mark.parametrize(("family", "name", "options"), FLAT)
def test_logits_equal_transformers(saved_model, family, name, options, record_property):
    model, folder = saved_model(name, options)
    config, params = load_hf(folder, scan_layers=False)
    ours, expected, real = both_logits(model, config, params, name)
    assert np.abs(expected[real]).max() > 0.1
    difference = float(np.abs(np.asarray(ours)[real] - expected[real]).max())
    record_property("difference", difference)
    print(
        f"\n{family:<12} {name:<32} largest difference {difference:.1e} "
        f"of logits up to {np.abs(expected).max():.1f}"
    )
    assert difference < 1e-4


@pytest.mark.parametrize(("family", "name", "options"), FLAT)
def test_round_trip_is_exact(saved_model, tmp_path, family, name, options):
    model, folder = saved_model(name, options)
    config, params = load_hf(folder)
    save_hf(tmp_path / "out", config, params, family=family)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [name]
    new_config, new_params = load_hf(tmp_path / "out")
    assert meaning(new_config) == meaning(config)
    jax.tree.map(np.testing.assert_array_equal, params, new_params)
    loaded = type(model).from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    for key, x in model.state_dict().items():
        np.testing.assert_array_equal(loaded.state_dict()[key].numpy(), x.numpy(), err_msg=key)


@pytest.mark.parametrize("family", [x for x in CASES if FAMILIES[x].ours != "encoder"])
def test_cached_decoding_equals_transformers(saved_model, family):
    """Greedy decoding of prompts of unequal length, padded left (or of sources, padded right)."""
    # Their T5 caches as many layers as the encoder has, so this case has equal depths.
    model, folder = saved_model(*CASES[family][-1 if "t5" in family else 0])
    config, params = load_hf(folder)
    our_model, new = build_model(config), 9
    ids, mask = padded_sequences(config.pad_id, length=11)
    seq2seq = config.is_encoder_decoder
    if not seq2seq:
        ids, mask = ids[:, ::-1], mask[:, ::-1]
    tensor = lambda x: torch.tensor(np.ascontiguousarray(x))
    options = {
        "do_sample": False,
        "num_beams": 1,
        "eos_token_id": None,
        "forced_eos_token_id": None,
        "forced_bos_token_id": None,
    }
    with torch.no_grad():
        out = model.generate(
            tensor(ids),
            attention_mask=tensor(mask).long(),
            max_new_tokens=new,
            pad_token_id=config.pad_id or 0,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    generated, expected = (
        out.sequences.numpy()[:, -new:],
        np.stack([x.numpy() for x in out.logits], 1),
    )
    start = out.sequences.numpy()[:, :1] if seq2seq else ids
    assert not seq2seq or set(start[:, 0]) == {config.decoder_start_id}
    encoder = (
        build_model(config).apply(params, ids, padding_mask=mask, method="encode")
        if seq2seq
        else ()
    )
    start_mask = np.ones_like(start, bool) if seq2seq else mask
    cache = empty_cache(config, len(ids), start.shape[1] + new)
    positions = np.maximum(np.cumsum(start_mask, 1) - 1, 0)
    step = jax.jit(
        lambda x, cache, positions, real, encoder: our_model.apply(
            params, x, cache, *encoder, positions=positions, padding_mask=real, method="decode"
        )
    )
    logits, cache = step(start, cache, positions, start_mask, encoder)
    ours = []
    for i in range(new):
        ours.append(np.asarray(logits[:, -1]))
        positions = positions[:, -1:] + 1
        encoder = (None, encoder[1]) if seq2seq else ()
        logits, cache = step(
            generated[:, i : i + 1], cache, positions, np.ones_like(positions, bool), encoder
        )
    assert np.abs(expected[:, 1:] - expected[:, :-1]).max() > 1e-2
    np.testing.assert_allclose(np.stack(ours, 1), expected, atol=1e-4)


def test_every_family_is_tested():
    assert CASES.keys() == FAMILIES.keys()


@pytest.mark.parametrize("name", ["gemma2", "llama", "t5"])
def test_scanned_and_unrolled_layouts_load_the_same_model(saved_model, name):
    _, folder = saved_model(*CASES[name][0])
    config, params = load_hf(folder)
    unrolled_config, unrolled_params = load_hf(folder, scan_layers=False)
    assert config.scan_layers
    assert not unrolled_config.scan_layers
    assert jax.tree.structure(params) != jax.tree.structure(unrolled_params)
    ids = (padded_sequences(0)[0],) * (1 + (config.is_encoder_decoder))
    a, b = (
        jax.jit(build_model(c).apply)(p, *ids)
        for c, p in ((config, params), (unrolled_config, unrolled_params))
    )
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_bfloat16_and_sharded_weights_round_trip(saved_model, tmp_path, monkeypatch):
    model, _ = saved_model(*CASES["llama"][0])
    half = copy.deepcopy(model).to(torch.bfloat16)
    half.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    config, params = load_hf(tmp_path / "sharded")
    expected = {key: x.float().numpy() for key, x in half.state_dict().items()}
    np.testing.assert_array_equal(
        params["embedding"]["embedding"], expected["model.embed_tokens.weight"]
    )
    assert params["embedding"]["embedding"].dtype == np.float32
    monkeypatch.setattr("transformer.convert.hf.SHARD_BYTES", 20_000)
    save_hf(tmp_path / "ours", config, params)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    loaded = type(model).from_pretrained(tmp_path / "ours")
    for key, x in expected.items():
        np.testing.assert_array_equal(loaded.state_dict()[key].numpy(), x)
    half_config, _ = load_hf(tmp_path / "sharded", param_dtype="bfloat16")
    assert half_config.param_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("gpt2", {"add_cross_attention": True},
         "add_cross_attention = True is not supported; it must be False"),
        ("gpt2", {"activation_function": "mish"},
         "activation_function = 'mish' is not supported; use one of 'relu', 'gelu'"),
        ("gpt2", {"some_new_switch": 3},
         "some_new_switch = 3 is not a known field of a gpt2 model"),
        ("gpt2", {"model_type": "gpt3"}, "model_type: unknown value 'gpt3'; did you mean 'gpt2'"),
        ("bloom", {"apply_residual_connection_post_layernorm": True},
         "apply_residual_connection_post_layernorm"),
        ("bert", {"position_embedding_type": "relative_key"},
         "position_embedding_type = 'relative_key'"),
        ("bart", {"decoder_ffn_dim": 64},
         "decoder.layers.0.fc1.weight: its shape is 48 x 32, but .* implies 64 x 32"),
        ("marian", {"decoder_vocab_size": 99}, "decoder_vocab_size = 99"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
         r"no rope_parameters\.short_factor"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, -2.0],
                                       "long_factor": [1.0, 1.0]}},
         r"short_factor = \[1.0, -2.0\] has -2.0; its entries are numbers over 0"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0],
                                      "long_factor": [1.0]}},
         r"short_factors: \(1.0,\) must have 4 numbers over 0, one per rotated pair"),
        ("phi3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
         "rope_type is 'default' or 'longrope'"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale": 0.7}},
         "rope_parameters.mscale = 0.7 has no effect without mscale_all_dim"),
        ("llama", {"rope_parameters": {"rope_type": "su"}}, "rope_type = 'su'"),
        ("mistral", {"mlp_bias": True}, "mlp_bias = True is not a known field"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "has 2 entries for 4 layers"),
        ("gemma3_text", {"rope_parameters": {"chunked": {}}}, "'chunked', which is not a layer"),
        ("gemma3_text", {"attn_logit_softcapping": 9.0}, "Transformers ignores it in this family"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "all layers are mixtures of experts"),
        ("qwen3_moe", {"num_local_experts": 5}, "missing tensors of a qwen3_moe model: "
         r"model\.layers\.0\.mlp\.experts\.4\.down_proj\.weight"),
        ("mixtral", {"intermediate_size": 50}, "w1.weight: its shape is 48 x 32, .* 50 x 32"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen2", {"layer_types": ["full_attention", "chunked_attention"] * 2},
         "chunked_attention"),
        ("modernbert", {"classifier_bias": True}, "classifier_bias = True"),
        ("t5", {"feed_forward_proj": "gated-tanh"}, "feed_forward_proj = 'gated-tanh'"),
        ("gpt_neox", {"hidden_act": "relu6"}, "hidden_act = 'relu6'"),
        ("opt", {"activation_function": "tanh"}, "activation_function = 'tanh'"),
        ("llama", {"intermediate_size": 50}, "gate_proj.weight: its shape is 48 x 32, .* 50 x 32"),
        ("llama", {"num_hidden_layers": 5},
         r"missing tensors of a llama model: model\.layers\.4\.input_layernorm\.weight"),
        ("llama", {"num_hidden_layers": 3},
         r"unexpected tensors.*model\.layers\.3\.input_layernorm\.weight"),
    ],
)  # fmt: skip
def test_unsupported_directory_raises_and_names_the_cause(
    saved_model, tmp_path, family, change, message
):
    _, folder = saved_model(*CASES[family][0])
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
        ("gpt2", {"parametrization": {"name": "mup", "base": {"d_model": 8}}}, "parametrization"),
        ("t5", {"logit_soft_cap": 3.0}, "logit_soft_cap"),
    ],
)
def test_export_of_inexpressible_config_names_the_field(
    saved_model, tmp_path, family, change, field
):
    _, folder = saved_model(*CASES[family][0])
    config, _ = load_hf(folder)
    config = dataclasses.replace(config, **change)
    with pytest.raises(UserError, match=f"model.{field}: .* cannot be expressed by {family}"):
        save_hf(tmp_path / "out", config, {}, family=family)
    assert not list(tmp_path.iterdir())


def test_pad_token_id_of_minus_one_is_read_as_none(saved_model, tmp_path):
    """The config.json of the first Llama sets it to -1."""
    _, folder = saved_model(*CASES["llama"][0])
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": -1}))
    assert load_hf(folder)[0].pad_id == 0
    assert load_hf(tmp_path)[0] == dataclasses.replace(load_hf(folder)[0], pad_id=None)


@pytest.mark.parametrize(
    ("family", "generation"),
    [
        ("llama", {"eos_token_id": [2, 5], "pad_token_id": 4}),
        ("t5", {"decoder_start_token_id": 3, "bos_token_id": 6}),
        ("bart", {"bos_token_id": None, "eos_token_id": 7}),
    ],
)
def test_generation_config_overrides_special_tokens(saved_model, tmp_path, family, generation):
    """Its token ids override those of config.json and add those that config.json lacks."""
    _, folder = saved_model(*CASES[family][0])
    before, _ = load_hf(folder)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config.pop("decoder_start_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    converted, theirs = (
        load_hf(tmp_path)[0],
        transformers.GenerationConfig.from_pretrained(tmp_path),
    )
    for ours, name in NAMES.items():
        value, our_value = getattr(theirs, name), getattr(converted, ours)
        if name in generation:
            assert our_value == (tuple(value) if isinstance(value, list) else value)
        assert (our_value != getattr(before, ours)) == (name in generation)
    config = json.loads((tmp_path / "config.json").read_text())
    for value in ("x", True, 1.0, [1, "x"]):  # also if generation_config.json replaces it
        (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": value}))
        with pytest.raises(UserError, match=r"/config\.json: eos_token_id = .* must be a token ID"):
            load_hf(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"pad_token_id": [3]}))
    with pytest.raises(UserError, match=r"generation_config\.json: pad_token_id = \[3\] must be"):
        load_hf(tmp_path)


def test_damaged_and_missing_files_raise(saved_model, tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        load_hf(tmp_path)
    _, folder = saved_model(*CASES["gpt2"][0])
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
        "[1]": "config.json: damaged (not a JSON object)",
        "[" * 100_000: "config.json: damaged",
        json.dumps({"model_type": ["gpt2"]}): "model_type: unknown value \"['gpt2']\"",
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
