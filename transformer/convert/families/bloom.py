"""BLOOM (Scao et al. 2022): a pre-norm decoder with ALiBi and a norm after the embedding."""

from transformer.convert.family import Family
from transformer.convert.fields import Fields, layer_count, positive
from transformer.convert.weights import fused_by_head, linear, norm, same, tied
from transformer.model.config import ModelConfig

_FIELDS = {
    "vocab_size": 250880,
    "hidden_size": 64,
    "n_head": 8,
    "n_layer": layer_count(2),
    "seq_length": 2048,
    "layer_norm_epsilon": positive(1e-5),
    "tie_word_embeddings": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
"""Fields that BLOOM reads, with their defaults.

BLOOM has no maximum length; `seq_length`, in files on the hub, is the training length.
"""


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    d_model = f.get("hidden_size")
    f.must(
        "apply_residual_connection_post_layernorm",
        False,
        "the residual stream would start after the norm",
    )
    f.ignore("attention_softmax_in_fp32", "masked_softmax_fusion")
    return {
        "family": "decoder",
        "vocab_size": f.get("vocab_size"),
        "d_model": d_model,
        "d_ff": 4 * d_model,
        "num_heads": f.get("n_head"),
        "num_decoder_layers": f.get("n_layer"),
        "max_length": f.get("seq_length"),
        "position": "alibi",
        "norm_placement": "pre",
        "norm_epsilon": f.get("layer_norm_epsilon"),
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "tie_embeddings": f.get("tie_word_embeddings"),
        "dropout": f.get("hidden_dropout"),
        "attention_dropout": f.get("attention_dropout"),
        "initializer": "normal",
        "embedding_init_std": 0.02,
    }


def _write(c: ModelConfig) -> dict:
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "n_layer": c.num_decoder_layers,
        "n_head": c.num_heads,
        "layer_norm_epsilon": c.norm_epsilon,
        "tie_word_embeddings": c.tie_embeddings,
        "seq_length": c.max_length,
    }


def _weights(c: ModelConfig):
    yield same("transformer.word_embeddings.weight", "embedding/embedding")
    yield from norm("transformer.word_embeddings_layernorm", "decoder/embedding_norm")
    for i in range(c.num_decoder_layers):
        theirs, ours = f"transformer.h.{i}", f"decoder/layers_{i}"
        attention = f"{ours}/self_attention"
        yield from norm(f"{theirs}.input_layernorm", f"{ours}/self_attention_residual/in_norm")
        qkv = tuple(f"{attention}/{part}" for part in ("query", "key", "value"))
        yield from fused_by_head(f"{theirs}.self_attention.query_key_value", qkv, bias=True)
        yield from linear(f"{theirs}.self_attention.dense", f"{attention}/out", bias=True, inputs=2)
        yield from norm(
            f"{theirs}.post_attention_layernorm", f"{ours}/feed_forward_residual/in_norm"
        )
        yield from linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}/feed_forward/in", bias=True)
        yield from linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}/feed_forward/out", bias=True)
    yield from norm("transformer.ln_f", "decoder/final_norm")
    if not c.tie_embeddings:
        yield from linear("lm_head", "unembedding", bias=False)


FAMILIES = [
    Family(
        "bloom",
        "BloomForCausalLM",
        "decoder",
        _read,
        _write,
        _weights,
        _FIELDS,
        special_tokens={"bos_token_id": 1, "eos_token_id": 2},
        aliases={
            "n_embed": "hidden_size",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        prefix="transformer.",
        heads=("lm_head.",),
        copies=lambda c: tied(c, "lm_head.weight", "transformer.word_embeddings.weight"),
    )
]
