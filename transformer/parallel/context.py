"""Context parallelism: the order of positions in a sharded sequence.

Shape suffixes: B batch, T length.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from transformer.model import positions
from transformer.model.config import ModelConfig
from transformer.model.masks import zigzag
from transformer.parallel.sharding import BATCH_AXES


def order_of(config: ModelConfig, mesh: Mesh) -> str:
    """Returns the order of a decoder's positions: "zigzag", or "contiguous" (unchanged).

    Zigzag order gives all devices the same work under a causal mask. It is used where the mesh
    shards sequences and the position schemes' scores depend on the query and the key alone.
    """
    decodes = "decoder" in config.sides and not config.num_labels
    in_order = any(mixer.in_order for mixer in config.mixers_of())
    if mesh.shape["context"] == 1 or not decodes or in_order:
        return "contiguous"
    pairwise = all(positions.build(layer.position).pairwise for layer in config.layers("decoder"))
    return "zigzag" if pairwise and not config.prefix_lm else "contiguous"


def arrange(batch: dict, order: str, mesh: Mesh) -> dict:
    """Shards the batch, with a decoder's positions in `order`; sums over tokens stay the same."""

    def constrain(name: str, x: jax.Array) -> jax.Array:
        if x.ndim > 1 and order == "zigzag" and not name.startswith("source"):
            x = zigzag(x, mesh.shape["context"])
        spec = P(BATCH_AXES, *["context"][: x.ndim - 1])
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return {name: constrain(name, x) for name, x in batch.items()} if mesh.size > 1 else batch
