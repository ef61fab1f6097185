"""OPT (Zhang et al. 2022): a pre-norm decoder with learned positions.

OPT-350m is post-norm, with a narrower embedding.
"""

from transformer.convert.family import Family
from transformer.convert.fields import ACTIVATIONS, ACTIVATIONS_BACK, Fields, layer_count, optional
from transformer.convert.weights import attention, linear, norm, same, tied
from transformer.model.config import ModelConfig

_FIELDS = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "word_embed_proj_dim": optional(int),
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": layer_count(12),
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "layer_norm_elementwise_affine": True,
    "activation_function": "relu",
    "enable_bias": True,
    "tie_word_embeddings": True,
    "dropout": 0.1,
    "attention_dropout": 0.0,
}


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    d_model, pre = f.get("hidden_size"), f.get("do_layer_norm_before")
    d_embedding = f.get("word_embed_proj_dim") or d_model
    before = {"name": "pre", "final_norm": False} if f.get("_remove_final_layer_norm") else "pre"
    affine = f.get("layer_norm_elementwise_affine")
    return {
        "family": "decoder",
        "vocab_size": f.get("vocab_size"),
        "d_model": d_model,
        "d_ff": f.get("ffn_dim"),
        "num_heads": f.get("num_attention_heads"),
        "num_decoder_layers": f.get("num_hidden_layers"),
        "max_length": f.get("max_position_embeddings"),
        "d_embedding": 0 if d_embedding == d_model else d_embedding,
        "position": {"name": "learned", "offset": 2},
        "norm_placement": before if pre else "post",
        "norm_epsilon": 1e-5,
        "norm_gain": affine,
        "norm_offset": affine,
        "activation": f.one_of("activation_function", ACTIVATIONS),
        "use_bias": f.get("enable_bias"),
        "tie_embeddings": f.get("tie_word_embeddings"),
        "dropout": f.get("dropout"),
        "attention_dropout": f.get("attention_dropout"),
        "initializer": "normal",
        "embedding_init_std": 0.02,
    }


def _write(c: ModelConfig) -> dict:
    placement = c.placement("decoder")
    return {
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.num_decoder_layers,
        "ffn_dim": c.ff_size,
        "max_position_embeddings": c.max_length,
        "do_layer_norm_before": placement.in_norm,
        "word_embed_proj_dim": c.embedding_size,
        "_remove_final_layer_norm": placement.in_norm and not placement.final_norm,
        "num_attention_heads": c.num_heads,
        "activation_function": ACTIVATIONS_BACK[c.activation],
        "enable_bias": c.use_bias,
        "layer_norm_elementwise_affine": c.norm_gain,
        "tie_word_embeddings": c.tie_embeddings,
    }


def _weights(c: ModelConfig):
    placement, root = c.placement("decoder"), "model.decoder"
    affine = {"gain": c.norm_gain, "offset": c.norm_offset}
    where = "in_norm" if placement.in_norm else "out_norm"
    yield same(f"{root}.embed_tokens.weight", "embedding/embedding")
    yield same(f"{root}.embed_positions.weight", "decoder/position_embedding")
    if c.d_embedding:
        yield from linear(f"{root}.project_in", "embedding/project", bias=False)
        yield from linear(f"{root}.project_out", "unembedding/project", bias=False)
    for i in range(c.num_decoder_layers):
        theirs, ours = f"{root}.layers.{i}", f"decoder/layers_{i}"
        yield from attention(f"{theirs}.self_attn", f"{ours}/self_attention", c.use_bias)
        yield from norm(
            f"{theirs}.self_attn_layer_norm", f"{ours}/self_attention_residual/{where}", **affine
        )
        yield from linear(f"{theirs}.fc1", f"{ours}/feed_forward/in", c.use_bias)
        yield from linear(f"{theirs}.fc2", f"{ours}/feed_forward/out", c.use_bias)
        yield from norm(
            f"{theirs}.final_layer_norm", f"{ours}/feed_forward_residual/{where}", **affine
        )
    if placement.final_norm:
        yield from norm(f"{root}.final_layer_norm", "decoder/final_norm", **affine)
    if not c.tie_embeddings:
        yield from linear("lm_head", "unembedding", bias=False)


FAMILIES = [
    Family(
        "opt",
        "OPTForCausalLM",
        "decoder",
        _read,
        _write,
        _weights,
        _FIELDS,
        special_tokens={"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2},
        prefix="model.",
        heads=("lm_head.",),
        copies=lambda c: tied(c, "lm_head.weight", "model.decoder.embed_tokens.weight"),
    )
]
