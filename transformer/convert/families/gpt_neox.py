"""GPT-NeoX (Black et al. 2022) and Pythia.

Decoders with partial rotary positions, and with attention and feed-forward in parallel.
"""

from transformer.convert.family import Family
from transformer.convert.fields import ACTIVATIONS, ACTIVATIONS_BACK, Fields, layer_count, positive
from transformer.convert.rope import FIELDS as ROTARY
from transformer.convert.rope import rotary, write_rotary
from transformer.convert.weights import fused_by_head, linear, norm, same, tied
from transformer.model.config import ModelConfig

_FIELDS = ROTARY | {
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 64,
    "num_hidden_layers": layer_count(44),
    "max_position_embeddings": 2048,
    "rotary_emb_base": positive(10_000.0),
    "rotary_pct": positive(0.25),
    "layer_norm_eps": positive(1e-5),
    "use_parallel_residual": True,
    "hidden_act": "gelu",
    "attention_bias": True,
    "tie_word_embeddings": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    return {
        "family": "decoder",
        "vocab_size": f.get("vocab_size"),
        "d_model": f.get("hidden_size"),
        "d_ff": f.get("intermediate_size"),
        "num_heads": f.get("num_attention_heads"),
        "num_decoder_layers": f.get("num_hidden_layers"),
        **rotary(f, theta="rotary_emb_base", fraction="rotary_pct"),
        "norm_placement": "pre",
        "norm_epsilon": f.get("layer_norm_eps"),
        "parallel": f.get("use_parallel_residual"),
        "activation": f.one_of("hidden_act", ACTIVATIONS),
        "attention_bias": None if f.get("attention_bias") else False,
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
        "num_hidden_layers": c.num_decoder_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.ff_size,
        "hidden_act": ACTIVATIONS_BACK[c.activation],
        "layer_norm_eps": c.norm_epsilon,
        "use_parallel_residual": c.parallel,
        "attention_bias": c.attention_has_bias,
        "tie_word_embeddings": c.tie_embeddings,
        **write_rotary(c, partial_rotary_factor=1.0),
    }


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


FAMILIES = [
    Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "decoder",
        _read,
        _write,
        _weights,
        _FIELDS,
        special_tokens={"bos_token_id": 0, "eos_token_id": 2},
        prefix="gpt_neox.",
        heads=("embed_out.",),
        copies=lambda c: tied(c, "embed_out.weight", "gpt_neox.embed_in.weight"),
        # the causal mask; angles, which config.json determines
        unused=(r".*\.attention\.(bias|masked_bias)", r".*rotary_emb\.inv_freq"),
    )
]
