"""Collections that record internal values of a model: `model.apply(..., mutable=["heads"])`.

A collection is computed only if `mutable` requests it.

sizes    root mean squares of the residual stream and of the branch added to it, at every sublayer
         (residual.py)
streams  the residual stream after each layer (stack.py)
heads    statistics of each attention head (attention_statistics.py)
maps     attention weights of each head"""

from flax import linen as nn

WATCHED = ("sizes", "streams", "heads", "maps")


def watched(module: nn.Module, what: str) -> bool:
    """Returns whether this module is to record the collection `what`; not in initialization."""
    return module.is_mutable_collection(what) and not module.is_initializing()
