"""OLMo 2 (OLMo Team 2025) and OLMo 3.

Llama with norms after each sublayer instead of before it, and with one norm for the queries of all
heads and one for their keys. In OLMo 3, three of four layers attend within a window.
"""

import functools

from transformer.convert.families import llama
from transformer.convert.fields import Fields, optional, positive
from transformer.convert.rope import rotary

_OLMO_2 = llama.ATTENTION_BIAS | {"vocab_size": 50304, "rms_norm_eps": positive(1e-5)}
_THETA = 500_000.0
_WINDOW = {"sliding_window": optional(int, 4096), "rope_theta": positive(_THETA)}
_OLMO_3 = _OLMO_2 | llama.LAYER_TYPES | _WINDOW
_NORMS = {
    "post_attention_layernorm": "self_attention_residual/res_norm",
    "post_feedforward_layernorm": "feed_forward_residual/res_norm",
}
_TOKENS = {"pad_token_id": 1, "eos_token_id": 50_279}
_variant = functools.partial(llama.Variant, norms=_NORMS, special_tokens=_TOKENS)
_COMMON = {"norm_placement": "res_post", "qk_norm": True, "qk_norm_joint": True}


def _read_olmo3(f: Fields) -> dict:
    # Transformers applies a `rope_theta` outside of rope_parameters to global layers alone.
    thetas = {"full_attention": f.get("rope_theta"), "sliding_attention": _THETA}
    local = [(i + 1) % 4 != 0 for i in range(f.get("num_hidden_layers"))]
    return _COMMON | llama.local_and_global(f, thetas, local)


FAMILIES = [
    _variant(_OLMO_2, lambda f: rotary(f) | _COMMON).family("olmo2", "Olmo2ForCausalLM"),
    _variant(_OLMO_3, _read_olmo3, llama.write_local_and_global).family(
        "olmo3", "Olmo3ForCausalLM"
    ),
]
