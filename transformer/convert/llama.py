"""Llama (Touvron et al. 2023) and its kin: Mistral, Qwen 2, Qwen 3, Gemma 2. RMSNorm, rotary, a gated feed-forward."""

import functools

from transformer.convert.family import Family
from transformer.convert.fields import ACTIVATIONS, ACTIVATIONS_BACK, Fields, rotary, rotary_back
from transformer.convert.weights import linear, norm, same
from transformer.errors import UserError
from transformer.model.config import ModelConfig


def _read(kind: str, f: Fields, tensors: frozenset[str]) -> dict:
    d_model, heads = f.get("hidden_size", 4096), f.get("num_attention_heads", 32)
    layers = f.get("num_hidden_layers", 32)
    fields = {
        "family": "decoder",
        "vocab_size": f.get("vocab_size", 32000),
        "d_model": d_model,
        "d_ff": f.need("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": f.get("num_key_value_heads", heads if kind != "mistral" else 8),
        "d_head": f.get(
            "head_dim", 256 if kind == "gemma2" else 128 if kind == "qwen3" else d_model // heads
        ),
        "num_decoder_layers": layers,
        **rotary(f, max_length={"mistral": 131072, "gemma2": 8192, "llama": 2048}.get(kind, 32768)),
        "norm_placement": "pre",
        "norm": "rmsnorm",
        "norm_epsilon": f.get("rms_norm_eps", 1e-6),
        "activation": f.one_of("hidden_act", "silu", ACTIVATIONS),
        "glu": True,
        "use_bias": False,
        "tie_embeddings": f.get("tie_word_embeddings", kind == "gemma2"),
        "attention_dropout": f.get("attention_dropout", 0.0),
        "initializer": "normal",
        "embedding_init_std": 0.02,
    }
    if kind == "llama":
        mlp, attention = f.get("mlp_bias", False), f.get("attention_bias", False)
        fields |= {"use_bias": mlp} | ({} if mlp == attention else {"attention_bias": attention})
    if kind == "qwen2":
        fields["qkv_bias"] = True
    if kind == "qwen3":
        fields |= {"qk_norm": True} | (
            {"attention_bias": True} if f.get("attention_bias", False) else {}
        )
    if kind == "gemma2":
        fields |= _gemma(f)
    if kind in ("mistral", "qwen2", "qwen3", "gemma2"):
        fields |= _windows(kind, f, layers)
    return fields


def _gemma(f: Fields) -> dict:
    f.must("use_bidirectional_attention", None)
    return {
        "norm_placement": "peri",
        "norm_zero_centered": True,
        "embedding_scale": True,
        "activation": f.one_of("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        "attention_scale": float(f.get("query_pre_attn_scalar", 256)) ** -0.5,
        "attention_soft_cap": f.get("attn_logit_softcapping", 0.0),
        "logit_soft_cap": f.get("final_logit_softcapping", 0.0),
        "pad_id": f.get("pad_token_id", 0),
    } | ({"attention_bias": True} if f.get("attention_bias", False) else {})


def _windows(kind: str, f: Fields, layers: int) -> dict:
    """Which layers see a window alone."""
    used = f.get("use_sliding_window", kind not in ("qwen2", "qwen3"))
    size = f.get("sliding_window", None if kind == "mistral" else 4096) if used else None
    f.ignore("max_window_layers", "sliding_window")
    types = f.get("layer_types")
    if types is None:
        first = f.get("max_window_layers", 28)
        local = {"mistral": lambda i: True, "gemma2": lambda i: i % 2 == 0}.get(
            kind, lambda i: i >= first
        )
        types = [
            "sliding_attention" if size and local(i) else "full_attention" for i in range(layers)
        ]
    if unknown := set(types) - {"sliding_attention", "full_attention"}:
        raise UserError(
            f"config.json: layer_types has {sorted(unknown)[0]!r}, which cannot be expressed"
        )
    windows = [size or 0 if one == "sliding_attention" else 0 for one in types]
    if len(set(windows)) == 1:
        return {"window": windows[0]}
    period = next(p for p in range(1, layers + 1) if windows[:-p] == windows[p:])
    return {"layer_pattern": tuple({"window": w} for w in windows[:period])}


def _write(kind: str, c: ModelConfig) -> dict:
    theirs = {
        "vocab_size": c.vocab_size, "hidden_size": c.d_model, "intermediate_size": c.d_ff, "num_hidden_layers": c.num_decoder_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads, 
        "rms_norm_eps": c.norm_epsilon, "tie_word_embeddings": c.tie_embeddings, **rotary_back(c),
        "head_dim": c.d_head, "hidden_act": ACTIVATIONS_BACK[c.activation],
    }  # fmt: skip
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
        theirs["max_window_layers"] = (
            types.index("sliding_attention") if any(windows) else c.num_decoder_layers
        )
    if kind == "qwen3":
        theirs["attention_bias"] = c.qkv_has_bias
    if kind == "gemma2":
        theirs |= {
            "hidden_activation": {"gelu_tanh": "gelu_pytorch_tanh"}.get(c.activation, ACTIVATIONS_BACK[c.activation]),
            "query_pre_attn_scalar": (c.attention_scale or c.d_head**-0.5) ** -2,
            "attn_logit_softcapping": c.attention_soft_cap or None, "final_logit_softcapping": c.logit_soft_cap or None,
            "layer_types": types, "sliding_window": max(windows) or None, "attention_bias": c.qkv_has_bias, "pad_token_id": c.pad_id,
        }  # fmt: skip
        theirs["query_pre_attn_scalar"] = round(theirs["query_pre_attn_scalar"])
        del theirs["hidden_act"]
    return theirs


def _weights(kind: str, c: ModelConfig):
    yield same("model.embed_tokens.weight", "embedding/embedding")
    for i in range(c.num_decoder_layers):
        theirs, ours = f"model.layers.{i}", f"decoder/layers_{i}"
        for name, part in {"q_proj": "query", "k_proj": "key", "v_proj": "value"}.items():
            yield from linear(
                f"{theirs}.self_attn.{name}", f"{ours}/self_attention/{part}", c.qkv_has_bias
            )
        yield from linear(
            f"{theirs}.self_attn.o_proj",
            f"{ours}/self_attention/out",
            c.attention_has_bias,
            inputs=2,
        )
        if c.qk_norm:
            yield from norm(
                f"{theirs}.self_attn.q_norm", f"{ours}/self_attention/query_norm", offset=False
            )
            yield from norm(
                f"{theirs}.self_attn.k_norm", f"{ours}/self_attention/key_norm", offset=False
            )
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


FAMILIES = [
    Family(
        kind, architecture, "decoder", *(functools.partial(f, kind) for f in (_read, _write, _weights)), prefix="model.",
        ignored=(r".*rotary_emb\.inv_freq", r"lm_head\.weight"),
    )
    for kind, architecture in {
        "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
    }.items()
]  # fmt: skip
