"""BART (Lewis et al. 2020), Marian (Junczys-Dowmunt et al. 2018; OPUS-MT), mBART (Liu et al. 2020)
and M2M-100 (Fan et al. 2021), whose type NLLB (NLLB team 2022) shares. The first two are post-norm
encoder-decoders, the others are pre-norm with final norms."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from transformer.convert.family import Family
from transformer.convert.fields import Fields, changed, count, field, optional
from transformer.convert.weights import Copy, Shape, attention, linear, norm, row, same
from transformer.model.config import ModelConfig

_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
_FIELDS = {
    "vocab_size": field(50265, "vocab_size"), "d_model": field(1024, "d_model"),
    "encoder_layers": field(12, "num_encoder_layers"),
    "decoder_layers": field(12, "num_decoder_layers"), "encoder_ffn_dim": field(4096, "d_ff"),
    "decoder_ffn_dim": field(4096, "d_ff"), "encoder_attention_heads": field(16, "num_heads"),
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


class _Kind(NamedTuple):
    """What differs between the model types. The defaults are those of BART."""

    architecture: str
    fields: Mapping[str, Any] = {}  # fields with another default
    special_tokens: Mapping[str, int] = _TOKENS | {"decoder_start_token_id": 2}
    learned: bool = True  # learned positions, and a norm after them
    pre: bool = False  # pre-norm
    logit_bias: bool = True
    family: Mapping[str, Any] = {}  # other fields of Family


_POSITIONS = r"model\.(encoder|decoder)\.embed_positions\.weight"
_KINDS = {
    "bart": _Kind("BartForConditionalGeneration", family={"source_begins": True}),
    "marian": _Kind(
        "MarianMTModel", {"vocab_size": 58101, "decoder_vocab_size": optional(int)},
        {"pad_token_id": 58_100, "eos_token_id": 0, "decoder_start_token_id": 58_100},
        learned=False, family={"constants": {_POSITIONS: _sinusoids}},
    ),
    "mbart": _Kind("MBartForConditionalGeneration", special_tokens=_TOKENS, pre=True),
    "m2m_100": _Kind(
        "M2M100ForConditionalGeneration",
        {"vocab_size": 128112, "activation_function": "relu", "scale_embedding": True,
         "attention_dropout": 0.1, "pad_token_id": count(1)},
        learned=False, pre=True, logit_bias=False, family={"unused": (_POSITIONS + "s",)},
    ),
}  # fmt: skip


def _position(kind: str, f: Fields) -> dict:
    """Returns our position scheme. fairseq's sinusoids have exponents i / (d / 2 - 1), up to 1."""
    if kind != "m2m_100":
        learned = {"name": "learned", "offset": 2}
        return learned if _KINDS[kind].learned else {"name": "sinusoidal", "layout": "halves"}
    half = f.get("d_model") // 2
    if half < 2:
        raise f.error("d_model", "is too small; its sinusoids need at least 4")
    base, offset = 10_000.0 ** (half / (half - 1)), f.get("pad_token_id") + 1
    return {"name": "sinusoidal", "layout": "halves", "base": base, "offset": offset}


def _read(kind: str, f: Fields, tensors: frozenset[str]) -> dict:
    for name in ("ffn_dim", "attention_heads"):
        why = "encoder and decoder share this setting"
        f.same(f"decoder_{name}", f.get(f"encoder_{name}"), why)
    f.must("is_decoder", False, "only encoder-decoders can be loaded")
    pre, learned = _KINDS[kind].pre, _KINDS[kind].learned
    f.must("add_final_layer_norm", pre)
    f.must("normalize_before", pre)
    f.must("normalize_embedding", learned)
    f.must("add_bias_logits", False, "it adds a second bias to the logits")
    if kind == "marian":
        why = "source and target must share a vocabulary"
        if f.get("decoder_vocab_size") is not None:
            f.same("decoder_vocab_size", f.get("vocab_size"), why)
        f.must("share_encoder_decoder_embeddings", True, why)
    return {
        "position": _position(kind, f), "norm_placement": "pre" if pre else "post",
        "norm_epsilon": 1e-5, "embedding_norm": learned, "logit_bias": _KINDS[kind].logit_bias,
    }  # fmt: skip


def _write(kind: str, c: ModelConfig) -> dict:
    shared = {"decoder_vocab_size": c.vocab_size, "share_encoder_decoder_embeddings": True}
    return shared if kind == "marian" else {}


def _weights(kind: str, c: ModelConfig):
    if c.logit_bias:
        yield row("final_logits_bias", "unembedding/bias")
    place = "in_norm" if _KINDS[kind].pre else "out_norm"
    for side, depth in (("encoder", c.num_encoder_layers), ("decoder", c.num_decoder_layers)):
        if _KINDS[kind].learned:
            yield same(f"model.{side}.embed_positions.weight", f"{side}/position_embedding")
            yield from norm(f"model.{side}.layernorm_embedding", f"{side}/embedding_norm")
        for i in range(depth):
            theirs, ours = f"model.{side}.layers.{i}", f"{side}/layers_{i}"
            attentions = {"self_attn": "self_attention"}
            if side == "decoder":
                attentions["encoder_attn"] = "cross_attention"
            for name, part in attentions.items():
                yield from attention(f"{theirs}.{name}", f"{ours}/{part}", bias=True)
                yield from norm(f"{theirs}.{name}_layer_norm", f"{ours}/{part}_residual/{place}")
            yield from linear(f"{theirs}.fc1", f"{ours}/feed_forward/in", bias=True)
            yield from linear(f"{theirs}.fc2", f"{ours}/feed_forward/out", bias=True)
            yield from norm(f"{theirs}.final_layer_norm", f"{ours}/feed_forward_residual/{place}")
        if _KINDS[kind].pre:
            yield from norm(f"model.{side}.layer_norm", f"{side}/final_norm")


def _copies(c: ModelConfig) -> tuple[Copy, ...]:
    # Transformers 5 ties the stacks' embeddings to the table only if the output layer is tied.
    names = (f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))
    return tuple(Copy(name, "model.shared.weight", not c.tie_embeddings) for name in names)


FAMILIES = [
    Family(
        name, kind.architecture, "encoder_decoder",
        *(functools.partial(f, name) for f in (_read, _write, _weights)),
        changed(_FIELDS, kind.fields), table="model.shared", head="lm_head",
        special_tokens=kind.special_tokens, copies=_copies, **kind.family,
    )
    for name, kind in _KINDS.items()
]  # fmt: skip
