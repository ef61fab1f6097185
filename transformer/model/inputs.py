"""Model inputs: token ids, and the position and document of each token. No token id has a special
meaning: tokens are real unless `segment_ids` or `padding_mask` says not. Shapes and types are
always checked, but values only outside `jax.jit`: a traced array has no values, and compiled code
never waits for a check. Shape suffixes: B batch, T length."""

import jax
import jax.numpy as jnp
import numpy as np

from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.masks import Tokens


def locate(
    config: ModelConfig, tokens_BxT: jax.Array, name: str = "tokens", *,
    before: Tokens | None = None, positions=None, segment_ids=None, padding_mask=None,
    prefix_mask=None, order="",
) -> Tokens:  # fmt: skip
    """Returns the positions and documents of tokens. By default, all tokens are real tokens of one
    document, at positions 0, 1, 2, ... With `before`, the tokens in a cache, the default positions
    follow theirs. `order` asserts how `positions` are arranged (see `Tokens`); default positions
    without a cache have the order "contiguous". Raises UserError for inputs that do not match;
    `name` is the name of the tokens in its message."""
    check_tokens(config, tokens_BxT, name)
    options = positions, segment_ids, padding_mask, prefix_mask
    _check_options(config, tokens_BxT.shape, name, *options)
    if positions is None:
        order = order or ("contiguous" if before is None else "")
        positions = jnp.arange(tokens_BxT.shape[1], dtype=jnp.int32)[None]
        if before is not None:  # after each sequence's last real token
            real_positions_BxT = jnp.where(before.segments_BxT > 0, before.positions_BxT, -1)
            positions += jnp.max(real_positions_BxT, axis=1, keepdims=True) + 1
    if segment_ids is None:
        real_BxT = jnp.ones(tokens_BxT.shape, bool) if padding_mask is None else padding_mask
        segment_ids = real_BxT.astype(bool).astype(jnp.int32)
    if before is None:
        side = "encoder" if name == "source" or config.family == "encoder" else "decoder"
        check_interruptions(config, side, values(segment_ids))
    if prefix_mask is None:
        return Tokens(positions, segment_ids, order=order)
    prefix_BxT, positions = prefix_mask.astype(bool), jnp.broadcast_to(positions, tokens_BxT.shape)
    together_BxTxT = (segment_ids[:, :, None] == segment_ids[:, None, :]) & prefix_BxT[:, None, :]
    end_BxT = jnp.max(jnp.where(together_BxTxT, positions[:, None, :], 0), axis=-1)
    return Tokens(positions, segment_ids, jnp.where(prefix_BxT, end_BxT, positions), order=order)


def check_interruptions(config: ModelConfig, side: str, segments_BxT: np.ndarray | None) -> None:
    """Raises UserError for padding within a document if a layer of the stack cannot skip it."""
    reads = [f"mixer = {x.name!r}" for x in config.mixers_of(side) if not x.skips_padding]
    reads += [f"canon = {config.canon!r}"] * bool(config.canon)
    for segments_T in segments_BxT if reads and segments_BxT is not None else ():
        real = np.flatnonzero(segments_T)
        same_document = np.diff(segments_T[real]) == 0
        if np.any(same_document & (np.diff(real) > 1)):
            why = f"which model.{reads[0]} does not support"
            problem = f"padding between tokens of one document, {why}"
            raise UserError(f"padding_mask: {problem}; move it before or after the document")


