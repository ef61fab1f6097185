"""BERT (Devlin et al. 2019).

A post-norm encoder with learned positions and token types, and its two heads.
"""

from transformer.convert.family import Family
from transformer.convert.fields import (
    ACTIVATIONS,
    ACTIVATIONS_BACK,
    Field,
    Fields,
    layer_count,
    optional,
    positive,
)
from transformer.convert.weights import Copy, attention, linear, norm, same, tied
from transformer.model.config import ModelConfig

_FIELDS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": layer_count(12),
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": positive(1e-12),
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "num_labels": optional(int),
    "id2label": Field(None, dict, nullable=True),
}


def _read(f: Fields, tensors: frozenset[str]) -> dict:
    f.must("position_embedding_type", "absolute")
    f.must("is_decoder", False)
    f.must("add_cross_attention", False)
    has = lambda fragment: any(fragment in name for name in tensors)
    id2label, num_labels = f.get("id2label"), 0
    if has("classifier."):  # config.json omits the default, two labels
        num_labels = len(id2label) if id2label is not None else f.get("num_labels") or 2
    elif has("cls.seq_relationship."):
        num_labels = 2
    head = has("cls.predictions.")
    pooler = has("pooler.")
    return {
        "family": "encoder",
        "vocab_size": f.get("vocab_size"),
        "d_model": f.get("hidden_size"),
        "d_ff": f.get("intermediate_size"),
        "num_heads": f.get("num_attention_heads"),
        "num_encoder_layers": f.get("num_hidden_layers"),
        "max_length": f.get("max_position_embeddings"),
        "token_types": f.get("type_vocab_size"),
        "position": "learned",
        "norm_placement": "post",
        "norm_epsilon": f.get("layer_norm_eps"),
        "embedding_norm": True,
        "activation": f.one_of("hidden_act", ACTIVATIONS),
        "lm_head": head,
        "head_transform": head,
        "logit_bias": head,
        "pooling": "cls" if pooler else "none",
        "pooler": pooler,
        "num_labels": num_labels,
        "tie_embeddings": f.get("tie_word_embeddings") or not head,
        "dropout": f.get("hidden_dropout_prob"),
        "attention_dropout": f.get("attention_probs_dropout_prob"),
        "initializer": "normal",
        "embedding_init_std": 0.02,
    }


def _write(c: ModelConfig) -> dict:
    theirs = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.d_model,
        "num_hidden_layers": c.num_encoder_layers,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.ff_size,
        "hidden_act": ACTIVATIONS_BACK[c.activation],
        "max_position_embeddings": c.max_length,
        "type_vocab_size": c.token_types,
        "layer_norm_eps": c.norm_epsilon,
        "tie_word_embeddings": c.tie_embeddings,
        "architectures": [_architecture(c)],
    }
    if c.num_labels and not _next_sentence(c):
        theirs["id2label"] = {str(i): f"LABEL_{i}" for i in range(c.num_labels)}
        theirs["label2id"] = {label: int(i) for i, label in theirs["id2label"].items()}
    return theirs


def _next_sentence(c: ModelConfig) -> bool:
    """Returns whether the labels are those of BERT's next-sentence prediction."""
    return c.lm_head and c.num_labels == 2 and c.pooler


def _architecture(c: ModelConfig) -> str:
    if c.num_labels and not _next_sentence(c):
        return "BertForSequenceClassification" if c.pooler else "BertForTokenClassification"
    return "BertForPreTraining" if c.num_labels else "BertForMaskedLM" if c.lm_head else "BertModel"


_ATTENTION = ("self.query", "self.key", "self.value", "output.dense")


def _weights(c: ModelConfig):
    root = "bert.embeddings"
    yield same(f"{root}.word_embeddings.weight", "embedding/embedding")
    yield same(f"{root}.position_embeddings.weight", "encoder/position_embedding")
    if c.token_types:
        yield same(f"{root}.token_type_embeddings.weight", "embedding/token_types")
    yield from norm(f"{root}.LayerNorm", "encoder/embedding_norm")
    for i in range(c.num_encoder_layers):
        theirs, ours = f"bert.encoder.layer.{i}", f"encoder/layers_{i}"
        yield from attention(
            f"{theirs}.attention", f"{ours}/self_attention", bias=True, names=_ATTENTION
        )
        yield from norm(
            f"{theirs}.attention.output.LayerNorm", f"{ours}/self_attention_residual/out_norm"
        )
        yield from linear(f"{theirs}.intermediate.dense", f"{ours}/feed_forward/in", bias=True)
        yield from linear(f"{theirs}.output.dense", f"{ours}/feed_forward/out", bias=True)
        yield from norm(f"{theirs}.output.LayerNorm", f"{ours}/feed_forward_residual/out_norm")
    if c.pooler:
        yield from linear("bert.pooler.dense", "classifier/pooler", bias=True)
    if c.num_labels:
        head = "cls.seq_relationship" if _next_sentence(c) else "classifier"
        yield from linear(head, "classifier/labels", bias=True)
    if c.lm_head:
        yield from linear("cls.predictions.transform.dense", "unembedding/transform", bias=True)
        yield from norm("cls.predictions.transform.LayerNorm", "unembedding/norm")
        if c.tie_embeddings:
            yield same("cls.predictions.bias", "unembedding/bias")
        else:
            yield from linear("cls.predictions.decoder", "unembedding", bias=True)


def _copies(c: ModelConfig) -> tuple[Copy, ...]:
    if not c.lm_head:
        return ()
    head, bias = "cls.predictions.decoder", "cls.predictions.bias"
    if c.tie_embeddings:
        table = "bert.embeddings.word_embeddings.weight"
        return (*tied(c, f"{head}.weight", table), Copy(f"{head}.bias", bias))
    return (Copy(bias, f"{head}.bias", written=True, compared=False),)


FAMILIES = [
    Family(
        "bert",
        "BertForPreTraining",
        "encoder",
        _read,
        _write,
        _weights,
        _FIELDS,
        special_tokens={"pad_token_id": 0},
        prefix="bert.",
        heads=("cls.", "classifier."),
        copies=_copies,
        unused=(r".*embeddings\.position_ids",),  # 0, 1, 2, ...
    )
]
