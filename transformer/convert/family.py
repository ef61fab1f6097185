"""What an outside family is to us: its config in our words and back, and a table of its weights."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from transformer.convert import special_tokens
from transformer.convert.fields import Fields
from transformer.convert.weights import Copy, Shape, Weight
from transformer.errors import UserError
from transformer.model import positions
from transformer.model.config import ModelConfig

TRAINING = frozenset(
    """dropout attention_dropout activation_dropout initializer init_std embedding_init_std residual_init_scale random_positions
    scan_layers remat dtype param_dtype attention_backend""".split()  # noqa: SIM905
)
"""Fields of ours that outside configs need not say: how a model is trained and run."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`.

    read(fields, names of the tensors that are there) -> fields of a ModelConfig; write(config) ->
    their config.json; weights(config) -> every tensor that holds parameters. `fields`: what `read`
    reads, with the defaults of their config class. `aliases`: other names of these fields.
    `prefix`: what the names may or may not begin with (GPT-2's files on the hub do without).
    `heads`: what the names begin with that never have the prefix. A tensor that `weights` does not
    name is refused unless it is one of three: a copy of another tensor (`copies`), which must hold
    the same numbers; a constant (`constants`: pattern -> function of its shape), which must hold
    what the function returns; or `unused`, a buffer that Transformers does not read either
    (patterns). `source_begins`: whether a source begins with the bos token. `special_tokens`: those
    that Transformers assumes where config.json does not name them.
    """

    model_type: str
    architecture: str
    ours: str  # our family
    read: Callable[[Fields, frozenset[str]], dict]
    write: Callable[[ModelConfig], dict]
    weights: Callable[[ModelConfig], Iterator[Weight]]
    fields: Mapping[str, Any]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    heads: tuple[str, ...] = ()
    copies: Callable[[ModelConfig], tuple[Copy, ...]] = lambda config: ()
    constants: Mapping[str, Callable[[Shape], np.ndarray | None]] = dataclasses.field(
        default_factory=dict
    )
    unused: tuple[str, ...] = ()
    source_begins: bool = False
    special_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def our_config(self, theirs: Mapping, tensors: frozenset[str], **ours) -> ModelConfig:
        """Their config.json as ours, with fields of `ours` on top. Raises UserError, with the field's name, for what we cannot express."""
        fields = Fields(theirs, self.model_type, self.fields, self.aliases)
        if self.ours != "encoder":
            fields.must("is_causal", True, "the decoder would see what comes after")
        config = self.read(fields, tensors) | ours
        config = special_tokens.read(theirs, self.special_tokens, config) | config
        fields.refuse_rest()
        return ModelConfig(**config)

    def their_config(self, config: ModelConfig) -> dict:
        """Our config as their config.json. Raises UserError, with the field's name, for what they cannot express."""
        if config.family != self.ours:
            raise UserError(
                f"model.family: {config.family!r} cannot be expressed by {self.model_type}, which is {self.ours!r}"
            )
        theirs = {"architectures": [self.architecture], "model_type": self.model_type}
        theirs |= special_tokens.write(config, self.special_tokens) | self.write(config)
        tensors = frozenset(weight.theirs for weight in self.weights(config))
        back = meaning(self.our_config(theirs, tensors))
        for field, value in meaning(config).items():
            if back[field] != value:
                raise UserError(
                    f"model.{field}: {value!r} cannot be expressed by {self.model_type}, which would make it {back[field]!r}"
                )
        return theirs


def meaning(config: ModelConfig) -> dict:
    """What the network computes, field by field, in one spelling."""
    said = {
        f.name: getattr(config, f.name)
        for f in dataclasses.fields(config)
        if f.name not in TRAINING
    }
    layers = [layer for side in config.sides for layer in config.layers(side)]
    return said | {
        "position": [positions.build(layer.position) for layer in layers],
        "window": [layer.window for layer in layers],
        "layer_pattern": (),
        "norm_placement": [config.placement(side) for side in config.sides],
        "norm_offset": config.norm_offset and config.norm == "layernorm",
        "attention_bias": config.attention_has_bias,
        "qkv_bias": config.qkv_has_bias,
        "attention_scale": round(
            config.head_size**-0.5 if config.attention_scale is None else config.attention_scale, 6
        ),
        "num_encoder_layers": config.num_layers("encoder"),
        "num_decoder_layers": config.num_layers("decoder"),
        "num_kv_heads": config.kv_heads,
        "d_head": config.head_size,
        "d_value": config.value_size,
        "d_embedding": config.embedding_size,
        "share_embeddings": config.share_embeddings or config.family != "encoder_decoder",
    }
