"""muP and CompleteP: the best learning rate of a small model is also that of a large one."""

import math
from fractions import Fraction
from typing import ClassVar

from flax.core import FrozenDict

from transformer.checks import coerce
from transformer.errors import UserError, nearest
from transformer.limits import Size
from transformer.model.parametrizations.base import NONE, PARAMETRIZATIONS, Parametrization, Rule

WIDTHS = ("d_model", "d_ff", "num_heads", "d_head", "d_value")


@PARAMETRIZATIONS.register("mup")
class MuP(Parametrization):
    """The maximal update parametrization, for width (Yang et al. 2022, Tensor Programs V, table 8).

    The initial values of a matrix have a variance proportional to 1 / m_N, and its learning rate is
    multiplied by 1 / m_N. Logits are divided by m_N of d_model. Queries times keys are divided by
    d_head / sqrt(d_head of the base) instead of sqrt(d_head). Embeddings, norms and biases keep
    their initial values and learning rates. Epsilon is multiplied by 1 / m_N.

    Weight decay is not multiplied. An update is w - rate (multiplier adam + decay w), so this
    equals decay times m_N where the multiplier applies to the whole update, as in the paper's code.

    The updates of Muon have a fixed root mean square (optimizers/muon.py), so that the learning
    rate of its matrices is multiplied by m_N^(-1/2).

    `base` holds sizes of the base model by field, such as dict(d_model=256). Its `d_ff` and
    `num_heads` are in proportion to d_model unless they are given, so that heads have the same
    size. Sizes that are options of a mixer or of experts are the same."""

    sizes: ClassVar[tuple[str, ...]] = WIDTHS
    alpha: ClassVar[float] = 1.0  # without effect, because the base has the same depth

    base: FrozenDict = NONE  # sizes of the base model: dict(d_model=256)

    def __post_init__(self):
        super().__post_init__()
        field = "model.parametrization.base"
        for name, size in self.base.items():
            if name not in self.sizes:
                problem = f"{self.name!r} has no size {name!r}; {nearest(name, self.sizes)}"
                raise UserError(f"{field}: {problem}")
            coerce(size, Size, f"{field}.{name}")
        object.__setattr__(self, "base", FrozenDict({k: int(x) for k, x in self.base.items()}))
        if not self.base:
            way_out = "set them, for example base=dict(d_model=256)"
            raise UserError(f"{field}: {self.name!r} needs the sizes of the base model; {way_out}")

    def base_of(self, config):
        sizes = {"d_model": config.d_model} | dict(self.base)
        for name in ("d_ff", "num_heads"):
            size = Fraction(getattr(config, name) * sizes["d_model"], config.d_model)
            if name not in sizes and size.denominator > 1:
                product = f"{getattr(config, name)} times {sizes['d_model']} / {config.d_model}"
                problem = f"model.{name} = {product} is not an integer"
                raise UserError(f"model.parametrization.base: {problem}; set base.{name}")
            sizes.setdefault(name, int(size))
        if not config.d_head and sizes["d_model"] % sizes["num_heads"]:
            problem = f"is not divisible by num_heads = {sizes['num_heads']}; change one"
            raise UserError(f"model.parametrization.base: d_model = {sizes['d_model']} {problem}")
        return config.part(**sizes, num_kv_heads=math.gcd(config.kv_heads, sizes["num_heads"]))

    def branch_scale(self, m_L):
        return m_L**-self.alpha

    def rule(self, place):
        m_N, m_L = place.m_N, place.m_L
        rate = {"branch": m_L ** (self.alpha - 1), "stream": 1 / m_L, "once": 1.0}[place.part]
        epsilon = (m_L**-self.alpha if place.part == "branch" else 1.0) / place.m_D
        if place.role in ("matrix", "readout"):
            init = place.std_ratio * m_N**-0.5
            return Rule(rate / m_N, rate, epsilon * place.m_D / m_N, init)
        return Rule(rate, 1.0, epsilon, place.std_ratio)


@PARAMETRIZATIONS.register("completep")
class CompleteP(MuP):
    """CompleteP: muP, with multipliers for depth (Dey et al. 2025, table 1).

    A residual branch is multiplied by m_L^(-alpha). In layers, learning rates and weight decay are
    multiplied by m_L^(alpha - 1), and epsilon by m_L^(-alpha). The learning rate of a norm of the
    stream itself, as in post-norm, is multiplied by 1 / m_L. Parts of a norm placement and of the
    initialization that depend on depth have the values of the base.

    The paper covers pre-norm; docs/parametrizations.md derives and checks other placements."""

    sizes = (*WIDTHS, "num_encoder_layers", "num_decoder_layers")

    alpha: float = 1.0  # 1, or 1/2 (Yang et al. 2023, Tensor Programs VI)
