"""The cache of incremental decoding: an explicit value, passed in and returned, never hidden state.

It is a tree of mixer states. The contents of a state are private to its mixer. Mixers that store an
entry per token share the slot functions below. Shape suffixes: B batch, T new tokens, S slots."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.inputs import check_interruptions, values
from transformer.model.masks import Tokens
from transformer.model.mixers.base import Context, State


@struct.dataclass
class Shared:
    """The part of a state that is computed from the source. The beams of a sentence share it: its
    batch size is the number of sources, and reordering beams leaves it unchanged."""

    value: Any


def _is_shared(x: Any) -> bool:
    return isinstance(x, Shared)


@struct.dataclass
class LayerState:
    """The state of a layer: of its mixer and, once the source is read, of its cross-attention."""

    mixer: State
    source: Shared | None = None


@struct.dataclass
class Cache:
    """The states of a decoder's layers, and the positions and segments of the cached tokens."""

    # One per layer, also if layers are scanned: a stack of states would be copied at each step.
    layers: tuple[LayerState, ...]
    tokens: Tokens  # one entry per slot. Empty slots have segment 0, so masks hide them
    index: jax.Array  # int32[], the next slot of all sequences, as prompts are padded on the left

    def append(self, tokens: Tokens) -> Tokens:
        """Returns the tokens of all slots after writing `tokens`, whose order they take on."""
        put = lambda slots, new: jax.lax.dynamic_update_slice_in_dim(
            slots, jnp.broadcast_to(new, (len(slots), new.shape[1])), self.index, axis=1
        )
        slots = jax.tree.map(put, self.tokens, tokens.replace(until_BxT=None, order=""))
        return slots.replace(order=tokens.order)

    def reorder(self, select: Callable[[jax.Array], jax.Array]) -> "Cache":
        """Applies `select`, an indexing of axis 0, to the batch axis of everything but `Shared`."""
        move = lambda x: x if _is_shared(x) else select(x)
        layers = jax.tree.map(move, self.layers, is_leaf=_is_shared)
        return self.replace(layers=layers, tokens=jax.tree.map(select, self.tokens))


def check_cache(config: ModelConfig, cache: Cache, tokens: Tokens, encoded_BxSxD=None) -> None:
    """Raises UserError for inputs that do not match what is in the cache: more tokens than free
    slots (than all slots, if the index is traced), an encoder's output where there is one already,
    and, where values are known, padding that a mixer's state does not support. A ring of `window`
    slots counts padding as tokens, so padding must precede the first."""
    cached_BxS, new_BxT = (values(x) for x in (cache.tokens.segments_BxT, tokens.segments_BxT))
    slots, new, index = cache.tokens.segments_BxT.shape[1], tokens.segments_BxT.shape[1], 0
    if (index_value := values(cache.index)) is not None:
        index = int(index_value)
    if index + new > slots:
        problem = f"{new} tokens do not fit, because {index} of the {slots} slots are used"
        raise UserError(f"cache: {problem}; create it with more slots")
    leaves = jax.tree.leaves(cache.layers, is_leaf=_is_shared)
    if encoded_BxSxD is not None and any(map(_is_shared, leaves)):
        way_out = "pass None, or begin with an empty cache"
        raise UserError(f"encoded_BxSxD: the cache already has a source; {way_out}")
    if cached_BxS is None or new_BxT is None or index_value is None:
        return
    new_BxT = np.broadcast_to(new_BxT, (len(cached_BxS), new))
    segments_BxT = np.concatenate([cached_BxS[:, :index], new_BxT], axis=1)
    check_interruptions(config, "decoder", segments_BxT)
    layers = [x for x in config.layers("decoder") if "window" in x.token_mixer.fields]
    rings = {x.window for x in layers if 0 < x.window < min(slots, index + new)}
    if rings and np.any(np.diff((segments_BxT > 0).astype(np.int8), axis=1) < 0):
        keeps = f"model.window = {min(rings)} keeps only as many entries in the cache"
        way_out = "put padding before the first token"
        raise UserError(f"padding_mask: padding after a token, but {keeps}; {way_out}")


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """Returns a cache that can hold `slots` tokens per sequence."""
    states = (_empty_state(layer, batch, slots) for layer in config.layers("decoder"))
    zeros = jnp.zeros((batch, slots), jnp.int32)
    return Cache(tuple(map(LayerState, states)), Tokens(zeros, zeros), jnp.zeros((), jnp.int32))


def _empty_state(layer: ModelConfig, batch: int, slots: int) -> State:
    """Returns the state of a layer's mixer. Raises TypeError if an array lacks the batch axis."""
    state = layer.token_mixer.empty_state(layer, batch, slots)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.shape[:1] != (batch,):
            array = f"array {jax.tree_util.keystr(path)!r} has shape {list(x.shape)}"
            name = f"{type(layer.token_mixer).__name__}.empty_state"
            raise TypeError(f"{name}: {array}; axis 0 must be the batch, of size {batch}")
    return state


# ---- Slots: one entry per token, on axis -2: [B, S, size] or, with heads, [B, K, S, size].
# Products of one query with all keys read each head's entries in this order.


def empty_slots(config: ModelConfig, batch: int, slots: int, *shape: int) -> jax.Array:
    """Returns zeros for `slots` tokens, or `window` if fewer. `shape`: (size) or (heads, size)."""
    count = min(slots, config.window or slots)
    return jnp.zeros((batch, *shape[:-1], count, shape[-1]), config.dtype)


def extend(slots: Any, new: Any, context: Context) -> tuple[Any, Tokens, Any]:
    """Writes the entries of new tokens, [B, T, size] or [B, K, T, size], to the slots.

    Returns the entries that the new tokens can attend to, their tokens, and the next slots.

    If there are fewer slots than the cache has tokens, they form a ring: token i is in slot
    i mod S. The token that it replaces is outside the window of every later token. Several new
    tokens at once attend to the previous contents of the ring and to each other, because the first
    of them may still attend to entries that the last of them overwrite."""
    tokens, index = context.key_tokens, context.index
    count, length = (jax.tree.leaves(tree)[0].shape[-2] for tree in (slots, new))
    if count == tokens.segments_BxT.shape[1]:
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=index, axis=-2)
        slots = jax.tree.map(lambda old, x: write(old, x.astype(old.dtype)), slots, new)
        return slots, tokens, slots
    num_written = min(length, count)
    ring = (index + length - num_written + jnp.arange(num_written)) % count
    last = lambda x: x[..., length - num_written :, :]
    put = lambda old, x: old.at[..., ring, :].set(last(x).astype(old.dtype))
    written = jax.tree.map(put, slots, new)
    if length == 1:
        return written, _in_ring(tokens, index, count), written
    like = lambda a, b: jnp.broadcast_to(b, (len(a), *b.shape[1:]))
    join = lambda a, b, axis=1: jnp.concatenate([a, like(a, b)], axis)
    new_tokens = context.tokens.replace(until_BxT=None, order="")
    readable_tokens = jax.tree.map(join, _in_ring(tokens, index - 1, count), new_tokens)
    readable = jax.tree.map(lambda old, x: join(old, x.astype(old.dtype), -2), slots, new)
    return readable, readable_tokens, written


def _in_ring(tokens: Tokens, last: jax.Array, count: int) -> Tokens:
    """Returns the tokens in a ring of `count` slots after token `last` was written."""
    index = last - (last - jnp.arange(count)) % count
    in_ring = jax.tree.map(lambda x: x[:, jnp.maximum(index, 0)], tokens)
    return in_ring.replace(segments_BxT=jnp.where(index >= 0, in_ring.segments_BxT, 0), order="")
