"""Layers without a feed-forward."""

import dataclasses
from typing import ClassVar

from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward


@FEED_FORWARDS.register("none")
@dataclasses.dataclass(frozen=True)
class NoFeedForward(FeedForward):
    """No feed-forward sublayer, as in attention-only models and stacked LSTMs."""

    exists: ClassVar[bool] = False
