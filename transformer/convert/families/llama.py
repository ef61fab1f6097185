"""Llama (Touvron et al. 2023), Mistral, Qwen 2, Qwen 3, SmolLM3 and Phi-3.

Decoders with RMSNorm, rotary positions and a gated feed-forward. Each model type is a `Variant`,
which states how it differs from Llama. gemma.py, olmo.py and mixtral.py add others.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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
    per_layer,
    positive,
)
from transformer.convert.rope import FIELDS as ROTARY
from transformer.convert.rope import options, rotary, rotary_by_type, write_rope, write_rotary
from transformer.convert.weights import Weight, fused, linear, norm, same, tied
from transformer.model.config import ModelConfig

FIELDS = ROTARY | {
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
LAYER_TYPES = {"layer_types": Field(None, list, nullable=True)}
ATTENTION_BIAS = {"attention_bias": False}
BIASES = ATTENTION_BIAS | {"mlp_bias": False}

PRE_NORMS = {
    "input_layernorm": "self_attention_residual/in_norm",
    "post_attention_layernorm": "feed_forward_residual/in_norm",
}
"""The norms of a layer in their model -> ours."""

Weights = Callable[[str, str, ModelConfig], Iterator[Weight]]
"""weights(theirs, ours, config) yields the tensors of a sublayer, whose names begin with these."""


def separate_projections(theirs: str, ours: str, c: ModelConfig) -> Iterator[Weight]:
    for name, part in {"q_proj": "query", "k_proj": "key", "v_proj": "value"}.items():
        yield from linear(f"{theirs}.{name}", f"{ours}/{part}", c.qkv_has_bias)


def fused_projections(theirs: str, ours: str, c: ModelConfig) -> Iterator[Weight]:
    parts = tuple(f"{ours}/{part}" for part in ("query", "key", "value"))
    return fused(f"{theirs}.qkv_proj", parts, c.qkv_has_bias)


def gated(theirs: str, ours: str, c: ModelConfig) -> Iterator[Weight]:
    for name, part in {"gate_proj": "gate", "up_proj": "in", "down_proj": "out"}.items():
        yield from linear(f"{theirs}.mlp.{name}", f"{ours}/{part}", c.use_bias)


def fused_gated(theirs: str, ours: str, c: ModelConfig) -> Iterator[Weight]:
    yield from fused(f"{theirs}.mlp.gate_up_proj", (f"{ours}/gate", f"{ours}/in"), c.use_bias)
    yield from linear(f"{theirs}.mlp.down_proj", f"{ours}/out", c.use_bias)


@dataclasses.dataclass(frozen=True)
class Variant:
    """How a model type differs from Llama.

    fields: the fields of config.json that Llama lacks, or whose default differs.
    read, write: the fields of a ModelConfig, or of config.json, that are added or replaced. They
        include those of positions.
    norms: the norms of a layer, as in PRE_NORMS.
    projections, feed_forward: the tensors of queries, keys and values, and of the feed-forward.
    """

    fields: Mapping[str, Any]
    read: Callable[[Fields], dict] = rotary
    write: Callable[[ModelConfig], dict] = write_rotary
    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: PRE_NORMS)
    projections: Weights = separate_projections
    feed_forward: Weights = gated
    special_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def family(self, model_type: str, architecture: str) -> Family:
        """Returns the family of this model type."""
        return Family(
            model_type,
            architecture,
            "decoder",
            self._read,
            self._write,
            self._weights,
            FIELDS | self.fields,
            aliases=self.aliases,
            special_tokens=self.special_tokens,
            prefix="model.",
            heads=("lm_head.",),
            copies=lambda c: tied(c, "lm_head.weight", "model.embed_tokens.weight"),
            unused=(r".*rotary_emb\.inv_freq",),  # angles, which config.json determines
        )

    def _read(self, f: Fields, tensors: frozenset[str]) -> dict:
        d_model, heads = f.get("hidden_size"), f.get("num_attention_heads")
        bias = lambda name: name in self.fields and f.get(name)
        mlp, attention = bias("mlp_bias"), bias("attention_bias")
        return {
            "family": "decoder",
            "vocab_size": f.get("vocab_size"),
            "d_model": d_model,
            "d_ff": f.get("intermediate_size"),
            "num_heads": heads,
            "num_kv_heads": f.get("num_key_value_heads") or heads,
            "d_head": f.get("head_dim") or d_model // heads,
            "num_decoder_layers": f.get("num_hidden_layers"),
            "max_length": f.get("max_position_embeddings"),
            "norm_placement": "pre",
            "norm": "rmsnorm",
            "norm_epsilon": f.get("rms_norm_eps"),
            "activation": f.one_of("hidden_act", ACTIVATIONS),
            "glu": True,
            "use_bias": mlp,
            **({} if mlp == attention else {"attention_bias": attention}),
            "tie_embeddings": f.get("tie_word_embeddings"),
            "attention_dropout": f.get("attention_dropout") or 0.0,
            "initializer": "normal",
            "embedding_init_std": 0.02,
            **self.read(f),
        }

    def _write(self, c: ModelConfig) -> dict:
        theirs = {
            "vocab_size": c.vocab_size,
            "hidden_size": c.d_model,
            "intermediate_size": c.ff_size,
            "num_hidden_layers": c.num_decoder_layers,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.kv_heads,
            "rms_norm_eps": c.norm_epsilon,
            "tie_word_embeddings": c.tie_embeddings,
            "max_position_embeddings": c.max_length,
            "head_dim": c.head_size,
            "hidden_act": ACTIVATIONS_BACK[c.activation],
        }
        biases = {"attention_bias": c.qkv_has_bias, "mlp_bias": c.use_bias}
        theirs |= {name: bias for name, bias in biases.items() if name in self.fields}
        return theirs | self.write(c)

    def _weights(self, c: ModelConfig) -> Iterator[Weight]:
        yield same("model.embed_tokens.weight", "embedding/embedding")
        for i in range(c.num_decoder_layers):
            theirs, ours = f"model.layers.{i}", f"decoder/layers_{i}"
            attn, attention = f"{theirs}.self_attn", f"{ours}/self_attention"
            yield from self.projections(attn, attention, c)
            yield from linear(f"{attn}.o_proj", f"{attention}/out", c.attention_has_bias, inputs=2)
            if c.qk_norm:
                yield from norm(f"{attn}.q_norm", f"{attention}/query_norm", offset=False)
                yield from norm(f"{attn}.k_norm", f"{attention}/key_norm", offset=False)
            yield from self.feed_forward(theirs, f"{ours}/feed_forward", c)
            for name, part in self.norms.items():
                yield from norm(f"{theirs}.{name}", f"{ours}/{part}", offset=False)
        yield from norm("model.norm", "decoder/final_norm", offset=False)
        if not c.tie_embeddings:
            yield from linear("lm_head", "unembedding", bias=False)


def windows(f: Fields, size: int | None, is_local: list[bool]) -> list[int]:
    """Returns the window of each layer: `size`, or 0 (none) where `is_local` is False.

    `layer_types`, if present, takes the place of `is_local`.
    """
    if kinds := layer_kinds(f, len(is_local)):
        is_local = [kind == "sliding_attention" for kind in kinds]
    return [(size or 0) if local else 0 for local in is_local]


def used_window(f: Fields) -> int | None:
    """Returns the `sliding_window` of config.json, or None if it is not used."""
    size, is_used = f.get("sliding_window"), f.get("use_sliding_window")
    return size if is_used else None


def layer_types(c: ModelConfig) -> list[str]:
    """Returns the `layer_types` of config.json."""
    return ["sliding_attention" if x.window else "full_attention" for x in c.layers("decoder")]


def largest_window(c: ModelConfig) -> int | None:
    """Returns the `sliding_window` of config.json."""
    return max(layer.window for layer in c.layers("decoder")) or None


def local_and_global(f: Fields, thetas: Mapping[str, float], is_local: list[bool]) -> dict:
    """Reads layers with a window and layers without, each with rotary positions of their own.

    `thetas` are the default bases by layer type.
    """
    positions = rotary_by_type(f, thetas, f.get("rope_scaling"))
    window = windows(f, f.get("sliding_window"), is_local)
    kinds = ["sliding_attention" if x else "full_attention" for x in window]
    return per_layer(window=window, position=[positions[kind] for kind in kinds])


def write_local_and_global(c: ModelConfig) -> dict:
    layers = c.layers("decoder")
    positions = {kind: x.position for kind, x in zip(layer_types(c), layers, strict=True)}
    return {
        "layer_types": layer_types(c),
        "sliding_window": largest_window(c) or 4096,
        "rope_parameters": {kind: write_rope(x) for kind, x in positions.items()},
    }


def one_window(f: Fields) -> dict:
    """Reads rotary positions and a window of all layers."""
    return rotary(f) | {"window": f.get("sliding_window") or 0}


def write_one_window(c: ModelConfig) -> dict:
    return write_rotary(c) | {"sliding_window": c.window or None}


def _read_qwen(f: Fields) -> dict:
    first, layers = f.get("max_window_layers"), f.get("num_hidden_layers")
    size = used_window(f)
    local = [i >= first for i in range(layers)]
    return rotary(f) | per_layer(window=windows(f, size, local))


def _write_qwen(c: ModelConfig) -> dict:
    types, size = layer_types(c), largest_window(c)
    first = types.index("sliding_attention") if size else c.num_decoder_layers
    return write_rotary(c) | {
        "layer_types": types,
        "use_sliding_window": size is not None,
        "sliding_window": size,
        "max_window_layers": first,
    }


def _read_smollm3(f: Fields) -> dict:
    layers, every = f.get("num_hidden_layers"), f.get("no_rope_layer_interval")
    rotated = f.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(layers)]
    if len(rotated) < layers:
        raise f.error("no_rope_layers", f"has {len(rotated)} entries for {layers} layers")
    size = used_window(f)
    fields = rotary(f)
    scheme = fields.pop("position")
    position = [scheme if x else "none" for x in rotated[:layers]]
    window = windows(f, size, [not x for x in rotated[:layers]])
    return fields | per_layer(window=window, position=position)


def _write_smollm3(c: ModelConfig) -> dict:
    positions, size = [layer.position for layer in c.layers("decoder")], largest_window(c)
    rotated = next((x for x in positions if x != "none"), "rotary")
    return write_rotary(c.part(position=rotated)) | {
        "no_rope_layers": [int(x != "none") for x in positions],
        "layer_types": layer_types(c),
        "use_sliding_window": size is not None,
        "sliding_window": size,
    }


def _read_phi3(f: Fields) -> dict:
    fields = rotary(f, fraction="partial_rotary_factor")
    if fields["position"].get("scaling", {"name": "longrope"})["name"] != "longrope":
        raise f.error("rope_parameters", "is not supported: rope_type is 'default' or 'longrope'")
    f.ignore("embd_pdrop")  # Transformers ignores it, too
    window, dropout = f.get("sliding_window") or 0, f.get("resid_pdrop")
    return fields | {"window": window, "dropout": dropout}


def _write_phi3(c: ModelConfig) -> dict:
    original = options(options(c.position).get("scaling", "none")).get("original_length")
    return write_one_window(c) | {"original_max_position_embeddings": original or c.max_length}


_QWEN = LAYER_TYPES | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": optional(int, 32),
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": optional(int, 4096),
    "max_window_layers": count(28),
    "attention_dropout": 0.0,
}
_LLAMA_TOKENS = {"bos_token_id": 1, "eos_token_id": 2}

FAMILIES = [
    Variant(BIASES, special_tokens=_LLAMA_TOKENS).family("llama", "LlamaForCausalLM"),
    Variant(
        {
            "intermediate_size": 14336,
            "num_key_value_heads": optional(int, 8),
            "max_position_embeddings": 131072,
            "sliding_window": optional(int, 4096),
            "attention_dropout": 0.0,
        },
        one_window,
        write_one_window,
        special_tokens=_LLAMA_TOKENS,
    ).family("mistral", "MistralForCausalLM"),
    Variant(_QWEN, lambda f: _read_qwen(f) | {"qkv_bias": True}, _write_qwen).family(
        "qwen2", "Qwen2ForCausalLM"
    ),
    Variant(
        _QWEN | ATTENTION_BIAS | {"head_dim": 128},
        lambda f: _read_qwen(f) | {"qk_norm": True},
        _write_qwen,
    ).family("qwen3", "Qwen3ForCausalLM"),
    Variant(
        BIASES
        | LAYER_TYPES
        | {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "num_hidden_layers": layer_count(36),
            "num_attention_heads": 16,
            "num_key_value_heads": optional(int, 4),
            "max_position_embeddings": 32768,
            "rope_theta": positive(2_000_000.0),
            "use_sliding_window": False,
            "sliding_window": optional(int),
            "no_rope_layers": Field(None, list, nullable=True),
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        _read_smollm3,
        _write_smollm3,
        special_tokens={
            "pad_token_id": 128_004,
            "bos_token_id": 128_000,
            "eos_token_id": 128_001,
        },
    ).family("smollm3", "SmolLM3ForCausalLM"),
    Variant(
        {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "max_position_embeddings": 4096,
            "rms_norm_eps": positive(1e-5),
            "sliding_window": optional(int),
            "resid_pdrop": 0.0,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": positive(1.0),
        },
        _read_phi3,
        _write_phi3,
        projections=fused_projections,
        feed_forward=fused_gated,
        special_tokens={"pad_token_id": 32_000, "bos_token_id": 1, "eos_token_id": 32_000},
    ).family("phi3", "Phi3ForCausalLM"),
]
