"""Sequences spread over devices: which order their tokens stand in, and how a batch is put into it.

Shape suffixes: B batch, T length.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from transformer.model import positions
from transformer.model.config import ModelConfig
from transformer.parallel.sharding import ROWS


def order_of(config: ModelConfig, mesh: Mesh) -> str:
    """The order of a decoder's tokens in a row: "zigzag" where the mesh spreads them and every attention asks about pairs alone, so
    that devices have equally much to do under a causal mask; else "rows"."""
    if (
        mesh.shape["context"] == 1
        or "decoder" not in config.sides
        or config.num_labels
        or any(mixer.in_order for mixer in config.token_mixers)
    ):
        return "rows"
    pairwise = all(positions.build(layer.position).pairwise for layer in config.layers("decoder"))
    return "zigzag" if pairwise and not config.prefix_lm else "rows"


def arrange(batch: dict, order: str, mesh: Mesh) -> dict:
    """The batch with its tokens spread over the mesh, a decoder's in `order`. Losses are sums over tokens: their order is nothing to them."""

    def place(name: str, x: jax.Array) -> jax.Array:
        if x.ndim > 1 and order == "zigzag" and not name.startswith("source"):
            x = zigzag(x, mesh.shape["context"])
        return jax.lax.with_sharding_constraint(
            x, NamedSharding(mesh, P(ROWS, *["context"][: x.ndim - 1]))
        )

    return {name: place(name, x) for name, x in batch.items()} if mesh.size > 1 else batch


def zigzag(x_BxT: jax.Array, count: int) -> jax.Array:
    """Rows cut into 2 `count` chunks, the n-th part of the result holding chunks n and 2 count - 1 - n."""
    chunks = x_BxT.reshape(x_BxT.shape[0], 2 * count, -1)
    both = jnp.stack([chunks[:, :count], jnp.flip(chunks[:, count:], axis=1)], axis=2)
    return both.reshape(x_BxT.shape)
