"""The first and the following steps of decoding, and the tokens that end it, for all generators.
Shape suffixes: B batch, S source length, P prompt length, V vocabulary."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.errors import UserError
from transformer.model.cache import Cache
from transformer.model.config import ModelConfig
from transformer.model.inputs import check_array, check_range, check_tokens, values
from transformer.model.layout import unroll
from transformer.model.special_tokens import Ids, as_tuple, check_inside

MANY = 128  # new tokens, from which on the cache first has slots for half of them


class Search(Protocol):
    """A way to choose tokens: `Sampling` or `BeamSearch`. A state has an entry per sequence on axis
    0 of its arrays, or one per beam, in adjacent rows. Its field `cache` is the model's cache."""

    def start(self, logits_BxV, cache: Cache, limits_B, keys_B, max_new: int) -> Any:
        """Returns the state with one token per sequence."""

    def step(self, read: Callable, state: Any) -> Any:
        """Returns the state with one more token per sequence. `read` is `advance` of a model."""

    def active(self, state: Any) -> jax.Array:
        """bool[B], whether the text of a sequence can still change."""

    def texts(self, state: Any) -> jax.Array:
        """int32[B, max_new], the best text of each sequence."""


def begin(
    model: nn.Module, params: Any, prompt_BxP: jax.Array | None, limits_B: jax.Array, max_new: int,
    source_BxS: jax.Array | None, *masks: jax.Array | None,
) -> tuple[jax.Array, Cache]:  # fmt: skip
    """Reads the prompts, by default the start token of an encoder-decoder, with `prefill`. Also
    raises UserError without both, and unless `limits_B` is an array with one entry per prompt."""
    _check(model, prompt_BxP, source_BxS)
    if prompt_BxP is None:
        start_id = model.config.decoder_start_id
        if source_BxS is None:
            raise UserError("prompt: None, but a decoder continues a prompt; pass one")
        if start_id is None:
            way_out = "pass a prompt, or set model.decoder_start_id"
            raise UserError(f"prompt: None, and there is no start token; {way_out}")
        prompt_BxP = jnp.full((source_BxS.shape[0], 1), start_id, jnp.int32)
    shape = getattr(limits_B, "shape", None)
    if shape is None or shape[:1] != prompt_BxP.shape[:1]:
        found = type(limits_B).__name__ if shape is None else f"shape {list(shape)}"
        way_out = "pass an array with one value for each"
        raise UserError(f"limits_B: {found}, but there are {len(prompt_BxP)} prompts; {way_out}")
    slots = prompt_BxP.shape[1]
    _check(model, prompt_BxP, source_BxS, slots + max_new - 1)  # nothing follows the last token
    return prefill(model, params, prompt_BxP, slots, source_BxS, *masks)


def decode(search: Search, model: nn.Module, params: Any, state: Any, max_new: int) -> Any:
    """Continues a search until all sequences have ended. The cache gets slots for `max_new` tokens:
    for half of them at first if they are many, because a step also reads empty slots."""
    half = max_new // 2 if max_new >= MANY else 0
    for tokens in (half, max_new - half)[half == 0 :]:
        state = decode_until(search, model, params, grow(state, tokens))
    return state


def decode_until(search: Search, model: nn.Module, params, state: Any, active=0) -> Any:
    """Continues a search until at most `active` sequences are active, or all slots are used."""
    read = functools.partial(advance, *unrolled(model, params))

    def runs(state):
        has_room = state.cache.index + state.cache.beams <= state.cache.tokens.segments_BxT.shape[1]
        return has_room & (jnp.sum(search.active(state)) > active)

    return jax.lax.while_loop(runs, functools.partial(search.step, read), state)


def grow(state: Any, tokens: int) -> Any:
    """Returns the state of a search with slots for `tokens` more tokens in its cache."""
    return state.replace(cache=state.cache.grow(tokens))


