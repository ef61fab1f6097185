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


@struct.dataclass
class Slots(Shared):
    """An array with an entry per token, [B, S, size] or [B, K, S, size], which beams share: each of
    them appends its own entries, and those of others are empty slots in its `Cache.tokens`."""


def _is_shared(x: Any) -> bool:
    return isinstance(x, Shared)


def _map_slots(function: Callable, state: Any) -> Any:
    """Applies a function to the arrays with an entry per token."""
    put = lambda x: Slots(function(x.value)) if type(x) is Slots else x
    return jax.tree.map(put, state, is_leaf=_is_shared)


@struct.dataclass
class LayerState:
    """States of a layer's mixer and, after the first tokens, cross-attention and Canon layers."""

    mixer: State
    source: Shared | None = None
    canon: dict[str, jax.Array] | None = None


@struct.dataclass
class Cache:
    """The states of a decoder's layers, and the positions and segments of the cached tokens."""

    # One per layer, also if layers are scanned: a stack of states would be copied at each step.
    layers: tuple[LayerState, ...]
    tokens: Tokens  # one entry per slot. Empty slots have segment 0, so masks hide them
    index: jax.Array  # int32[], the next slot of all sequences, as prompts are padded on the left
    source: Tokens | None = None  # those of the encoder's output
    windows: tuple[int, ...] = struct.field(pytree_node=False, default=())  # of layers; 0: none
    beams: int = struct.field(pytree_node=False, default=1)  # rows that share a sentence's slots

    def append(self, tokens: Tokens) -> Tokens:
        """Returns the tokens of all slots after writing `tokens`, whose order they take on. Each
        beam's token takes one of `beams` slots, and the others stay empty in its row."""
        rows = len(self.tokens.segments_BxT)
        is_own_BxK = jnp.arange(rows)[:, None] % self.beams == jnp.arange(self.beams)

        def put(slots, new):
            new = (new[..., None] * is_own_BxK[:, None]).reshape(rows, -1)
            return jax.lax.dynamic_update_slice_in_dim(slots, new, self.index, axis=1)

        slots = jax.tree.map(put, self.tokens, tokens.replace(until_BxT=None, order=""))
        return slots.replace(order=tokens.order)

    def branch(self, beams: int) -> "Cache":
        """Returns the cache of `beams` continuations of each sequence, in adjacent rows."""
        return self.reorder(lambda x: jnp.repeat(x, beams, axis=0)).replace(beams=beams)

    def grow(self, tokens: int) -> "Cache":
        """Returns this cache with slots for `tokens` more tokens of each beam."""
        last, new = self.index - 1, tokens * self.beams
        slots = self.tokens.segments_BxT.shape[1] + new

        def grown(state, window: int):
            size = min(slots, window * self.beams or slots)
            token = last - (last - jnp.arange(size)) % size  # in each slot; negative: none
            wider = lambda x: jnp.take(x, token % x.shape[-2], axis=-2)
            return _map_slots(wider, state)

        tokens = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, new)]), self.tokens)
        return self.replace(layers=tuple(map(grown, self.layers, self.windows)), tokens=tokens)

    def move(self, index: jax.Array) -> "Cache":
        """Returns this cache with `index` as its next slot. It moves all tokens to the left, and
        drops slots, which are empty in rows that are used further."""
        roll = lambda x, axis: jnp.roll(x, index - self.index, axis)
        layers = _map_slots(lambda x: roll(x, -2), self.layers)
        tokens = jax.tree.map(lambda x: roll(x, 1), self.tokens)
        return self.replace(layers=layers, tokens=tokens, index=index)

    def take(self, new: "Cache", choose: Callable) -> "Cache":
        """Returns this cache with rows of `new`, whose last tokens move to the slot of the last one
        here. `choose(old, new)` returns an array with the rows of both that the result has."""
        length = new.tokens.segments_BxT.shape[1]

        def put(old, new):
            if type(old) is not Slots:
                return jax.tree.map(choose, old, new)
            (old, new), count = (old.value, new.value), new.value.shape[-2]
            at = (self.index - count + jnp.arange(count)) % old.shape[-2]
            new = jnp.roll(new, -(length % count), axis=-2)  # a ring, from its first token on
            return Slots(old.at[..., at, :].set(choose(old[..., at, :], new)))

        def put_tokens(old, new):
            empty = jnp.zeros((len(new), old.shape[1]), new.dtype)
            start = self.index - length
            return choose(old, jax.lax.dynamic_update_slice_in_dim(empty, new, start, axis=1))

        layers = jax.tree.map(put, self.layers, new.layers, is_leaf=_is_shared)
        source = jax.tree.map(choose, self.source, new.source)
        tokens = jax.tree.map(put_tokens, self.tokens, new.tokens)
        return self.replace(layers=layers, tokens=tokens, source=source)

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
    new *= cache.beams  # each beam's tokens have their own slots
    if (index_value := values(cache.index)) is not None:
        index = int(index_value)
    if index + new > slots:
        problem = f"{new} tokens do not fit, because {index} of the {slots} slots are used"
        raise UserError(f"cache: {problem}; create it with more slots")
    leaves = jax.tree.leaves(cache.layers, is_leaf=_is_shared)
    if encoded_BxSxD is not None and Shared in map(type, leaves):
        way_out = "pass None, or begin with an empty cache"
        raise UserError(f"encoded_BxSxD: the cache already has a source; {way_out}")
    if cached_BxS is None or new_BxT is None or index_value is None or cache.beams > 1:
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
    layers, zeros = config.layers("decoder"), jnp.zeros((batch, slots), jnp.int32)
    states = tuple(LayerState(_empty_state(layer, batch, slots)) for layer in layers)
    windows = tuple(layer.window for layer in layers)
    return Cache(states, Tokens(zeros, zeros), jnp.zeros((), jnp.int32), windows=windows)


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


