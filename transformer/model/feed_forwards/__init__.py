"""Feed-forwards: the sublayer that acts on each token separately.

The rest of the code uses a feed-forward only through the interface of `FeedForward`. To add a
feed-forward, add a file to this package.
"""

from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward

__all__ = ["FEED_FORWARDS", "FeedForward"]
