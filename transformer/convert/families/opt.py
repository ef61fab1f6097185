"""OPT (Zhang et al. 2022): a pre-norm decoder with learned positions.

OPT-350m is post-norm, with a narrower embedding.
"""

from transformer.convert.family import Family
from transformer.convert.fields import Fields, field, optional
from transformer.convert.weights import attention, linear, norm, same
from transformer.model.config import ModelConfig

_FIELDS = {
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


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    width = f.get("word_embed_proj_dim")
    before = {"name": "pre", "final_norm": False} if f.get("_remove_final_layer_norm") else "pre"
    return {
        "d_embedding": 0 if width in (None, f.get("hidden_size")) else width,
        "position": {"name": "learned", "offset": 2},
        "norm_placement": before if f.get("do_layer_norm_before") else "post", "norm_epsilon": 1e-5,
        "norm_offset": f.get("layer_norm_elementwise_affine"),
    }  # fmt: skip


def _write(c: ModelConfig) -> dict:
    placement = c.placement("decoder")
    return {
        "do_layer_norm_before": placement.in_norm,
        "_remove_final_layer_norm": placement.in_norm and not placement.final_norm,
    }


def _weights(c: ModelConfig):
    placement, root = c.placement("decoder"), "model.decoder"
    affine = {"gain": c.norm_gain, "offset": c.norm_offset}
    where = "in_norm" if placement.in_norm else "out_norm"
    yield same(f"{root}.embed_positions.weight", "decoder/position_embedding")
    if c.d_embedding:
        yield from linear(f"{root}.project_in", "embedding/project", bias=False)
        yield from linear(f"{root}.project_out", "unembedding/project", bias=False)
    for i in range(c.num_decoder_layers):
        theirs, ours = f"{root}.layers.{i}", f"decoder/layers_{i}"
        attn, feed_forward = f"{ours}/self_attention", f"{ours}/feed_forward"
        yield from attention(f"{theirs}.self_attn", attn, c.use_bias)
        yield from norm(f"{theirs}.self_attn_layer_norm", f"{attn}_residual/{where}", **affine)
        yield from linear(f"{theirs}.fc1", f"{feed_forward}/in", c.use_bias)
        yield from linear(f"{theirs}.fc2", f"{feed_forward}/out", c.use_bias)
        yield from norm(f"{theirs}.final_layer_norm", f"{feed_forward}_residual/{where}", **affine)
    if placement.final_norm:
        yield from norm(f"{root}.final_layer_norm", "decoder/final_norm", **affine)


FAMILIES = [
    Family(
        "opt", "OPTForCausalLM", "decoder", _read, _write, _weights, _FIELDS,
        table="model.decoder.embed_tokens",
        head="lm_head",
        special_tokens={"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2},
        prefix="model.",
    )
]  # fmt: skip
