"""Greedy decoding and sampling: token by token, until each sequence reaches eos or its limit.

Shape suffixes: B batch, P prompt length, L generated length, V vocabulary.

A temperature of 0 selects the most likely token. Any other divides the logits, and the next token
is drawn from the `top_k` most likely ones, or from the fewest that hold `top_p` of the probability.
Each sequence has its own key, so its tokens do not depend on the batch. Pad may be generated."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn, struct

from transformer.decoding.config import check_numbers
from transformer.decoding.prefill import Ending, begin, decode
from transformer.errors import UserError
from transformer.model.cache import Cache
from transformer.model.sharding import platform
from transformer.model.special_tokens import Ids


def sample(
    model: nn.Module, params: Any, prompt_BxP: jax.Array | None, limits_B: jax.Array,
    keys_B: jax.Array, *, max_new: int, eos_id: Ids = None, pad_id: int | None = None,
    suppress_tokens: Sequence[int] = (), source_BxS: jax.Array | None = None,
    prompt_mask_BxP: jax.Array | None = None, source_mask_BxS: jax.Array | None = None,
    temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
) -> jax.Array:  # fmt: skip
    """Continues each prompt up to eos or `limits_B` tokens, then pads: int32[B, max_new].

    Args:
      model, params: a decoder or an encoder-decoder, and its parameters.
      prompt_BxP: token ids, padded on the left. None starts an encoder-decoder with the
        `decoder_start_id` of its config.
      limits_B: the maximum number of new tokens of each sequence, including eos; 0: none.
      keys_B: one random key per sequence, `jax.random.split(key, B)`. Temperature 0 ignores them.
      max_new: the length of the result, and a limit for all sequences.
      eos_id, pad_id: one or several tokens that end a sequence, and the token that pads it.
        Default: those of the config; if there is no pad token, eos pads.
      suppress_tokens: tokens that are never generated.
      source_BxS: the token ids of an encoder-decoder's sources, padded on the right.
      prompt_mask_BxP, source_mask_BxS: True at real tokens. Default: all True.
      temperature, top_k, top_p: see the top of this module. 0, 0 and 1 are off.

    Raises UserError (a ValueError) without eos or one key per sequence, and for ids outside the
    vocabulary, prompts padded on the right, too many tokens, and what `DecodingConfig` refuses."""
    check_numbers(max_new=max_new, temperature=temperature, top_k=top_k, top_p=top_p)
    inputs = source_BxS, prompt_mask_BxP, source_mask_BxS
    logits_BxV, cache = begin(model, params, prompt_BxP, limits_B, max_new, *inputs)
    ending = Ending.of(model.config, eos_id, pad_id, suppress_tokens)
    if temperature:
        batch, typed = len(logits_BxV), jnp.issubdtype(keys_B.dtype, jax.dtypes.prng_key)
        if keys_B.ndim != (1 if typed else 2) or len(keys_B) != batch:
            raise UserError(f"keys: expected [{batch}] keys; use jax.random.split(key, {batch})")
    search = Sampling(ending, temperature, top_k, top_p)
    state = search.start(logits_BxV, cache, jnp.minimum(limits_B, max_new), keys_B, max_new)
    return search.texts(decode(search, model, params, state, max_new))


@struct.dataclass
class Sampled:
    """The tokens of each sequence, of which the last one is not in the cache yet."""

    step_B: jax.Array
    out_BxL: jax.Array
    done_B: jax.Array
    token_B: jax.Array
    limits_B: jax.Array
    keys_B: jax.Array
    cache: Cache


class Sampling(NamedTuple):
    """Greedy decoding and sampling (a `Search`); the numbers are those of `sample`."""

    ending: Ending
    temperature: float
    top_k: int
    top_p: float

    def start(self, logits_BxV, cache: Cache, limits_B, keys_B, max_new: int) -> Sampled:
        zeros = jnp.zeros(limits_B.shape, jnp.int32)
        blank_BxL = jnp.full((len(limits_B), max_new), self.ending.fill_id, jnp.int32)
        start = Sampled(zeros, blank_BxL, limits_B <= 0, zeros, limits_B, keys_B, cache)
        return self._emit(start, logits_BxV, cache)

    def active(self, state: Sampled) -> jax.Array:
        return ~state.done_B

    def step(self, read: Callable, state: Sampled) -> Sampled:
        return self._emit(state, *read(state.token_B, state.cache))

    def texts(self, state: Sampled) -> jax.Array:
        return state.out_BxL

    def _emit(self, state: Sampled, logits_BxV: jax.Array, cache: Cache) -> Sampled:
        step_B, token_B = state.step_B, self._draw(logits_BxV, state.keys_B, state.step_B)
        token_B = jnp.where(state.done_B, self.ending.fill_id, token_B)
        out_BxL = put(state.out_BxL, step_B, token_B)
        done_B = state.done_B | self.ending.ends(token_B) | (step_B + 1 >= state.limits_B)
        return Sampled(step_B + 1, out_BxL, done_B, token_B, state.limits_B, state.keys_B, cache)

    def _draw(self, logits_BxV, keys_B, step_B) -> jax.Array:
        logits_BxV = self.ending.suppress(logits_BxV, -jnp.inf)
        if self.temperature == 0.0:
            on_cpu = platform() == "cpu"  # where jnp.argmax is slow
            return largest(logits_BxV, 1)[1][:, 0] if on_cpu else jnp.argmax(logits_BxV, axis=-1)
        relative_BxV = logits_BxV - jnp.max(logits_BxV, axis=-1, keepdims=True)  # no overflow
        allowed_BxV = truncate(relative_BxV / self.temperature, self.top_k, self.top_p)
        keys = jax.vmap(jax.random.fold_in)(keys_B, step_B)
        return jax.vmap(jax.random.categorical)(keys, allowed_BxV).astype(jnp.int32)


def put(text: jax.Array, step_B: jax.Array, token: jax.Array) -> jax.Array:
    """Writes token [B, ...] to text [B, ..., L] at the place of each sequence's step."""
    at = jnp.arange(text.shape[-1]) == step_B.reshape(-1, *[1] * (text.ndim - 1))
    return jnp.where(at, token[..., None], text)


