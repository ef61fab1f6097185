"""What a token mixer is, and what it is given.

A mixer owns its options (the fields of its dataclass), its parameters and forward pass (the module
that `build` returns), and its decoding state. Nothing else in the code knows what a state holds.

The sizes that most mixers share (`num_heads`, `num_kv_heads`, `d_head`, `d_value`, `window`) are
fields of the model, not options: experiment files vary them beside `d_model`, and cross-attention
has them too. A mixer names those that it reads in `fields`; the config refuses the others.

Shape suffixes: B batch, T length of the stack's tokens, S length of the source, D d_model.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from flax import linen as nn
from flax import struct

from transformer.model.masks import Tokens
from transformer.model.positions import StackFacts
from transformer.registry import Registry

MIXERS = Registry("model.mixer", __package__)

SHARED_FIELDS = (
    "num_heads", "num_kv_heads", "d_head", "d_value", "window", "attention_bias", "qkv_bias", "qk_norm", "attention_scale",
    "attention_soft_cap", "attention_sink", "attention_backend", "attention_dropout",
)  # fmt: skip
"""The fields of ModelConfig that belong to mixers. Each mixer names those that it reads."""

Config = Any
"""The layer's ModelConfig, whose module imports this one."""

State = Any
"""A tree of arrays with the batch on axis 0, or None outside decoding."""


@struct.dataclass
class Context:
    """What every layer of a stack is given beside the residual stream.

    tokens: where the stack's tokens stand.
    key_tokens: the same; in decoding, the tokens of all cache slots, these included.
    source_BxSxD, source_tokens: what the encoder wrote, in a decoder that reads one. In decoding the
        output is given once, and None after that: each state keeps what it needs of it.
    index: int32[], the cache slot of the first of `tokens`; None outside decoding.
    dropout_rate: float32[], in place of the config's; None: the config's.
    """

    tokens: Tokens
    key_tokens: Tokens
    source_BxSxD: jax.Array | None = None
    source_tokens: Tokens | None = None
    index: jax.Array | None = None
    dropout_rate: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Mixer:
    """The base of every mixer. Register a subclass with `@MIXERS.register("name")`."""

    scope: ClassVar[str] = "mixer"
    """The name of the sublayer: in parameter paths, and in what evaluators report."""

    fields: ClassVar[frozenset[str]] = frozenset()
    """Those of SHARED_FIELDS that it reads, and "use_bias" if its projections have biases by that field."""

    hooks: ClassVar[frozenset[str]] = frozenset({"embed"})
    """The hooks of a position scheme that act on it (model/positions/base.py)."""

    observes: ClassVar[frozenset[str]] = frozenset()
    """What it tells to those who watch (model/watch.py)."""

    source: ClassVar[str] = "cross_attention"
    """How the layers of a decoder read the encoder. "cross_attention": in a sublayer beside the mixer. "none":
    not at all. Any other value: the mixer reads the encoder itself. A mixer may make this an option."""

    in_order: ClassVar[bool] = False
    """Whether a token's output is computed from the state after the token before it. Then the tokens of
    a sequence stay in order and on one device: no context parallelism."""

    pairs: ClassVar[bool] = False
    """Whether it computes products of pairs of tokens, which a mask can forbid. Only the share that is
    allowed counts as work (planning/model_flops.py)."""

    def check(self, config: Config, side: str) -> str | None:
        """Why it cannot serve the layers of this side, in one line; None if it can."""
        return None

    def facts(self, config: Config, facts: StackFacts) -> StackFacts:
        """What a position scheme is told of the heads that it acts on."""
        return facts

    def build(
        self, config: Config, side: str, gain: float, out_gain: float
    ) -> Callable[..., nn.Module]:
        """Makes the module, given its `name`.

        The module is called with (x_BxTxD, context: Context, position: Position, state: State,
        deterministic: bool) and returns (out_BxTxD, state), the state with these tokens read.
        Outside decoding the state is None, and what is returned for it is dropped. `gain` scales the initial
        values of the matrices that carry values, `out_gain` the last one on top. What a state keeps of
        the source is a `Shared` (model/cache.py): the beams of a sentence share it.
        """
        raise NotImplementedError

    def empty_state(self, config: Config, batch: int, slots: int) -> State:
        """The state of a layer that has read nothing, for `slots` tokens a sequence."""
        raise NotImplementedError
