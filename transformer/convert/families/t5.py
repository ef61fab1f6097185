"""T5 (Raffel et al. 2020), v1.0 and v1.1, and mT5 (Xue et al. 2021), with unscaled logits. A
pre-norm encoder-decoder with bucketed relative distances, RMSNorm and no biases.

T5Gemma (Zhang et al. 2025, arXiv:2504.06225): encoder-decoders with the layers of Gemma 2. The
stacks may differ in size, and have tables of their own. config.json has an object for each stack.
In Transformers 5, the encoder's window reaches one token further than the decoder's."""

from transformer.convert import fields, special_tokens
from transformer.convert.families import gemma, llama
from transformer.convert.family import Family, paired
from transformer.convert.fields import Field, Fields, changed, field, optional, positive
from transformer.convert.rope import options, rotary, write_rotary
from transformer.convert.weights import Copy, attention, linear, norm, same
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.config_checks import ENCODER_FIELDS

_FEED_FORWARDS = {
    "relu": ("relu", False), "gelu": ("gelu", False), "silu": ("silu", False),
    "gelu_new": ("gelu_tanh", False), "gated-gelu": ("gelu_tanh", True),
    "gated-silu": ("silu", True), "gated-relu": ("relu", True),
}  # fmt: skip
"""feed_forward_proj -> our (activation, glu). T5's gelu is approximate if gated, else exact."""

