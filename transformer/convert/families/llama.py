"""Llama (Touvron et al. 2023), Mistral, Qwen 2, Qwen 3 and Gemma 2.

Decoders with RMSNorm, rotary positions and a gated feed-forward.
"""

import functools

from transformer.convert.family import Family
from transformer.convert.fields import (
    ACTIVATIONS,
    ACTIVATIONS_BACK,
    Field,
    Fields,
    count,
    layer_count,
    layer_kinds,
    optional,
    positive,
    shortest_period,
)
from transformer.convert.rope import FIELDS as ROTARY
from transformer.convert.rope import rotary, write_rotary
from transformer.convert.weights import linear, norm, same, tied
from transformer.model.config import ModelConfig

_FIELDS = ROTARY | {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": layer_count(32),
    "num_attention_heads": 32,
    "num_key_value_heads": optional(int),
    "head_dim": optional(int),
    "max_position_embeddings": 2048,
    "rms_norm_eps": positive(1e-6),
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": Field(0.0, float, nullable=True),
}
_QWEN = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": optional(int, 32),
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": optional(int, 4096),
    "max_window_layers": count(28),
    "layer_types": Field(None, list, nullable=True),
    "attention_dropout": 0.0,
}
_FIELDS_OF = {
    "llama": _FIELDS | {"attention_bias": False, "mlp_bias": False},
    "mistral": _FIELDS
    | {
        "intermediate_size": 14336,
        "num_key_value_heads": optional(int, 8),
        "max_position_embeddings": 131072,
        "sliding_window": optional(int, 4096),
        "attention_dropout": 0.0,
    },
    "qwen2": _FIELDS | _QWEN,
    "qwen3": _FIELDS | _QWEN | {"head_dim": 128, "attention_bias": False},
    "gemma2": _FIELDS
    | {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": layer_count(26),
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": optional(int, 4096),
        "layer_types": Field(None, list, nullable=True),
        "final_logit_softcapping": optional(float, 30.0),
        "attn_logit_softcapping": optional(float, 50.0),
    },
}


def _read(kind: str, f: Fields, tensors: frozenset[str]) -> dict:
    d_model, heads = f.get("hidden_size"), f.get("num_attention_heads")
    layers = f.get("num_hidden_layers")
    activation = "hidden_activation" if kind == "gemma2" else "hidden_act"
    fields = {
        "family": "decoder",
        "vocab_size": f.get("vocab_size"),
        "d_model": d_model,
        "d_ff": f.get("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": f.get("num_key_value_heads") or heads,
        "d_head": f.get("head_dim") or d_model // heads,
        "num_decoder_layers": layers,
        **rotary(f),
        "norm_placement": "pre",
        "norm": "rmsnorm",
        "norm_epsilon": f.get("rms_norm_eps"),
        "activation": f.one_of(activation, ACTIVATIONS),
        "glu": True,
        "use_bias": False,
        "tie_embeddings": f.get("tie_word_embeddings"),
        "attention_dropout": f.get("attention_dropout") or 0.0,
        "initializer": "normal",
        "embedding_init_std": 0.02,
    }
    f.ignore("hidden_act")  # Gemma 2 reads hidden_activation
    if kind == "llama":
        mlp, attention = f.get("mlp_bias"), f.get("attention_bias")
        fields |= {"use_bias": mlp} | ({} if mlp == attention else {"attention_bias": attention})
    if kind == "qwen2":
        fields["qkv_bias"] = True
    if kind == "qwen3":
        fields |= {"qk_norm": True} | ({"attention_bias": True} if f.get("attention_bias") else {})
    if kind == "gemma2":
        fields |= _gemma(f)
    if kind != "llama":
        fields |= _windows(kind, f, layers)
    return fields


def _gemma(f: Fields) -> dict:
    f.must("use_bidirectional_attention", False)
    return {
        "norm_placement": "peri",
        "norm_zero_centered": True,
        "embedding_scale": True,
        "attention_scale": float(f.get("query_pre_attn_scalar")) ** -0.5,
        "attention_soft_cap": f.get("attn_logit_softcapping") or 0.0,
        "logit_soft_cap": f.get("final_logit_softcapping") or 0.0,
    } | ({"attention_bias": True} if f.get("attention_bias") else {})


def _windows(kind: str, f: Fields, layers: int) -> dict:
    """Returns the attention windows of the layers."""
    size, local = f.get("sliding_window"), [True] * layers
    if kind in ("qwen2", "qwen3"):
        first = f.get("max_window_layers")
        size = size if f.get("use_sliding_window") else None
        local = [i >= first for i in range(layers)]
    if kind == "gemma2":
        local = [i % 2 == 0 for i in range(layers)]
    if kind != "mistral" and (kinds := layer_kinds(f, layers)):
        local = [layer_kind == "sliding_attention" for layer_kind in kinds]
    windows = shortest_period([size or 0 if is_local else 0 for is_local in local])
    if len(windows) == 1:
        return {"window": windows[0]}
    return {"layer_pattern": tuple({"window": w} for w in windows)}


def _write(kind: str, c: ModelConfig) -> dict:
    theirs = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.ff_size,
        "num_hidden_layers": c.num_decoder_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.kv_heads,
        "rms_norm_eps": c.norm_epsilon,
        "tie_word_embeddings": c.tie_embeddings,
        **write_rotary(c),
        "head_dim": c.head_size,
        "hidden_act": ACTIVATIONS_BACK[c.activation],
    }
    windows = [layer.window for layer in c.layers("decoder")]
    types = ["sliding_attention" if w else "full_attention" for w in windows]
    if kind == "llama":
        theirs |= {"attention_bias": c.qkv_has_bias, "mlp_bias": c.use_bias}
    if kind == "mistral":
        theirs["sliding_window"] = c.window or None
    if kind in ("qwen2", "qwen3"):
        theirs |= {
            "layer_types": types,
            "use_sliding_window": any(windows),
            "sliding_window": max(windows) or None,
        }
        first = types.index("sliding_attention") if any(windows) else c.num_decoder_layers
        theirs["max_window_layers"] = first
    if kind == "qwen3":
        theirs["attention_bias"] = c.qkv_has_bias
    if kind == "gemma2":
        is_tanh = c.activation == "gelu_tanh"
        theirs |= {
            "hidden_activation": "gelu_pytorch_tanh" if is_tanh else theirs["hidden_act"],
            "query_pre_attn_scalar": (c.attention_scale or c.head_size**-0.5) ** -2,
            "attn_logit_softcapping": c.attention_soft_cap or None,
            "final_logit_softcapping": c.logit_soft_cap or None,
            "layer_types": types,
            "sliding_window": max(windows) or 4096,
            "attention_bias": c.qkv_has_bias,
        }
        theirs["query_pre_attn_scalar"] = round(theirs["query_pre_attn_scalar"])
        del theirs["hidden_act"]
    return theirs


