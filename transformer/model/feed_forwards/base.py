"""What a feed-forward is. A new one is a class in a file of this package."""

import dataclasses
from collections.abc import Callable
from typing import Any

from flax import linen as nn

from transformer.registry import Registry

FEED_FORWARDS = Registry("model.feed_forward", __package__)

Config = Any
"""The layer's ModelConfig, whose module imports this one."""


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """The base of every feed-forward; its fields are the options that a config may set. Register a subclass with
    `@FEED_FORWARDS.register("name")`."""

    def build(
        self, config: Config, gain: float, out_gain: float
    ) -> Callable[..., nn.Module] | None:
        """Makes the module, given its `name`; or None, where the layer has no such sublayer.

        The module is called with (x_BxTxD, tokens: Tokens, deterministic: bool) and returns out_BxTxD. `gain` scales the initial
        values of its matrices, `out_gain` those of the last one on top.
        """
        raise NotImplementedError
