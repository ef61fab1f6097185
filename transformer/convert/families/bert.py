"""BERT (Devlin et al. 2019), RoBERTa (Liu et al. 2019), XLM-RoBERTa (Conneau et al. 2020),
CamemBERT (Martin et al. 2020), DistilBERT (Sanh et al. 2019): post-norm, learned positions. DeBERTa
v3 (He et al. 2023), whose type is that of v2: post-norm, relative positions."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from transformer.convert.family import Family
from transformer.convert.fields import Field, Fields, changed, count, field, positive, write_labels
from transformer.convert.rope import options
from transformer.convert.weights import Copy, attention, linear, norm, same
from transformer.errors import UserError
from transformer.model.config import ModelConfig

_TABLE = "bert.embeddings.word_embeddings"
_ATTENTION = ("self.query", "self.key", "self.value", "output.dense")
_FIELDS = {
    "vocab_size": field(30522, "vocab_size"), "hidden_size": field(768, "d_model"),
    "intermediate_size": field(3072, "d_ff"), "num_attention_heads": field(12, "num_heads"),
    "num_hidden_layers": field(12, "num_encoder_layers"),
    "max_position_embeddings": field(512, "max_length"), "type_vocab_size": field(2, "token_types"),
    "layer_norm_eps": positive(1e-12, "norm_epsilon"), "hidden_act": field("gelu", "activation"),
    "tie_word_embeddings": field(True, "tie_embeddings"),
    "hidden_dropout_prob": field(0.1, "dropout"),
    "attention_probs_dropout_prob": field(0.1, "attention_dropout"),
}  # fmt: skip


class _Kind(NamedTuple):
    """A model type as its differences from BERT, whose names of tensors and fields the code uses.
    `tensors` maps parts of the names of tensors to their replacements, which are made in turn."""

    title: str = "Bert"  # the names of classes begin with it
    changes: Mapping[str, Any] = {}  # fields with another default
    named: Mapping[str, str] = {}  # fields with another name
    fixed: Mapping[str, Any] = {}  # fields of ModelConfig that this type lacks, with their values
    tensors: Mapping[str, str] = {}
    head: str = "cls.predictions."
    sequence: tuple[str, ...] = ("bert.pooler.dense", "classifier")  # to classify sequences
    next_sentence: bool = False  # the head for pre-training also predicts the next sentence
    after_pad: bool = False  # the first position is the ID of the pad token plus 1
    relative: bool = False  # positions are relative (DeBERTa)
    special_tokens: Mapping[str, int] = {"pad_token_id": 0}
    unused: tuple[str, ...] = ()  # patterns of tensors that Transformers ignores

    def fields(self) -> dict:
        """Returns this type's fields, with their defaults."""
        own = {name: x for name, x in _FIELDS.items() if field(x).ours not in self.fixed}
        return changed({self.named.get(name, name): x for name, x in own.items()}, self.changes)

    def tensor(self, name: str) -> str:
        return functools.reduce(lambda name, pair: name.replace(*pair), self.tensors.items(), name)


