"""No feed-forward."""

import dataclasses

from transformer.model.feed_forwards.base import FEED_FORWARDS, FeedForward


@FEED_FORWARDS.register("none")
@dataclasses.dataclass(frozen=True)
class Nothing(FeedForward):
    """The layer has no feed-forward sublayer, like those of an attention-only model or of stacked LSTMs."""

    def build(self, config, gain, out_gain):
        return None