def empty_slots(config: ModelConfig, batch: int, slots: int, *shape: int) -> Slots:
    """Returns zeros for `slots` tokens, or `window` if fewer. `shape`: (size) or (heads, size)."""
    count = min(slots, config.window or slots)
    return Slots(jnp.zeros((batch, *shape[:-1], count, shape[-1]), config.dtype))


def by_beam(function: Callable, entries: Any, *rows: Any) -> Any:
    """Returns function(entries, *rows), where the entries of a sentence serve all its beams. Arrays
    of `entries` have one row per sentence, those of `rows` and of the result one per beam."""
    count, total = (len(jax.tree.leaves(tree)[0]) for tree in (entries, rows))
    if count == total:
        return function(entries, *rows)
    split = lambda x: jnp.broadcast_to(x, (total, *x.shape[1:])).reshape(count, -1, *x.shape[1:])
    out = jax.vmap(functools.partial(function, entries), 1, 1)(*jax.tree.map(split, rows))
    return jax.tree.map(lambda x: x.reshape(total, *x.shape[2:]), out)


def extend(slots: Any, new: Any, context: Context) -> tuple[Any, Tokens, Any]:
    """Writes the entries of new tokens, [B, T, size] or [B, K, T, size], to a tree of `Slots`.
    Returns the entries for them to attend to (with `by_beam`), their tokens, and the next slots.

    If there are fewer slots than the cache has tokens, they form a ring: token i is in slot
    i mod S. The token that it replaces is outside the window of every later token. Several new
    tokens at once attend to the previous contents of the ring and to each other, because the first
    of them may still attend to entries that the last of them overwrite."""
    tokens, index, T = context.key_tokens, context.index, jax.tree.leaves(new)[0].shape[-2]
    old = jax.tree.map(lambda x: x.value, slots, is_leaf=_is_shared)
    new = jax.tree.map(_of_sentences, old, new)
    count, length = (jax.tree.leaves(tree)[0].shape[-2] for tree in (old, new))
    if count == tokens.segments_BxT.shape[1]:
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=index, axis=-2)
        written = jax.tree.map(write, old, new)
        return written, tokens, jax.tree.map(Slots, written)
    num_written, in_ring = min(length, count), functools.partial(_in_ring, tokens, count)
    ring = (index + length - num_written + jnp.arange(num_written)) % count
    put = lambda old, x: old.at[..., ring, :].set(x[..., length - num_written :, :])
    written = jax.tree.map(put, old, new)
    slots = jax.tree.map(Slots, written)
    if T == 1:
        return written, in_ring(index + length - 1), slots
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, index, length, axis=1)
    join = lambda a, b, axis=1: jnp.concatenate([a, b], axis)
    new_tokens = jax.tree.map(cut, tokens.replace(order=""))
    readable = jax.tree.map(functools.partial(join, axis=-2), old, new)
    return readable, jax.tree.map(join, in_ring(index - 1), new_tokens), slots


def _of_sentences(slots: jax.Array, new: jax.Array) -> jax.Array:
    """Returns new entries, [B, ..., T, size], with those of a sentence's beams in one row."""
    new = new.astype(slots.dtype).reshape(len(slots), -1, *new.shape[1:])
    return jnp.moveaxis(new, 1, -2).reshape(*slots.shape[:-2], -1, slots.shape[-1])


def _in_ring(tokens: Tokens, count: int, last: jax.Array) -> Tokens:
    """Returns the tokens in a ring of `count` slots after token `last` was written."""
    index = last - (last - jnp.arange(count)) % count
    in_ring = jax.tree.map(lambda x: x[:, jnp.maximum(index, 0)], tokens)
    return in_ring.replace(segments_BxT=jnp.where(index >= 0, in_ring.segments_BxT, 0), order="")
