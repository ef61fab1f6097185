"""ModernBERT (Warner et al. 2024).

A pre-norm encoder with rotary positions and gated feed-forwards. By default, every third
layer attends globally, and the others attend within a local window.
"""

from transformer.convert.family import Family
from transformer.convert.fields import (
    ACTIVATIONS,
    ACTIVATIONS_BACK,
    Field,
    Fields,
    layer_count,
    layer_kinds,
    positive,
    shortest_period,
)
from transformer.convert.rope import rotary_by_type, write_rope
from transformer.convert.weights import fused, linear, norm, same, tied
from transformer.model.config import ModelConfig

_FIELDS = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": layer_count(22),
    "num_attention_heads": 12,
    "max_position_embeddings": 8192,
    "local_attention": 128,
    "global_attn_every_n_layers": 3,
    "layer_types": Field(None, list, nullable=True),
    "rope_parameters": Field(None, dict, nullable=True),
    "global_rope_theta": positive(160_000.0),
    "local_rope_theta": positive(10_000.0),
    "norm_eps": positive(1e-5),
    "norm_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
    "classifier_bias": False,
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
    "mlp_dropout": 0.0,
}


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    layers, length = f.get("num_hidden_layers"), f.get("max_position_embeddings")
    every = f.get("global_attn_every_n_layers")
    by_default = ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    kinds = layer_kinds(f, layers) or by_default
    of_kind = {
        # Their window covers both sides of a query. Ours covers one side and the query itself.
        "sliding_attention": {"window": f.get("local_attention") // 2 + 1},
        "full_attention": {"window": 0},
    }
    theta, local_theta = f.get("global_rope_theta"), f.get("local_rope_theta")
    thetas = {"full_attention": theta, "sliding_attention": local_theta}
    for kind, position in rotary_by_type(f, thetas).items():
        of_kind[kind]["position"] = position
    bias = f.get("mlp_bias")
    f.same("classifier_bias", bias, "feed-forward and head share one bias setting")
    activation = f.one_of("hidden_activation", ACTIVATIONS)
    if f.one_of("classifier_activation", ACTIVATIONS) != activation:
        f.same(
            "classifier_activation",
            f.get("hidden_activation"),
            "feed-forward and head share an activation",
        )
    f.must("decoder_bias", True)
    return {
        "family": "encoder",
        "vocab_size": f.get("vocab_size"),
        "d_model": f.get("hidden_size"),
        "d_ff": f.get("intermediate_size"),
        "num_heads": f.get("num_attention_heads"),
        "num_encoder_layers": layers,
        "max_length": length,
        "layer_pattern": tuple(of_kind[kind] for kind in shortest_period(kinds)),
        "norm_placement": "pre",
        "norm_epsilon": f.get("norm_eps"),
        "norm_offset": f.get("norm_bias"),
        "embedding_norm": True,
        "first_norm": False,
        "activation": activation,
        "glu": True,
        "use_bias": bias,
        "attention_bias": f.get("attention_bias"),
        "head_transform": True,
        "logit_bias": True,
        "tie_embeddings": f.get("tie_word_embeddings"),
        "attention_dropout": f.get("attention_dropout"),
        "activation_dropout": f.get("mlp_dropout"),
        "initializer": "normal",
        "embedding_init_std": 0.02,
    }


def _write(c: ModelConfig) -> dict:
    layers = c.layers("encoder")
    first_layer = {bool(layer.window): layer for layer in reversed(layers)}
    full, local = first_layer.get(False, layers[0]), first_layer.get(True, layers[0])
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "intermediate_size": c.ff_size,
        "num_hidden_layers": c.num_encoder_layers,
        "num_attention_heads": c.num_heads,
        "hidden_activation": ACTIVATIONS_BACK[c.activation],
        "classifier_activation": ACTIVATIONS_BACK[c.activation],
        "max_position_embeddings": c.max_length,
        "norm_eps": c.norm_epsilon,
        "norm_bias": c.norm_offset,
        "mlp_bias": c.use_bias,
        "classifier_bias": c.use_bias,
        "attention_bias": c.attention_has_bias,
        "tie_word_embeddings": c.tie_embeddings,
        "layer_types": ["sliding_attention" if x.window else "full_attention" for x in layers],
        "local_attention": 2 * (local.window - 1) if local.window else 128,
        "rope_parameters": {
            "full_attention": write_rope(full.position),
            "sliding_attention": write_rope(local.position),
        },
    }


def _weights(c: ModelConfig):
    offset, bias = c.norm_offset, c.use_bias
    yield same("model.embeddings.tok_embeddings.weight", "embedding/embedding")
    yield from norm("model.embeddings.norm", "encoder/embedding_norm", offset)
    for i in range(c.num_encoder_layers):
        theirs, ours = f"model.layers.{i}", f"encoder/layers_{i}"
        if i or c.first_norm:
            yield from norm(
                f"{theirs}.attn_norm", f"{ours}/self_attention_residual/in_norm", offset
            )
        qkv = tuple(f"{ours}/self_attention/{part}" for part in ("query", "key", "value"))
        yield from fused(f"{theirs}.attn.Wqkv", qkv, c.qkv_has_bias)
        yield from linear(
            f"{theirs}.attn.Wo", f"{ours}/self_attention/out", c.attention_has_bias, inputs=2
        )
        yield from norm(f"{theirs}.mlp_norm", f"{ours}/feed_forward_residual/in_norm", offset)
        yield from fused(
            f"{theirs}.mlp.Wi", (f"{ours}/feed_forward/gate", f"{ours}/feed_forward/in"), bias
        )
        yield from linear(f"{theirs}.mlp.Wo", f"{ours}/feed_forward/out", bias)
    yield from norm("model.final_norm", "encoder/final_norm", offset)
    yield from linear("head.dense", "unembedding/transform", bias)
    yield from norm("head.norm", "unembedding/norm", offset)
    yield same("decoder.bias", "unembedding/bias")
    if not c.tie_embeddings:
        yield from linear("decoder", "unembedding", bias=False)


FAMILIES = [
    Family(
        "modernbert",
        "ModernBertForMaskedLM",
        "encoder",
        _read,
        _write,
        _weights,
        _FIELDS,
        special_tokens={"pad_token_id": 50_283, "bos_token_id": 50_281, "eos_token_id": 50_282},
        prefix="model.",
        heads=("head.", "decoder.", "classifier."),
        copies=lambda c: tied(c, "decoder.weight", "model.embeddings.tok_embeddings.weight"),
    )
]
