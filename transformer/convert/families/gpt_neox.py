"""GPT-NeoX (Black et al. 2022) and Pythia.

Decoders with partial rotary positions, and with attention and feed-forward in parallel.
"""

from transformer.convert.family import Family
from transformer.convert.fields import Fields, field, positive
from transformer.convert.rope import ROPE, rotary, write_rotary
from transformer.convert.weights import fused_by_head, linear, norm
from transformer.model.config import ModelConfig

_FIELDS = ROPE | {
    "vocab_size": field(50432, "vocab_size"), "hidden_size": field(6144, "d_model"),
    "intermediate_size": field(24576, "d_ff"), "num_attention_heads": field(64, "num_heads"),
    "num_hidden_layers": field(44, "num_decoder_layers"), "max_position_embeddings": 2048,
    "rotary_emb_base": positive(10_000.0), "rotary_pct": positive(0.25),
    "layer_norm_eps": positive(1e-5, "norm_epsilon"),
    "use_parallel_residual": field(True, "parallel"), "hidden_act": field("gelu", "activation"),
    "attention_bias": field(True, "attention_bias"),
    "tie_word_embeddings": field(False, "tie_embeddings"), "hidden_dropout": field(0.0, "dropout"),
    "attention_dropout": field(0.0, "attention_dropout"),
}  # fmt: skip


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    return {
        **rotary(f, theta="rotary_emb_base", fraction="rotary_pct"),
        "attention_bias": None if f.get("attention_bias") else False,
    }


def _write(c: ModelConfig) -> dict:
    return write_rotary(c, partial_rotary_factor=1.0)


def _weights(c: ModelConfig):
    residuals = ("self_attention_residual/in_norm", "feed_forward_residual/in_norm")
    norms = ("residual/in_norm", "residual/in_norm_1") if c.parallel else residuals
    for i in range(c.num_decoder_layers):
        theirs, ours = f"gpt_neox.layers.{i}", f"decoder/layers_{i}"
        attention, bias = f"{ours}/self_attention", c.attention_has_bias
        yield from norm(f"{theirs}.input_layernorm", f"{ours}/{norms[0]}")
        yield from fused_by_head(f"{theirs}.attention.query_key_value", attention, bias)
        yield from linear(f"{theirs}.attention.dense", f"{attention}/out", bias, inputs=2)
        yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}/{norms[1]}")
        yield from linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}/feed_forward/in", bias=True)
        yield from linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}/feed_forward/out", bias=True)
    yield from norm("gpt_neox.final_layer_norm", "decoder/final_norm")


FAMILIES = [
    Family(
        "gpt_neox", "GPTNeoXForCausalLM", "decoder", _read, _write, _weights, _FIELDS,
        table="gpt_neox.embed_in",
        head="embed_out",
        special_tokens={"bos_token_id": 0, "eos_token_id": 2},
        prefix="gpt_neox.",
        # the causal mask; angles, which config.json determines
        unused=(r".*\.attention\.(bias|masked_bias)", r".*rotary_emb\.inv_freq"),
    )
]  # fmt: skip