def prefill(
    model: nn.Module, params: Any, prompt_BxP: jax.Array, slots: int,
    source_BxS: jax.Array | None = None, prompt_mask_BxP: jax.Array | None = None,
    source_mask_BxS: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:  # fmt: skip
    """Reads the prompts. Returns the logits of the next token, [B, V], and the cache, with room
    for `slots` tokens including the prompt. The masks are True at real tokens (default: all).
    Prompts of unequal length are padded on the left, sources on the right. Raises UserError for
    arrays of the wrong shape or type, for a prompt mask with padding on the right (if its values
    are known, that is, outside `jax.jit`), and for more slots than the model has positions."""
    _check(model, prompt_BxP, source_BxS, slots)
    if slots < prompt_BxP.shape[1]:
        problem = f"{slots} are fewer than the {prompt_BxP.shape[1]} tokens of the prompt"
        raise UserError(f"slots: {problem}; add the number of tokens to generate")
    real_BxP = jnp.ones(prompt_BxP.shape, bool) if prompt_mask_BxP is None else prompt_mask_BxP
    check_array("prompt_mask", real_BxP, prompt_BxP.shape, np.integer, np.bool_)
    check_range("prompt_mask", real_BxP, 2)
    real = values(real_BxP)
    if real is not None and np.any(np.diff(real.astype(np.int8), axis=1) < 0):
        raise UserError("prompt_mask: padding after a real token; pad prompts on the left")
    real_BxP = jnp.broadcast_to(real_BxP, prompt_BxP.shape)
    options = {"segment_ids": real_BxP.astype(jnp.int32), "order": "contiguous", "last_only": True}
    options["positions"] = jnp.maximum(jnp.cumsum(real_BxP, axis=1) - 1, 0)
    if model.config.prefix_lm:
        options["prefix_mask"] = real_BxP
    cache, encoded = model.empty_cache(prompt_BxP.shape[0], slots), ()
    if source_BxS is not None:
        encoded = model.apply(params, source_BxS, padding_mask=source_mask_BxS, method="encode")
    logits, cache = model.apply(params, prompt_BxP, cache, *encoded, method="decode", **options)
    return logits[:, -1], cache.replace(source=encoded[1] if encoded else None)


def _check(model: nn.Module, prompt_BxP: Any, source_BxS: Any, slots: int = 0) -> None:
    """Raises UserError if the model cannot generate, or for tokens that it does not match."""
    family = model.config.family
    if family == "encoder":
        raise UserError("model.family: 'encoder' does not generate text; use another family")
    if (source_BxS is not None) != model.config.is_encoder_decoder:
        problem = "missing; pass one" if source_BxS is None else "passed; leave it out"
        raise UserError(f"source: {problem}, because model.family = {family!r}")
    for name, tokens in {"prompt": prompt_BxP, "source": source_BxS}.items():
        if tokens is not None:
            check_tokens(model.config, tokens, name)
    if (last := model.config.last_position) is not None and slots > last + 1:
        end = f"but the positions of this model end at {last} (model.max_length)"
        raise UserError(f"max_new: prompt and answer take {slots} positions, {end}; reduce max_new")


def unrolled(model: nn.Module, params: Any) -> tuple[nn.Module, Any]:
    """Returns the model and its parameters for `advance`, with a subtree of parameters per layer. A
    step of scanned layers copies the cache of all layers, because a scan stacks it anew."""
    if not model.config.scan_layers:
        return model, params
    config, params = unroll(model.config, params)
    return type(model)(config), params


def advance(
    model: nn.Module, params: Any, tokens_B: jax.Array, cache: Cache
) -> tuple[jax.Array, Cache]:
    """Reads one token per sequence. Returns the logits of the next one, [B, V], and the cache."""
    encoder = () if cache.source is None else (None, cache.source)
    logits, cache = model.apply(params, tokens_B[:, None], cache, *encoder, method="decode")
    return logits[:, -1], cache


class Ending(NamedTuple):
    """Tokens that end a sequence (`eos_ids`), fill it afterwards, or are never generated."""

    eos_ids: tuple[int, ...]
    fill_id: int
    suppressed: tuple[int, ...]

    @classmethod
    def of(
        cls, config: ModelConfig, eos_id: Ids, pad_id: int | None, suppress_tokens: Sequence[int]
    ) -> "Ending":
        """The tokens of the arguments, or of `config` where an argument is None. If there is no pad
        token, eos pads. Raises UserError without eos or tokens to generate, and for unknown ids."""
        eos_ids = as_tuple(config.eos_id if eos_id is None else eos_id)
        pad_id = config.pad_id if pad_id is None else pad_id
        suppressed = tuple(suppress_tokens)
        tokens = {"eos_id": eos_ids, "pad_id": pad_id, "suppress_tokens": suppressed}
        for field, ids in tokens.items():
            check_inside(field, ids, config.vocab_size)
        if not eos_ids:
            way_out = "pass eos_id, or set model.eos_id"
            raise UserError(f"eos_id: not set, so no sequence would end; {way_out}")
        if len(set(suppressed)) == config.vocab_size:
            raise UserError("suppress_tokens: the whole vocabulary; leave one token out")
        return cls(eos_ids, eos_ids[0] if pad_id is None else pad_id, suppressed)

    def ends(self, token: jax.Array) -> jax.Array:
        """Whether each token ends a sequence: bool, of the same shape as `token`."""
        return jnp.isin(token, jnp.array(self.eos_ids))

    def suppress(self, scores_V: jax.Array, never: float) -> jax.Array:
        """The scores [..., V], with those of suppressed tokens set to `never`."""
        if not self.suppressed:
            return scores_V
        mask_V = np.isin(np.arange(scores_V.shape[-1]), self.suppressed)  # fused, unlike .at[].set
        return jnp.where(mask_V, never, scores_V)
