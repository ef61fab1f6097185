"""The residual connection of every sublayer, in every placement: one formula.

    y = out_norm( a * x + gate * res_norm( dropout( f( in_norm(x) ) ) ) )        an absent norm is the identity

Shape suffixes: B batch, T length, D d_model.
"""

from collections.abc import Callable

import jax
from flax import linen as nn

from transformer.config import ModelConfig
from transformer.model.dropout import Dropout
from transformer.model.placements import Placement


class Residual(nn.Module):
    """Wraps one sublayer: y = out_norm(a x + gate res_norm(dropout(f(in_norm(x)))))."""

    config: ModelConfig
    placement: Placement

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, f: Callable[[jax.Array], jax.Array], deterministic: bool) -> jax.Array:
        p, norm = self.placement, self.config.norm_module
        h = norm(name="in_norm")(x_BxTxD) if p.in_norm else x_BxTxD
        h = Dropout(self.config.dropout)(f(h), deterministic)
        h = norm(name="res_norm")(h) if p.res_norm else h
        if p.gate:
            gate = self.param(
                "gate", nn.with_logical_partitioning(nn.initializers.zeros, ()), (), self.config.param_dtype
            )
            h = gate.astype(h.dtype) * h
        y = p.residual_scale * x_BxTxD + h if p.residual_scale else h
        y = norm(name="out_norm")(y) if p.out_norm else y
        return nn.with_logical_constraint(y, ("batch", "length", "activation_embed"))
