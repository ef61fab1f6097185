"""Feed-forwards: the sublayer that acts on each token alone. One object each, as the mixers of mixers/.

A new one is a new file in this folder.
"""

from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward

__all__ = ["FEED_FORWARDS", "FeedForward"]
