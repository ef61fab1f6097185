"""Layers without a feed-forward."""

import dataclasses

from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward


@FEED_FORWARDS.register("none")
@dataclasses.dataclass(frozen=True)
class NoFeedForward(FeedForward):
    """No feed-forward sublayer, as in attention-only models and stacked LSTMs."""

    def build(self, config, gain, out_gain):
        return None
