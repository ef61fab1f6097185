"""Text to text: translation by encoder-decoders, continuation by decoders.

Waiting sequences replace those in the batch that have ended. Otherwise, a batch would run until its
longest text ends, and compute the other rows for nothing. The program stops when a quarter of the
rows have ended. Waiting sequences, whose prompts are read in batches of the same size, take their
places, and the program goes on ("iteration-level scheduling", Yu et al. 2022, Orca). Shapes do not
change. The cost is the memory of a second batch. Replacement changes texts only by rounding."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import NamedSharding, PartitionSpec as P

from transformer.data.batching import by_width
from transformer.data.config import Task
from transformer.data.tokenizer import Tokenizer
from transformer.decoding import prefill
from transformer.decoding.beam import BeamSearch
from transformer.decoding.config import DecodingConfig
from transformer.decoding.sampling import Sampling
from transformer.errors import UserError
from transformer.mapping import to_mapping
from transformer.model.network import build_model


def check_texts(texts: Any, name: str = "texts") -> None:
    """Raises UserError unless the argument is a list of strings that UTF-8 can encode."""
    if isinstance(texts, (str, bytes)) or not hasattr(texts, "__len__"):
        raise UserError(f"{name}: expected a list of strings, got {type(texts).__name__}")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"{name}[{i}]: {text!r} is not text; pass strings")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UserError(f"{name}[{i}]: {text[e.start]!a} is not in UTF-8; remove it") from None


def check_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Returns the tokenizer of a run. Raises UserError if there is none."""
    if tokenizer is None:
        missing = "no tokenizer (tokenizer.model or tokenizer.json)"
        raise UserError(f"this run has {missing}; put one into its directory")
    return tokenizer


