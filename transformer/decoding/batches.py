"""Decoding of many sequences in one batch, in which waiting ones replace those that have ended.

Without it, a batch runs until its longest text ends, and computes the other rows for nothing. Here
the program stops when a quarter of the rows have ended. Waiting sequences, whose prompts are read
in batches of the same size, take their places, and the program goes on ("iteration-level
scheduling", Yu et al. 2022, Orca). Shapes do not change. The cost is the memory of a second batch.
Texts are the same as without replacement, up to rounding."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec as P

from transformer.decoding import prefill
from transformer.decoding.prefill import Search, decode_until, grow


class Batches:
    """The programs that decode batches. `begin`: (params, *inputs) -> the state of the search after
    the prompts. Inputs are arrays with a row per sequence."""

    def __init__(self, search: Search, model: nn.Module, begin: Callable, params: Any):
        def go_on(params, state, active):
            state = decode_until(search, model, params, state, active)
            slots = used_slots(search, state), state.cache.index
            return state, (search.texts(state), search.active(state), *slots)

        sharding = jax.tree.leaves(params)[0].sharding
        is_on_mesh = isinstance(sharding, NamedSharding)
        replicated = NamedSharding(sharding.mesh, P()) if is_on_mesh else None  # all processes read
        self._search, self._start = search, jax.jit(begin)
        self._grow = jax.jit(grow, static_argnames="tokens")
        self._go_on = jax.jit(go_on, donate_argnums=1, out_shardings=(None, replicated))
        self._replace = jax.jit(lambda *args: replace_rows(search, *args), donate_argnums=0)

    def decode(
        self, params: Any, batches: Sequence[Sequence[Any]], inputs: Callable
    ) -> Iterator[tuple[Any, np.ndarray]]:
        """Yields (name, text) of each sequence when it has ended. `batches` are lists with a name
        for each row; rows that the last one lacks are empty. `inputs`: names -> inputs."""
        following, new, waiting = deque(batches), None, deque()

        def read():
            """Returns the state after the prompts of the next batch, and its sequences."""
            batch = following.popleft()
            return self._start(params, *inputs(batch)), deque(enumerate(batch))

        state, rows = read()
        (size, length), names = jax.eval_shape(self._search.texts, state).shape, dict(rows)
        more = length // 2 if length >= prefill.MANY else 0  # as in `decode`
        state = self._grow(state, length - more - 1)  # no step reads the last token of a text
        while names:
            most = 3 * size // 4 if waiting or following else 0
            state, outputs = self._go_on(params, state, most)
            texts, active, used, index = map(np.asarray, outputs)
            for row in [row for row in names if not active[row]]:
                yield names.pop(row), texts[row]
            slots = state.cache.tokens.segments_BxT.shape[1]
            if more and (index if new is None else used) > 3 * slots // 4:  # `new` frees slots
                state, more = self._grow(state, more), 0
            free, is_done = deque(set(range(size)) - set(names)), False
            while not is_done:
                if free and following and not waiting:
                    new = None  # frees its memory
                    new, waiting = read()
                rows_B = np.full(size, -1)
                while free and waiting:
                    row = free.popleft()
                    rows_B[row], names[row] = waiting.popleft()
                if new is not None:
                    state = self._replace(state, new, rows_B)
                is_done = not (free and following)


def used_slots(search: Search, state: Any) -> jax.Array:
    """Returns the number of slots since the first token of an active sequence."""
    first_R = jnp.argmax(state.cache.tokens.segments_BxT > 0, axis=1)
    is_active_R = jnp.repeat(search.active(state), state.cache.beams)
    return state.cache.index - jnp.min(jnp.where(is_active_R, first_R, state.cache.index))


def replace_rows(search: Search, old: Any, new: Any, rows_B: jax.Array) -> Any:
    """Returns the state of a search with row `rows_B[r]` of `new` in row r, or that of `old` where
    it is -1. Active sequences keep their rows. The last tokens of all rows take the same slot, as
    after padding on the left. If all slots are used, those before the first token of every active
    sequence become free."""
    cache, batch = old.cache, len(rows_B)

    def choose(old, new):
        if len(old) == 1 < batch:  # the same for all sequences
            return old
        by_sequence = lambda x: x.reshape(batch, -1, *x.shape[1:])
        is_new = (rows_B >= 0).reshape(batch, *[1] * old.ndim)
        return jnp.where(is_new, by_sequence(new)[rows_B], by_sequence(old)).reshape(old.shape)

    index = jnp.maximum(used_slots(search, old), new.cache.index)
    is_full = cache.index + cache.beams > cache.tokens.segments_BxT.shape[1]
    cache = jax.lax.cond(is_full, lambda cache: cache.move(index), lambda cache: cache, cache)
    cache = cache.take(new.cache, choose)
    # The program goes on with rows that have ended, but without the tokens before.
    active_B = jnp.where(rows_B < 0, search.active(old), search.active(new)[rows_B])
    segments = jnp.where(jnp.repeat(active_B, cache.beams)[:, None], cache.tokens.segments_BxT, 0)
    cache = cache.replace(tokens=cache.tokens.replace(segments_BxT=segments))
    old, new = (x.replace(cache=None) for x in (old, new))
    return jax.tree.map(choose, old, new).replace(cache=cache)