_ROBERTA = _Kind(
    "Roberta", {"vocab_size": 50265, "pad_token_id": count(1)},
    tensors={
        "bert.": "roberta.", "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
        "cls.predictions.transform.": "lm_head.", "cls.predictions.": "lm_head.",
    },
    head="lm_head.", sequence=("classifier.dense", "classifier.out_proj"), after_pad=True,
    special_tokens={"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    unused=(r"roberta\.pooler\.dense\..*",),
)  # fmt: skip
_XLM = {"pad_token_id": count(1)}
_SIZE = Field(-1, int)  # numbers below 1 stand for the default
_RELATIVE = {"relative_attention": True, "position_biased_input": False, "share_att_key": True}
_KINDS = {
    "bert": _Kind(next_sentence=True),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA._replace(title="XLMRoberta", changes=_XLM),
    "camembert": _ROBERTA._replace(title="Camembert", changes=_XLM),
    "distilbert": _Kind(
        "DistilBert", {"n_layers": 6},
        {
            "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
            "intermediate_size": "hidden_dim", "hidden_act": "activation",
            "hidden_dropout_prob": "dropout", "attention_probs_dropout_prob": "attention_dropout",
        },
        fixed={"token_types": 0, "norm_epsilon": 1e-12},
        tensors={
            "bert.": "distilbert.", "encoder.layer": "transformer.layer",
            "self.query": "q_lin", "self.key": "k_lin", "self.value": "v_lin",
            "attention.output.dense": "attention.out_lin",
            "attention.output.LayerNorm": "sa_layer_norm", "intermediate.dense": "ffn.lin1",
            "output.dense": "ffn.lin2", "output.LayerNorm": "output_layer_norm",
            "cls.predictions.transform.dense": "vocab_transform",
            "cls.predictions.transform.LayerNorm": "vocab_layer_norm",
            "cls.predictions.decoder": "vocab_projector",
            "cls.predictions.bias": "vocab_projector.bias",
        },
        head="vocab_", sequence=(),
    ),
    "deberta-v2": _Kind(
        "DebertaV2", {
            "vocab_size": 128100, "hidden_size": 1536, "intermediate_size": 6144,
            "num_hidden_layers": 24, "num_attention_heads": 24, "layer_norm_eps": 1e-7,
            "type_vocab_size": count(0), "relative_attention": False, "position_buckets": _SIZE,
            "max_relative_positions": _SIZE, "norm_rel_ebd": "none", "share_att_key": False,
            "position_biased_input": True, "pos_att_type": Field(None, str | list, nullable=True),
            "pooler_hidden_act": "gelu", "legacy": True,
        },
        tensors={
            "bert.pooler": "pooler", "bert.": "deberta.", "self.query": "self.query_proj",
            "self.key": "self.key_proj", "self.value": "self.value_proj",
        },
        sequence=("pooler.dense", "classifier"), relative=True,
        unused=(r"deberta\.embeddings\.position_embeddings\..*", r"mask_predictions\..*"),
    ),
}  # fmt: skip


def _read(kind: _Kind, f: Fields, tensors: frozenset[str]) -> dict:
    f.must("position_embedding_type", "absolute")
    f.must("is_decoder", False)
    f.must("add_cross_attention", False)
    has = lambda prefix: any(name.startswith(prefix) for name in tensors)
    if has("pre_classifier."):
        problem = f"{f.family} classifies sequences with a ReLU, which is not supported"
        raise UserError(f"pre_classifier: {problem}; load an encoder without labels")
    num_labels = f.num_labels() if has("classifier.") else 0
    if has("qa_outputs.") or (kind.next_sentence and has("cls.seq_relationship.")):
        num_labels = 2
    head = has(kind.head)
    # RoBERTa's files may have a pooler besides their classifier, which Transformers ignores.
    pooler = has(kind.tensor("bert.pooler.")) and not has("classifier.")
    pooler = bool(kind.sequence) and (pooler or has(f"{kind.sequence[0]}."))
    length, position = f.get("max_position_embeddings"), "learned"
    if kind.after_pad:
        position = {"name": "learned", "offset": f.get("pad_token_id") + 1}
        length -= position["offset"]
        if head:
            f.must("hidden_act", "gelu", "the language-model head applies gelu")
    return {
        **kind.fixed, "max_length": length, "position": position, "norm_placement": "post",
        "embedding_norm": True, "lm_head": head, "head_transform": head, "logit_bias": head,
        "pooling": "cls" if pooler else "span" if has("qa_outputs.") else "none",
        "pooler": pooler, "num_labels": num_labels,
        "tie_embeddings": f.get("tie_word_embeddings") or not head,
        **(_read_relative(f, pooler) if kind.relative else {}),
    }  # fmt: skip


def _read_relative(f: Fields, pooler: bool) -> dict:
    for name, value in (_RELATIVE | {"conv_kernel_size": 0}).items():
        f.must(name, value)
    f.must("pooler_hidden_size", f.get("hidden_size"))
    if f.words("pos_att_type") != {"c2p", "p2c"}:
        raise f.error("pos_att_type", "is not supported; it must be 'p2c|c2p'")
    if unknown := (norms := f.words("norm_rel_ebd")) - {"none", "layer_norm"}:
        raise f.error("norm_rel_ebd", f"has {unknown.pop()!r}; use 'none' or 'layer_norm'")
    longest = f.get("max_relative_positions")
    position = {
        "name": "deberta", "shared": True, "norm": "layer_norm" in norms,
        "max_distance": longest if longest > 0 else f.get("max_position_embeddings"),
        "buckets": max(f.get("position_buckets"), 0),
    }  # fmt: skip
    activation = f.one_of("pooler_hidden_act", {"gelu": "gelu", "tanh": "tanh"})
    own = {"position": position} | ({"pooler_activation": activation} if pooler else {})
    return own if f.get("legacy") else own | {"tie_embeddings": True}  # the newer head is tied


def _write_relative(c: ModelConfig) -> dict:
    chosen = options(c.position)
    return _RELATIVE | {
        "pos_att_type": ["p2c", "c2p"], "position_buckets": chosen.get("buckets", 0) or -1,
        "max_relative_positions": chosen.get("max_distance", 128),
        "norm_rel_ebd": "layer_norm" if chosen.get("norm") else "none",
        "pooler_hidden_size": c.d_model,
        **({"pooler_hidden_act": c.pooler_activation} if c.pooler else {}),
    }  # fmt: skip


def _write(kind: _Kind, c: ModelConfig) -> dict:
    offset = options(c.position).get("offset", 0) if kind.after_pad else 0
    architecture = f"{kind.title}{_architecture(kind, c)}"
    theirs = {"architectures": [architecture], "max_position_embeddings": c.max_length + offset}
    theirs |= _write_relative(c) if kind.relative else {}
    return theirs | (write_labels(c.num_labels) if "Classification" in architecture else {})


def _architecture(kind: _Kind, c: ModelConfig) -> str:
    if kind.next_sentence and c.lm_head and c.num_labels == 2 and c.pooler:
        return "ForPreTraining"
    if c.pooling == "span":
        return "ForQuestionAnswering"
    if c.num_labels:
        return "ForSequenceClassification" if c.pooler else "ForTokenClassification"
    return "ForMaskedLM" if c.lm_head else "Model"


def _weights(kind: _Kind, c: ModelConfig):
    for weight in _bert_weights(kind, c):
        yield dataclasses.replace(weight, theirs=kind.tensor(weight.theirs))


def _bert_weights(kind: _Kind, c: ModelConfig):
    root = "bert.embeddings"
    if not kind.relative:
        yield same(f"{root}.position_embeddings.weight", "encoder/position_embedding")
    else:
        yield same("bert.encoder.rel_embeddings.weight", "encoder/relative_embedding")
        if options(c.position).get("norm"):
            yield same("bert.encoder.LayerNorm.weight", "encoder/relative_norm_gain")
            yield same("bert.encoder.LayerNorm.bias", "encoder/relative_norm_offset")
    if c.token_types:
        yield same(f"{root}.token_type_embeddings.weight", "embedding/token_types")
    yield from norm(f"{root}.LayerNorm", "encoder/embedding_norm")
    for i in range(c.num_encoder_layers):
        theirs, ours = f"bert.encoder.layer.{i}", f"encoder/layers_{i}"
        attn, feed_forward = f"{ours}/self_attention", f"{ours}/feed_forward"
        yield from attention(f"{theirs}.attention", attn, True, _ATTENTION)
        yield from norm(f"{theirs}.attention.output.LayerNorm", f"{attn}_residual/out_norm")
        yield from linear(f"{theirs}.intermediate.dense", f"{feed_forward}/in", bias=True)
        yield from linear(f"{theirs}.output.dense", f"{feed_forward}/out", bias=True)
        yield from norm(f"{theirs}.output.LayerNorm", f"{feed_forward}_residual/out_norm")
    both = c.pooler and c.num_labels and kind.sequence
    pooler, labels = both or ("bert.pooler.dense", "classifier")
    if c.pooler:
        yield from linear(pooler, "classifier/pooler", bias=True)
    if c.num_labels:
        own = {"ForPreTraining": "cls.seq_relationship", "ForQuestionAnswering": "qa_outputs"}
        labels = own.get(_architecture(kind, c), labels)
        yield from linear(labels, "classifier/labels", bias=True)
    if c.lm_head:
        yield from linear("cls.predictions.transform.dense", "unembedding/transform", bias=True)
        yield from norm("cls.predictions.transform.LayerNorm", "unembedding/norm")
        if c.tie_embeddings:
            yield same("cls.predictions.bias", "unembedding/bias")
        else:
            yield from linear("cls.predictions.decoder", "unembedding", bias=True)


def _rename(name: str, stored: Collection[str]) -> str:
    """A head for next-sentence prediction alone is a classifier of two classes. Files of DeBERTa v3
    and of models with `legacy` false have other names for the tensors of the head."""
    if any(x.startswith("cls.predictions.") for x in stored):
        return name
    name = name.replace("lm_predictions.lm_head.", "cls.predictions.transform.")
    name = name.replace("cls.predictions.transform.bias", "cls.predictions.bias")
    return name.replace("cls.seq_relationship.", "classifier.")


def _copies(kind: _Kind, c: ModelConfig) -> tuple[Copy, ...]:
    if not c.lm_head:
        return ()
    decoder, bias = map(kind.tensor, ("cls.predictions.decoder", "cls.predictions.bias"))
    if c.tie_embeddings:
        table = kind.tensor(_TABLE)
        copies = (Copy(f"{decoder}.weight", f"{table}.weight"), Copy(f"{decoder}.bias", bias))
    else:
        copies = (Copy(bias, f"{decoder}.bias", written=True, compared=False),)
    return tuple(copy for copy in copies if copy.theirs != copy.of)


FAMILIES = [
    Family(
        model_type, f"{kind.title}{'ForPreTraining' if kind.next_sentence else 'ForMaskedLM'}",
        "encoder", *(functools.partial(f, kind) for f in (_read, _write, _weights)), kind.fields(),
        table=kind.tensor(_TABLE), special_tokens=kind.special_tokens, prefix=kind.tensor("bert."),
        copies=functools.partial(_copies, kind), rename=_rename,
        heads=("cls.", kind.head, "classifier.", "qa_outputs.", "lm_", "mask_", *kind.sequence[:1]),
        unused=(r".*embeddings\.position_ids", *kind.unused),  # the first is 0, 1, 2, ...
    )
    for model_type, kind in _KINDS.items()
]  # fmt: skip
