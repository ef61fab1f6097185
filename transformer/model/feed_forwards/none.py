"""Layers without a feed-forward."""

from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward


@FEED_FORWARDS.register("none")
class NoFeedForward(FeedForward):
    """No feed-forward sublayer, as in attention-only models and stacked LSTMs."""

    exists = False
