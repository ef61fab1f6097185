"""The residual connection of every sublayer: one formula for every norm placement.

    y = out_norm( a * x + s * gate * l * res_norm( dropout( f( in_norm(x) ) ) ) )

a and s are constants, gate is a learned scalar and l a learned vector. An absent norm is the
identity. Parallel sublayers (GPT-J, GPT-NeoX,
PaLM) are one sum over branches, each with separate norms and a separate gate. The collection
"sizes" (watch.py) records the root mean squares of the residual stream and of the branch.

Shape suffixes: B batch, T length, D d_model.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import constant

from transformer.model.config import ModelConfig
from transformer.model.dropout import Dropout, rate_of
from transformer.model.initializers import declare
from transformer.model.mixers.base import Context
from transformer.model.placements import Placement
from transformer.model.sharding import constrain
from transformer.model.watch import watched


class Residual(nn.Module):
    """Wraps sublayers f with the same input x.

    y = out_norm(a x + s * sum over f of gate l res_norm(dropout(f(in_norm(x)))))
    """

    config: ModelConfig
    placement: Placement

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, *sublayers: Callable, context: Context, deterministic: bool
    ) -> jax.Array:
        p, norm = self.placement, self.config.norm_module
        y = skip = p.residual_scale * x_BxTxD if p.residual_scale else None
        for i, f in enumerate(sublayers):
            suffix = f"_{i}" if i else ""
            h = norm(name="in_norm" + suffix)(x_BxTxD) if p.in_norm else x_BxTxD
            # Sublayers take tokens sharded as "length". Between sublayers, norms, dropout and sums
            # act on each token separately, so tokens may be sharded over more axes, as "stream".
            h = constrain(h, ("batch", "length", "activation_embed"))
            h = constrain(f(h), ("batch", "stream", "activation_embed"))
            h = Dropout(rate_of(self.config, context.dropout_rate))(h, deterministic)
            h = norm(name="res_norm" + suffix)(h) if p.res_norm else h
            if p.gate:
                h = declare(self, "gate" + suffix, constant(0.0), (), ()).astype(h.dtype) * h
            if p.layer_scale:
                start, name = constant(p.layer_scale), "layer_scale" + suffix
                h = declare(self, name, start, ("norm",), h.shape[-1:]).astype(h.dtype) * h
            h = h * p.branch_scale if p.branch_scale != 1.0 else h
            y = h if y is None else y + h
        if watched(self, "sizes"):
            size = lambda x: rms(x, context.tokens.segments_BxT)
            kept, branch = (0.0, size(y)) if skip is None else (size(skip), size(y - skip))
            self.sow("sizes", "sizes", {"stream": size(x_BxTxD), "kept": kept, "branch": branch})
        y = norm(name="out_norm")(y) if p.out_norm else y
        return constrain(y, ("batch", "stream", "activation_embed"))


def rms(x_BxTxD: jax.Array, segments_BxT: jax.Array) -> jax.Array:
    """Returns the root mean square over real tokens, excluding padding (segment 0)."""
    real_BxT = jnp.broadcast_to(segments_BxT > 0, x_BxTxD.shape[:-1])
    square_BxT = jnp.mean(jnp.square(x_BxTxD.astype(jnp.float32)), axis=-1)
    return jnp.sqrt(jnp.sum(square_BxT, where=real_BxT) / jnp.maximum(jnp.sum(real_BxT), 1))
