"""Feed-forwards, used only through the interface of `FeedForward`. To add one, add a file."""

from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward

__all__ = ["FEED_FORWARDS", "FeedForward"]
