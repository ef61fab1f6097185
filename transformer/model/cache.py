"""The key/value cache of incremental decoding: an explicit value, passed in and returned, never hidden state.

Shape suffixes: B batch, S slots, K key/value heads, H head size, L layers.
"""

import jax
import jax.numpy as jnp
from flax import struct

from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.masks import Tokens


@struct.dataclass
class KeyValue:
    """Keys and values of one attention sublayer (with a leading L when layers are scanned)."""

    k_BxSxKxH: jax.Array
    v_BxSxKxH: jax.Array

    def write(self, new: "KeyValue", index: jax.Array) -> "KeyValue":
        """With slots index, index + 1, ... replaced by those of `new`."""
        put = lambda slots, x: jax.lax.dynamic_update_slice_in_dim(
            slots, x.astype(slots.dtype), index, axis=1
        )
        return jax.tree.map(put, self, new)


@struct.dataclass
class LayerCache:
    """What one decoder layer remembers: keys and values (of a recurrent layer: its state, and what it reads of the encoder).
    `cross_attention` is None in a decoder-only model and before the prefill has filled it."""

    self_attention: KeyValue
    cross_attention: KeyValue | None = None


@struct.dataclass
class Cache:
    """A decoder's memory: its layers', and where the cached tokens stand. Empty slots have segment 0, so masks hide them."""

    layers: (
        LayerCache | tuple[LayerCache, ...]
    )  # one a layer; one a layer of the period, stacked on axis 0, when they are looped
    tokens: Tokens
    index: (
        jax.Array
    )  # int32[]: the next slot to be written, the same in all rows (prompts are padded on the left)

    def append(self, tokens: Tokens) -> Tokens:
        """The tokens of all slots, once `tokens` stand in the next ones."""
        put = lambda slots, new: jax.lax.dynamic_update_slice_in_dim(slots, new, self.index, axis=1)
        return jax.tree.map(put, self.tokens, tokens.replace(until_BxT=None, order=""))


def check_room(cache: Cache, tokens_BxT: jax.Array) -> None:
    """Raises UserError where the cache has no slots left for these tokens: they would overwrite the last ones."""
    slots, used = cache.tokens.segments_BxT.shape[1], 0
    if not isinstance(cache.index, jax.core.Tracer):
        used = int(cache.index)
    if used + tokens_BxT.shape[1] > slots:
        raise UserError(
            f"cache: {slots} slots, but {used} + {tokens_BxT.shape[1]} tokens; make it with more slots"
        )


def empty_cache(config: ModelConfig, batch: int, slots: int) -> Cache:
    """A cache with room for `slots` tokens a row."""
    blank = lambda size: jnp.zeros((batch, slots, config.num_kv_heads, size), config.dtype)
    layers = tuple(
        LayerCache(KeyValue(blank(one.key_size("decoder")), blank(one.value_size)))
        for one in config.layers("decoder")
    )
    depth = config.num_decoder_layers
    if config.scan_layers:
        period = config.period("decoder")
        looped = layers[0] if period == 1 else layers[:period]
        layers = jax.tree.map(lambda x: jnp.zeros((depth // period, *x.shape), x.dtype), looped)
    nothing = jnp.zeros((batch, slots), jnp.int32)
    return Cache(layers, Tokens(nothing, nothing), jnp.zeros((), jnp.int32))
