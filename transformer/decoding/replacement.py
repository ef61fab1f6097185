"""Decoding of many sequences in one batch, in which waiting ones replace those that have ended.

Without it, a batch runs until its longest text ends, and computes the other rows for nothing. Here
the program stops when a quarter of the rows have ended. Waiting sequences, whose prompts are read
in batches of the same size, take their places, and the program goes on ("iteration-level
scheduling", Yu et al. 2022, Orca). Shapes never change, so nothing is compiled again. The cost is
the memory of a second batch. Texts are the same as without replacement."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Sharding

from transformer.decoding.prefill import DecodeState, Search, grow, reader


class Replacing:
    """The programs that decode batches with replacement.

    Args:
      search, model: what chooses the tokens, and the model that it reads.
      begin: (params, *inputs) -> the state of the search after the prompts, and the length of
        texts. The inputs are arrays with a row per sequence.
      replicated: the sharding of the texts, or None on one device."""

    def __init__(
        self, search: Search, model: nn.Module, begin: Callable, replicated: Sharding | None
    ):
        def start(params, *inputs):
            return begin(params, *inputs)[0]

        def go_on(params, state, active):
            state = decode_until(search, reader(model, params), state, active)
            return state, (search.texts(state), search.active(state), used_slots(search, state))

        self._search, self._start = search, jax.jit(start)
        self._grow = jax.jit(grow, static_argnames="tokens")
        self._go_on = jax.jit(go_on, donate_argnums=1, out_shardings=(None, replicated))
        replace = lambda old, new, rows_B: replace_rows(search, old, new, rows_B)
        self._replace = jax.jit(replace, donate_argnums=0)

    def decode(
        self, params: Any, batches: Sequence[Sequence[Any]], inputs: Callable
    ) -> Iterator[tuple[Any, np.ndarray]]:
        """Yields (name, text) of each sequence when it has ended.

        Args:
          params: the parameters of the model.
          batches: two or more lists with a name for each row; the last one may be shorter.
          inputs: names -> the inputs of `begin`, in which other rows are empty sequences."""
        size, batches = len(batches[0]), deque(batches)

        def read():
            """Returns the state after the prompts of the next batch, and its sequences."""
            names = batches.popleft()
            return self._start(params, *inputs(names)), deque(enumerate(names))

        (state, names), (new, waiting) = read(), read()
        names, length = dict(names), jax.eval_shape(self._search.texts, state).shape[1]
        more = length - length // 2  # a step also reads empty slots, so the cache grows if needed
        state = self._grow(state, length // 2)
        while names:
            most = 3 * size // 4 if waiting or batches else 0
            state, outputs = self._go_on(params, state, most)
            texts, active, used = map(np.asarray, outputs)
            for row in [row for row in names if not active[row]]:
                yield names.pop(row), texts[row]
            if more and used > 3 * state.memory.cache.tokens.segments_BxT.shape[1] // 4:
                state, more = self._grow(state, more), 0
            free = deque(row for row in range(size) if row not in names)
            while True:
                rows_B = np.full(size, -1)
                while free and waiting:
                    row = free.popleft()
                    rows_B[row], names[row] = waiting.popleft()
                state = self._replace(state, new, rows_B)
                if not (free and batches):
                    break
                new, waiting = read()


def decode_until(search: Search, read: Callable, state: Any, active: jax.Array) -> Any:
    """Continues a search until at most `active` sequences are active, or all slots are used."""

    def runs(state):
        cache = state.memory.cache
        has_room = cache.index + cache.beams <= cache.tokens.segments_BxT.shape[1]
        return has_room & (jnp.sum(search.active(state)) > active)

    return jax.lax.while_loop(runs, lambda state: search.step(read, state), state)


def used_slots(search: Search, state: Any) -> jax.Array:
    """Returns the number of slots since the first token of an active sequence."""
    cache, active_B = state.memory.cache, search.active(state)
    first_R = jnp.argmax(cache.tokens.segments_BxT > 0, axis=1)
    first_R = jnp.where(jnp.repeat(active_B, cache.beams), first_R, cache.index)
    return cache.index - jnp.min(first_R)


def replace_rows(search: Search, old: Any, new: Any, rows_B: jax.Array) -> Any:
    """Returns the state of a search with row `rows_B[r]` of `new` in row r, or that of `old` where
    it is -1. Active sequences keep their rows. The last tokens of all rows take the same slot, as
    after padding on the left. If all slots are used, those before the first token of every active
    sequence become free."""
    cache, batch = old.memory.cache, len(rows_B)

    def choose(old, new):
        if len(old) == 1 < batch:  # the same for all sequences
            return old
        by_sequence = lambda x: x.reshape(batch, -1, *x.shape[1:])
        is_new = (rows_B >= 0).reshape(batch, *[1] * old.ndim)
        return jnp.where(is_new, by_sequence(new)[rows_B], by_sequence(old)).reshape(old.shape)

    index = jnp.maximum(used_slots(search, old), new.memory.cache.index)
    is_full = cache.index + cache.beams > cache.tokens.segments_BxT.shape[1]
    cache = jax.lax.cond(is_full, lambda cache: cache.move(index), lambda cache: cache, cache)
    cache = cache.take(new.memory.cache, choose)
    # The program goes on with rows that have ended, but without the tokens before.
    active_B = jnp.where(rows_B < 0, search.active(old), search.active(new)[rows_B])
    segments = jnp.where(jnp.repeat(active_B, cache.beams)[:, None], cache.tokens.segments_BxT, 0)
    cache = cache.replace(tokens=cache.tokens.replace(segments_BxT=segments))
    source = jax.tree.map(choose, old.memory.source, new.memory.source)
    old, new = (x.replace(memory=None) for x in (old, new))
    return jax.tree.map(choose, old, new).replace(memory=DecodeState(cache, source))
