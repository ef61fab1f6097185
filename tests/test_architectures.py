"""The named architectures: their published sizes, and scaled-down versions against the oracle."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from conftest import make, tokens
from test_oracle import unstack_layers

from transformer import UserError, architecture, build_model
from transformer.convert import FAMILIES
from transformer.model.architectures import ARCHITECTURES

HF_FAMILIES = {
    "bert": "bert", "modernbert": "modernbert", "gpt2": "gpt2", "gpt3": "gpt2", "bloom": "bloom",
    "t5": "t5", "bart": "bart", "marian": "marian", "opt": "opt", "gpt_neox": "gpt_neox",
    "pythia": "gpt_neox", "llama2": "llama", "llama3": "llama", "llama3.1": "llama",
    "mistral": "mistral", "qwen2": "qwen2", "qwen3_30b_a3b": "qwen3_moe", "qwen3": "qwen3",
    "gemma2": "gemma2", "gemma3": "gemma3_text", "olmo2": "olmo2", "mixtral": "mixtral",
    "gpt_oss": "gpt_oss",
}  # fmt: skip
"""Architecture -> the family of Transformers that can express it."""

PUBLISHED = {
    "transformer_base": 65e6, "transformer_big": 213e6, "bert_base": 110e6, "bert_large": 340e6,
    "gpt2": 124e6, "gpt2_medium": 355e6, "gpt2_large": 774e6, "gpt2_xl": 1558e6,
    "gpt3_small": 125e6, "gpt3_175b": 175e9, "bloom_560m": 559e6, "bloom_176b": 176.2e9,
    "t5_small": 60e6, "t5_base": 220e6, "t5_11b": 11.3e9, "t5_v1_1_small": 77e6,
    "t5_v1_1_xxl": 11.1e9, "bart_large": 406e6, "opt_350m": 331e6, "opt_175b": 175e9,
    "gpt_neox_20b": 20.55e9, "pythia_70m": 70.4e6, "pythia_12b": 11.85e9, "llama2_7b": 6.74e9,
    "llama3_8b": 8.03e9, "llama3.1_405b": 405.8e9, "mistral_7b": 7.24e9, "qwen2_0.5b": 494e6,
    "qwen2_72b": 72.7e9, "qwen3_0.6b": 596e6, "qwen3_32b": 32.76e9, "gemma2_2b": 2.61e9,
    "gemma2_27b": 27.2e9, "gemma3_1b": 1.0e9, "gemma3_4b": 3.88e9, "gemma3_12b": 11.77e9,
    "gemma3_27b": 27.0e9, "olmo2_1b": 1.48e9, "olmo2_7b": 7.3e9, "olmo2_13b": 13.7e9,
    "olmo2_32b": 32.2e9, "mixtral_8x7b": 46.7e9, "qwen3_30b_a3b": 30.5e9,
    "gpt_oss_20b": 20.91e9, "gpt_oss_120b": 116.8e9,
    "modernbert_base": 149e6, "modernbert_large": 395e6,
}  # fmt: skip
"""Architecture -> its number of parameters as the authors report it."""

POST, RMS = {"norm_placement": "post", "norm": "layernorm"}, {"norm": "rmsnorm", "use_bias": False}
LLAMA = {"family": "decoder", "norm_placement": "pre", **RMS, "activation": "silu", "glu": True}
TABLE = {
    "transformer_base transformer_big": {
        "family": "encoder_decoder", **POST, "position": "sinusoidal", "activation": "relu",
        "share_embeddings": True, "tie_embeddings": True, "embedding_scale": True,
    },
    "minimal": {
        "family": "decoder", "norm_placement": {"name": "none", "residual_scale": 0.0},
        "activation": "relu", "num_heads": 1, "attention_scale": 1.0, "attention_bias": False,
        "attention_out": False,
    },
    "mit_6390": {**POST, "use_bias": False},
    "jurafsky_martin": {"norm_placement": "pre", "tie_embeddings": True, "attention_bias": False},
    "bert_base bert_large": {
        "family": "encoder", **POST, "position": "learned", "token_types": 2,
        "embedding_norm": True, "head_transform": True, "pooler": True, "num_labels": 2,
    },
    "gpt2 gpt2_medium gpt2_large gpt2_xl gpt3_small gpt3_175b": {
        "family": "decoder", "norm_placement": "pre", "activation": "gelu_tanh",
        "residual_init_scale": True,
    },
    "bloom_560m bloom_176b": {"position": "alibi", "embedding_norm": True},
    "t5_small t5_11b": {
        **RMS, "position": "t5", "attention_scale": 1.0, "glu": False, "tie_embeddings": True,
    },
    "t5_v1_1_small t5_v1_1_xxl": {
        **RMS, "position": "t5", "attention_scale": 1.0, "glu": True, "activation": "gelu_tanh",
        "tie_embeddings": False,
    },
    "bart_base bart_large": {
        "family": "encoder_decoder", **POST, "position": {"name": "learned", "offset": 2},
        "logit_bias": True,
    },
    "marian": {
        "family": "encoder_decoder", **POST, "position": {"name": "sinusoidal", "layout": "halves"},
        "logit_bias": True,
    },
    "opt_125m opt_175b": {
        "norm_placement": "pre", "position": {"name": "learned", "offset": 2}, "activation": "relu",
    },
    "gpt_neox_20b pythia_12b": {
        "parallel": True, "position": {"name": "rotary", "fraction": 0.25},
    },
    "llama2_7b": {**LLAMA, "position": "rotary", "num_kv_heads": 32},
    "llama3_8b": {
        **LLAMA, "position": {"name": "rotary", "theta": 500_000.0}, "num_kv_heads": 8,
    },
    "mistral_7b": {**LLAMA, "window": 4096, "num_kv_heads": 8},
    "qwen2_0.5b": {**LLAMA, "qkv_bias": True, "num_kv_heads": 2},
    "qwen3_0.6b": {**LLAMA, "qk_norm": True, "num_kv_heads": 8},
    "gemma2_2b gemma2_27b": {
        **RMS, "norm_placement": "peri", "attention_soft_cap": 50.0, "logit_soft_cap": 30.0,
        "embedding_scale": True,
    },
    "gemma3_1b gemma3_27b": {
        **RMS, "norm_placement": "peri", "attention_soft_cap": 0.0, "qk_norm": True,
        "embedding_scale": True,
    },
    "olmo2_1b olmo2_32b": {**LLAMA, "norm_placement": "res_post", "qk_norm_joint": True},
    "gpt_oss_20b gpt_oss_120b": {
        **LLAMA, "use_bias": True, "activation": "quick_gelu", "glu_limit": 7.0, "num_kv_heads": 8,
    },
    "mixtral_8x7b": {**LLAMA, "num_kv_heads": 8, "window": 0},
    "modernbert_base modernbert_large": {
        "family": "encoder", "first_norm": False, "glu": True, "norm_offset": False,
    },
}  # fmt: skip
"""Architectures -> field values that their configs must have.

