"""BART (Lewis et al. 2020) and Marian (Junczys-Dowmunt et al. 2018; OPUS-MT): post-norm encoder-decoders with a bias on the logits."""

import functools

from transformer.convert.family import Family
from transformer.convert.fields import ACTIVATIONS, ACTIVATIONS_BACK, Fields
from transformer.convert.weights import Weight, linear, norm, same
from transformer.model.config import ModelConfig


def _read(kind: str, f: Fields, tensors: frozenset[str]) -> dict:
    pairs = {}
    for name, default in {"ffn_dim": 4096, "attention_heads": 16}.items():
        pairs[name] = f.get(f"encoder_{name}", default)
        f.must(f"decoder_{name}", pairs[name], "both sides share one number")
    f.must("is_decoder", False, "only the encoder-decoder is read")
    f.must("add_final_layer_norm", False)
    f.must("normalize_before", False)
    f.must("normalize_embedding", kind == "bart")
    f.must("add_bias_logits", False, "a second bias on the logits")
    vocab = f.get("vocab_size", {"bart": 50265, "marian": 58101}[kind])
    f.must("decoder_vocab_size", vocab, "source and target share a vocabulary")
    f.must("share_encoder_decoder_embeddings", True, "source and target share a vocabulary")
    learned, sinusoids = (
        {"name": "learned", "offset": 2},
        {"name": "sinusoidal", "layout": "halves"},
    )
    return {
        "family": "encoder_decoder",
        "vocab_size": vocab,
        "d_model": f.get("d_model", 1024),
        "d_ff": pairs["ffn_dim"],
        "num_heads": pairs["attention_heads"],
        "num_encoder_layers": f.get("encoder_layers", 12),
        "num_decoder_layers": f.get("decoder_layers", 12),
        "max_length": f.get("max_position_embeddings", 1024),
        "position": learned if kind == "bart" else sinusoids,
        "norm_placement": "post",
        "norm_epsilon": 1e-5,
        "embedding_norm": kind == "bart",
        "embedding_scale": f.get("scale_embedding", False),
        "activation": f.one_of("activation_function", "gelu", ACTIVATIONS),
        "tie_embeddings": f.get("tie_word_embeddings", True),
        "logit_bias": True,
        "dropout": f.get("dropout", 0.1),
        "attention_dropout": f.get("attention_dropout", 0.0),
        "activation_dropout": f.get("activation_dropout", 0.0),
        "initializer": "normal",
        "embedding_init_std": 0.02,
        "pad_id": f.get("pad_token_id", {"bart": 1, "marian": 58100}[kind]),
    }


def _write(kind: str, c: ModelConfig) -> dict:
    theirs = {
        "vocab_size": c.vocab_size, "d_model": c.d_model, "encoder_layers": c.num_encoder_layers, "decoder_layers": c.num_decoder_layers,
        "encoder_ffn_dim": c.d_ff, "decoder_ffn_dim": c.d_ff, "encoder_attention_heads": c.num_heads, "decoder_attention_heads": c.num_heads,
        "max_position_embeddings": c.max_length, "activation_function": ACTIVATIONS_BACK[c.activation], "scale_embedding": c.embedding_scale,
        "tie_word_embeddings": c.tie_embeddings, "pad_token_id": c.pad_id, "decoder_start_token_id": c.pad_id,
    }  # fmt: skip
    if kind == "marian":
        theirs |= {"decoder_vocab_size": c.vocab_size, "share_encoder_decoder_embeddings": True}
    return theirs


def _weights(kind: str, c: ModelConfig):
    yield same("model.shared.weight", "embedding/embedding")
    yield Weight(
        "final_logits_bias",
        ("unembedding/bias",),
        lambda x, shapes: [x.reshape(shapes[0])],
        lambda xs: xs[0][None],
    )
    for side, depth in (("encoder", c.num_encoder_layers), ("decoder", c.num_decoder_layers)):
        if kind == "bart":
            yield same(f"model.{side}.embed_positions.weight", f"{side}/position_embedding")
            yield from norm(f"model.{side}.layernorm_embedding", f"{side}/embedding_norm")
        for i in range(depth):
            theirs, ours = f"model.{side}.layers.{i}", f"{side}/layers_{i}"
            attentions = {"self_attn": "self_attention"} | (
                {"encoder_attn": "cross_attention"} if side == "decoder" else {}
            )
            for name, part in attentions.items():
                for t, o in {
                    "q_proj": "query",
                    "k_proj": "key",
                    "v_proj": "value",
                    "out_proj": "out",
                }.items():
                    yield from linear(
                        f"{theirs}.{name}.{t}",
                        f"{ours}/{part}/{o}",
                        bias=True,
                        inputs=1 + (o == "out"),
                    )
                yield from norm(f"{theirs}.{name}_layer_norm", f"{ours}/{part}_residual/out_norm")
            yield from linear(f"{theirs}.fc1", f"{ours}/feed_forward/in", bias=True)
            yield from linear(f"{theirs}.fc2", f"{ours}/feed_forward/out", bias=True)
            yield from norm(f"{theirs}.final_layer_norm", f"{ours}/feed_forward_residual/out_norm")
    if not c.tie_embeddings:
        yield from linear("lm_head", "unembedding", bias=False)


_COPIES = (r"model\.(encoder|decoder)\.embed_tokens\.weight", r"lm_head\.weight")

FAMILIES = [
    Family(
        kind, architecture, "encoder_decoder", *(functools.partial(f, kind) for f in (_read, _write, _weights)),
        ignored=_COPIES + ((r"model\.(encoder|decoder)\.embed_positions\.weight",) if kind == "marian" else ()),
        source_begins="bos_token_id" if kind == "bart" else "",
    )
    for kind, architecture in {"bart": "BartForConditionalGeneration", "marian": "MarianMTModel"}.items()
]  # fmt: skip
