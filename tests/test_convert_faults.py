"""Damaged, altered or incomplete weights and configs of Transformers.

They raise an error of one line, or are read as Transformers reads them.
"""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

pytest.importorskip("torch", reason="the test extra brings it")
pytest.importorskip("transformers", reason="the test extra brings it")

import safetensors.torch
import test_convert
import torch
import transformers
from faults import hf_directories
from hf_cases import REQUIRED

from transformer import load_hf
from transformer.convert import FAMILIES
from transformer.convert.fields import field
from transformer.errors import UserError

CASES, saved_model = test_convert.CASES, test_convert.saved_model


def copy_directory(folder, target, change=lambda config: None, alter=lambda tensors: None):
    """Copies a directory; `change` edits its config.json, `alter` its tensors."""
    target.mkdir()
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    change(config)
    alter(tensors)
    (target / "config.json").write_text(json.dumps(config))
    tensors = {name: x.contiguous() for name, x in tensors.items()}
    safetensors.torch.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def load_error(folder, **fields):
    """Returns the error message of a directory, and checks that it is one line."""
    with pytest.raises(UserError) as error:
        load_hf(folder, **fields)
    assert "\n" not in str(error.value)
    return str(error.value)


REFUSED = [
    (
        "llama",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor = 0.5 is not supported: Transformers ignores it",
    ),
    (
        "llama",
        {"rope_parameters": {"partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor = 0.5 is not supported",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        "no rope_parameters.high_freq_factor",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 9}},
        "no rope_parameters.factor",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "default", "factor": 2.0}},
        "rope_parameters.factor = 2.0 is not a known field of a llama",
    ),
    (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "dynamic",
                "factor": 2.0,
                "original_max_position_embeddings": 9,
            }
        },
        "rope_parameters.original_max_position_embeddings = 9 is not supported",
    ),
    (
        "qwen2",
        {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "rope_parameters.full_attention = .* is not a known field",
    ),
    (
        "modernbert",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "rope_parameters = .* has 'factor', which is not a layer type",
    ),
    (
        "modernbert",
        {"classifier_activation": "relu"},
        "classifier_activation = 'relu' is not supported",
    ),
    (
        "gpt_neox",
        {"rope_theta": 500.0},
        "rope_theta = 500.0 is not a known field of a gpt_neox model",
    ),
    ("gpt2", {"is_causal": False}, "is_causal = False is not supported"),
    ("gpt2", {"num_attention_heads": 2}, "n_head = 4 contradicts num_attention_heads = 2"),
    (
        "mistral",
        {"layer_types": ["full_attention"] * 4},
        "layer_types = .* is not a known field of a mistral model",
    ),
    (
        "qwen2",
        {"layer_types": ["full_attention"] * 3},
        "layer_types = .* has 3 entries for 4 layers",
    ),
    ("gpt2", {"eos_token_id": "x"}, "eos_token_id = 'x' must be a token ID or null"),
    ("bart", {"pad_token_id": [1]}, r"pad_token_id = \[1\] must be a token ID or null"),
    (
        "llama",
        {"num_hidden_layers": 10**9},
        "num_hidden_layers = 1000000000 is out of bounds; at most 10,000",
    ),
    ("llama", {"hidden_size": -32}, "hidden_size = -32 is too small; it must be more than 0"),
    ("llama", {"rms_norm_eps": "1e-5"}, "rms_norm_eps = '1e-5' must be a number"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps = None must be a number"),
    ("llama", {"num_attention_heads": True}, "num_attention_heads = True must be a whole number"),
    ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping = 0 is too small"),
    ("roberta", {"hidden_act": "relu"}, "hidden_act = 'relu' is not supported: the language-model"),
    ("camembert", {"pad_token_id": None}, "pad_token_id = None must be a whole number"),
    ("xlm-roberta", {"pad_token_id": 41}, "model.max_length: 0 is too small"),
    ("distilbert", {"dim": -32}, "dim = -32 is too small; it must be more than 0"),
    ("m2m_100", {"d_model": 3}, "d_model = 3 is too small; its sinusoids need at least 4"),
    ("mbart", {"normalize_before": False}, "normalize_before = False is not supported"),
    ("bert", {"hidden_act": ["gelu"]}, r"hidden_act = \['gelu'\] must be a string"),
    (
        "t5",
        {"tie_word_embeddings": "no"},
        "tie_word_embeddings = 'no' must be true or false or null",
    ),
]
"""(family, fields of config.json, message)."""


@pytest.mark.parametrize(("family", "change", "message"), REFUSED)
def test_config_field_that_would_be_misread_raises(saved_model, tmp_path, family, change, message):
    _, folder = saved_model(*CASES[family][0])
    altered = copy_directory(folder, tmp_path / "x", change=lambda config: config.update(change))
    assert re.search(message, load_error(altered))


@pytest.mark.parametrize(
    ("family", "name", "shapes"),
    [
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", ("128 x 32", "32 x 128")),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", ("96 x 32", "32 x 96")),
        ("gpt2", "transformer.wte.weight", ("32 x 61", "61 x 32")),
        ("llama", "model.layers.2.self_attn.k_proj.weight", ("32 x 16", "16 x 32")),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", ("32 x 96", "96 x 32")),
        ("marian", "final_logits_bias", ("61 x 1", "1 x 61")),
        (
            "t5",
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            ("4 x 32", "32 x 4"),
        ),
    ],
)
def test_transposed_tensor_raises(saved_model, tmp_path, family, name, shapes):
    _, folder = saved_model(*CASES[family][0])
    transposed = copy_directory(
        folder, tmp_path / "x", alter=lambda tensors: tensors.update({name: tensors[name].T})
    )
    actual, expected = shapes
    assert (
        load_error(transposed)
        == f"{name}: its shape is {actual}, but config.json implies {expected}"
    )


