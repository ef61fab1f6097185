"""The cache of incremental decoding: an explicit value, passed in and returned, never hidden state.

It is a tree of mixer states. Only a mixer knows what its state holds; those that keep something for
every token share the slots below.

Shape suffixes: B batch, T new tokens, S slots.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.masks import Tokens
from transformer.model.mixers.base import Context, State


@struct.dataclass
class Shared:
    """The part of a state that comes from the source. The beams of a sentence share it, so its batch
    is that of the sources, and reordering beams leaves it as it is."""

    value: Any


@struct.dataclass
class LayerState:
    """What one decoder layer remembers: the state of its mixer, and of its cross-attention once the source is read."""

    mixer: State
    source: Shared | None = None


@struct.dataclass
class Cache:
    """A decoder's memory: its layers' states, and where the cached tokens stand. Empty slots have segment 0, so masks hide them.

    layers: a state for each layer; where layers are scanned, for each of a period, stacked on axis 0.
    index: int32[], the next slot to be written, the same in all sequences (prompts are padded on the left).
    """

    layers: LayerState | tuple[LayerState, ...]
    tokens: Tokens
    index: jax.Array

    def append(self, tokens: Tokens) -> Tokens:
        """The tokens of all slots, once `tokens` stand in the next ones."""
        put = lambda slots, new: jax.lax.dynamic_update_slice_in_dim(slots, new, self.index, axis=1)
        return jax.tree.map(put, self.tokens, tokens.replace(until_BxT=None, order=""))

    def reorder(self, rows: Callable[[jax.Array], jax.Array], scanned: bool) -> "Cache":
        """`rows`, an indexing of axis 0, applied to the batch of everything that is not `Shared`."""
        one = (lambda x: jnp.swapaxes(rows(jnp.swapaxes(x, 0, 1)), 0, 1)) if scanned else rows
        is_shared = lambda x: isinstance(x, Shared)
        move = lambda x: x if is_shared(x) else one(x)
        layers = jax.tree.map(move, self.layers, is_leaf=is_shared)
        return self.replace(layers=layers, tokens=jax.tree.map(rows, self.tokens))


def check_room(cache: Cache, tokens_BxT: jax.Array) -> None:
    """Raises UserError where the cache has no slots left for these tokens: they would overwrite the last ones."""
    slots, used = cache.tokens.segments_BxT.shape[1], 0
    if not isinstance(cache.index, jax.core.Tracer):
        used = int(cache.index)
    if used + tokens_BxT.shape[1] > slots:
        raise UserError(
            f"cache: {slots} slots, but {used} + {tokens_BxT.shape[1]} tokens; make it with more slots"
        )


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """A cache with room for `slots` tokens in each sequence."""
    layers = tuple(
        LayerState(layer.token_mixer.empty_state(layer, batch, slots))
        for layer in config.layers("decoder")
    )
    depth = config.num_decoder_layers
    if config.scan_layers:
        period = config.period("decoder")
        looped = layers[0] if period == 1 else layers[:period]
        layers = jax.tree.map(lambda x: jnp.zeros((depth // period, *x.shape), x.dtype), looped)
    nothing = jnp.zeros((batch, slots), jnp.int32)
    return Cache(layers, Tokens(nothing, nothing), jnp.zeros((), jnp.int32))


# ---- Slots: one entry for each token, [B, S, ...]


def empty_slots(config: ModelConfig, batch: int, slots: int, *shape: int) -> jax.Array:
    """Room for `slots` tokens, or for as many as a token with `window` can still see."""
    count = min(slots, config.window or slots)
    return jnp.zeros((batch, count, *shape), config.dtype)


def extend(slots: Any, new: Any, context: Context) -> tuple[Any, Tokens, Any]:
    """Writes the entries of new tokens, [B, T, ...]: what they may read, where that stands, and the slots for the next call.

    Fewer slots than the cache has tokens are a ring: token i is in slot i mod S, and the token before
    it in that slot is out of every later token's sight. Several new tokens at once read the ring as it was and each other, because some of
    them may still see what the last of them overwrite.
    """
    tokens, index = context.key_tokens, context.index
    count, length = (jax.tree.leaves(tree)[0].shape[1] for tree in (slots, new))
    if count == tokens.segments_BxT.shape[1]:
        put = lambda old, x: jax.lax.dynamic_update_slice_in_dim(
            old, x.astype(old.dtype), index, axis=1
        )
        slots = jax.tree.map(put, slots, new)
        return slots, tokens, slots
    kept = min(length, count)
    at = (index + length - kept + jnp.arange(kept)) % count
    put = lambda old, x: old.at[:, at].set(x[:, length - kept :].astype(old.dtype))
    written = jax.tree.map(put, slots, new)
    if length == 1:
        return written, _in_ring(tokens, index, count), written
    join = lambda a, b: jnp.concatenate([a, jnp.broadcast_to(b, (len(a), *b.shape[1:]))], axis=1)
    own = context.tokens.replace(until_BxT=None, order="")
    seen = jax.tree.map(join, _in_ring(tokens, index - 1, count), own)
    read = jax.tree.map(lambda old, x: join(old, x.astype(old.dtype)), slots, new)
    return read, seen, written


def _in_ring(tokens: Tokens, last: jax.Array, count: int) -> Tokens:
    """Where the tokens in a ring of `count` slots stand, once token `last` is written."""
    at = last - (last - jnp.arange(count)) % count
    there = jax.tree.map(lambda x: x[:, jnp.maximum(at, 0)], tokens)
    return there.replace(segments_BxT=jnp.where(at >= 0, there.segments_BxT, 0))
