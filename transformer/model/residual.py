"""The residual connection of every sublayer, in every placement: one formula.

    y = out_norm( a * x + gate * res_norm( dropout( f( in_norm(x) ) ) ) )        an absent norm is the identity

Sublayers side by side (GPT-J, GPT-NeoX, PaLM) are one sum over branches, each with its own norms and gate.

Shape suffixes: B batch, T length, D d_model.
"""

from collections.abc import Callable

import jax
from flax import linen as nn

from transformer.model.config import ModelConfig
from transformer.model.dropout import Dropout
from transformer.model.placements import Placement
from transformer.model.sharding import constrain


class Residual(nn.Module):
    """Wraps sublayers f that read one x: y = out_norm(a x + sum over f of gate res_norm(dropout(f(in_norm(x)))))."""

    config: ModelConfig
    placement: Placement

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, *sublayers: Callable[[jax.Array], jax.Array], deterministic: bool
    ) -> jax.Array:
        p, norm = self.placement, self.config.norm_module
        y = p.residual_scale * x_BxTxD if p.residual_scale else None
        for i, f in enumerate(sublayers):
            suffix = f"_{i}" if i else ""
            h = norm(name="in_norm" + suffix)(x_BxTxD) if p.in_norm else x_BxTxD
            h = constrain(h, ("batch", "length", "activation_embed"))  # a sublayer's matrices want whole rows,
            h = constrain(f(h), ("batch", "stream", "activation_embed"))  # what acts on each token alone does not
            h = Dropout(self.config.dropout)(h, deterministic)
            h = norm(name="res_norm" + suffix)(h) if p.res_norm else h
            if p.gate:
                zero = nn.with_logical_partitioning(nn.initializers.zeros, ())
                h = self.param("gate" + suffix, zero, (), self.config.param_dtype).astype(h.dtype) * h
            y = h if y is None else y + h
        y = norm(name="out_norm")(y) if p.out_norm else y
        return constrain(y, ("batch", "stream", "activation_embed"))