def test_reshaped_square_matrix_raises(saved_model, tmp_path):
    """The number of elements is right, so NumPy would reshape the tensor silently."""
    _, folder = saved_model(*CASES["llama"][0])
    name = "model.layers.0.self_attn.q_proj.weight"
    for i, shape in enumerate([(1024,), (1, 32, 32), (16, 64)]):

        def alter(tensors, shape=shape):
            tensors[name] = tensors[name].reshape(shape)

        message = load_error(copy_directory(folder, tmp_path / str(i), alter=alter))
        assert message.startswith(f"{name}: its shape is {' x '.join(map(str, shape))}, but")


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("bert", 1),
        ("roberta", 0),
        ("distilbert", 0),
        ("modernbert", 0),
        ("gpt2", 0),
        ("bloom", 0),
        ("t5", 0),
        ("bart", 0),
        ("bart", 2),
        ("marian", 2),
        ("mbart", 0),
        ("m2m_100", 1),
        ("opt", 0),
        ("gpt_neox", 2),
        ("gemma2", 0),
    ],
)
def test_copied_tensor_is_dropped_only_if_equal(saved_model, tmp_path, family, case):
    """Copies are tied output layers, and tables that encoder and decoder share.

    A file may contain them, but they are not read.
    """
    _, folder = saved_model(*CASES[family][case])
    config, _ = load_hf(folder)
    copies = [tensor for tensor in FAMILIES[family].all_copies(config) if tensor.compared]
    assert copies

    def add_copies(tensors):
        tensors.update({tensor.theirs: tensors[tensor.of].clone() for tensor in copies})

    assert load_hf(copy_directory(folder, tmp_path / "equal", alter=add_copies))[0] == config
    for i, tensor in enumerate(copies):

        def perturb(tensors, tensor=tensor):
            tensors[tensor.theirs] = tensors[tensor.of].clone()
            tensors[tensor.theirs].reshape(-1)[-1] += 1e-3

        def truncate(tensors, tensor=tensor):
            tensors[tensor.theirs] = tensors[tensor.of][:-1].clone()

        for alter in (perturb, truncate)[: 2 - (i > 0)]:
            message = load_error(
                copy_directory(folder, tmp_path / f"{alter.__name__}{i}", alter=alter)
            )
            assert message.startswith(f"{tensor.theirs} and {tensor.of} hold different numbers")


@pytest.mark.parametrize(
    ("family", "case"),
    [
        ("bert", 0),
        ("bert", 3),
        ("camembert", 0),
        ("xlm-roberta", 4),
        ("distilbert", 0),
        ("modernbert", 1),
        ("gpt2", 2),
        ("bloom", 1),
        ("opt", 1),
        ("gpt_neox", 0),
        ("llama", 0),
    ],
)
def test_tensor_names_may_omit_the_prefix(saved_model, tmp_path, family, case):
    """Some files on the hub omit the prefix. The names of heads have none."""
    _, folder = saved_model(*CASES[family][case])

    def alter(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(FAMILIES[family].prefix)] = tensors.pop(name)

    bare = copy_directory(folder, tmp_path / "bare", alter=alter)
    jax.tree.map(np.testing.assert_array_equal, load_hf(bare)[1], load_hf(folder)[1])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "holds a NaN or an infinite number"),
        (float("-inf"), "holds a NaN or an infinite number"),
        (torch.int64, "holds numbers of type I64"),
        (torch.int8, "holds numbers of type I8"),
        (torch.bool, "holds numbers of type BOOL"),
        (1e300, "holds a NaN or an infinite number"),  # a float64 that overflows float32
    ],
)
def test_invalid_parameter_values_and_types_raise(saved_model, tmp_path, value, message):
    _, folder = saved_model(*CASES["llama"][0])
    name = "model.layers.3.mlp.up_proj.weight"

    def alter(tensors):
        if isinstance(value, torch.dtype):
            tensors[name] = tensors[name].to(value)
        else:
            tensors[name] = tensors[name].double() if value == 1e300 else tensors[name]
            tensors[name][1, 2] = value

    assert load_error(copy_directory(folder, tmp_path / "x", alter=alter)).startswith(
        f"{name}: {message}"
    )


