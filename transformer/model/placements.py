"""Norm placements: presets of the parts of one formula, and of what must go with them.

    y = out_norm( a * x + gate * res_norm( dropout( f( in_norm(x) ) ) ) )        an absent norm is the identity

A preset fixes which norms there are, whether the stack ends in one, how the branch is initialised, how long to warm up. A
config may take it apart, part by part. residual.py applies the formula.
"""

import dataclasses
from collections.abc import Callable

from flax.core import FrozenDict

from transformer.checks import check_options, plain
from transformer.errors import UserError, look_up, nearest


@dataclasses.dataclass(frozen=True)
class Placement:
    """The parts of the formula, and what goes with them."""

    in_norm: bool = False  # normalise what the sublayer reads
    res_norm: bool = False  # normalise what the sublayer writes
    out_norm: bool = False  # normalise the sum
    final_norm: bool = (
        False  # the stack ends in a norm: needed wherever the stream itself is never normalised
    )
    residual_scale: float = 1.0  # a; 0 means no residual connection
    branch_gain: float = 1.0  # scales the initial values of W_V, W_O and both feed-forward matrices
    gate: bool = False  # a learned scalar per sublayer, 0 at the start
    warmup_hint: int = 0  # steps of warm-up without which training is known to fail; 0: none needed


def _deepnorm(layers: int, encoder_layers: int, decoder_layers: int, is_decoder: bool) -> Placement:
    """DeepNet's table 1: N encoder and M decoder layers, or L layers of an only stack."""
    n, m = encoder_layers, decoder_layers
    if n and m and is_decoder:
        alpha, beta = (3 * m) ** 0.25, (12 * m) ** -0.25
    elif n and m:
        alpha, beta = 0.81 * (n**4 * m) ** (1 / 16), 0.87 * (n**4 * m) ** (-1 / 16)
    else:
        alpha, beta = (2 * layers) ** 0.25, (8 * layers) ** -0.25
    return Placement(out_norm=True, residual_scale=alpha, branch_gain=beta)


def _fixed(**parts) -> Callable[..., Placement]:
    return lambda **depths: Placement(**parts)


_KNOWN = ("warmup_hint",)
"""What is known of a preset, and nothing that a config could set."""

PLACEMENTS: dict[str, Callable[..., Placement]] = {
    # x + f(norm(x)), final norm (Wang et al. 2019; Xiong et al. 2020; GPT-2). Well-behaved gradients at the start; the
    # stream grows with depth.
    "pre": _fixed(in_norm=True, final_norm=True),
    # norm(x + f(x)) (Vaswani et al. 2017; BERT). Gradients grow towards the last layer at the start: warm up.
    "post": _fixed(out_norm=True, warmup_hint=1000),
    # x + norm(f(norm(x))), final norm: "sandwich" (Ding et al. 2021; Gemma 2), "peri-LN" (Kim et al. 2025).
    "peri": _fixed(in_norm=True, res_norm=True, final_norm=True),
    # x + norm(f(x)), final norm: Swin v2's "res-post-norm" (Liu et al. 2022), OLMo 2.
    "res_post": _fixed(res_norm=True, final_norm=True),
    # norm(a x + f(x)) with a and the initialisation set by depth (Wang et al. 2022, "DeepNet").
    "deepnorm": lambda **depths: _deepnorm(**depths),
    # x + f(x): no norm anywhere.
    "none": _fixed(),
    # x + g f(x), g learned from 0, no norm (Bachlechner et al. 2021, "ReZero").
    "rezero": _fixed(gate=True),
}


def build_placement(
    spec: str | FrozenDict, *, encoder_layers: int, decoder_layers: int, is_decoder: bool
) -> Placement:
    """The placement of a config for one stack: `"post"`, or a preset taken apart, `dict(name="post", final_norm=True)`."""
    name, given = (
        (spec, {})
        if isinstance(spec, str)
        else (spec.get("name", ""), {k: v for k, v in spec.items() if k != "name"})
    )
    if not isinstance(name, str):
        raise UserError(
            f"model.norm_placement.name: {plain(name)!r} is not a name; {nearest(str(name), PLACEMENTS)}"
        )
    make = look_up(PLACEMENTS, name, "model.norm_placement")
    options = {f.name: f.default for f in dataclasses.fields(Placement) if f.name not in _KNOWN}
    given = check_options("model.norm_placement", name, options, given, "part")
    if given.get("branch_gain", 1.0) <= 0:
        raise UserError(
            f"model.norm_placement.branch_gain: {given['branch_gain']} must be more than 0"
        )
    preset = make(
        layers=decoder_layers if is_decoder else encoder_layers,
        encoder_layers=encoder_layers,
        decoder_layers=decoder_layers,
        is_decoder=is_decoder,
    )
    return dataclasses.replace(preset, **given)
