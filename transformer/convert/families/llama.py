"""Llama (Touvron et al. 2023), Mistral, Qwen 2, Qwen 3, SmolLM3, Phi-3, and OLMo 2 and 3. Decoders
with RMSNorm, rotary positions and a gated feed-forward. Each is a `variant`, which states how it
differs from Llama. gemma.py and mixtral.py add others. OLMo (OLMo Team 2025) has norms after each
sublayer instead of before it, and one norm for the queries of all heads and one for their keys. In
OLMo 3, three of four layers attend within a window."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transformer.convert.family import Family
from transformer.convert.fields import Field, Fields, changed, count, field, optional, positive
from transformer.convert.rope import ROPE, options, rotary, rotary_by_type, write_rope, write_rotary
from transformer.convert.weights import QKV, Weight, fused, linear, norm, same
from transformer.model.config import ModelConfig

FIELDS = ROPE | {
    "vocab_size": field(32000, "vocab_size"), "hidden_size": field(4096, "d_model"),
    "intermediate_size": field(11008, "d_ff"), "num_hidden_layers": field(32, "num_decoder_layers"),
    "num_attention_heads": field(32, "num_heads"),
    "num_key_value_heads": optional(int, ours="num_kv_heads"),
    "head_dim": optional(int, ours="d_head"), "max_position_embeddings": field(2048, "max_length"),
    "rms_norm_eps": positive(1e-6, "norm_epsilon"), "hidden_act": field("silu", "activation"),
    "tie_word_embeddings": field(False, "tie_embeddings"),
    "attention_dropout": Field(0.0, float, "attention_dropout", nullable=True),
}  # fmt: skip
LAYER_TYPES = {"layer_types": optional(list)}
ATTENTION_BIAS = {"attention_bias": False}
BIASES = ATTENTION_BIAS | {"mlp_bias": False}

PRE_NORMS = {
    "input_layernorm": "self_attention_residual/in_norm",
    "post_attention_layernorm": "feed_forward_residual/in_norm",
}
"""The norms of a layer in their model -> ours."""

Parts = Mapping[str, tuple[str, ...]]
PROJECTIONS: Parts = {"q_proj": ("query",), "k_proj": ("key",), "v_proj": ("value",)}
"""The linear layers at the start of attention -> those of ours that each holds."""

GATED: Parts = {"gate_proj": ("gate",), "up_proj": ("in",), "down_proj": ("out",)}
"""The linear layers of a gated feed-forward -> those of ours that each holds."""

Weights = Callable[[str, str, ModelConfig], Iterator[Weight]]
"""weights(theirs, ours, config) yields the tensors of a sublayer, whose names begin with these."""


def gated(theirs: str, ours: str, c: ModelConfig, names: Parts = GATED) -> Iterator[Weight]:
    """Yields the linear layers of a gated feed-forward."""
    for name, parts in names.items():
        yield from fused(f"{theirs}.mlp.{name}", ours, c.use_bias, parts)


def variant(
    model_type: str, architecture: str, fields: Mapping[str, Any],
    read: Callable[[Fields], dict] = rotary, write: Callable[[ModelConfig], dict] = write_rotary,
    norms: Mapping[str, str] = PRE_NORMS, projections: Parts = PROJECTIONS,
    feed_forward: Weights = gated, **family,
) -> Family:  # fmt: skip
    """Returns a family, given how it differs from Llama.

    fields: the fields of config.json that Llama lacks, or whose default differs.
    read, write: the added or replaced fields of a ModelConfig, or of config.json, with positions.
    norms, projections: as in PRE_NORMS and PROJECTIONS.
    feed_forward: the tensors of the feed-forward.
    family: other fields of Family."""
    biases = [name for name in BIASES if name in fields]

    def read_all(f: Fields, tensors: frozenset[str]) -> dict:
        attention, mlp = (name in biases and f.get(name) for name in BIASES)
        return {
            "norm": "rmsnorm", "glu": True, "use_bias": mlp,
            **({} if mlp == attention else {"attention_bias": attention}), **read(f),
        }  # fmt: skip

    def write_all(c: ModelConfig) -> dict:
        values = {"attention_bias": c.qkv_has_bias, "mlp_bias": c.use_bias}
        return {name: values[name] for name in biases} | write(c)

    return Family(
        model_type, architecture, "decoder", read_all, write_all,
        functools.partial(_weights, norms, projections, feed_forward), changed(FIELDS, fields),
        table="model.embed_tokens", head="lm_head", prefix="model.",
        unused=(r".*rotary_emb\.inv_freq",),  # angles, which config.json determines
        **family,
    )  # fmt: skip


def _weights(norms: Mapping[str, str], projections: Parts, feed_forward: Weights, c: ModelConfig):
    for i in range(c.num_decoder_layers):
        theirs, ours = f"model.layers.{i}", f"decoder/layers_{i}"
        attn, attention = f"{theirs}.self_attn", f"{ours}/self_attention"
        for name, parts in projections.items():
            yield from fused(f"{attn}.{name}", attention, c.qkv_has_bias, parts)
        yield from linear(f"{attn}.o_proj", f"{attention}/out", c.attention_has_bias, inputs=2)
        if c.qk_norm:
            yield from norm(f"{attn}.q_norm", f"{attention}/query_norm", offset=False)
            yield from norm(f"{attn}.k_norm", f"{attention}/key_norm", offset=False)
        if c.attention_sink:
            yield same(f"{attn}.sinks", f"{attention}/sink")
        yield from feed_forward(theirs, f"{ours}/feed_forward", c)
        for name, part in norms.items():
            yield from norm(f"{theirs}.{name}", f"{ours}/{part}", offset=False)
    yield from norm("model.norm", "decoder/final_norm", offset=False)


def per_layer(**fields: list) -> dict:
    """Returns the fields of a ModelConfig for lists of one value per layer. Those that differ
    between layers form `layer_pattern`: the shortest that, repeated, gives them."""
    fixed = {name: xs[0] for name, xs in fields.items() if xs.count(xs[0]) == len(xs)}
    varied = {name: xs for name, xs in fields.items() if name not in fixed}
    if not varied:
        return fixed
    columns = zip(*varied.values(), strict=True)
    layers = [dict(zip(varied, values, strict=True)) for values in columns]
    period = next(p for p in range(1, len(layers) + 1) if layers[:-p] == layers[p:])
    return fixed | {"layer_pattern": tuple(layers[:period])}


def used_window(f: Fields) -> int:
    """Returns `sliding_window`, or 0 (none) if it is null or `use_sliding_window` is false."""
    size, switch = f.get("sliding_window"), "use_sliding_window"
    return (size or 0) if switch not in f.table or f.get(switch) else 0


def windows(f: Fields, is_local: list[bool], size: int | None = None) -> list[int]:
    """Returns the window of each layer: `size` (`used_window`), or 0 (none) where `is_local` is
    False. `layer_types`, if present, takes the place of `is_local`."""
    size = used_window(f) if size is None else size
    if kinds := f.layer_kinds(len(is_local)):
        is_local = [kind == "sliding_attention" for kind in kinds]
    return [size if local else 0 for local in is_local]


def write_windows(c: ModelConfig, has_switch: bool = False) -> dict:
    """Returns `layer_types`, `sliding_window` and, with `has_switch`, `use_sliding_window`."""
    sizes = [layer.window for layer in c.layers("decoder")]
    kinds = ["sliding_attention" if size else "full_attention" for size in sizes]
    fields, size = {"layer_types": kinds}, max(sizes)
    if has_switch:
        return fields | {"use_sliding_window": size > 0, "sliding_window": size or None}
    return fields | {"sliding_window": size or 4096}


def local_and_global(
    f: Fields, theta: float, local_theta: float, is_local: list[bool], size: int | None = None
) -> dict:
    """Reads layers without a window, with base `theta`, and with one of `size`, `local_theta`."""
    positions = rotary_by_type(f, {"full_attention": theta, "sliding_attention": local_theta})
    window = windows(f, is_local, size)
    kinds = ["sliding_attention" if x else "full_attention" for x in window]
    return per_layer(window=window, position=[positions[kind] for kind in kinds])


def write_local_and_global(c: ModelConfig) -> dict:
    """Returns the fields of config.json that `local_and_global` reads."""
    fields, ropes = write_windows(c), [write_rope(x.position) for x in c.layers("decoder")]
    return fields | {"rope_parameters": dict(zip(fields["layer_types"], ropes, strict=True))}


def _read_qwen(f: Fields) -> dict:
    first, layers = f.get("max_window_layers"), f.get("num_hidden_layers")
    return rotary(f) | per_layer(window=windows(f, [i >= first for i in range(layers)]))


def _write_qwen(c: ModelConfig) -> dict:
    is_local = [layer.window > 0 for layer in c.layers("decoder")]
    first = is_local.index(True) if any(is_local) else len(is_local)
    return write_rotary(c) | write_windows(c, has_switch=True) | {"max_window_layers": first}


def _read_smollm3(f: Fields) -> dict:
    layers, every = f.get("num_hidden_layers"), f.get("no_rope_layer_interval")
    rotated = f.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if len(rotated) < layers:
        raise f.error("no_rope_layers", f"has {len(rotated)} entries for {layers} layers")
    fields = rotary(f)
    scheme = fields.pop("position")
    position = [scheme if x else "none" for x in rotated[:layers]]
    window = windows(f, [not x for x in rotated[:layers]])
    return fields | per_layer(window=window, position=position)


def _write_smollm3(c: ModelConfig) -> dict:
    positions = [layer.position for layer in c.layers("decoder")]
    rotated = next((x for x in positions if x != "none"), "rotary")
    fields = write_rotary(c.part(position=rotated)) | write_windows(c, has_switch=True)
    return fields | {"no_rope_layers": [int(x != "none") for x in positions]}


def _read_phi3(f: Fields) -> dict:
    fields = rotary(f, fraction="partial_rotary_factor")
    if fields["position"].get("scaling", {"name": "longrope"})["name"] != "longrope":
        raise f.error("rope_parameters", "is not supported: rope_type is 'default' or 'longrope'")
    return fields


def _write_phi3(c: ModelConfig) -> dict:
    original = options(options(c.position).get("scaling", "none")).get("original_length")
    return write_rotary(c) | {"original_max_position_embeddings": original or c.max_length}


def _read_olmo3(f: Fields) -> dict:
    # Transformers applies a `rope_theta` outside of rope_parameters to global layers alone.
    local = [(i + 1) % 4 != 0 for i in range(f.get("num_hidden_layers"))]
    return _OLMO | local_and_global(f, f.get("rope_theta"), _THETA, local)


_QWEN = LAYER_TYPES | {
    "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": optional(int, 32),
    "max_position_embeddings": 32768, "attention_dropout": 0.0, "use_sliding_window": False,
    "sliding_window": optional(int, 4096), "max_window_layers": count(28),
}  # fmt: skip
_FUSED_GATE = {"gate_up_proj": ("gate", "in"), "down_proj": ("out",)}
_LLAMA_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}

_THETA = 500_000.0
_OLMO_2 = ATTENTION_BIAS | {"vocab_size": 50304, "rms_norm_eps": positive(1e-5)}
_OLMO_3 = LAYER_TYPES | {"sliding_window": optional(int, 4096), "rope_theta": positive(_THETA)}
_OLMO_NORMS = {
    "post_attention_layernorm": "self_attention_residual/res_norm",
    "post_feedforward_layernorm": "feed_forward_residual/res_norm",
}
_OLMO = {"norm_placement": "res_post", "qk_norm": True, "qk_norm_joint": True}
_olmo = functools.partial(
    variant, norms=_OLMO_NORMS, special_tokens={"pad_token_id": 1, "eos_token_id": 50_279}
)

FAMILIES = [
    variant("llama", "LlamaForCausalLM", BIASES, special_tokens=_LLAMA_TOKENS),
    variant("mistral", "MistralForCausalLM", {
        "intermediate_size": 14336, "num_key_value_heads": optional(int, 8),
        "max_position_embeddings": 131072, "sliding_window": optional(int, 4096, "window"),
        "attention_dropout": 0.0,
    }, special_tokens=_LLAMA_TOKENS),
    variant("qwen2", "Qwen2ForCausalLM", _QWEN,
            lambda f: _read_qwen(f) | {"qkv_bias": True}, _write_qwen),
    variant("qwen3", "Qwen3ForCausalLM", {**_QWEN, **ATTENTION_BIAS, "head_dim": 128},
            lambda f: _read_qwen(f) | {"qk_norm": True}, _write_qwen),
    variant("smollm3", "SmolLM3ForCausalLM", {
        **BIASES, **LAYER_TYPES, "vocab_size": 128256, "hidden_size": 2048,
        "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": optional(int, 4), "max_position_embeddings": 32768,
        "tie_word_embeddings": True, "use_sliding_window": False,
        "sliding_window": optional(int), "rope_theta": positive(2_000_000.0),
        "no_rope_layers": optional(list), "no_rope_layer_interval": 4,
    }, _read_smollm3, _write_smollm3,
       special_tokens={"pad_token_id": 128_004, "bos_token_id": 128_000, "eos_token_id": 128_001}),
    variant("phi3", "Phi3ForCausalLM", {
        "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096,
        "sliding_window": optional(int, ours="window"), "rms_norm_eps": positive(1e-5),
        "resid_pdrop": field(0.0, "dropout"), "partial_rotary_factor": positive(1.0),
    }, _read_phi3, _write_phi3,
       projections={"qkv_proj": QKV}, feed_forward=functools.partial(gated, names=_FUSED_GATE),
       special_tokens={"pad_token_id": 32_000, "bos_token_id": 1, "eos_token_id": 32_000}),
    _olmo("olmo2", "Olmo2ForCausalLM", _OLMO_2, lambda f: rotary(f) | _OLMO),
    _olmo("olmo3", "Olmo3ForCausalLM", _OLMO_2 | _OLMO_3, _read_olmo3, write_local_and_global),
]  # fmt: skip
