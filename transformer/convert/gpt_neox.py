"""GPT-NeoX (Black et al. 2022) and Pythia: a decoder with partial rotary positions, attention beside the feed-forward."""

from transformer.convert.family import Family
from transformer.convert.fields import ACTIVATIONS, ACTIVATIONS_BACK, Fields, rotary, rotary_back
from transformer.convert.weights import fused_by_head, linear, norm, same
from transformer.model.config import ModelConfig


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    return {
        "family": "decoder",
        "vocab_size": f.get("vocab_size", 50432),
        "d_model": f.get("hidden_size", 6144),
        "d_ff": f.get("intermediate_size", 24576),
        "num_heads": f.get("num_attention_heads", 64),
        "num_decoder_layers": f.get("num_hidden_layers", 44),
        **rotary(f, max_length=2048, fraction=0.25),
        "norm_placement": "pre",
        "norm_epsilon": f.get("layer_norm_eps", 1e-5),
        "parallel": f.get("use_parallel_residual", True),
        "activation": f.one_of("hidden_act", "gelu", ACTIVATIONS),
        "attention_bias": None if f.get("attention_bias", True) else False,
        "tie_embeddings": f.get("tie_word_embeddings", False),
        "dropout": f.get("hidden_dropout", 0.0),
        "attention_dropout": f.get("attention_dropout", 0.0),
        "initializer": "normal",
        "embedding_init_std": 0.02,
    }


def _write(c: ModelConfig) -> dict:
    return {
        "vocab_size": c.vocab_size, "hidden_size": c.d_model, "num_hidden_layers": c.num_decoder_layers, "num_attention_heads": c.num_heads,
        "intermediate_size": c.d_ff, "hidden_act": ACTIVATIONS_BACK[c.activation], "layer_norm_eps": c.norm_epsilon, "use_parallel_residual": c.parallel, "attention_bias": c.attention_has_bias,
        "tie_word_embeddings": c.tie_embeddings, **rotary_back(c, partial_rotary_factor=1.0),
    }  # fmt: skip


def _weights(c: ModelConfig):
    residuals = ("self_attention_residual/in_norm", "feed_forward_residual/in_norm")
    attention_norm, feed_forward_norm = (
        ("residual/in_norm", "residual/in_norm_1") if c.parallel else residuals
    )
    yield same("gpt_neox.embed_in.weight", "embedding/embedding")
    for i in range(c.num_decoder_layers):
        theirs, ours = f"gpt_neox.layers.{i}", f"decoder/layers_{i}"
        attention, bias = f"{ours}/self_attention", c.attention_has_bias
        yield from norm(f"{theirs}.input_layernorm", f"{ours}/{attention_norm}")
        qkv = tuple(f"{attention}/{part}" for part in ("query", "key", "value"))
        yield from fused_by_head(f"{theirs}.attention.query_key_value", qkv, bias)
        yield from linear(f"{theirs}.attention.dense", f"{attention}/out", bias, inputs=2)
        yield from norm(f"{theirs}.post_attention_layernorm", f"{ours}/{feed_forward_norm}")
        yield from linear(f"{theirs}.mlp.dense_h_to_4h", f"{ours}/feed_forward/in", bias=True)
        yield from linear(f"{theirs}.mlp.dense_4h_to_h", f"{ours}/feed_forward/out", bias=True)
    yield from norm("gpt_neox.final_layer_norm", "decoder/final_norm")
    if not c.tie_embeddings:
        yield from linear("embed_out", "unembedding", bias=False)


FAMILY = Family(
    "gpt_neox", "GPTNeoXForCausalLM", "decoder", _read, _write, _weights, prefix="gpt_neox.",
    ignored=(r".*\.attention\.(bias|masked_bias)", r".*rotary_emb\.inv_freq", r"embed_out\.weight"),
)  # fmt: skip
