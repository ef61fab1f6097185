"""BART (Lewis et al. 2020) and Marian (Junczys-Dowmunt et al. 2018; OPUS-MT).

Both are post-norm encoder-decoders with a bias on the logits.
"""

import functools

import numpy as np

from transformer.convert.family import Family
from transformer.convert.fields import ACTIVATIONS, ACTIVATIONS_BACK, Fields, layer_count, optional
from transformer.convert.weights import Copy, Shape, attention, linear, norm, row, same, tied
from transformer.model.config import ModelConfig

_FIELDS = {
    "vocab_size": 50265,
    "d_model": 1024,
    "encoder_layers": layer_count(12),
    "decoder_layers": layer_count(12),
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
    "scale_embedding": False,
    "tie_word_embeddings": True,
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
}
_FIELDS_OF = {
    "bart": _FIELDS,
    "marian": _FIELDS | {"vocab_size": 58101, "decoder_vocab_size": optional(int)},
}


def _read(kind: str, f: Fields, tensors: frozenset[str]) -> dict:
    shared = {}
    for name in ("ffn_dim", "attention_heads"):
        shared[name] = f.get(f"encoder_{name}")
        f.same(f"decoder_{name}", shared[name], "encoder and decoder share this setting")
    f.must("is_decoder", False, "only encoder-decoders can be loaded")
    f.must("add_final_layer_norm", False)
    f.must("normalize_before", False)
    f.must("normalize_embedding", kind == "bart")
    f.must("add_bias_logits", False, "it adds a second bias to the logits")
    vocab = f.get("vocab_size")
    if kind == "marian":
        if f.get("decoder_vocab_size") is not None:
            f.same("decoder_vocab_size", vocab, "source and target must share a vocabulary")
        f.must(
            "share_encoder_decoder_embeddings", True, "source and target must share a vocabulary"
        )
    learned = {"name": "learned", "offset": 2}
    sinusoids = {"name": "sinusoidal", "layout": "halves"}
    return {
        "family": "encoder_decoder",
        "vocab_size": vocab,
        "d_model": f.get("d_model"),
        "d_ff": shared["ffn_dim"],
        "num_heads": shared["attention_heads"],
        "num_encoder_layers": f.get("encoder_layers"),
        "num_decoder_layers": f.get("decoder_layers"),
        "max_length": f.get("max_position_embeddings"),
        "position": learned if kind == "bart" else sinusoids,
        "norm_placement": "post",
        "norm_epsilon": 1e-5,
        "embedding_norm": kind == "bart",
        "embedding_scale": f.get("scale_embedding"),
        "activation": f.one_of("activation_function", ACTIVATIONS),
        "tie_embeddings": f.get("tie_word_embeddings"),
        "logit_bias": True,
        "dropout": f.get("dropout"),
        "attention_dropout": f.get("attention_dropout"),
        "activation_dropout": f.get("activation_dropout"),
        "initializer": "normal",
        "embedding_init_std": 0.02,
    }


def _write(kind: str, c: ModelConfig) -> dict:
    theirs = {
        "vocab_size": c.vocab_size,
        "d_model": c.d_model,
        "encoder_layers": c.num_encoder_layers,
        "decoder_layers": c.num_decoder_layers,
        "encoder_ffn_dim": c.ff_size,
        "decoder_ffn_dim": c.ff_size,
        "encoder_attention_heads": c.num_heads,
        "decoder_attention_heads": c.num_heads,
        "max_position_embeddings": c.max_length,
        "activation_function": ACTIVATIONS_BACK[c.activation],
        "scale_embedding": c.embedding_scale,
        "tie_word_embeddings": c.tie_embeddings,
    }
    if kind == "marian":
        theirs |= {"decoder_vocab_size": c.vocab_size, "share_encoder_decoder_embeddings": True}
    return theirs


def _weights(kind: str, c: ModelConfig):
    yield same("model.shared.weight", "embedding/embedding")
    yield row("final_logits_bias", "unembedding/bias")
    for side, depth in (("encoder", c.num_encoder_layers), ("decoder", c.num_decoder_layers)):
        if kind == "bart":
            yield same(f"model.{side}.embed_positions.weight", f"{side}/position_embedding")
            yield from norm(f"model.{side}.layernorm_embedding", f"{side}/embedding_norm")
        for i in range(depth):
            theirs, ours = f"model.{side}.layers.{i}", f"{side}/layers_{i}"
            attentions = {"self_attn": "self_attention"}
            if side == "decoder":
                attentions["encoder_attn"] = "cross_attention"
            for name, part in attentions.items():
                yield from attention(f"{theirs}.{name}", f"{ours}/{part}", bias=True)
                yield from norm(f"{theirs}.{name}_layer_norm", f"{ours}/{part}_residual/out_norm")
            yield from linear(f"{theirs}.fc1", f"{ours}/feed_forward/in", bias=True)
            yield from linear(f"{theirs}.fc2", f"{ours}/feed_forward/out", bias=True)
            yield from norm(f"{theirs}.final_layer_norm", f"{ours}/feed_forward_residual/out_norm")
    if not c.tie_embeddings:
        yield from linear("lm_head", "unembedding", bias=False)


def _copies(c: ModelConfig) -> tuple[Copy, ...]:
    """Returns both stacks' embeddings and the tied output layer, as copies of the shared table.

    Transformers 5 ties the two embeddings to the table only if the output layer is tied.
    """
    sides = [
        Copy(f"model.{side}.embed_tokens.weight", "model.shared.weight", not c.tie_embeddings)
        for side in ("encoder", "decoder")
    ]
    return (*sides, *tied(c, "lm_head.weight", "model.shared.weight"))


def _sinusoids(shape: Shape) -> np.ndarray | None:
    """Returns sin(t / 10000^(2i/d)) for all pairs i, then their cosines.

    Returns None if the shape is not that of a matrix.
    """
    if len(shape) != 2:
        return None
    length, d = shape
    angles = np.arange(length)[:, None] / 10_000.0 ** (2 * np.arange((d + 1) // 2) / d)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :d]


_CONSTANTS = {
    "bart": {},
    "marian": {r"model\.(encoder|decoder)\.embed_positions\.weight": _sinusoids},
}

_SPECIAL_TOKENS = {
    "bart": {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2},
    "marian": {"pad_token_id": 58_100, "eos_token_id": 0, "decoder_start_token_id": 58_100},
}

FAMILIES = [
    Family(
        kind,
        architecture,
        "encoder_decoder",
        *(functools.partial(f, kind) for f in (_read, _write, _weights)),
        _FIELDS_OF[kind],
        special_tokens=_SPECIAL_TOKENS[kind],
        aliases={
            "num_attention_heads": "encoder_attention_heads",
            "hidden_size": "d_model",
            "num_hidden_layers": "encoder_layers",
        },
        copies=_copies,
        constants=_CONSTANTS[kind],
        source_begins=kind == "bart",
    )
    for kind, architecture in {
        "bart": "BartForConditionalGeneration",
        "marian": "MarianMTModel",
    }.items()
]
