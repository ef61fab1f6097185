"""The residual connection of every sublayer, by the formula of placements/base.py. In it, a and s
are constants, g is a learned scalar and l a learned vector. Parallel sublayers (GPT-J, GPT-NeoX,
PaLM) are one sum over branches, each with separate norms and a separate gate. A placement may
replace the sum. "sizes" (`WATCHED`) has the root mean squares of the stream read and of the branch.
Shape suffixes: B batch, T length, D d_model."""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.initializers import constant

from transformer.model.config import ModelConfig
from transformer.model.dropout import Dropout, rate_of
from transformer.model.mixers.base import Context
from transformer.model.modules import declare, watched
from transformer.model.placements.base import Parts, Placement, Site, Streams
from transformer.model.sharding import constrain


class Residual(nn.Module):
    """The connection of one sublayer f, or of parallel ones with the same input x."""

    config: ModelConfig
    side: str  # encoder | decoder
    placement: Placement
    step: int  # the number of this connection in its layer
    steps: int  # number of connections in a layer

    @nn.compact
    def __call__(
        self, streams: Streams, *sublayers: Callable, context: Context, deterministic: bool
    ) -> Streams:
        layers, base_layers = (c.num_layers(self.side) for c in (self.config, self.config.base))
        branch = functools.partial(self._branch, sublayers, context, deterministic)
        site = Site(context.layer, self.step, self.steps, layers, base_layers)
        streams = self.placement.connect(parts_of(self), site, streams, branch)
        return jax.tree.map(constrain_streams, streams)

    def _branch(self, sublayers, context, deterministic, x_BxTxD: jax.Array) -> list[jax.Array]:
        """Returns s g l res_norm(dropout(f(in_norm(x)))) of each sublayer f."""
        p, norm, branches = self.placement, self.config.norm_module, []
        for i, f in enumerate(sublayers):
            suffix = f"_{i}" if i else ""
            h = norm(name="in_norm" + suffix)(x_BxTxD) if p.in_norm else x_BxTxD
            # Sublayers take tokens sharded as "length". Between sublayers, norms, dropout and sums
            # act on each token separately, so tokens may be sharded over more axes, as "stream".
            h = constrain(h, ("batch", "length", "activation_embed"))
            h = constrain_streams(f(h))
            h = Dropout(rate_of(self.config, context.dropout_rate))(h, deterministic)
            h = norm(name="res_norm" + suffix)(h) if p.res_norm else h
            if p.gate:
                h = declare(self, "gate" + suffix, constant(0.0), (), ()).astype(h.dtype) * h
            if p.layer_scale:
                start, name = constant(p.layer_scale), "layer_scale" + suffix
                h = declare(self, name, start, ("norm",), h.shape[-1:]).astype(h.dtype) * h
            branches.append(h * p.branch_scale if p.branch_scale != 1.0 else h)
        if watched(self, "sizes"):
            size = lambda x: rms(x, context.tokens.segments_BxT)
            stream, branch = size(x_BxTxD), size(functools.reduce(operator.add, branches))
            scale = 1.0 if p.residual_scale is None else p.residual_scale
            self.sow("sizes", "sizes", {"stream": stream, "kept": scale * stream, "branch": branch})
        return branches


def parts_of(module: nn.Module) -> Parts:
    """Returns the norms and parameters that a placement may declare in this module."""
    norm = lambda name: module.config.norm_module(name=name)
    return Parts(norm, functools.partial(declare, module))


def constrain_streams(x: jax.Array) -> jax.Array:
    """Shards residual streams, [B, T, ..., D], over devices."""
    return constrain(x, ("batch", "stream", *[None] * (x.ndim - 3), "activation_embed"))


def rms(x_BxTxD: jax.Array, segments_BxT: jax.Array) -> jax.Array:
    """Returns the root mean square over real tokens, excluding padding (segment 0)."""
    real_BxT = jnp.broadcast_to(segments_BxT > 0, x_BxTxD.shape[:-1])
    square_BxT = jnp.mean(jnp.square(x_BxTxD.astype(jnp.float32)), axis=-1)
    return jnp.sqrt(jnp.sum(square_BxT, where=real_BxT) / jnp.maximum(jnp.sum(real_BxT), 1))