The tests below check their equations against the oracle, and their numbers of parameters. For
architectures with published weights, test_convert.py compares the logits with PyTorch's.
"""

SMALL = {"d_model": 32, "num_heads": 4, "d_ff": 48, "vocab_size": 61, "max_length": 40}


def hf_family(name: str) -> str | None:
    families = [
        family
        for prefix, family in HF_FAMILIES.items()
        if name == prefix or name.startswith(prefix + "_")
    ]
    return families[0] if families else None


def count_parameters(config) -> int:
    sides = (jax.ShapeDtypeStruct((1, 1), jnp.int32),) * (1 + (config.family == "encoder_decoder"))
    abstract = jax.eval_shape(build_model(config).init, jax.random.key(0), *sides)
    return sum(math.prod(x.shape) for x in jax.tree.leaves(abstract))


def small(name: str):
    """Returns the config of an architecture with few and narrow layers."""
    published = architecture(name)
    most = max(3, len(published.layer_pattern))
    depth = {f"num_{s}_layers": min(published.num_layers(s), most) for s in published.sides}
    fields = SMALL | depth | {"num_kv_heads": 2 if published.kv_heads < published.num_heads else 0}
    fields |= {
        "d_head": 12 if published.head_size * published.num_heads != published.d_model else 0
    }
    fields |= {"logit_scale": 32**-0.5} if published.logit_scale != 1 else {}
    fields |= {"d_embedding": 20} if published.d_embedding else {}
    return architecture(name, **fields)


@pytest.mark.parametrize("names", TABLE)
def test_architecture_fields_match_the_table(names):
    for name in names.split():
        config = architecture(name)
        assert {field: getattr(config, field) for field in TABLE[names]} == TABLE[names]
    assert set(HF_FAMILIES.values()) <= set(FAMILIES), (
        "every family of the table has a weight mapping"
    )


def test_per_layer_windows_and_rotary_scaling():
    """Alternating local and global attention; the rotary scaling of Llama 3.1."""
    gemma, modern = architecture("gemma2_2b"), architecture("modernbert_base")
    assert [layer.window for layer in gemma.layers("decoder")][:4] == [4096, 0, 4096, 0]
    assert [layer.window for layer in modern.layers("encoder")][:6] == [0, 65, 65] * 2
    assert (
        modern.layers("encoder")[0].position["theta"]
        != modern.layers("encoder")[1].position["theta"]
    )
    assert architecture("llama3.1_8b").position["scaling"]["name"] == "llama3"


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_matches_published_count(name):
    assert count_parameters(architecture(name)) == pytest.approx(PUBLISHED[name], rel=0.03)


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if hf_family(name)])
def test_parameter_count_equals_transformers(name):
    """The number of parameters equals that of the model in Transformers.

    Models of n and n + 1 layers are built there. Each further layer adds as many parameters as the
    last one.
    """
    if name in ("gpt3_13b", "gpt3_xl"):
        pytest.skip(
            "GPT-2's config cannot express these heads: 128 times their number is not d_model"
        )
    config, family = architecture(name), FAMILIES[hf_family(name)]
    (depth,) = {config.num_layers(side) for side in config.sides}
    at_depth = lambda layers: transformers_parameters(
        family,
        dataclasses.replace(config, **{f"num_{side}_layers": layers for side in config.sides}),
    )
    n = max(3, len(config.layer_pattern))
    shallow, deeper = at_depth(n), at_depth(n + 1)
    assert deeper > shallow and depth > n + 1
    ours = count_parameters(config)
    if family.model_type in ("bart", "marian"):
        ours -= config.vocab_size  # the bias on the logits is a buffer in Transformers
    assert ours == shallow + (depth - n) * (deeper - shallow)


def transformers_parameters(family, config) -> int:
    """Returns the parameters of the model that Transformers builds, on the meta device."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    hf_config = family.their_config(config)
    cls = getattr(transformers, hf_config.pop("architectures")[0])
    with torch.device("meta"):
        model = cls(cls.config_class(**hf_config))
    assert {x.device.type for x in model.state_dict().values()} == {"meta"}
    parameters = {
        name: math.prod(x.shape)
        for name, x in model.named_parameters()
        if family.model_type != "marian" or "embed_positions" not in name  # not trained
    }
    total = sum(parameters.values())
    if family.model_type == "t5" and not config.tie_embeddings:
        # Transformers 5 unties when it loads two matrices, not when it builds the model.
        total += config.vocab_size * config.d_model
    return total


