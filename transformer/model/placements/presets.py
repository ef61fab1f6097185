"""The placements whose parts do not depend on depth."""

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
