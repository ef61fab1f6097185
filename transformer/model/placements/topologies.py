"""Placements with two residual streams, or whose norms depend on the layer. N is a norm with
parameters of its own. Sublayers are numbered from 0."""

import dataclasses
import math
from typing import Annotated

import jax.numpy as jnp

from transformer.limits import POSITIVE, Rate
from transformer.model.placements.base import PLACEMENTS, Placement


@dataclasses.dataclass(frozen=True)
class _PostAndPre(Placement):
    """The base of placements with a post-norm and a pre-norm stream, which begin as embeddings."""

    out_norm: bool = True
    final_norm: bool = True
    fixed = ("out_norm", "final_norm")

    def begin(self, x_BxTxD, sublayers):
        return x_BxTxD, x_BxTxD

    def end(self, parts, streams, done):
        return streams[0] + parts.norm("final_norm")(streams[1])


@PLACEMENTS.register("resi_dual")
class ResiDual(_PostAndPre):
    """ResiDual (Xie et al. 2023, arXiv:2304.14802): a post-norm and a pre-norm stream.

    o = f(x),  x <- N(x + o),  r <- r + o        x = r = the embeddings
    output: x + N(r)"""

    def connect(self, parts, site, streams, branch):
        x, r = streams
        o = sum(branch(x))
        return parts.norm("out_norm")(self.residual_scale * x + o), r + o


@PLACEMENTS.register("siamese_norm")
class SiameseNorm(_PostAndPre):
    """SiameseNorm (2026, arXiv:2602.08064): a post-norm and a pre-norm stream share all sublayers.

        o = f(N(x + N(y))),  x <- N(x + o / c),  y <- y + o        x = y = the embeddings
        output: x + N(y)

    This is Algorithm 1 with its two additions, the norm before f and the scale c of one stream.
    c = sqrt(2 (l + 1)) in layer l, as in the released language model. The text of the paper was not
    available to confirm c; the released model also normalizes queries, keys and values."""

    in_norm: bool = True

    def connect(self, parts, site, streams, branch):
        x, y = streams
        o = sum(branch(x + parts.norm("stream_norm")(y)))
        c = jnp.sqrt(2.0 * (site.layer + 1)).astype(o.dtype)
        return parts.norm("out_norm")(self.residual_scale * x + o / c), y + o


@PLACEMENTS.register("b2t")
class BottomToTop(Placement):
    """B2T connection (Takase et al. 2022, arXiv:2206.00330): post-norm with a skip over each layer.

        u = N(x + attention(x)),  y = N(x + u + ff(u))

    The layer's input x is added before its last norm; with an encoder, the skip also crosses
    cross-attention. The authors' code multiplies initial matrices by L^-0.5: set `branch_gain`."""

    out_norm: bool = True
    warmup_hint: int = 1000
    fixed = ("out_norm",)

    def begin(self, x_BxTxD, sublayers):
        return x_BxTxD, x_BxTxD

    def connect(self, parts, site, streams, branch):
        x, layer_input = streams
        layer_input = x if site.step == 0 else layer_input
        y = self.residual_scale * x + sum(branch(x))
        y = y + layer_input if 0 < site.step == site.steps - 1 else y
        return parts.norm("out_norm")(y), layer_input

    def end(self, parts, streams, done):
        return parts.norm("final_norm")(streams[0]) if self.final_norm else streams[0]


@PLACEMENTS.register("keel")
class Keel(Placement):
    """Keel (2026, arXiv:2601.19895): post-norm whose skip outweighs the branch by depth.

        y = N(a x + f(N(x)))        a: the number of sublayers

    In the first layer, a = 1, and its first sublayer is x + f(N(x)). The paper's text was not
    available to confirm that no other norm ends the stack."""

    in_norm: bool = True
    out_norm: bool = True
    residual_scale: float | None = None  # None: a
    fixed = ("out_norm",)

    def connect(self, parts, site, x_BxTxD, branch):
        sublayers, a = site.base_layers * site.steps, self.residual_scale
        a = jnp.where(site.layer == 0, 1.0, sublayers if a is None else a)
        y = a.astype(x_BxTxD.dtype) * x_BxTxD + sum(branch(x_BxTxD))
        return jnp.where(site.index == 0, y, parts.norm("out_norm")(y))


@PLACEMENTS.register("mix_ln")
class MixLN(Placement):
    """Mix-LN (Li et al. 2024, arXiv:2412.13795): post-norm in the first layers, then pre-norm.

    The first floor(share L) of L layers compute N(x + f(x)), the others x + f(N(x)): one N each."""

    final_norm: bool = True
    share: Annotated[Rate, POSITIVE] = 0.25  # of the layers with post-norm
    fixed = ("in_norm", "out_norm", "final_norm")

    def connect(self, parts, site, x_BxTxD, branch):
        norm, is_post = parts.norm("norm"), site.layer < math.floor(self.share * site.layers)
        h_BxTxD = jnp.where(is_post, x_BxTxD, norm(x_BxTxD))
        y_BxTxD = self.residual_scale * x_BxTxD + sum(branch(h_BxTxD))
        return jnp.where(is_post, norm(y_BxTxD), y_BxTxD)


@PLACEMENTS.register("hybrid_norm")
class HybridNorm(Placement):
    """HybridNorm* (Zhuo et al. 2025, arXiv:2503.04598): norms of queries, keys and values.

        y = x + attention(x),  z = N(y),  output: z + ff(z)

    Attention normalizes its queries, keys and values (`qk_norm`, `v_norm`) and not its input. The
    first layer is pre-norm: y = x + attention(N(x)), output y + ff(N(y)). With `pre_first=False`,
    it is like the others, which the paper calls HybridNorm. The stack ends in a norm.

    The norm before attention affects the first layer only; all layers have its gain."""

    final_norm: bool = True
    pre_first: bool = True
    fixed = ("in_norm", "out_norm", "final_norm")

    def check(self, config, side):
        if config.parallel or not config.feed_forward_kind.exists:
            problem = "'hybrid_norm' needs a feed-forward after attention"
            return f"model.norm_placement: {problem}; set model.parallel=False"
        if not (config.qk_norm and config.v_norm):
            way_out = "set model.qk_norm=True and model.v_norm=True"
            return f"model.norm_placement: 'hybrid_norm' normalizes values, too; {way_out}"
        return None

    def connect(self, parts, site, x_BxTxD, branch):
        is_pre = self.pre_first and site.layer == 0
        skip_BxTxD = h_BxTxD = x_BxTxD
        if site.step == site.steps - 1:
            h_BxTxD = parts.norm("norm")(x_BxTxD)
            skip_BxTxD = jnp.where(is_pre, x_BxTxD, h_BxTxD)
        elif self.pre_first:
            h_BxTxD = jnp.where(is_pre, parts.norm("norm")(x_BxTxD), x_BxTxD)
        return self.residual_scale * skip_BxTxD + sum(branch(h_BxTxD))
