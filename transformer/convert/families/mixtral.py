"""Mixtral (Jiang et al. 2024) and Qwen 3 MoE: Mistral and Qwen 3 with mixtures of experts."""

import functools

from transformer.convert.families.llama import ATTENTION_BIAS, GATED, Parts, used_window, variant
from transformer.convert.fields import Field, Fields, optional, positive
from transformer.convert.rope import rotary, write_rotary
from transformer.convert.weights import expert, linear, matrix
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.feed_forwards.experts import Mixture

_ROUTER = {"router_aux_loss_coef": Field(0.001, float), "num_experts_per_tok": 2}


def _experts(f: Fields, count: str, normalize: bool = True) -> dict:
    f.ignore("output_router_logits", "router_jitter_noise")  # of training
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


def _weights(block: str, names: Parts, theirs: str, ours: str, c: ModelConfig):
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
    sizes = {"d_ff": f.get("moe_intermediate_size"), "window": used_window(f)}
    return rotary(f) | experts | sizes | {"qk_norm": True}


def _write_qwen3(c: ModelConfig) -> dict:
    return write_rotary(c) | {
        **_write_experts(c, "num_experts"), "moe_intermediate_size": c.ff_size,
        "norm_topk_prob": c.feed_forward_kind.normalize, "use_sliding_window": c.window > 0,
        "sliding_window": c.window or None,
    }  # fmt: skip


_W123 = {"w1": ("gate",), "w3": ("in",), "w2": ("out",)}

FAMILIES = [
    variant("mixtral", "MixtralForCausalLM", {
        **_ROUTER, "intermediate_size": 14336, "num_key_value_heads": optional(int, 8),
        "max_position_embeddings": 131072, "sliding_window": optional(int, ours="window"),
        "rms_norm_eps": positive(1e-5), "rope_theta": positive(1_000_000.0),
        "num_local_experts": 8,
    }, lambda f: rotary(f) | _experts(f, "num_local_experts"),
       lambda c: write_rotary(c) | _write_experts(c, "num_local_experts"),
       feed_forward=functools.partial(_weights, "block_sparse_moe", _W123),
       special_tokens={"bos_token_id": 1, "eos_token_id": 2},
       aliases={"num_experts": "num_local_experts"}),
    variant("qwen3_moe", "Qwen3MoeForCausalLM", {
        **_ROUTER, **ATTENTION_BIAS, "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
        "max_position_embeddings": 32768, "use_sliding_window": False,
        "sliding_window": optional(int, 4096), "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": False,
    }, _read_qwen3, _write_qwen3, feed_forward=functools.partial(_weights, "mlp", GATED),
       aliases={"num_local_experts": "num_experts"}),
]  # fmt: skip
