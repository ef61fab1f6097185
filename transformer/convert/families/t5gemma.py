"""T5Gemma (Zhang et al. 2025, arXiv:2504.06225): encoder-decoders with the layers of Gemma 2. The
stacks may differ in size, and have tables of their own. config.json has an object for each stack.
In Transformers 5, the encoder's window reaches one token further than the decoder's."""

from transformer.convert import special_tokens
from transformer.convert.families import gemma, llama
from transformer.convert.family import Family, paired
from transformer.convert.fields import Field, Fields, changed, field, optional
from transformer.convert.rope import rotary, write_rotary
from transformer.convert.weights import Copy, attention, linear, norm, same
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.config_checks import ENCODER_FIELDS

_STACK = changed(llama.FIELDS, gemma.GEMMA_2)
_FIELDS = {
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


def _read(f: Fields, tensors: frozenset[str]) -> dict:
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


def _write(c: ModelConfig) -> dict:
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


def _weights(c: ModelConfig):
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


_TIED = Copy("lm_head.out_proj.weight", "model.decoder.embed_tokens.weight")

FAMILIES = [
    Family(
        "t5gemma", "T5GemmaForConditionalGeneration", "encoder_decoder", _read, _write, _weights,
        _FIELDS, table="model.encoder.embed_tokens", copies=lambda c: (_TIED,) * c.tie_embeddings,
        special_tokens=gemma.TOKENS,
    )
]  # fmt: skip