_T5 = {
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


def _read_t5(f: Fields, tensors: frozenset[str]) -> dict:
    activation, glu = f.one_of("feed_forward_proj", _FEED_FORWARDS)
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


def _write_t5(c: ModelConfig) -> dict:
    projections = {ours: theirs for theirs, ours in _FEED_FORWARDS.items()}
    if (c.activation, c.glu) not in projections:
        problem = f"{c.activation!r} with glu={c.glu} has no name in T5"
        raise UserError(f"model.activation: {problem}; T5 supports {', '.join(_FEED_FORWARDS)}")
    return {
        "relative_attention_num_buckets": options(c.position).get("num_buckets", 32),
        "relative_attention_max_distance": options(c.position).get("max_distance", 128),
        "feed_forward_proj": projections[c.activation, c.glu],
        **dict.fromkeys(("tie_word_embeddings", "scale_decoder_outputs"), c.logit_scale != 1.0),
    }


def _t5_weights(c: ModelConfig):
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


_STACK = changed(llama.FIELDS, gemma.GEMMA_2)
_T5GEMMA = {
    "encoder": optional(dict), "decoder": optional(dict), "dropout_rate": 0.0,
    "attention_dropout": 0.0, "tie_word_embeddings": field(True, "tie_embeddings"),
    "bos_token_id": Field(2, int, nullable=True),
}  # fmt: skip
_MAY_DIFFER = {"num_encoder_layers", "logit_soft_cap", "attention_dropout", "tie_embeddings"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def _read_stack(f: Fields, side: str) -> dict:
    inner = Fields(f.get(side) or {}, f.family, _STACK, inside=f"{side}.")
    # The fields outside of the stacks take the place of these.
    inner.ignore("dropout_rate", "attention_dropout", "tie_word_embeddings", "is_decoder")
    fields = inner.paired() | rotary(inner) | gemma.peri(inner)
    layers, size = fields.pop("num_decoder_layers"), llama.used_window(inner)
    local, reach = [i % 2 == 0 for i in range(layers)], size and size + (side == "encoder")
    windows = llama.per_layer(window=llama.windows(inner, local, reach))
    fields["layer_pattern"] = windows.pop("layer_pattern", (windows,))
    bias = {"use_bias": False, "attention_bias": inner.get("attention_bias")}
    inner.check_all_read()
    return fields | bias | {f"num_{side}_layers": layers}


def _read_t5gemma(f: Fields, tensors: frozenset[str]) -> dict:
    encoder, decoder = (_read_stack(f, side) for side in ("encoder", "decoder"))
    own = {name: x for name, x in encoder.items() if x != decoder.get(name)}
    for name in sorted(own.keys() - {*ENCODER_FIELDS} - _MAY_DIFFER):
        problem = f"encoder and decoder differ in {name}; only {', '.join(ENCODER_FIELDS)} may"
        raise UserError(f"config.json: {problem} (our names)")
    f.ignore("vocab_size", "classifier_dropout_rate")  # the model does not read them
    bos, dropout = f.get("bos_token_id"), f.get("dropout_rate")
    start = {} if f.has("decoder_start_token_id") else {"decoder_start_id": bos}
    return decoder | start | {
        "num_encoder_layers": encoder["num_encoder_layers"], "norm": "rmsnorm", "glu": True,
        "encoder": {name: own[name] for name in ENCODER_FIELDS if name in own},
        "share_embeddings": False, "tie_embeddings": f.get("tie_word_embeddings"),
        "dropout": dropout, "activation_dropout": dropout,
        "attention_dropout": f.get("attention_dropout"),
    }  # fmt: skip


def _write_t5gemma(c: ModelConfig) -> dict:
    theirs = {"vocab_size": c.vocab_size}
    tokens = special_tokens.write(c.part(decoder_start_id=None), gemma.TOKENS)
    for side in c.sides:
        stack = c.stack(side).part(family="decoder", num_decoder_layers=c.num_layers(side))
        windows = llama.write_windows(stack)
        windows["sliding_window"] -= side == "encoder"
        others = {"model_type": "t5_gemma_module", "attention_bias": c.qkv_has_bias} | tokens
        fields = write_rotary(stack) | gemma.write_peri(stack) | windows
        theirs[side] = others | paired(_STACK, stack) | fields
    return theirs


def _t5gemma_weights(c: ModelConfig):
    yield same("model.decoder.embed_tokens.weight", "target_embedding/embedding")
    for side in c.sides:
        for i in range(c.num_layers(side)):
            theirs, ours = f"model.{side}.layers.{i}", f"{side}/layers_{i}"
            sublayers = {"self_attn": "self_attention", "feedforward": "feed_forward"}
            if side == "decoder":
                sublayers["cross_attn"] = "cross_attention"
            for name, part in sublayers.items():
                if name == "feedforward":
                    yield from llama.gated(theirs, f"{ours}/{part}", c)
                else:
                    projections, bias = f"{theirs}.{name}", c.qkv_has_bias
                    yield from attention(projections, f"{ours}/{part}", bias, _PROJECTIONS)
                for when, place in (("pre", "in_norm"), ("post", "res_norm")):
                    residual = f"{ours}/{part}_residual/{place}"
                    yield from norm(f"{theirs}.{when}_{name}_layernorm", residual, offset=False)
        yield from norm(f"model.{side}.norm", f"{side}/final_norm", offset=False)
    if not c.tie_embeddings:
        yield from linear("lm_head.out_proj", "unembedding", bias=False)


_COPIES = tuple(Copy(f"{x}.embed_tokens.weight", "shared.weight") for x in ("encoder", "decoder"))
_MT5 = {"vocab_size": 250112, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
_MT5 |= {"feed_forward_proj": "gated-gelu"}
_TIED = Copy("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight")

FAMILIES = [
    Family(
        model_type, f"{model_type.upper()}ForConditionalGeneration", "encoder_decoder", _read_t5,
        _write_t5, _t5_weights, changed(_T5, changes), table="shared",
        special_tokens={"pad_token_id": 0, "eos_token_id": 1} | start, aliases={"head_dim": "d_kv"},
        copies=lambda c: _COPIES, encoder=f"{model_type.upper()}EncoderModel",
        # Transformers never reads it.
        unused=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )
    for model_type, changes, start in (("t5", {}, {}), ("mt5", _MT5, {"decoder_start_token_id": 0}))
]  # fmt: skip
FAMILIES += [
    Family(
        "t5gemma", "T5GemmaForConditionalGeneration", "encoder_decoder", _read_t5gemma,
        _write_t5gemma, _t5gemma_weights, _T5GEMMA, table="model.encoder.embed_tokens",
        copies=lambda c: (_TIED,) * c.tie_embeddings, special_tokens=gemma.TOKENS,
    )
]  # fmt: skip
