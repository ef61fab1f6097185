"""BLOOM (Scao et al. 2022): a pre-norm decoder with ALiBi and a norm after the embedding."""

from transformer.convert.family import Family
from transformer.convert.fields import Fields, field, positive
from transformer.convert.weights import fused_by_head, linear, norm
from transformer.model.config import ModelConfig

_FIELDS = {
    "vocab_size": field(250880, "vocab_size"), "hidden_size": field(64, "d_model"),
    "n_head": field(8, "num_heads"), "n_layer": field(2, "num_decoder_layers"),
    "seq_length": field(2048, "max_length"), "layer_norm_epsilon": positive(1e-5, "norm_epsilon"),
    "tie_word_embeddings": field(True, "tie_embeddings"), "hidden_dropout": field(0.0, "dropout"),
    "attention_dropout": field(0.0, "attention_dropout"),
}  # fmt: skip
"""BLOOM has no maximum length; `seq_length`, in files on the hub, is the training length."""


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    why = "the residual stream would start after the norm"
    f.must("apply_residual_connection_post_layernorm", False, why)
    f.ignore("attention_softmax_in_fp32", "masked_softmax_fusion")
    return {
        "d_ff": 4 * f.get("hidden_size"), "position": "alibi", "embedding_norm": True,
        "activation": "gelu_tanh",
    }  # fmt: skip


def _weights(c: ModelConfig):
    yield from norm("transformer.word_embeddings_layernorm", "decoder/embedding_norm")
    for i in range(c.num_decoder_layers):
        theirs, ours = f"transformer.h.{i}", f"decoder/layers_{i}"
        attention, feed_forward = f"{ours}/self_attention", f"{ours}/feed_forward"
        yield from norm(f"{theirs}.input_layernorm", f"{attention}_residual/in_norm")
        yield from fused_by_head(f"{theirs}.self_attention.query_key_value", attention, bias=True)
        yield from linear(f"{theirs}.self_attention.dense", f"{attention}/out", bias=True, inputs=2)
        yield from norm(f"{theirs}.post_attention_layernorm", f"{feed_forward}_residual/in_norm")
        yield from linear(f"{theirs}.mlp.dense_h_to_4h", f"{feed_forward}/in", bias=True)
        yield from linear(f"{theirs}.mlp.dense_4h_to_h", f"{feed_forward}/out", bias=True)
    yield from norm("transformer.ln_f", "decoder/final_norm")


FAMILIES = [
    Family(
        "bloom", "BloomForCausalLM", "decoder", _read, lambda c: {}, _weights, _FIELDS,
        table="transformer.word_embeddings",
        head="lm_head",
        special_tokens={"bos_token_id": 1, "eos_token_id": 2},
        aliases={"n_embed": "hidden_size"},
        prefix="transformer.",
    )
]  # fmt: skip