def _weights(kind: str, c: ModelConfig):
    yield same("model.embed_tokens.weight", "embedding/embedding")
    for i in range(c.num_decoder_layers):
        theirs, ours = f"model.layers.{i}", f"decoder/layers_{i}"
        attn, attention = f"{theirs}.self_attn", f"{ours}/self_attention"
        for name, part in {"q_proj": "query", "k_proj": "key", "v_proj": "value"}.items():
            yield from linear(f"{attn}.{name}", f"{attention}/{part}", c.qkv_has_bias)
        yield from linear(f"{attn}.o_proj", f"{attention}/out", c.attention_has_bias, inputs=2)
        if c.qk_norm:
            yield from norm(f"{attn}.q_norm", f"{attention}/query_norm", offset=False)
            yield from norm(f"{attn}.k_norm", f"{attention}/key_norm", offset=False)
        for name, part in {"gate_proj": "gate", "up_proj": "in", "down_proj": "out"}.items():
            yield from linear(f"{theirs}.mlp.{name}", f"{ours}/feed_forward/{part}", c.use_bias)
        norms = {
            "input_layernorm": "self_attention_residual/in_norm",
            "post_attention_layernorm": "feed_forward_residual/in_norm",
        }
        if kind == "gemma2":
            norms = {
                "input_layernorm": "self_attention_residual/in_norm",
                "post_attention_layernorm": "self_attention_residual/res_norm",
                "pre_feedforward_layernorm": "feed_forward_residual/in_norm",
                "post_feedforward_layernorm": "feed_forward_residual/res_norm",
            }
        for name, part in norms.items():
            yield from norm(f"{theirs}.{name}", f"{ours}/{part}", offset=False)
    yield from norm("model.norm", "decoder/final_norm", offset=False)
    if not c.tie_embeddings:
        yield from linear("lm_head", "unembedding", bias=False)


_LLAMA = {"bos_token_id": 1, "eos_token_id": 2}
_SPECIAL_TOKENS = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "gemma2": {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1},
}

FAMILIES = [
    Family(
        kind,
        architecture,
        "decoder",
        *(functools.partial(f, kind) for f in (_read, _write, _weights)),
        _FIELDS_OF[kind],
        special_tokens=_SPECIAL_TOKENS.get(kind, {}),
        prefix="model.",
        heads=("lm_head.",),
        copies=lambda c: tied(c, "lm_head.weight", "model.embed_tokens.weight"),
        unused=(r".*rotary_emb\.inv_freq",),  # angles, which config.json determines
    )
    for kind, architecture in {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
    }.items()
]
