"""How decoding starts and takes a step, for both families that decode.

Shape suffixes: B batch (rows), S source length, P prompt length, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from transformer.errors import UserError
from transformer.model.cache import Cache
from transformer.model.inputs import values
from transformer.model.masks import Tokens


@struct.dataclass
class Memory:
    """What the decoder has read: its own tokens and, in an encoder-decoder, where the source's stand."""

    cache: Cache
    source: Tokens | None


def first_prompt(
    model: nn.Module, prompt_BxP: jax.Array | None, source_BxS: jax.Array | None
) -> jax.Array:
    """The prompts; without any, the start token of an encoder-decoder, int32[B, 1].

    Raises UserError where there is nothing to begin with.
    """
    if prompt_BxP is not None:
        return prompt_BxP
    start_id = model.config.decoder_start_id
    if source_BxS is None or start_id is None:
        raise UserError(
            "prompt: None, and there is no start token; give a prompt, or set model.decoder_start_id"
        )
    return jnp.full((source_BxS.shape[0], 1), start_id, jnp.int32)


def prefill(
    model: nn.Module,
    params: Any,
    prompt_BxP: jax.Array,
    slots: int,
    source_BxS: jax.Array | None = None,
    prompt_mask_BxP: jax.Array | None = None,
    source_mask_BxS: jax.Array | None = None,
) -> tuple[jax.Array, Memory]:
    """Reads the prompts and returns the logits, [B, V], of what follows, and the memory.

    The masks are True where a token is real; without them, every token is. Prompts of unequal length are padded on the left,
    sources on the right. The memory has room for `slots` tokens, prompt included. Raises UserError for a prompt mask with
    padding on the right (where its values are known, that is outside `jax.jit`), and for more slots than the model's positions
    have a meaning for.
    """
    last = model.config.last_position
    if last is not None and slots > last + 1:
        raise UserError(
            f"max_new: prompt and answer take {slots} tokens, but the positions of this model end at {last} (model.max_length); "
            "take a smaller one"
        )
    given, real_BxP = {"params": params}, prompt_mask_BxP
    if real_BxP is None:
        real_BxP = jnp.ones(prompt_BxP.shape, bool)
    _check_prompt_mask(prompt_BxP, real_BxP)
    where = {
        "positions": jnp.maximum(jnp.cumsum(real_BxP, axis=1) - 1, 0),
        "segment_ids": real_BxP.astype(jnp.int32),
    }
    if model.config.prefix_lm:
        where["prefix_mask"] = real_BxP
    cache = model.empty_cache(prompt_BxP.shape[0], slots)
    if source_BxS is None:
        logits, cache = model.apply(
            given, prompt_BxP, cache, **where, last_only=True, method="decode"
        )
        return logits[:, -1], Memory(cache, None)
    encoded = model.apply(given, source_BxS, padding_mask=source_mask_BxS, method="encode")
    logits, cache = model.apply(
        given, prompt_BxP, cache, *encoded, **where, last_only=True, method="decode"
    )
    return logits[:, -1], Memory(cache, encoded[1])


def _check_prompt_mask(prompt_BxP: jax.Array, real_BxP: jax.Array) -> None:
    if real_BxP.shape != prompt_BxP.shape:
        raise UserError(
            f"prompt_mask: shape {list(real_BxP.shape)}, but the prompts' is {list(prompt_BxP.shape)}"
        )
    found = values(real_BxP)
    if found is not None and np.any(np.diff(found.astype(np.int8), axis=1) < 0):
        raise UserError("prompt_mask: padding after a real token; pad prompts on the left")


def advance(
    model: nn.Module, params: Any, tokens_B: jax.Array, memory: Memory
) -> tuple[jax.Array, Memory]:
    """Reads one more token a row: the logits, [B, V], of what follows it, and the memory with it."""
    encoder = () if memory.source is None else (None, memory.source)
    logits, cache = model.apply(
        {"params": params}, tokens_B[:, None], memory.cache, *encoder, method="decode"
    )
    return logits[:, -1], memory.replace(cache=cache)
