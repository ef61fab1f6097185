"""A model family of Transformers: conversion of its config in both directions, and its weights."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from transformer.convert import special_tokens
from transformer.convert.fields import ACTIVATIONS_BACK, Fields, field, write_labels
from transformer.convert.weights import Copy, Shape, Weight, linear, same
from transformer.errors import UserError
from transformer.model import positions
from transformer.model.config import ModelConfig

Constant = Callable[[Shape], np.ndarray | None]

TRAINING = frozenset(
    """dropout attention_dropout activation_dropout initializer init_std embedding_init_std
    residual_init_scale random_positions scan_layers remat dtype param_dtype
    attention_backend""".split()
)
"""Fields of ModelConfig that set how a model is trained and run. Outside configs may omit them."""

_NO_HEAD = {"lm_head": False, "tie_embeddings": True, "logit_scale": 1.0, "logit_soft_cap": 0.0}
_CLASSIFIER = _NO_HEAD | {"pooling": "last", "label_bias": False}
"""Fields of a decoder that classifies sequences: the last token's logits, of a layer `score`."""

_SIZES = ("d_model", "num_heads", "kv_heads", "head_size", "value_size", "ff_size")

_RESOLVED = {
    "d_ff": "ff_size", "d_head": "head_size", "d_value": "value_size",
    "d_embedding": "embedding_size", "num_kv_heads": "kv_heads",
    "attention_bias": "attention_has_bias", "qkv_bias": "qkv_has_bias",
}  # fmt: skip
"""Fields of ModelConfig whose defaults follow from others -> the property that resolves them."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of Transformers.

    `fields` are the fields of config.json, with the defaults of Transformers' config class. Those
    paired with a field of ModelConfig are converted in both directions. `read(fields, names of the
    tensors in the directory)` returns the other fields of a ModelConfig, and `write(config)` those
    of config.json; both take precedence. `table` and `head` are the modules of the embedding and
    of a language model's output layer, which may be tied. `weights(config)` yields every other
    tensor that holds parameters. Other tensors raise an error, except:

    - a copy of another tensor (`copies`, or a tied head), which must hold the same numbers;
    - a constant (`constants`: pattern -> function of its shape), which must hold its values;
    - a buffer that Transformers does not read either (`unused`: patterns).

    `aliases` are other names of `fields`, besides the three that every config class has. `prefix`
    is an optional prefix of tensor names (GPT-2's files on the hub omit it); names that begin with
    `head` or one of `heads` never have it. `rename(name, names in the files)` returns a tensor's
    name in `weights`. `encoder` is the class of an encoder alone, if any. `source_begins`: sources
    begin with bos. `special_tokens` are Transformers' defaults of those not in config.json."""

    model_type: str
    architecture: str
    ours: str  # ModelConfig.family
    read: Callable[[Fields, frozenset[str]], dict]
    write: Callable[[ModelConfig], dict]
    weights: Callable[[ModelConfig], Iterator[Weight]]
    fields: Mapping[str, Any]
    table: str
    head: str = ""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    heads: tuple[str, ...] = ()
    copies: Callable[[ModelConfig], tuple[Copy, ...]] = lambda config: ()
    constants: Mapping[str, Constant] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()
    rename: Callable[[str, Collection[str]], str] = lambda name, stored: name
    encoder: str = ""
    source_begins: bool = False
    special_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def all_weights(self, config: ModelConfig) -> Iterator[Weight]:
        """Yields every tensor that holds parameters."""
        yield same(f"{self.table}.weight", "embedding/embedding")
        yield from self.weights(config)
        if self._classifies(config):
            yield from linear("score", "classifier/labels", bias=False)
        elif self.head and not config.tie_embeddings:
            yield from linear(self.head, "unembedding", bias=False)

    def all_copies(self, config: ModelConfig) -> tuple[Copy, ...]:
        """Returns the tensors that are copies of others, such as a tied head."""
        tied = (Copy(f"{self.head}.weight", f"{self.table}.weight"),)
        has_copy = self.head and config.tie_embeddings and not self._classifies(config)
        return self.copies(config) + (tied if has_copy else ())

    def _classifies(self, config: ModelConfig) -> bool:
        """Returns whether a decoder has a classifier instead of its head, as all families may."""
        return self.ours == "decoder" and config.num_labels > 0

    def our_config(self, theirs: Mapping, tensors: frozenset[str], **ours) -> ModelConfig:
        """Returns the ModelConfig for a config.json; the fields in `ours` take precedence. Raises
        UserError with the name of a field that a ModelConfig cannot express."""
        fields = Fields(theirs, self.model_type, self.fields, self._common_aliases | self.aliases)
        if self.ours != "encoder":
            fields.must("is_causal", True, "the decoder would attend to later tokens")
        read = self.read(fields, tensors)
        config = {"family": self.ours, "initializer": "normal", "embedding_init_std": 0.02}
        config |= fields.paired() | read
        if self.ours == "decoder" and "score.weight" in tensors:
            config |= _CLASSIFIER | {"num_labels": fields.num_labels()}
        if self.encoder and not any(name.startswith("decoder.") for name in tensors):
            config |= _NO_HEAD | {"family": "encoder"}
            del config["num_decoder_layers"]
        config |= ours
        config = special_tokens.read(theirs, self.special_tokens, config) | config
        fields.check_all_read()
        return ModelConfig(**config)

    @property
    def _common_aliases(self) -> dict[str, str]:
        """The names that every config class of Transformers also has for three of its fields."""
        layers = "num_decoder_layers" if self.ours == "decoder" else "num_encoder_layers"
        names = {"d_model": "hidden_size", "num_heads": "num_attention_heads"}
        names |= {layers: "num_hidden_layers"}
        pairs = [(field(x).ours, name) for name, x in self.fields.items()]
        return {names[ours]: name for ours, name in reversed(pairs) if ours in names}

    def their_config(self, config: ModelConfig) -> dict:
        """Returns the config.json of a ModelConfig. UserError names a field it cannot express."""
        alone = self.encoder and config.family == "encoder"
        if config.family != self.ours and not alone:
            problem = f"{config.family!r} cannot be expressed by {self.model_type}"
            raise UserError(f"model.family: {problem}, which is {self.ours!r}")
        architecture = self.encoder if alone else self.architecture
        theirs = {"architectures": [architecture], "model_type": self.model_type}
        if self._classifies(config):
            text = "Text" * self.model_type.endswith("_text")  # one part of a larger model
            title = re.sub("(ForCausalLM|LMHeadModel)$", text, architecture)
            theirs["architectures"] = [f"{title}ForSequenceClassification"]
            theirs |= write_labels(config.num_labels)
        theirs |= special_tokens.write(config, self.special_tokens)
        theirs |= paired(self.fields, config) | self.write(config)
        tensors = frozenset(weight.theirs for weight in self.all_weights(config))
        restored = meaning(self.our_config(theirs, tensors))
        for name, value in meaning(config).items():
            if restored[name] != value:
                problem = f"{value!r} cannot be expressed by {self.model_type}"
                raise UserError(f"model.{name}: {problem}, but only {restored[name]!r}")
        return theirs


