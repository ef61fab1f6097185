"""The interface of feed-forwards, which act on each token. Their fields are options of configs."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from flax import linen as nn

from transformer.registry import Registry

FEED_FORWARDS = Registry("model.feed_forward", __package__)
Config = Any  # the layer's ModelConfig. Its module imports this one, so it cannot be imported here


@dataclasses.dataclass(frozen=True)
class FeedForward:
    """The base class of feed-forwards. Register one with `@FEED_FORWARDS.register("name")`."""

    exists: ClassVar[bool] = True  # whether a layer has the sublayer; if not, `build` is not called

    def build(self, config: Config, gain: float, out_gain: float) -> Callable[..., nn.Module]:
        """Returns a function that constructs the module from its `name`. The module is called with
        (x_BxTxD, tokens: Tokens, deterministic: bool) and returns out_BxTxD. `gain` scales the
        initial values of its matrices. `out_gain` additionally scales those of the last one."""
        raise NotImplementedError


@FEED_FORWARDS.register("none")
class NoFeedForward(FeedForward):
    """No feed-forward sublayer, as in attention-only models and stacked LSTMs."""

    exists = False
