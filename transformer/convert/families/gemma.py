"""Gemma (Gemma Team 2024), Gemma 2 and the text model of Gemma 3 (Gemma Team 2025). Llama with
norms whose gain is 1 + w, scaled embeddings and another activation. Gemma 2 and 3 normalize the
input and the output of each sublayer, and alternate local and global layers."""

import functools

from transformer.convert.families import llama
from transformer.convert.fields import ACTIVATIONS, ACTIVATIONS_BACK, Fields, optional, positive
from transformer.convert.rope import rotary, write_rotary
from transformer.model.config import ModelConfig

_GEMMA = llama.ATTENTION_BIAS | {
    "vocab_size": 256000, "num_key_value_heads": 16, "head_dim": 256,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA_1 = _GEMMA | {
    "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
    "num_attention_heads": 16,
}  # fmt: skip
GEMMA_2 = {
    **_GEMMA, **llama.LAYER_TYPES, "hidden_size": 2304, "intermediate_size": 9216,
    "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
    "sliding_window": optional(int, 4096),
    "final_logit_softcapping": optional(float, 30.0, "logit_soft_cap"),
    "attn_logit_softcapping": optional(float, 50.0, "attention_soft_cap"),
}  # fmt: skip
_GEMMA_3 = GEMMA_2 | {
    "vocab_size": 262_208, "max_position_embeddings": 131_072,
    "final_logit_softcapping": optional(float, ours="logit_soft_cap"),
    "attn_logit_softcapping": optional(float, ours="attention_soft_cap"),
    "rope_theta": positive(1_000_000.0), "rope_local_base_freq": positive(10_000.0),
    "sliding_window_pattern": 6,
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
_variant = functools.partial(llama.variant, special_tokens=TOKENS)
_ACTIVATIONS_BACK = ACTIVATIONS_BACK | {"gelu_tanh": "gelu_pytorch_tanh"}
_PERI = {
    "input_layernorm": "self_attention_residual/in_norm",
    "post_attention_layernorm": "self_attention_residual/res_norm",
    "pre_feedforward_layernorm": "feed_forward_residual/in_norm",
    "post_feedforward_layernorm": "feed_forward_residual/res_norm",
}


def _common(f: Fields) -> dict:
    f.must("use_bidirectional_attention", False)
    return {"norm_zero_centered": True, "embedding_scale": True}


def _read_gemma(f: Fields) -> dict:
    f.ignore("hidden_activation")  # Transformers ignores it and takes "gelu" for "gelu_tanh"
    activation = f.one_of("hidden_act", ACTIVATIONS | {"gelu": "gelu_tanh"})
    return rotary(f) | _common(f) | {"activation": activation}


def _read_gemma2(f: Fields) -> dict:
    local = [i % 2 == 0 for i in range(f.get("num_hidden_layers"))]
    return rotary(f) | peri(f) | llama.per_layer(window=llama.windows(f, local))


def peri(f: Fields) -> dict:
    return _common(f) | {
        "norm_placement": "peri", "activation": f.one_of("hidden_activation", ACTIVATIONS),
        "attention_scale": float(f.get("query_pre_attn_scalar")) ** -0.5,
    }  # fmt: skip


def write_peri(c: ModelConfig) -> dict:
    names = dict.fromkeys(("hidden_act", "hidden_activation"), _ACTIVATIONS_BACK[c.activation])
    return names | {"query_pre_attn_scalar": round((c.attention_scale or c.head_size**-0.5) ** -2)}


def _read_gemma3(f: Fields) -> dict:
    f.must("attn_logit_softcapping", None, "Transformers ignores it in this family")
    f.ignore("_sliding_window_pattern")  # Transformers does not read it
    layers, every = f.get("num_hidden_layers"), f.get("sliding_window_pattern")
    theta, local_theta = f.get("rope_theta"), f.get("rope_local_base_freq")
    local = [bool((i + 1) % every) for i in range(layers)]
    return peri(f) | {"qk_norm": True} | llama.local_and_global(f, theta, local_theta, local)


FAMILIES = [
    _variant("gemma", "GemmaForCausalLM", _GEMMA_1, _read_gemma,
             lambda c: write_rotary(c) | {"hidden_act": _ACTIVATIONS_BACK[c.activation]}),
    _variant("gemma2", "Gemma2ForCausalLM", GEMMA_2, _read_gemma2,
             lambda c: write_rotary(c) | write_peri(c) | llama.write_windows(c), _PERI),
    _variant("gemma3_text", "Gemma3ForCausalLM", _GEMMA_3, _read_gemma3,
             lambda c: write_peri(c) | llama.write_local_and_global(c), _PERI),
]  # fmt: skip
