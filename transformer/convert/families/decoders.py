"""GPT-2 (Radford et al. 2019), OPT (Zhang et al. 2022), BLOOM (Scao et al. 2022), and GPT-NeoX
(Black et al. 2022) with Pythia: pre-norm decoders with LayerNorm. OPT-350m is post-norm."""

from transformer.convert.families import bart
from transformer.convert.family import Family
from transformer.convert.fields import Fields, field, optional, positive
from transformer.convert.rope import ROPE, rotary, write_rotary
from transformer.convert.weights import fused, fused_by_head, linear, norm, same
from transformer.model.config import ModelConfig

_GPT2 = {
    "vocab_size": field(50257, "vocab_size"), "n_embd": field(768, "d_model"),
    "n_inner": optional(int, ours="d_ff"), "n_head": field(12, "num_heads"),
    "n_layer": field(12, "num_decoder_layers"), "n_positions": field(1024, "max_length"),
    "layer_norm_epsilon": positive(1e-5, "norm_epsilon"),
    "activation_function": field("gelu_new", "activation"), "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": field(False, "attention_layer_scale"),
    "tie_word_embeddings": field(True, "tie_embeddings"), "resid_pdrop": field(0.1, "dropout"),
    "attn_pdrop": field(0.1, "attention_dropout"),
}  # fmt: skip
_OPT = {
    "vocab_size": field(50272, "vocab_size"), "hidden_size": field(768, "d_model"),
    "word_embed_proj_dim": optional(int, ours="d_embedding"), "ffn_dim": field(3072, "d_ff"),
    "num_attention_heads": field(12, "num_heads"),
    "num_hidden_layers": field(12, "num_decoder_layers"),
    "max_position_embeddings": field(2048, "max_length"), "do_layer_norm_before": True,
    "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": field(True, "norm_gain"),
    "activation_function": field("relu", "activation"), "enable_bias": field(True, "use_bias"),
    "tie_word_embeddings": field(True, "tie_embeddings"), "dropout": field(0.1, "dropout"),
    "attention_dropout": field(0.0, "attention_dropout"),
}  # fmt: skip
_BLOOM = {
    "vocab_size": field(250880, "vocab_size"), "hidden_size": field(64, "d_model"),
    "n_head": field(8, "num_heads"), "n_layer": field(2, "num_decoder_layers"),
    # BLOOM has no maximum length. This field, in files on the hub, is the training length.
    "seq_length": field(2048, "max_length"), "layer_norm_epsilon": positive(1e-5, "norm_epsilon"),
    "tie_word_embeddings": field(True, "tie_embeddings"), "hidden_dropout": field(0.0, "dropout"),
    "attention_dropout": field(0.0, "attention_dropout"),
}  # fmt: skip
_NEOX = ROPE | {
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


def _read_gpt2(f: Fields, tensors: frozenset[str]) -> dict:
    f.must("add_cross_attention", False)
    scale = None if f.get("scale_attn_weights") else 1.0
    return {"position": "learned", "attention_scale": scale, "residual_init_scale": True}


def _gpt2_weights(c: ModelConfig):
    yield same("transformer.wpe.weight", "decoder/position_embedding")
    for i in range(c.num_decoder_layers):
        theirs, ours = f"transformer.h.{i}", f"decoder/layers_{i}"
        attn, feed_forward = f"{ours}/self_attention", f"{ours}/feed_forward"
        plain = {"bias": True, "transposed": False}
        yield from norm(f"{theirs}.ln_1", f"{attn}_residual/in_norm")
        yield from fused(f"{theirs}.attn.c_attn", attn, **plain)
        yield from linear(f"{theirs}.attn.c_proj", f"{attn}/out", inputs=2, **plain)
        yield from norm(f"{theirs}.ln_2", f"{feed_forward}_residual/in_norm")
        yield from linear(f"{theirs}.mlp.c_fc", f"{feed_forward}/in", **plain)
        yield from linear(f"{theirs}.mlp.c_proj", f"{feed_forward}/out", **plain)
    yield from norm("transformer.ln_f", "decoder/final_norm")


def _read_opt(f: Fields, tensors: frozenset[str]) -> dict:
    width = f.get("word_embed_proj_dim")
    before = {"name": "pre", "final_norm": False} if f.get("_remove_final_layer_norm") else "pre"
    return {
        "d_embedding": 0 if width in (None, f.get("hidden_size")) else width,
        "position": {"name": "learned", "offset": 2},
        "norm_placement": before if f.get("do_layer_norm_before") else "post", "norm_epsilon": 1e-5,
        "norm_offset": f.get("layer_norm_elementwise_affine"),
    }  # fmt: skip


def _write_opt(c: ModelConfig) -> dict:
    placement = c.placement("decoder")
    removed = placement.in_norm and not placement.final_norm
    return {"do_layer_norm_before": placement.in_norm, "_remove_final_layer_norm": removed}


def _opt_weights(c: ModelConfig):
    root = "model.decoder"
    yield same(f"{root}.embed_positions.weight", "decoder/position_embedding")
    if c.d_embedding:
        yield from linear(f"{root}.project_in", "embedding/project", bias=False)
        yield from linear(f"{root}.project_out", "unembedding/project", bias=False)
    for i in range(c.num_decoder_layers):
        yield from bart.layer(f"{root}.layers.{i}", f"decoder/layers_{i}", c)
    if c.placement("decoder").final_norm:
        ours = "decoder/final_norm"
        yield from norm(f"{root}.final_layer_norm", ours, gain=c.norm_gain, offset=c.norm_offset)


def _read_bloom(f: Fields, tensors: frozenset[str]) -> dict:
    why = "the residual stream would start after the norm"
    f.must("apply_residual_connection_post_layernorm", False, why)
    return {"position": "alibi", "embedding_norm": True, "activation": "gelu_tanh"}


def _bloom_weights(c: ModelConfig):
    yield from norm("transformer.word_embeddings_layernorm", "decoder/embedding_norm")
    yield from _neox_weights(c, "transformer.h", "self_attention", "transformer.ln_f")


def _neox_weights(
    c: ModelConfig, theirs="gpt_neox.layers", attention="attention",
    final_norm="gpt_neox.final_layer_norm",
):  # fmt: skip
    """Yields the layers and the final norm of GPT-NeoX and of BLOOM, which has other names."""
    residuals = ("self_attention_residual/in_norm", "feed_forward_residual/in_norm")
    norms = ("residual/in_norm", "residual/in_norm_1") if c.parallel else residuals
    for i in range(c.num_decoder_layers):
        layer, ours = f"{theirs}.{i}", f"decoder/layers_{i}"
        attn, bias = f"{ours}/self_attention", c.attention_has_bias
        yield from norm(f"{layer}.input_layernorm", f"{ours}/{norms[0]}")
        yield from fused_by_head(f"{layer}.{attention}.query_key_value", attn, bias)
        yield from linear(f"{layer}.{attention}.dense", f"{attn}/out", bias, inputs=2)
        yield from norm(f"{layer}.post_attention_layernorm", f"{ours}/{norms[1]}")
        yield from linear(f"{layer}.mlp.dense_h_to_4h", f"{ours}/feed_forward/in", bias=True)
        yield from linear(f"{layer}.mlp.dense_4h_to_h", f"{ours}/feed_forward/out", bias=True)
    yield from norm(final_norm, "decoder/final_norm")


def _read_neox(f: Fields, tensors: frozenset[str]) -> dict:
    bias = None if f.get("attention_bias") else False
    return rotary(f, theta="rotary_emb_base", fraction="rotary_pct") | {"attention_bias": bias}


FAMILIES = [
    Family(
        "gpt2", "GPT2LMHeadModel", "decoder", _read_gpt2,
        lambda c: {"scale_attn_weights": c.attention_scale is None}, _gpt2_weights, _GPT2,
        table="transformer.wte", head="lm_head", prefix="transformer.",
        special_tokens={"bos_token_id": 50_256, "eos_token_id": 50_256},
        aliases={"max_position_embeddings": "n_positions"},
        unused=(r".*\.attn\.(bias|masked_bias)",),  # the causal mask
    ),
    Family(
        "opt", "OPTForCausalLM", "decoder", _read_opt, _write_opt, _opt_weights, _OPT,
        table="model.decoder.embed_tokens", head="lm_head", prefix="model.",
        special_tokens={"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2},
    ),
    Family(
        "bloom", "BloomForCausalLM", "decoder", _read_bloom, lambda c: {}, _bloom_weights, _BLOOM,
        table="transformer.word_embeddings", head="lm_head", prefix="transformer.",
        special_tokens={"bos_token_id": 1, "eos_token_id": 2}, aliases={"n_embed": "hidden_size"},
    ),
    Family(
        "gpt_neox", "GPTNeoXForCausalLM", "decoder", _read_neox,
        lambda c: write_rotary(c, partial_rotary_factor=1.0), _neox_weights, _NEOX,
        table="gpt_neox.embed_in", head="embed_out", prefix="gpt_neox.",
        special_tokens={"bos_token_id": 0, "eos_token_id": 2},
        # the causal mask; angles, which config.json determines
        unused=(r".*\.attention\.(bias|masked_bias)", r".*rotary_emb\.inv_freq"),
    ),
]  # fmt: skip
