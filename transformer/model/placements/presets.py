"""The placements that only set the parts of the residual formula."""

import dataclasses
from typing import Annotated

from transformer.limits import POSITIVE
from transformer.model.placements.base import PLACEMENTS, Placement


@PLACEMENTS.register("pre")
class Pre(Placement):
    """x + f(norm(x)), then a final norm (Wang et al. 2019; Xiong et al. 2020; GPT-2).

    At initialization, layers have about equal gradients. The residual stream grows with depth."""

    in_norm: bool = True
    final_norm: bool = True


@PLACEMENTS.register("post")
class Post(Placement):
    """norm(x + f(x)) (Vaswani et al. 2017; BERT).

    Gradients grow towards the last layer at initialization, so training needs warm-up."""

    out_norm: bool = True
    warmup_hint: int = 1000


@PLACEMENTS.register("deepnorm")
class DeepNorm(Placement):
    """norm(alpha x + f(x)), with initial branch weights scaled by beta (Wang et al. 2022, DeepNet).

    Table 1 of the paper gives alpha (`residual_scale`) and beta (`branch_gain`) for N encoder and M
    decoder layers, or for a single stack of L layers."""

    out_norm: bool = True
    residual_scale: float | None = None  # None: alpha
    branch_gain: Annotated[float | None, POSITIVE] = None  # None: beta

    def in_stack(self, side, encoder_layers, decoder_layers):
        n, m = encoder_layers, decoder_layers
        if not (n and m):
            alpha, beta = (2 * (n or m)) ** 0.25, (8 * (n or m)) ** -0.25
        elif side == "encoder":
            alpha, beta = 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
        else:
            alpha, beta = (3 * m) ** 0.25, (12 * m) ** -0.25
        scale = alpha if self.residual_scale is None else self.residual_scale
        gain = beta if self.branch_gain is None else self.branch_gain
        parts = dataclasses.replace(self, residual_scale=scale, branch_gain=gain)
        return Placement(**dataclasses.asdict(parts))


@PLACEMENTS.register("peri")
class Peri(Placement):
    """x + norm(f(norm(x))), then a final norm.

    Also called sandwich norm (Ding et al. 2021; Gemma 2) and Peri-LN (Kim et al. 2025)."""

    in_norm: bool = True
    res_norm: bool = True
    final_norm: bool = True


@PLACEMENTS.register("res_post")
class ResPost(Placement):
    """x + norm(f(x)), then a final norm: res-post-norm (Liu et al. 2022, Swin v2; OLMo 2)."""

    res_norm: bool = True
    final_norm: bool = True


@PLACEMENTS.register("none")
class NoNorm(Placement):
    """x + f(x), without any norm."""


@PLACEMENTS.register("rezero")
class ReZero(Placement):
    """x + g f(x) with a learned g, initially 0, and no norm (Bachlechner et al. 2021)."""

    gate: bool = True
