"""The residual connection of every sublayer, in every placement: one formula.

    y = out_norm( a * x + gate * res_norm( dropout( f( in_norm(x) ) ) ) )        an absent norm is the identity

Sublayers side by side (GPT-J, GPT-NeoX, PaLM) are one sum over branches, each with its own norms and gate. Who asks for
"sizes" (watch.py) is told how large the stream and the branch are.

Shape suffixes: B batch, T length, D d_model.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.model.config import ModelConfig
from transformer.model.dropout import Dropout, rate_of
from transformer.model.placements import Placement
from transformer.model.sharding import constrain
from transformer.model.watch import watched


class Residual(nn.Module):
    """Wraps sublayers f that read one x: y = out_norm(a x + sum over f of gate res_norm(dropout(f(in_norm(x)))))."""

    config: ModelConfig
    placement: Placement

    @nn.compact
    def __call__(
        self,
        x_BxTxD: jax.Array,
        *sublayers: Callable[[jax.Array], jax.Array],
        segments_BxT: jax.Array,
        deterministic: bool,
        dropout_rate: jax.Array | None = None,
    ) -> jax.Array:
        p, norm = self.placement, self.config.norm_module
        y = stream = p.residual_scale * x_BxTxD if p.residual_scale else None
        for i, f in enumerate(sublayers):
            suffix = f"_{i}" if i else ""
            h = norm(name="in_norm" + suffix)(x_BxTxD) if p.in_norm else x_BxTxD
            h = constrain(
                h, ("batch", "length", "activation_embed")
            )  # a sublayer's matrices want whole rows,
            h = constrain(
                f(h), ("batch", "stream", "activation_embed")
            )  # what acts on each token alone does not
            h = Dropout(rate_of(self.config, dropout_rate))(h, deterministic)
            h = norm(name="res_norm" + suffix)(h) if p.res_norm else h
            if p.gate:
                zero = nn.with_logical_partitioning(nn.initializers.zeros, ())
                h = (
                    self.param("gate" + suffix, zero, (), self.config.param_dtype).astype(h.dtype)
                    * h
                )
            y = h if y is None else y + h
        if watched(self, "sizes"):
            size = lambda x: rms(x, segments_BxT)
            kept, branch = (0.0, size(y)) if stream is None else (size(stream), size(y - stream))
            self.sow("sizes", "sizes", {"stream": size(x_BxTxD), "kept": kept, "branch": branch})
        y = norm(name="out_norm")(y) if p.out_norm else y
        return constrain(y, ("batch", "stream", "activation_embed"))


def rms(x_BxTxD: jax.Array, segments_BxT: jax.Array) -> jax.Array:
    """The root of the mean square, over tokens that are there: padding, of segment 0, does not count."""
    there_BxT = jnp.broadcast_to(segments_BxT > 0, x_BxTxD.shape[:-1])
    square_BxT = jnp.mean(jnp.square(x_BxTxD.astype(jnp.float32)), axis=-1)
    return jnp.sqrt(jnp.sum(square_BxT, where=there_BxT) / jnp.maximum(jnp.sum(there_BxT), 1))