def values(x) -> np.ndarray | None:
    """Returns the values of an array, or None if it is traced or sharded over several processes."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def check_sources(sources: int, targets: int, shared: bool) -> None:
    """Raises UserError unless there is one source, one per target or, if `shared`, per several."""
    if sources not in (1, targets) and (not shared or targets % sources):
        way_out = "pass one source for each target"
        raise UserError(f"source: {sources} sequences, but the target has {targets}; {way_out}")


def check_same_documents(segment_ids, source_segment_ids) -> None:
    """Raises UserError if one side alone is packed: document n attends to document n."""
    for field, ids, missing, other_ids in (
        ("segment_ids", segment_ids, "source_segment_ids", source_segment_ids),
        ("source_segment_ids", source_segment_ids, "segment_ids", segment_ids),
    ):
        array = values(ids) if ids is not None and other_ids is None else None
        if array is not None and array.size and array.max() > 1:
            count = f"{array.max()} documents in a sequence"
            raise UserError(f"{field}: {count}, but no {missing}; pass both")


def check_token_types(config: ModelConfig, tokens_BxT: jax.Array, token_types) -> None:
    """Raises UserError for token types without an embedding in this model."""
    if token_types is None:
        return
    if not config.token_types:
        raise UserError("token_types: passed, but model.token_types = 0; leave them out")
    check_array("token_types", token_types, tokens_BxT.shape, np.integer)
    check_range("token_types", token_types, config.token_types, "model.token_types")


def check_tokens(config: ModelConfig, tokens_BxT, name: str) -> None:
    """Raises UserError unless `tokens_BxT` are token ids of this model, [B, T]."""
    shape, dtype = getattr(tokens_BxT, "shape", None), getattr(tokens_BxT, "dtype", None)
    if dtype is None or shape is None:
        raise UserError(f"{name}: expected an integer array, got a {type(tokens_BxT).__name__}")
    if len(shape) != 2 or not jnp.issubdtype(dtype, jnp.integer):
        way_out = f"; add the batch axis, {name}[None]" if len(shape) == 1 else ""
        found = f"{dtype}{list(shape)}{way_out}"
        raise UserError(f"{name}: expected integers of shape [B, T], got {found}")
    if 0 in shape:
        raise UserError(f"{name}: an array of shape {list(shape)} has no tokens")
    if shape[1] > config.max_length:
        limit = f"is longer than model.max_length = {config.max_length}"
        raise UserError(f"{name}: a sequence of {shape[1]} tokens {limit}; shorten it")
    check_range(name, tokens_BxT, config.vocab_size, "model.vocab_size")


def _check_options(config, shape, name, positions, segment_ids, padding_mask, prefix_mask) -> None:
    suffix = "" if name == "tokens" else f" of the {name}"
    if segment_ids is not None and padding_mask is not None:
        way_out = "pass one of them (segment 0 is padding)"
        raise UserError(f"padding_mask{suffix}: passed together with segment_ids; {way_out}")
    if prefix_mask is not None and not config.prefix_lm:
        way_out = "set model.prefix_lm=True"
        raise UserError(f"prefix_mask: needs a decoder with a bidirectional prefix; {way_out}")
    integers, flags = (np.integer,), (np.integer, np.bool_)
    end = None if config.last_position is None else config.last_position + 1
    for field, x, kinds, *limits in (
        ("padding_mask", padding_mask, flags, 2), ("prefix_mask", prefix_mask, flags, 2),
        ("segment_ids", segment_ids, integers),
        ("positions", positions, integers, end, "model.max_length"),
    ):  # fmt: skip
        if x is not None:
            check_array(field + suffix, x, shape, *kinds)
            check_range(field + suffix, x, *limits)


def check_array(field: str, x, shape: tuple[int, ...], *kinds: type) -> None:
    """Raises UserError unless `x` is an array of one of `kinds` that fits tokens of `shape`."""
    x_shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if dtype is None or x_shape is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
        expected = "an integer array" if kinds == (np.integer,) else "an array of bool"
        raise UserError(f"{field}: expected {expected}, got {dtype or type(x).__name__}")
    if x_shape not in (shape, (1, shape[1])):
        problem = f"shape {list(x.shape)} differs from the tokens' shape {list(shape)}"
        raise UserError(f"{field}: {problem}; pass one value per token")


def check_range(field: str, x, end: int | None = None, why: str = "") -> None:
    """Raises UserError unless all values, where available, lie in [0, end)."""
    array = values(x)
    if array is None or not array.size or array.dtype == bool:
        return
    lowest, highest = array.min(), array.max()
    if lowest < 0 or (end is not None and highest >= end):
        bounds = f"between 0 and {end - 1}" if end is not None else "at least 0"
        bounds += f" ({why} = {end})" if why and end else ""
        raise UserError(f"{field}: {lowest if lowest < 0 else highest} must be {bounds}")
