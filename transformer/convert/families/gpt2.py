"""GPT-2 (Radford et al. 2019) and models that share its code: pre-norm, with learned positions."""

from transformer.convert.family import Family
from transformer.convert.fields import (
    ACTIVATIONS,
    ACTIVATIONS_BACK,
    Fields,
    layer_count,
    optional,
    positive,
)
from transformer.convert.weights import fused, linear, norm, same, tied
from transformer.model.config import ModelConfig

_FIELDS = {
    "vocab_size": 50257,
    "n_embd": 768,
    "n_inner": optional(int),
    "n_head": 12,
    "n_layer": layer_count(12),
    "n_positions": 1024,
    "layer_norm_epsilon": positive(1e-5),
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
    "resid_pdrop": 0.1,
    "attn_pdrop": 0.1,
}


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    d_model, d_ff = f.get("n_embd"), f.get("n_inner")
    f.must("scale_attn_by_inverse_layer_idx", False)
    f.must("add_cross_attention", False)
    f.ignore("embd_pdrop")
    return {
        "family": "decoder",
        "vocab_size": f.get("vocab_size"),
        "d_model": d_model,
        "d_ff": 4 * d_model if d_ff is None else d_ff,
        "num_heads": f.get("n_head"),
        "num_decoder_layers": f.get("n_layer"),
        "max_length": f.get("n_positions"),
        "position": "learned",
        "norm_placement": "pre",
        "norm_epsilon": f.get("layer_norm_epsilon"),
        "activation": f.one_of("activation_function", ACTIVATIONS),
        "attention_scale": None if f.get("scale_attn_weights") else 1.0,
        "tie_embeddings": f.get("tie_word_embeddings"),
        "dropout": f.get("resid_pdrop"),
        "attention_dropout": f.get("attn_pdrop"),
        "initializer": "normal",
        "embedding_init_std": 0.02,
        "residual_init_scale": True,
    }


def _write(c: ModelConfig) -> dict:
    return {
        "vocab_size": c.vocab_size,
        "n_positions": c.max_length,
        "n_embd": c.d_model,
        "n_layer": c.num_decoder_layers,
        "n_head": c.num_heads,
        "n_inner": c.ff_size,
        "activation_function": ACTIVATIONS_BACK[c.activation],
        "layer_norm_epsilon": c.norm_epsilon,
        "scale_attn_weights": c.attention_scale is None,
        "tie_word_embeddings": c.tie_embeddings,
    }


def _weights(c: ModelConfig):
    yield same("transformer.wte.weight", "embedding/embedding")
    yield same("transformer.wpe.weight", "decoder/position_embedding")
    for i in range(c.num_decoder_layers):
        theirs, ours = f"transformer.h.{i}", f"decoder/layers_{i}"
        attention = f"{ours}/self_attention"
        yield from norm(f"{theirs}.ln_1", f"{ours}/self_attention_residual/in_norm")
        qkv = tuple(f"{attention}/{part}" for part in ("query", "key", "value"))
        yield from fused(f"{theirs}.attn.c_attn", qkv, bias=True, transposed=False)
        yield from linear(
            f"{theirs}.attn.c_proj", f"{attention}/out", bias=True, inputs=2, transposed=False
        )
        yield from norm(f"{theirs}.ln_2", f"{ours}/feed_forward_residual/in_norm")
        for name, part in {"c_fc": "in", "c_proj": "out"}.items():
            yield from linear(
                f"{theirs}.mlp.{name}", f"{ours}/feed_forward/{part}", bias=True, transposed=False
            )
    yield from norm("transformer.ln_f", "decoder/final_norm")
    if not c.tie_embeddings:
        yield from linear("lm_head", "unembedding", bias=False)


FAMILIES = [
    Family(
        "gpt2",
        "GPT2LMHeadModel",
        "decoder",
        _read,
        _write,
        _weights,
        _FIELDS,
        special_tokens={"bos_token_id": 50_256, "eos_token_id": 50_256},
        prefix="transformer.",
        heads=("lm_head.",),
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        copies=lambda c: tied(c, "lm_head.weight", "transformer.wte.weight"),
        unused=(r".*\.attn\.(bias|masked_bias)",),  # the causal mask
    )
]
