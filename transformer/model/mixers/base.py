"""The interface of token mixers, which move information between tokens, and inputs of layers.

A mixer owns its options (the fields of its dataclass), its parameters and forward pass (the module
that `build` constructs), and its decoding state. The rest of the code treats the state as opaque.

The sizes that most mixers share (`num_heads`, `num_kv_heads`, `d_head`, `d_value`, `window`) are
fields of ModelConfig, not options: experiment files vary them together with `d_model`, and
cross-attention uses them too. A mixer lists those that it reads in `fields`; others are rejected.

Shape suffixes: B batch, T length of the stack's tokens, S length of the source, D d_model."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import linen as nn, struct

from transformer.model.masks import Tokens
from transformer.model.positions import StackFacts
from transformer.registry import Registry

MIXERS = Registry("model.mixer", __package__)

SOURCE_MIXERS = Registry("model.mixer.source", __package__)
"""The mixers of the sublayer in which a decoder layer reads the encoder."""

SHARED_FIELDS = (
    "num_heads", "num_kv_heads", "d_head", "d_value", "window", "attention_bias", "qkv_bias",
    "qk_norm", "qk_norm_joint", "v_norm", "attention_score", "attention_scale",
    "attention_layer_scale", "attention_soft_cap", "attention_mask_value", "attention_sink",
    "attention_gate", "value_residual", "attention_out", "attention_backend", "attention_dropout",
    "canon", "cross_position",
)  # fmt: skip
"""The fields of ModelConfig that configure mixers; each mixer lists those that it reads."""

NORM_FIELDS = ("norm", "norm_gain", "norm_offset", "norm_epsilon", "norm_zero_centered")
"""The fields of ModelConfig that configure norms, also those within mixers."""

Config = Any  # the layer's ModelConfig. Its module imports this one, so it cannot be imported here

State = Any  # a pytree of arrays with the batch on axis 0; None outside decoding


@struct.dataclass
class Context:
    """The inputs of every layer of a stack, apart from the residual stream."""

    tokens: Tokens  # positions and segments of the stack's tokens
    key_tokens: Tokens  # those that can be attended to: `tokens`; in decoding, of all cache slots
    # The output of the encoder, if any. In decoding, it is passed once and is None afterwards,
    # because each state keeps what it needs from it.
    source_BxSxD: jax.Array | None = None
    source_tokens: Tokens | None = None  # the encoder's tokens
    index: jax.Array | None = None  # int32[], the cache slot of the first of `tokens`, in decoding
    dropout_rate: jax.Array | None = None  # float32[], overrides the config's; None keeps it
    layer: jax.Array | int | None = None  # the layer's number, from 0; int32[] if scanned
    passed: Any = None  # by the mixer of the layer before; zeros in the first layer; None: nothing
    # The layer's Canon layers. Attention calls it with (module, "B_query", logical names, x).
    canon: Callable = struct.field(pytree_node=False, default=lambda module, place, names, x: x)


@dataclasses.dataclass(frozen=True)
class Mixer:
    """The base class of mixers. Register a subclass with `@MIXERS.register("name")`."""

    # The sublayer's name in parameter paths and in the results of evaluators
    scope: ClassVar[str] = "mixer"
    # The SHARED_FIELDS and NORM_FIELDS that it reads, and "use_bias" if that field adds its biases
    fields: ClassVar[frozenset[str]] = frozenset()
    # The hooks of position schemes (model/positions/base.py) that it supports
    hooks: ClassVar[frozenset[str]] = frozenset({"embed"})
    observes: ClassVar[frozenset[str]] = frozenset()  # statistics that it can record (modules.py)
    # How a decoder layer reads the encoder. A name in SOURCE_MIXERS: in a separate sublayer.
    # "none": not at all. Any other value: inside the mixer. A mixer may make this an option.
    source: ClassVar[str] = "cross_attention"
    # Whether each output is computed from the state after the previous token. Then the tokens of a
    # sequence stay in order on one device, which rules out context parallelism.
    in_order: ClassVar[bool] = False
    # Whether padding between two tokens of a document leaves the results at tokens unchanged.
    # Padding before and after a document always does.
    skips_padding: ClassVar[bool] = True
    causal: ClassVar[bool] = False  # whether it is defined for causal decoders alone

    def check(self, config: Config, side: str) -> str | None:
        """Returns why the mixer cannot serve the layers of this stack, in one line, or None. `side`
        is "encoder" or "decoder". The config raises the returned text as an error."""
        return None

    def facts(self, config: Config, facts: StackFacts) -> StackFacts:
        """Returns the stack's facts, adapted to the heads that a position scheme acts on."""
        return facts

    def module(self, side: str) -> type["MixerModule"]:
        """Returns the class of the module in a stack, for `build`."""
        raise NotImplementedError

    def build(
        self, config: Config, side: str, gain: float, out_gain: float
    ) -> Callable[..., nn.Module]:
        """Returns a function that constructs the module from its `name`.

        The module is called with (x_BxTxD, context: Context, position: Position, state: State,
        deterministic: bool). It returns (out_BxTxD, state), where the new state includes these
        tokens, and may add a value, `passed` for the next layer. Outside decoding, `state` is None.

        `gain` scales the initial values of the matrices that carry values. `out_gain` additionally
        scales the last of them. A state wraps the parts that come from the source in `Shared`
        (model/cache.py), because the beams of a sentence share them.

        Products of token pairs, which a mask can exclude, go into the scope `masks.pairs`. Only the
        share that the mask allows counts as FLOPs (planning/model_flops.py)."""
        return functools.partial(self.module(side), config, self, side, gain, out_gain)

    def empty_state(self, config: Config, batch: int, slots: int) -> State:
        """Returns a layer's state before the first token, with `slots` slots per sequence."""
        raise NotImplementedError


class MixerModule(nn.Module):
    """The base class of the modules of mixers: what `Mixer.build` passes on to them."""

    config: Config
    kind: Any  # the mixer, with its options
    side: str  # encoder | decoder
    gain: float  # scales the initial W_V and W_O, or the matrices in their place
    out_gain: float  # additionally scales the initial W_O
