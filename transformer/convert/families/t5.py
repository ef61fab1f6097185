"""T5 (Raffel et al. 2020), v1.0 and v1.1, and mT5 (Xue et al. 2021), with unscaled logits. A
pre-norm encoder-decoder with bucketed relative distances, RMSNorm and no biases."""

from transformer.convert import fields
from transformer.convert.family import Family
from transformer.convert.fields import Field, Fields, changed, field, optional, positive
from transformer.convert.rope import options
from transformer.convert.weights import Copy, attention, linear, norm, same
from transformer.errors import UserError
from transformer.model.config import ModelConfig

_PROJECTIONS = {
    "relu": ("relu", False), "gelu": ("gelu", False), "silu": ("silu", False),
    "gelu_new": ("gelu_tanh", False), "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True), "gated-relu": ("relu", True),
}  # fmt: skip
"""feed_forward_proj -> our (activation, glu). T5's gelu is approximate if gated, else exact."""

_FIELDS = {
    "vocab_size": field(32128, "vocab_size"), "d_model": field(512, "d_model"),
    "d_kv": field(64, "d_head"), "d_ff": field(2048, "d_ff"),
    "num_layers": field(6, "num_encoder_layers"),
    "num_decoder_layers": optional(int, ours="num_decoder_layers"),
    "num_heads": field(8, "num_heads"), "n_positions": field(512, "max_length"),
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "layer_norm_epsilon": positive(1e-6, "norm_epsilon"), "feed_forward_proj": "relu",
    "dense_act_fn": "", "is_gated_act": False, "dropout_rate": 0.1,
    "tie_word_embeddings": Field(True, bool, nullable=True), "scale_decoder_outputs": True,
}  # fmt: skip


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    activation, glu = f.one_of("feed_forward_proj", _PROJECTIONS)
    # Transformers derives dense_act_fn and is_gated_act from it, writes both, and prefers them.
    if f.has("dense_act_fn"):
        activation = f.one_of("dense_act_fn", fields.ACTIVATIONS)
    glu = f.get("is_gated_act", glu)
    f.must("is_decoder", False, "only encoder-decoders can be loaded")
    buckets = f.get("relative_attention_num_buckets")
    distance = f.get("relative_attention_max_distance")
    scaled = f.get("scale_decoder_outputs", f.get("tie_word_embeddings") is not False)
    scaled = scaled and f.family != "mt5"
    dropout = f.get("dropout_rate")
    return {
        "num_decoder_layers": f.get("num_decoder_layers") or f.get("num_layers"),
        "position": {"name": "t5", "num_buckets": buckets, "max_distance": distance},
        "norm": "rmsnorm", "activation": activation, "glu": glu, "use_bias": False,
        "attention_scale": 1.0, "tie_embeddings": "lm_head.weight" not in tensors,
        "logit_scale": f.get("d_model") ** -0.5 if scaled else 1.0, "dropout": dropout,
        "attention_dropout": dropout, "activation_dropout": dropout,
        "initializer": "xavier_uniform", "embedding_init_std": 1.0,
    }  # fmt: skip


def _write(c: ModelConfig) -> dict:
    projections = {ours: theirs for theirs, ours in _PROJECTIONS.items()}
    if (c.activation, c.glu) not in projections:
        problem = f"{c.activation!r} with glu={c.glu} has no name in T5"
        raise UserError(f"model.activation: {problem}; T5 supports {', '.join(_PROJECTIONS)}")
    return {
        "relative_attention_num_buckets": options(c.position).get("num_buckets", 32),
        "relative_attention_max_distance": options(c.position).get("max_distance", 128),
        "feed_forward_proj": projections[c.activation, c.glu],
        **dict.fromkeys(("tie_word_embeddings", "scale_decoder_outputs"), c.logit_scale != 1.0),
    }


def _weights(c: ModelConfig):
    for side in c.sides:
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield same(bias, f"{side}/relative_bias")
        cross = {"EncDecAttention": "cross_attention"} if side == "decoder" else {}
        sublayers = {"SelfAttention": "self_attention", **cross, "DenseReluDense": "feed_forward"}
        for i in range(c.num_layers(side)):
            for i_sublayer, (name, part) in enumerate(sublayers.items()):
                theirs, ours = f"{side}.block.{i}.layer.{i_sublayer}", f"{side}/layers_{i}/{part}"
                yield from norm(f"{theirs}.layer_norm", f"{ours}_residual/in_norm", offset=False)
                if part == "feed_forward":
                    inner = {"wi_0": "gate", "wi_1": "in"} if c.glu else {"wi": "in"}
                    for t, o in (inner | {"wo": "out"}).items():
                        yield from linear(f"{theirs}.{name}.{t}", f"{ours}/{o}", bias=False)
                    continue
                yield from attention(f"{theirs}.{name}", ours, False, names=("q", "k", "v", "o"))
        yield from norm(f"{side}.final_layer_norm", f"{side}/final_norm", offset=False)
    if not c.tie_embeddings:  # a file that has this tensor is of an untied model
        yield from linear("lm_head", "unembedding", bias=False)


_COPIES = tuple(Copy(f"{x}.embed_tokens.weight", "shared.weight") for x in ("encoder", "decoder"))
_MT5 = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
_MT5 |= {"feed_forward_proj": "gated-gelu"}

FAMILIES = [
    Family(
        model_type, f"{model_type.upper()}ForConditionalGeneration", "encoder_decoder", _read,
        _write, _weights, changed(_FIELDS, changes), table="shared",
        special_tokens={"pad_token_id": 0, "eos_token_id": 1} | start, aliases={"head_dim": "d_kv"},
        copies=lambda c: _COPIES, encoder=f"{model_type.upper()}EncoderModel",
        # Transformers never reads it.
        unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )
    for model_type, changes, start in (("t5", {}, {}), ("mt5", _MT5, {"decoder_start_token_id": 0}))
]  # fmt: skip
