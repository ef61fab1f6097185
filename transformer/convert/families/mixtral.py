"""Mixtral (Jiang et al. 2024) and Qwen 3 MoE: Mistral and Qwen 3 with mixtures of experts. GPT-OSS
(OpenAI 2025, arXiv:2508.10925): a mixture with biases and clipped units, and attention sinks."""

import functools

from transformer.convert.families import llama
from transformer.convert.fields import Field, Fields, optional, positive
from transformer.convert.rope import rotary, write_rotary
from transformer.convert.weights import expert, interleaved, linear, matrix, same
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.feed_forwards.experts import Mixture

_ROUTER = {"router_aux_loss_coef": Field(0.001, float), "num_experts_per_tok": 2}


def _experts(f: Fields, count: str, normalize: bool = True) -> dict:
    counts = {"num_experts": f.get(count), "top_k": f.get("num_experts_per_tok")}
    options = {"normalize": normalize, "load_balance": f.get("router_aux_loss_coef")}
    return {"feed_forward": {"name": "experts"} | counts | options}


def _write_experts(c: ModelConfig, count: str) -> dict:
    kind = c.feed_forward_kind
    if not isinstance(kind, Mixture):
        problem = "cannot be expressed by a mixture-of-experts family"
        raise UserError(f"model.feed_forward: {kind.name!r} {problem}")
    counts = {count: kind.num_experts, "num_experts_per_tok": kind.top_k}
    return counts | {"router_aux_loss_coef": kind.load_balance}


def _weights(block: str, names: llama.Parts, theirs: str, ours: str, c: ModelConfig):
    """Yields the router and the matrices of each expert. `names`: their name -> ours."""
    yield from linear(f"{theirs}.{block}.gate", f"{ours}/router", bias=False)
    for i in range(c.feed_forward_kind.num_experts):
        for name, (part,) in names.items():
            kernel = expert(f"{ours}/{part}/kernel", i)
            yield matrix(f"{theirs}.{block}.experts.{i}.{name}.weight", kernel)


def _read_qwen3(f: Fields) -> dict:
    f.must("decoder_sparse_step", 1, "all layers are mixtures of experts")
    f.must("mlp_only_layers", [], "all layers are mixtures of experts")
    f.ignore("max_window_layers")  # not used
    experts = _experts(f, "num_experts", f.get("norm_topk_prob"))
    sizes = {"d_ff": f.get("moe_intermediate_size"), "window": llama.used_window(f)}
    return rotary(f) | experts | sizes | {"qk_norm": True}


def _write_qwen3(c: ModelConfig) -> dict:
    return write_rotary(c) | {
        **_write_experts(c, "num_experts"), "moe_intermediate_size": c.ff_size,
        "norm_topk_prob": c.feed_forward_kind.normalize, "use_sliding_window": c.window > 0,
        "sliding_window": c.window or None,
    }  # fmt: skip


def _gpt_oss_weights(theirs: str, ours: str, c: ModelConfig):
    yield from linear(f"{theirs}.mlp.router", f"{ours}/router", bias=True)
    for suffix, kind in (("", "kernel"), ("_bias", "bias")):
        experts, gate = f"{theirs}.mlp.experts", f"{ours}/gate/{kind}"
        yield interleaved(f"{experts}.gate_up_proj{suffix}", gate, f"{ours}/in/{kind}")
        yield same(f"{experts}.down_proj{suffix}", f"{ours}/out/{kind}")


def _read_gpt_oss(f: Fields) -> dict:
    local = [i % 2 == 0 for i in range(f.get("num_hidden_layers"))]
    experts = _experts(f, "num_local_experts")["feed_forward"] | {"router_use_bias": True}
    return rotary(f, default=_YARN) | llama.per_layer(window=llama.windows(f, local)) | {
        "feed_forward": experts, "use_bias": True, "attention_bias": f.get("attention_bias"),
        "attention_sink": True, "activation": f.one_of("swiglu_alpha", _SWIGLU),
    }  # fmt: skip


def _write_gpt_oss(c: ModelConfig) -> dict:
    alpha = {name: alpha for alpha, name in _SWIGLU.items()}.get(c.activation, 1.702)
    own = {"hidden_act": "silu", "swiglu_alpha": alpha}
    return write_rotary(c) | llama.write_windows(c) | _write_experts(c, "num_local_experts") | own


_SWIGLU = {1.702: "quick_gelu", 1.0: "silu"}
"""swiglu_alpha, a in x sigmoid(a x) -> our activation. Transformers does not use hidden_act."""

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_W123 = {"w1": ("gate",), "w3": ("in",), "w2": ("out",)}

FAMILIES = [
    llama.variant("mixtral", "MixtralForCausalLM", {
        **_ROUTER, "intermediate_size": 14336, "num_key_value_heads": optional(int, 8),
        "max_position_embeddings": 131072, "sliding_window": optional(int, ours="window"),
        "rms_norm_eps": positive(1e-5), "rope_theta": positive(1_000_000.0),
        "num_local_experts": 8,
    }, lambda f: rotary(f) | _experts(f, "num_local_experts"),
       lambda c: write_rotary(c) | _write_experts(c, "num_local_experts"),
       feed_forward=functools.partial(_weights, "block_sparse_moe", _W123),
       special_tokens={"bos_token_id": 1, "eos_token_id": 2},
       aliases={"num_experts": "num_local_experts"}),
    llama.variant("qwen3_moe", "Qwen3MoeForCausalLM", {
        **_ROUTER, **llama.ATTENTION_BIAS, "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "use_sliding_window": False,
        "sliding_window": optional(int, 4096), "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": False,
    }, _read_qwen3, _write_qwen3, feed_forward=functools.partial(_weights, "mlp", llama.GATED),
       aliases={"num_local_experts": "num_experts"}),
    llama.variant("gpt_oss", "GptOssForCausalLM", {
        **_ROUTER, **llama.LAYER_TYPES, "attention_bias": True, "vocab_size": 201_088,
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": optional(int, 8),
        "head_dim": optional(int, 64), "max_position_embeddings": 131_072,
        "sliding_window": optional(int, 128), "rms_norm_eps": positive(1e-5),
        "rope_theta": positive(150_000.0), "num_local_experts": 128, "num_experts_per_tok": 4,
        "swiglu_alpha": positive(1.702), "swiglu_limit": positive(7.0, "glu_limit"),
    }, _read_gpt_oss, _write_gpt_oss, feed_forward=_gpt_oss_weights,
       aliases={"num_experts": "num_local_experts"}),
]  # fmt: skip
