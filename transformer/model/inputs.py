"""What a model is given: tokens, and where they stand.

Shape suffixes: B batch, T length.

No token id is special here. Every token is real unless `segment_ids` or `padding_mask` say otherwise.

Shapes and types are always checked. Values are checked where they are at hand, that is outside `jax.jit`: a traced array has
none, and nothing that is compiled waits for a check.
"""

import jax
import jax.numpy as jnp
import numpy as np

from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.masks import Tokens


def locate(
    config: ModelConfig,
    tokens_BxT: jax.Array,
    name: str = "tokens",
    *,
    before: Tokens | None = None,
    positions=None,
    segment_ids=None,
    padding_mask=None,
    prefix_mask=None,
    order="",
) -> Tokens:
    """Where tokens stand: by default at 0, 1, 2, ... of one document, all of them real.

    `before` are the tokens in a cache, which these follow by default. `order` promises of given positions what is known of the
    default ones, "rows" (see `Tokens`). Raises UserError for inputs that do not fit together; `name` is what it calls them.
    """
    _check_tokens(config, tokens_BxT, name)
    _check_options(
        config, tokens_BxT.shape, name, positions, segment_ids, padding_mask, prefix_mask
    )
    if positions is None:
        order = order or ("rows" if before is None else "")
        positions = jnp.arange(tokens_BxT.shape[1], dtype=jnp.int32)[None]
        if before is not None:
            positions += next_position(before)[:, None]
    if segment_ids is None:
        real_BxT = jnp.ones(tokens_BxT.shape, bool) if padding_mask is None else padding_mask
        segment_ids = real_BxT.astype(bool).astype(jnp.int32)
    if prefix_mask is None:
        return Tokens(positions, segment_ids, order=order)
    prefix_BxT, positions = prefix_mask.astype(bool), jnp.broadcast_to(positions, tokens_BxT.shape)
    together_BxTxT = (segment_ids[:, :, None] == segment_ids[:, None, :]) & prefix_BxT[:, None, :]
    end_BxT = jnp.max(jnp.where(together_BxTxT, positions[:, None, :], 0), axis=-1)
    return Tokens(positions, segment_ids, jnp.where(prefix_BxT, end_BxT, positions), order)


def next_position(tokens: Tokens) -> jax.Array:
    """int32[B]: the position after the last real token of each row; 0 where there is none."""
    real_BxT = tokens.segments_BxT > 0
    return jnp.max(jnp.where(real_BxT, tokens.positions_BxT, -1), axis=1) + 1


def values(x) -> np.ndarray | None:
    """The values of an array, or None where there are none at hand: it is traced, or spread over several processes."""
    if isinstance(x, jax.core.Tracer) or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return None
    return np.asarray(x)


def check_same_documents(segment_ids, source_segment_ids) -> None:
    """Raises UserError where one side alone is packed: a document of the target reads the source's of the same number."""
    for field, one, missing, other in (
        ("segment_ids", segment_ids, "source_segment_ids", source_segment_ids),
        ("source_segment_ids", source_segment_ids, "segment_ids", segment_ids),
    ):
        found = values(one) if one is not None and other is None else None
        if found is not None and found.size and found.max() > 1:
            raise UserError(
                f"{field}: {found.max()} documents in a row, but no {missing}; give both"
            )


def check_token_types(config: ModelConfig, tokens_BxT: jax.Array, token_types) -> None:
    """Raises UserError for types that this model has no embedding for."""
    if token_types is None:
        return
    if not config.token_types:
        raise UserError("token_types: given, but model.token_types = 0; leave them out")
    _check_array("token_types", token_types, tokens_BxT.shape, np.integer)
    _check_range("token_types", token_types, config.token_types, "model.token_types")


def _check_tokens(config: ModelConfig, tokens_BxT, name: str) -> None:
    shape, kind = getattr(tokens_BxT, "shape", None), getattr(tokens_BxT, "dtype", None)
    if kind is None or shape is None:
        raise UserError(f"{name}: expected an integer array, got a {type(tokens_BxT).__name__}")
    if len(shape) != 2 or not jnp.issubdtype(kind, jnp.integer):
        way_out = f"; add the batch axis, {name}[None]" if len(shape) == 1 else ""
        raise UserError(
            f"{name}: expected integers of shape [B, T], got {kind}{list(shape)}{way_out}"
        )
    if shape[1] > config.max_length:
        raise UserError(
            f"{name}: a sequence of {shape[1]} tokens, but model.max_length = {config.max_length}"
        )
    _check_range(name, tokens_BxT, config.vocab_size, "model.vocab_size")


def _check_options(config, shape, name, positions, segment_ids, padding_mask, prefix_mask) -> None:
    of = "" if name == "tokens" else f" of the {name}"
    if segment_ids is not None and padding_mask is not None:
        raise UserError(
            f"padding_mask{of}: given beside segment_ids; give one of them (segment 0 is padding)"
        )
    if prefix_mask is not None and not config.prefix_lm:
        raise UserError(
            "prefix_mask: only decoders that read a prefix whole take one; set model.prefix_lm=True"
        )
    for field, mask in {"padding_mask": padding_mask, "prefix_mask": prefix_mask}.items():
        if mask is not None:
            _check_array(field + of, mask, shape, np.integer, np.bool_)
            _check_range(field + of, mask, 2)
    if segment_ids is not None:
        _check_array(f"segment_ids{of}", segment_ids, shape, np.integer)
        _check_range(f"segment_ids{of}", segment_ids)
    if positions is not None:
        _check_array(f"positions{of}", positions, shape, np.integer)
        end = None if config.last_position is None else config.last_position + 1
        _check_range(f"positions{of}", positions, end, "model.max_length")


def _check_array(field: str, x, shape: tuple[int, int], *kinds: type) -> None:
    found, kind = getattr(x, "shape", None), getattr(x, "dtype", None)
    if kind is None or not any(jnp.issubdtype(kind, one) for one in kinds):
        wanted = "an integer array" if kinds == (np.integer,) else "an array of bool"
        raise UserError(f"{field}: expected {wanted}, got {kind or type(x).__name__}")
    if found not in (shape, (1, shape[1])):
        raise UserError(
            f"{field}: shape {list(found)}, but the tokens' is {list(shape)}; give one value per token"
        )


def _check_range(field: str, x, end: int | None = None, why: str = "") -> None:
    """Raises UserError unless all values that are at hand lie in [0, end)."""
    found = values(x)
    if found is None or not found.size or found.dtype == bool:
        return
    least, most = found.min(), found.max()
    if least < 0 or (end is not None and most >= end):
        bad = least if least < 0 else most
        wanted = f"between 0 and {end - 1}" if end is not None else "at least 0"
        raise UserError(
            f"{field}: {bad} must be {wanted}" + (f" ({why} = {end})" if why and end else "")
        )
