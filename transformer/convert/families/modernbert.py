"""ModernBERT (Warner et al. 2024): a pre-norm encoder with rotary positions and gated
feed-forwards. By default, every third layer attends globally, the others within a local window."""

from transformer.convert.families.llama import local_and_global
from transformer.convert.family import Family
from transformer.convert.fields import ACTIVATIONS, Fields, field, optional, positive
from transformer.convert.rope import write_rope
from transformer.convert.weights import fused, linear, norm, same
from transformer.model.config import ModelConfig

_FIELDS = {
    "vocab_size": field(50368, "vocab_size"), "hidden_size": field(768, "d_model"),
    "intermediate_size": field(1152, "d_ff"), "num_hidden_layers": field(22, "num_encoder_layers"),
    "num_attention_heads": field(12, "num_heads"),
    "max_position_embeddings": field(8192, "max_length"), "local_attention": 128,
    "global_attn_every_n_layers": 3, "layer_types": optional(list),
    "rope_parameters": optional(dict), "global_rope_theta": positive(160_000.0),
    "local_rope_theta": positive(10_000.0), "norm_eps": positive(1e-5, "norm_epsilon"),
    "norm_bias": field(False, "norm_offset"), "mlp_bias": field(False, "use_bias"),
    "attention_bias": field(False, "attention_bias"), "classifier_bias": field(False, "use_bias"),
    "hidden_activation": field("gelu", "activation"),
    "classifier_activation": field("gelu", "activation"),
    "tie_word_embeddings": field(True, "tie_embeddings"),
    "attention_dropout": field(0.0, "attention_dropout"),
    "mlp_dropout": field(0.0, "activation_dropout"),
}  # fmt: skip


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    layers, every = f.get("num_hidden_layers"), f.get("global_attn_every_n_layers")
    theta, local_theta = f.get("global_rope_theta"), f.get("local_rope_theta")
    # Their window covers both sides of a query. Ours covers one side and the query itself.
    size, is_local = f.get("local_attention") // 2 + 1, [i % every > 0 for i in range(layers)]
    by_layer = local_and_global(f, theta, local_theta, is_local, size)
    f.must("classifier_bias", f.get("mlp_bias"), "feed-forward and head share one bias setting")
    hidden, head = "hidden_activation", "classifier_activation"
    if f.one_of(head, ACTIVATIONS) != f.one_of(hidden, ACTIVATIONS):
        f.must(head, f.get(hidden), "feed-forward and head share an activation")
    f.must("decoder_bias", True)
    return {
        **by_layer, "embedding_norm": True, "first_norm": False, "glu": True,
        "head_transform": True, "logit_bias": True,
    }  # fmt: skip


def _write(c: ModelConfig) -> dict:
    layers = c.layers("encoder")
    first_layer = {bool(layer.window): layer for layer in reversed(layers)}
    full, local = first_layer.get(False, layers[0]), first_layer.get(True, layers[0])
    by_type = {"full_attention": full, "sliding_attention": local}
    return {
        "layer_types": ["sliding_attention" if x.window else "full_attention" for x in layers],
        "local_attention": 2 * (local.window - 1) if local.window else 128,
        "rope_parameters": {kind: write_rope(x.position) for kind, x in by_type.items()},
    }


def _weights(c: ModelConfig):
    offset, bias = c.norm_offset, c.use_bias
    yield from norm("model.embeddings.norm", "encoder/embedding_norm", offset)
    for i in range(c.num_encoder_layers):
        theirs, ours = f"model.layers.{i}", f"encoder/layers_{i}"
        attention, feed_forward = f"{ours}/self_attention", f"{ours}/feed_forward"
        if i or c.first_norm:
            yield from norm(f"{theirs}.attn_norm", f"{attention}_residual/in_norm", offset)
        yield from fused(f"{theirs}.attn.Wqkv", attention, c.qkv_has_bias)
        yield from linear(f"{theirs}.attn.Wo", f"{attention}/out", c.attention_has_bias, inputs=2)
        yield from norm(f"{theirs}.mlp_norm", f"{feed_forward}_residual/in_norm", offset)
        yield from fused(f"{theirs}.mlp.Wi", feed_forward, bias, ("gate", "in"))
        yield from linear(f"{theirs}.mlp.Wo", f"{feed_forward}/out", bias)
    yield from norm("model.final_norm", "encoder/final_norm", offset)
    yield from linear("head.dense", "unembedding/transform", bias)
    yield from norm("head.norm", "unembedding/norm", offset)
    yield same("decoder.bias", "unembedding/bias")


FAMILIES = [
    Family(
        "modernbert", "ModernBertForMaskedLM", "encoder", _read, _write, _weights, _FIELDS,
        table="model.embeddings.tok_embeddings", head="decoder", prefix="model.",
        heads=("head.", "classifier."),
        special_tokens={"pad_token_id": 50_283, "bos_token_id": 50_281, "eos_token_id": 50_282},
    )
]  # fmt: skip
