"""What a model tells of its inside to who asks (`mutable=` of `apply`); to nobody else, and then nothing of it is computed.

sizes    of the residual stream and of the branch added to it, at every sublayer (residual.py)
streams  the residual stream behind each layer (stack.py)
heads    in numbers, where each head of each attention looks (attention_statistics.py)
maps     each head's weights
"""

from flax import linen as nn

WATCHED = ("sizes", "streams", "heads", "maps")


def watched(module: nn.Module, what: str) -> bool:
    """Whether somebody asks this module for it: not while its parameters are made, when every collection may be written to."""
    return module.is_mutable_collection(what) and not module.is_initializing()


def any_watched(module: nn.Module) -> bool:
    """Whether somebody asks for anything."""
    return any(watched(module, what) for what in WATCHED)