@pytest.mark.parametrize(
    "entry", ["../outside.safetensors", "/etc/passwd", "a/../../b", "C:\\x", "..\\x", "..", "", "."]
)
def test_weight_map_outside_its_directory_raises(saved_model, tmp_path, entry):
    _, folder = saved_model(*CASES["gpt2"][0])
    directory = copy_directory(folder, tmp_path / "here")
    (directory / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = {"weight_map": {"transformer.wte.weight": entry}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"weight_map names {entry!r}, which is not a file of this directory" in load_error(
        directory
    )


def test_linked_shards_load_and_inconsistent_shards_raise(saved_model, tmp_path):
    """The cache of the hub stores files elsewhere, under their hashes, and links to them."""
    model, folder = saved_model(*CASES["llama"][0])
    model.save_pretrained(tmp_path / "blobs", max_shard_size="20KB")
    cache, index = tmp_path / "snapshot", "model.safetensors.index.json"
    cache.mkdir()
    for file in (tmp_path / "blobs").iterdir():
        (cache / file.name).symlink_to(file)
    jax.tree.map(np.testing.assert_array_equal, load_hf(cache)[1], load_hf(folder)[1])
    (cache / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert f"has both model.safetensors and {index}; delete the outdated one" in load_error(cache)
    (cache / "model.safetensors").unlink()
    index_content = json.loads((cache / index).read_text())
    files = sorted(set(index_content["weight_map"].values()))
    index_content["weight_map"]["model.norm.weight"] = files[0]
    (cache / index).unlink()
    (cache / index).write_text(json.dumps(index_content))
    assert "disagree about model.norm.weight" in load_error(cache)
    index_content["weight_map"] = {}
    (cache / index).write_text(json.dumps(index_content))
    assert "weight_map names no tensor" in load_error(cache)
    index_content["weight_map"] = {"model.norm.weight": "absent.safetensors"}
    (cache / index).write_text(json.dumps(index_content))
    assert "no absent.safetensors, which" in load_error(cache)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_absent_fields_have_the_defaults_of_transformers(family):
    mapping, cls = FAMILIES[family], transformers.CONFIG_MAPPING[family]
    heads = ("cls.predictions", "lm_head", "vocab_projector", "decoder.final_layer_norm")
    tensors = frozenset(f"{head}.bias" for head in heads)
    required, ours = REQUIRED.get(family, {}), lambda f: mapping.our_config(required | f, tensors)
    their_defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    empty = ours({})
    for name, default in their_defaults.items():
        if name not in required and isinstance(default, bool | int | float | str | None):
            assert ours({name: default}) == empty, name
    our_defaults = {name: field(default).default for name, default in mapping.fields.items()}
    for name in (our_defaults.keys() & their_defaults.keys()) - {"num_decoder_layers"}:
        assert our_defaults[name] == their_defaults[name], name
    for name in ("rope_theta", "rotary_emb_base") if "rope_scaling" in our_defaults else ():
        theirs = cls.default_theta
        theirs = theirs["global"] if isinstance(theirs, dict) else theirs
        assert our_defaults.get(name, theirs) == theirs
    if family in ("bart", "marian", "mbart", "m2m_100"):
        alias = {"num_attention_heads": 8, "decoder_attention_heads": 4}
        assert ours(alias) == ours(alias | {"encoder_attention_heads": 8}) != ours({})
        assert cls(**alias).encoder_attention_heads == ours(alias).stack("encoder").num_heads == 8
    if family == "t5gemma":  # its stacks have configs of their own
        for f in dataclasses.fields(transformers.T5GemmaModuleConfig):
            fields = {} if f.name == "is_decoder" else {f.name: f.default}
            assert ours({"encoder": fields, "decoder": fields}) == empty, f.name
    assert ours({"bos_token_id" if family == "t5gemma" else "vocab_size": 70_000}) != empty


def test_gemma_soft_caps_are_on_by_default(saved_model, tmp_path):
    _, folder = saved_model(*CASES["gemma2"][0])
    caps = ("final_logit_softcapping", "attn_logit_softcapping")
    bare = copy_directory(
        folder, tmp_path / "bare", change=lambda fields: [fields.pop(name) for name in caps]
    )
    config, _ = load_hf(bare)
    assert (config.logit_soft_cap, config.attention_soft_cap) == (30.0, 50.0)
    assert config == load_hf(folder)[0]
    set_null = lambda fields: fields.update(dict.fromkeys(caps))
    config, _ = load_hf(copy_directory(folder, tmp_path / "nulls", change=set_null))
    assert (config.logit_soft_cap, config.attention_soft_cap) == (0.0, 0.0)


def test_damaged_directories_raise_or_match_transformers(tmp_path):
    """A seeded sample of the faults of `faults.hf_directories`.

    Each raises an error of one line or gives the logits of Transformers.
    """
    names = ("bert-labels", "gpt2")
    sources = {name: hf_directories.save(name, tmp_path / name) for name in names}
    outcomes = []
    for seed in range(50):
        target = tmp_path / str(seed)
        name, _ = hf_directories.mutate_any(sources, target, seed)
        outcomes.append(hf_directories.judge(name, target, compare=seed % 5 == 4))
    kinds = [outcome.partition(":")[0] for outcome in outcomes]
    assert kinds.count("refused") > 20
    assert kinds.count("equal") > 1