@dataclasses.dataclass
class Generator:
    """A trained model that generates text. `cut` counts inputs that were too long and cut."""

    config: Task
    params: Any
    tokenizer: Tokenizer | None
    cut: int = 0
    add_bos: bool = True  # whether a prompt begins with bos

    def __post_init__(self):
        if not self.config.objective.generates_text or self.config.model.family == "encoder":
            problem = f"{to_mapping(self.config.data.objective)!r} does not train text generation"
            raise UserError(f"data.objective: {problem}; causal_lm, prefix_lm and seq2seq do")
        check_tokenizer(self.tokenizer)
        self._model = build_model(self.config.model)
        self._translates = self.config.model.is_encoder_decoder
        # A decoder trained on pairs reads eos after the source. Its output is no continuation.
        self._answers = not self._translates and self.config.objective.has_pairs
        self._calls = 0  # number of previous texts; each text has its own random key
        decoding: DecodingConfig = self.config.decoding
        eos_ids, pad = self.config.model.eos_ids or (self.tokenizer.eos,), self.tokenizer.pad
        suppressed = () if pad in eos_ids else (pad,)  # within a text, pad would mean its end
        ending = prefill.Ending.of(self.config.model, eos_ids, pad, suppressed)
        numbers = decoding.temperature, decoding.top_k, decoding.top_p
        self._search: prefill.Search = Sampling(ending, *numbers)
        if decoding.beam_size > 1:
            self._search = BeamSearch(ending, decoding.beam_size, decoding.length_penalty)
        self._batches = Batches(self._search, self._model, self._begin, self.params)

    def __call__(self, texts: Sequence[str], progress: Callable = lambda done: None) -> list[str]:
        """Returns the translation or continuation of each text. `progress` gets the number done."""
        check_texts(texts)
        ids = self.tokenizer.encode(texts)
        if self._translates or self._answers:
            ids = [[*self.tokenizer.source_prefix_ids, *i] for i in ids]
        if self._answers:
            ids = [[*i, self.tokenizer.eos] for i in ids]
        out: list[str] = [""] * len(texts)
        # The output of a decoder gets at most half of the length.
        done, length = 0, self.config.model.max_length
        answer = min(self.config.decoding.max_extra, length - length // 2)
        room = length if self._translates else max(length - answer, 1)
        lengths = [len(i) + 1 for i in ids]  # with the source's eos, or the prompt's bos
        self.cut += sum(length > room for length in lengths)
        for width, batches in by_width(lengths, room, self.config.decoding.batch_size):
            inputs = lambda batch, width=width: self._inputs(width, [ids[i] for i in batch], batch)
            for i, tokens in self._batches.decode(self.params, batches, inputs):
                out[i] = self._text(ids[i], tokens)
                progress(done := done + 1)
        self._calls += len(texts)
        return out

    def _text(self, prompt: list[int], output: np.ndarray) -> str:
        """Decodes the generated tokens. A continuation keeps the space that it may begin with."""
        if self._translates or self._answers:
            return self.tokenizer.decode(output)
        return self.tokenizer.decode([*prompt, *output])[len(self.tokenizer.decode(prompt)) :]

    def _inputs(self, width: int, ids: list[list[int]], numbers: Sequence[int]) -> tuple:
        """The arguments of `_begin`. The batch is filled with empty sequences."""
        decoding, max_length = self.config.decoding, self.config.model.max_length
        batch_size, bos = decoding.batch_size, self.tokenizer.bos
        inputs = np.full((batch_size, width), self.tokenizer.pad, np.int32)
        limits, real = np.zeros(batch_size, np.int32), np.zeros((batch_size, width), bool)
        for r, tokens in enumerate(ids):
            if self._translates:
                tokens = [*tokens[: width - 1], self.tokenizer.eos]
                inputs[r, : len(tokens)], real[r, : len(tokens)] = tokens, True
                limits[r] = min(len(tokens) + decoding.max_extra, max_length)
            else:
                begins = self.add_bos or not tokens
                tokens = [*[bos] * begins, *tokens[max(len(tokens) + begins - width, 0) :]]
                inputs[r, width - len(tokens) :], real[r, width - len(tokens) :] = tokens, True
                limits[r] = min(decoding.max_extra, max_length - len(tokens))
        numbers = np.resize(np.asarray(numbers, np.uint32), batch_size) + np.uint32(self._calls)
        return inputs, real, limits, numbers

    def _begin(self, params, inputs, real, limits, numbers) -> Any:
        """Returns the state of the search after the prompts."""
        decoding: DecodingConfig = self.config.decoding
        source, prompt, max_length = None, inputs, self.config.model.max_length
        masks, max_new = (real, None), min(decoding.max_extra, max_length - 1)
        if self._translates:  # the start token is real, even if it is the pad token
            source, max_new = inputs, min(inputs.shape[1] + decoding.max_extra, max_length)
            prompt = jnp.full((inputs.shape[0], 1), self.tokenizer.bos, jnp.int32)
            masks = jnp.ones_like(prompt, bool), real
        logits, cache = prefill.begin(self._model, params, prompt, limits, max_new, source, *masks)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.config.seed), numbers)
        return self._search.start(logits, cache, jnp.minimum(limits, max_new), keys, max_new)


class Batches:
    """The programs that decode batches. `begin`: (params, *inputs) -> the state of the search after
    the prompts. Inputs are arrays with a row per sequence."""

    def __init__(self, search: prefill.Search, model: nn.Module, begin: Callable, params: Any):
        def go_on(params, state, active):
            state = prefill.decode_until(search, model, params, state, active)
            slots = used_slots(search, state), state.cache.index
            return state, (search.texts(state), search.active(state), *slots)

        sharding = jax.tree.leaves(params)[0].sharding
        is_on_mesh = isinstance(sharding, NamedSharding)
        replicated = NamedSharding(sharding.mesh, P()) if is_on_mesh else None  # all processes read
        self._search, self._start = search, jax.jit(begin)
        self._grow = jax.jit(prefill.grow, static_argnames="tokens")
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
        more = length // 2 if length >= prefill.MANY else 0  # as in `prefill.decode`
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


def used_slots(search: prefill.Search, state: Any) -> jax.Array:
    """Returns the number of slots since the first token of an active sequence."""
    first_R = jnp.argmax(state.cache.tokens.segments_BxT > 0, axis=1)
    is_active_R = jnp.repeat(search.active(state), state.cache.beams)
    return state.cache.index - jnp.min(jnp.where(is_active_R, first_R, state.cache.index))


def replace_rows(search: prefill.Search, old: Any, new: Any, rows_B: jax.Array) -> Any:
    """Returns the state of a search with row `rows_B[r]` of `new` in row r, or of `old` where it is
    -1. Active sequences keep their rows. The last tokens of all rows take one slot, as after left
    padding. If all slots are used, those before all tokens of active sequences become free."""
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
