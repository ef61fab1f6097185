"""The first and the following steps of decoding, for decoders and encoder-decoders.

Shape suffixes: B batch, S source length, P prompt length, V vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn, struct

from transformer.errors import UserError
from transformer.model.cache import Cache
from transformer.model.inputs import check_array, check_range, check_tokens, values
from transformer.model.layout import unroll
from transformer.model.masks import Tokens


@struct.dataclass
class DecodeState:
    """The state of decoding: the cache and, in an encoder-decoder, the positions of the source."""

    cache: Cache
    source: Tokens | None


def first_prompt(
    model: nn.Module, prompt_BxP: jax.Array | None, source_BxS: jax.Array | None, **each: Any
) -> jax.Array:
    """The prompts; by default, the start token of an encoder-decoder, int32[B, 1].

    `each` are arrays with one entry per prompt on axis 0. Raises UserError if they are not, if
    prompt or source do not match the model, and if there is neither a prompt nor a start token.
    """
    _check(model, prompt_BxP, source_BxS)
    if prompt_BxP is None:
        start_id = model.config.decoder_start_id
        if source_BxS is None:
            raise UserError("prompt: None, but a decoder continues a prompt; pass one")
        if start_id is None:
            way_out = "pass a prompt, or set model.decoder_start_id"
            raise UserError(f"prompt: None, and there is no start token; {way_out}")
        prompt_BxP = jnp.full((source_BxS.shape[0], 1), start_id, jnp.int32)
    for name, x in each.items():
        shape = getattr(x, "shape", None)
        if shape is None or shape[:1] != prompt_BxP.shape[:1]:
            found = type(x).__name__ if shape is None else f"shape {list(shape)}"
            way_out = "pass an array with one value for each"
            raise UserError(f"{name}: {found}, but there are {len(prompt_BxP)} prompts; {way_out}")
    return prompt_BxP


def prefill(
    model: nn.Module,
    params: Any,
    prompt_BxP: jax.Array,
    slots: int,
    source_BxS: jax.Array | None = None,
    prompt_mask_BxP: jax.Array | None = None,
    source_mask_BxS: jax.Array | None = None,
) -> tuple[jax.Array, DecodeState]:
    """Reads the prompts. Returns the logits of the next token, [B, V], and the memory.

    The masks are True where a token is real; by default, every token is. Prompts of unequal length
    are padded on the left, sources on the right. The memory has room for `slots` tokens, including
    the prompt. Raises UserError for arrays of the wrong shape or type, for a prompt mask with
    padding on the right (if its values are known, that is, outside `jax.jit`), and for more slots
    than the model has positions.
    """
    _check(model, prompt_BxP, source_BxS)
    if slots < prompt_BxP.shape[1]:
        problem = f"{slots} are fewer than the {prompt_BxP.shape[1]} tokens of the prompt"
        raise UserError(f"slots: {problem}; add the number of tokens to generate")
    last = model.config.last_position
    if last is not None and slots > last + 1:
        end = f"but the positions of this model end at {last} (model.max_length)"
        raise UserError(f"max_new: prompt and answer take {slots} tokens, {end}; reduce max_new")
    real_BxP = jnp.ones(prompt_BxP.shape, bool) if prompt_mask_BxP is None else prompt_mask_BxP
    check_array("prompt_mask", real_BxP, prompt_BxP.shape, np.integer, np.bool_)
    check_range("prompt_mask", real_BxP, 2)
    real = values(real_BxP)
    if real is not None and np.any(np.diff(real.astype(np.int8), axis=1) < 0):
        raise UserError("prompt_mask: padding after a real token; pad prompts on the left")
    real_BxP = jnp.broadcast_to(real_BxP, prompt_BxP.shape)
    options = {"segment_ids": real_BxP.astype(jnp.int32), "order": "contiguous"}
    options["positions"] = jnp.maximum(jnp.cumsum(real_BxP, axis=1) - 1, 0)
    if model.config.prefix_lm:
        options["prefix_mask"] = real_BxP
    options |= {"last_only": True, "method": "decode"}
    cache, encoded = model.empty_cache(prompt_BxP.shape[0], slots), ()
    if source_BxS is not None:
        encoded = model.apply(params, source_BxS, padding_mask=source_mask_BxS, method="encode")
    logits, cache = model.apply(params, prompt_BxP, cache, *encoded, **options)
    return logits[:, -1], DecodeState(cache, encoded[1] if encoded else None)


def _check(model: nn.Module, prompt_BxP: Any, source_BxS: Any) -> None:
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


def unrolled(model: nn.Module, params: Any) -> tuple[nn.Module, Any]:
    """Returns the model and its parameters for `advance`, with a subtree of parameters per layer.

    A step of scanned layers copies the cache of all layers, because a scan stacks it anew.
    """
    if not model.config.scan_layers:
        return model, params
    config, params = unroll(model.config, params)
    return type(model)(config), params


def advance(
    model: nn.Module, params: Any, tokens_B: jax.Array, memory: DecodeState
) -> tuple[jax.Array, DecodeState]:
    """Reads one token per sequence. Returns the logits of the next one, [B, V], and the memory."""
    encoder = () if memory.source is None else (None, memory.source)
    logits, cache = model.apply(params, tokens_B[:, None], memory.cache, *encoder, method="decode")
    return logits[:, -1], memory.replace(cache=cache)
