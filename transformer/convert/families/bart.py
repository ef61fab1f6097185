"""BART (Lewis et al. 2020), Marian (Junczys-Dowmunt et al. 2018; OPUS-MT), mBART (Liu et al. 2020)
and M2M-100 (Fan et al. 2021), whose type NLLB (NLLB team 2022) shares. The first two are post-norm
encoder-decoders, the others are pre-norm with final norms."""

import functools

import numpy as np

from transformer.convert.family import Family
from transformer.convert.fields import Fields, changed, count, field, optional
from transformer.convert.weights import Copy, Shape, attention, linear, matrix, norm, same
from transformer.model.config import ModelConfig

_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_FIELDS = {
    "vocab_size": field(50265, "vocab_size"), "d_model": field(1024, "d_model"),
    "encoder_layers": field(12, "num_encoder_layers"),
    "decoder_layers": field(12, "num_decoder_layers"), "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": field(4096, "d_ff"), "encoder_attention_heads": 16,
    "decoder_attention_heads": field(16, "num_heads"),
    "max_position_embeddings": field(1024, "max_length"),
    "activation_function": field("gelu", "activation"),
    "scale_embedding": field(False, "embedding_scale"),
    "tie_word_embeddings": field(True, "tie_embeddings"), "dropout": field(0.1, "dropout"),
    "attention_dropout": field(0.0, "attention_dropout"),
    "activation_dropout": field(0.0, "activation_dropout"),
}  # fmt: skip


def _sinusoids(shape: Shape) -> np.ndarray | None:
    """Returns sin(t / 10000^(2i/d)) for all pairs i, then their cosines; None if not a matrix."""
    if len(shape) != 2:
        return None
    length, d = shape
    angles = np.arange(length)[:, None] / 10_000.0 ** (2 * np.arange((d + 1) // 2) / d)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :d]


_OF_SIDES = {"ffn_dim": "d_ff", "attention_heads": "num_heads"}
"""The sizes in which encoder and decoder may differ, as in the students of Marian -> ours."""

_SHARED = "share_encoder_decoder_embeddings"
_POSITIONS = r"model\.(encoder|decoder)\.embed_positions\.weight"


def _position(f: Fields) -> dict:
    """Returns our position scheme. fairseq's sinusoids have exponents i / (d / 2 - 1), up to 1."""
    if f.family in ("bart", "mbart"):
        return {"name": "learned", "offset": 2}
    sinusoids = {"name": "sinusoidal", "layout": "halves"}
    if f.family == "marian":
        return sinusoids
    half = f.get("d_model") // 2
    if half < 2:
        raise f.error("d_model", "is too small; its sinusoids need at least 4")
    base, offset = 10_000.0 ** (half / (half - 1)), f.get("pad_token_id") + 1
    return sinusoids | {"base": base, "offset": offset}


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    learned, pre = f.family in ("bart", "mbart"), f.family in ("mbart", "m2m_100")
    own = {name: f.get(f"encoder_{theirs}") for theirs, name in _OF_SIDES.items()}
    decoder = {name: f.get(f"decoder_{theirs}") for theirs, name in _OF_SIDES.items()}
    f.must("is_decoder", False, "only encoder-decoders can be loaded")
    f.must("add_final_layer_norm", pre)
    f.must("normalize_before", pre)
    f.must("normalize_embedding", learned)
    f.must("add_bias_logits", False, "it adds a second bias to the logits")
    if f.family == "marian":
        why = "source and target must share a vocabulary"
        if f.get("decoder_vocab_size") is not None:
            f.must("decoder_vocab_size", f.get("vocab_size"), why)
        f.must(_SHARED, True, why)
    return {
        "position": _position(f), "norm_placement": "pre" if pre else "post",
        "norm_epsilon": 1e-5, "embedding_norm": learned, "logit_bias": f.family != "m2m_100",
        "encoder": {name: x for name, x in own.items() if x != decoder[name]},
    }  # fmt: skip


def _write(c: ModelConfig) -> dict:
    own = c.stack("encoder")
    return {"encoder_ffn_dim": own.ff_size, "encoder_attention_heads": own.num_heads}


def layer(theirs: str, ours: str, c: ModelConfig, attentions=("self_attention",)):
    """Yields a layer of the models that were first published in fairseq."""
    place = "in_norm" if c.placement("decoder").in_norm else "out_norm"
    affine = {"gain": c.norm_gain, "offset": c.norm_offset}
    for part in attentions:
        name = {"self_attention": "self_attn", "cross_attention": "encoder_attn"}[part]
        yield from attention(f"{theirs}.{name}", f"{ours}/{part}", c.use_bias)
        yield from norm(f"{theirs}.{name}_layer_norm", f"{ours}/{part}_residual/{place}", **affine)
    feed_forward = f"{ours}/feed_forward"
    yield from linear(f"{theirs}.fc1", f"{feed_forward}/in", c.use_bias)
    yield from linear(f"{theirs}.fc2", f"{feed_forward}/out", c.use_bias)
    yield from norm(f"{theirs}.final_layer_norm", f"{feed_forward}_residual/{place}", **affine)


def _weights(c: ModelConfig):
    if c.logit_bias:
        # A vector, stored as a matrix with one row
        yield matrix("final_logits_bias", "unembedding/bias", inputs=0, transposed=False)
    for side in c.sides:
        if c.embedding_norm:
            yield same(f"model.{side}.embed_positions.weight", f"{side}/position_embedding")
            yield from norm(f"model.{side}.layernorm_embedding", f"{side}/embedding_norm")
        attentions = ("self_attention", "cross_attention")[: 1 + (side == "decoder")]
        for i in range(c.num_layers(side)):
            yield from layer(f"model.{side}.layers.{i}", f"{side}/layers_{i}", c, attentions)
        if c.placement(side).final_norm:
            yield from norm(f"model.{side}.layer_norm", f"{side}/final_norm")


def _copies(c: ModelConfig) -> tuple[Copy, ...]:
    # Transformers 5 ties the stacks' embeddings to the table only if the output layer is tied.
    names = (f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
    return tuple(Copy(name, "model.shared.weight", not c.tie_embeddings) for name in names)


_family = functools.partial(
    Family, ours="encoder_decoder", read=_read, write=_write, weights=_weights,
    fields=_FIELDS, table="model.shared", head="lm_head", copies=_copies,
    special_tokens=_TOKENS | {"decoder_start_token_id": 2},
    aliases={"num_attention_heads": "encoder_attention_heads"},
)  # fmt: skip

FAMILIES = [
    _family("bart", "BartForConditionalGeneration", source_begins=True),
    _family(
        "marian", "MarianMTModel",
        fields=changed(_FIELDS, {"vocab_size": 58101, "decoder_vocab_size": optional(int)}),
        write=lambda c: _write(c) | {"decoder_vocab_size": c.vocab_size, _SHARED: True},
        constants={_POSITIONS: _sinusoids}, special_tokens={
            "pad_token_id": 58_100, "eos_token_id": 0, "decoder_start_token_id": 58_100,
        },
    ),
    _family("mbart", "MBartForConditionalGeneration", special_tokens=_TOKENS),
    _family(
        "m2m_100", "M2M100ForConditionalGeneration", fields=changed(_FIELDS, {
            "vocab_size": 128112, "activation_function": "relu", "scale_embedding": True,
            "attention_dropout": 0.1, "pad_token_id": count(1),
        }), unused=(_POSITIONS + "s",),
    ),
]  # fmt: skip
