"""GPT-2 (Radford et al. 2019) and models that share its code: pre-norm, with learned positions."""

from transformer.convert.family import Family
from transformer.convert.fields import Fields, field, optional, positive
from transformer.convert.weights import fused, linear, norm, same
from transformer.model.config import ModelConfig

_FIELDS = {
    "vocab_size": field(50257, "vocab_size"), "n_embd": field(768, "d_model"),
    "n_inner": optional(int, ours="d_ff"), "n_head": field(12, "num_heads"),
    "n_layer": field(12, "num_decoder_layers"), "n_positions": field(1024, "max_length"),
    "layer_norm_epsilon": positive(1e-5, "norm_epsilon"),
    "activation_function": field("gelu_new", "activation"), "scale_attn_weights": True,
    "tie_word_embeddings": field(True, "tie_embeddings"), "resid_pdrop": field(0.1, "dropout"),
    "attn_pdrop": field(0.1, "attention_dropout"),
}  # fmt: skip


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    d_ff = f.get("n_inner")
    f.must("scale_attn_by_inverse_layer_idx", False)
    f.must("add_cross_attention", False)
    f.ignore("embd_pdrop")
    return {
        "d_ff": 4 * f.get("n_embd") if d_ff is None else d_ff, "position": "learned",
        "attention_scale": None if f.get("scale_attn_weights") else 1.0,
        "residual_init_scale": True,
    }  # fmt: skip


def _write(c: ModelConfig) -> dict:
    return {"scale_attn_weights": c.attention_scale is None}


def _weights(c: ModelConfig):
    yield same("transformer.wpe.weight", "decoder/position_embedding")
    for i in range(c.num_decoder_layers):
        theirs, ours = f"transformer.h.{i}", f"decoder/layers_{i}"
        attention, feed_forward = f"{ours}/self_attention", f"{ours}/feed_forward"
        plain = {"bias": True, "transposed": False}
        yield from norm(f"{theirs}.ln_1", f"{attention}_residual/in_norm")
        yield from fused(f"{theirs}.attn.c_attn", attention, **plain)
        yield from linear(f"{theirs}.attn.c_proj", f"{attention}/out", inputs=2, **plain)
        yield from norm(f"{theirs}.ln_2", f"{feed_forward}_residual/in_norm")
        yield from linear(f"{theirs}.mlp.c_fc", f"{feed_forward}/in", **plain)
        yield from linear(f"{theirs}.mlp.c_proj", f"{feed_forward}/out", **plain)
    yield from norm("transformer.ln_f", "decoder/final_norm")


FAMILIES = [
    Family(
        "gpt2", "GPT2LMHeadModel", "decoder", _read, _write, _weights, _FIELDS,
        table="transformer.wte",
        head="lm_head",
        special_tokens={"bos_token_id": 50_256, "eos_token_id": 50_256},
        prefix="transformer.",
        aliases={"max_position_embeddings": "n_positions"},
        unused=(r".*\.attn\.(bias|masked_bias)",),  # the causal mask
    )
]  # fmt: skip