def paired(table: Mapping[str, Any], config: ModelConfig) -> dict:
    """Returns the fields of config.json that a table pairs with fields of ModelConfig. Those of
    training are left out. 0 is null where null is permitted. `Fields.paired` is the inverse."""
    theirs = {}
    for name, default in table.items():
        x = field(default)
        if x.ours == "activation":
            theirs[name] = ACTIVATIONS_BACK[config.activation]
        elif x.ours and x.ours not in TRAINING:
            value = getattr(config, _RESOLVED.get(x.ours, x.ours))
            theirs[name] = None if x.nullable and not value else value
    return theirs


def meaning(config: ModelConfig) -> dict:
    """Returns the fields that determine what the network computes, in a canonical form."""
    names = [f.name for f in dataclasses.fields(config) if f.name not in TRAINING]
    fields = {name: getattr(config, name) for name in names}
    scale = config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
    layers = [layer for side in config.sides for layer in config.layers(side)]
    schemes = [positions.build(layer.position) for layer in layers]
    kinds = [layer.feed_forward_kind for layer in layers]
    training = {"load_balance": 0.0, "router_z_loss": 0.0}
    fields |= {name: getattr(config, resolved) for name, resolved in _RESOLVED.items()}
    return fields | {
        "position": schemes[0] if schemes.count(schemes[0]) == len(schemes) else schemes,
        "window": [layer.window for layer in layers],
        "feed_forward": [{"name": x.name} | dataclasses.asdict(x) | training for x in kinds],
        "layer_pattern": (),
        "encoder": [getattr(config.stack("encoder"), name) for name in _SIZES],
        # Without a smaller base, a parametrization only determines how a model is trained.
        "parametrization": "standard" if config.base == config else config.parametrization,
        "norm_placement": [config.placement(side) for side in config.sides],
        "norm_offset": config.norm_offset and config.norm == "layernorm",
        "attention_scale": round(scale, 6),
        "num_encoder_layers": config.num_layers("encoder"),
        "num_decoder_layers": config.num_layers("decoder"),
        "share_embeddings": config.share_embeddings or config.family != "encoder_decoder",
    }