@pytest.mark.parametrize("name", [
    "transformer_base", "minimal", "mit_6390", "jurafsky_martin", "bert_base", "gpt2", "gpt3_small",
    "bloom_560m", "t5_small", "t5_v1_1_small", "bart_base", "marian", "opt_125m", "opt_350m",
    "pythia_70m", "llama2_7b", "llama3.1_8b", "mistral_7b", "qwen2_0.5b", "qwen3_0.6b", "gemma2_2b",
    "gemma3_1b", "olmo2_1b", "modernbert_base",
])  # fmt: skip
def test_small_version_matches_oracle(name):
    """Compares a scaled-down version with the oracle."""
    config = small(name)
    sides = (tokens(0, 2, 9), tokens(1, 2, 7))[: 1 + (config.family == "encoder_decoder")]
    model, params = make(config, noise=0.2)
    expected = oracle.forward(config, unstack_layers(config, params), *sides)
    np.testing.assert_allclose(jax.jit(model.apply)(params, *sides), expected, atol=1e-4)


def test_minimal_architecture_has_no_norm_and_no_residual():
    config = small("minimal")
    model, params = make(config)
    assert not [
        path
        for path, _ in jax.tree_util.tree_leaves_with_path(params)
        if "norm" in jax.tree_util.keystr(path)
    ]
    zeroed = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if "feed_forward" in jax.tree_util.keystr(path) else x, params
    )
    x = tokens(0, 1, 5)
    assert np.ptp(model.apply(params, x)) > 1e-3
    assert np.ptp(model.apply(zeroed, x)) == 0  # nothing bypasses the feed-forward
    assert architecture("minimal").d_ff == 5 * architecture("minimal").d_model


def test_overrides_fields_and_rejects_unknown_names():
    assert architecture("gpt2", num_decoder_layers=6).num_decoder_layers == 6
    assert architecture("gpt2_medium").d_model == 1024
    with pytest.raises(
        UserError, match="architecture: unknown value 'gpt2_medum'; did you mean 'gpt2_medium'"
    ):
        architecture("gpt2_medum")
    with pytest.raises(UserError, match="no such field"):
        architecture("gpt2", d_modell=3)