def largest(x_BxV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the same as `jax.lax.top_k`, if no number is NaN. On a CPU, it takes a quarter of the
    time for a large V: it sorts the k blocks with the largest maxima, which hold the results."""
    length, block = x_BxV.shape[-1], 256
    if length <= k * block or platform() != "cpu":
        return jax.lax.top_k(x_BxV, k)
    window = (1, block), (1, block), ((0, 0), (0, -length % block))
    maxima = jax.lax.reduce_window(x_BxV, -jnp.inf, jax.lax.max, *window)
    first_Bxk = jnp.sort(jax.lax.top_k(maxima, k)[1]) * block
    start_Bxk = jnp.minimum(first_Bxk, length - block)  # the last block overlaps the one before
    cut = jax.vmap(lambda x, start: jax.lax.dynamic_slice(x, (start,), (block,)), (None, 0))
    index = start_Bxk[..., None] + jnp.arange(block)
    near = jnp.where(index >= first_Bxk[..., None], jax.vmap(cut)(x_BxV, start_Bxk), -jnp.inf)
    values, at = jax.lax.top_k(near.reshape(len(x_BxV), -1), k)
    return values, jnp.take_along_axis(index.reshape(len(x_BxV), -1), at, axis=1)


def truncate(logits_BxV: jax.Array, top_k: int, top_p: float) -> jax.Array:
    """Sets the logits of disallowed tokens to -inf. The most likely token is always allowed."""
    if top_k:
        smallest = largest(logits_BxV, min(top_k, logits_BxV.shape[-1]))[0][:, -1:]
        logits_BxV = jnp.where(logits_BxV >= smallest, logits_BxV, -jnp.inf)
    if top_p < 1.0:
        ordered_BxV = jnp.flip(jnp.sort(logits_BxV, axis=-1), axis=-1)
        p_BxV = jax.nn.softmax(ordered_BxV, axis=-1)
        ordered_BxV = jnp.where(jnp.cumsum(p_BxV, axis=-1) - p_BxV < top_p, ordered_BxV, jnp.inf)
        smallest = jnp.min(ordered_BxV, axis=-1, keepdims=True)
        logits_BxV = jnp.where(logits_BxV >= smallest, logits_BxV, -jnp.inf)
    return logits_BxV
