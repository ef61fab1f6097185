"""The parts of the residual formula, which every placement fills in.

    y = out_norm( a * x + s * g * l * res_norm( dropout( f( in_norm(x) ) ) ) )

An absent norm is the identity. A placement sets which norms are present, whether the stack ends in
a norm, how branches are initialized, and a recommended warm-up. A config may change each part.
model/residual.py applies the formula.
"""

import dataclasses

from transformer.errors import UserError
from transformer.registry import Registry

PLACEMENTS = Registry(
    "model.norm_placement", __package__, is_option=lambda field: field.name != "warmup_hint"
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """The parts of the residual formula, and settings that depend on them.

    Register a subclass with `@PLACEMENTS.register("name")`. It changes the defaults of the parts.
    """

    in_norm: bool = False  # normalize the input of the sublayer
    res_norm: bool = False  # normalize the output of the sublayer
    out_norm: bool = False  # normalize the sum
    # End the stack with a norm, which is needed if the residual stream is not normalized.
    final_norm: bool = False
    residual_scale: float = 1.0  # a; 0 means no residual connection
    branch_scale: float = 1.0  # s, which multiplies the branch after its norm and gates
    branch_gain: float = 1.0  # scales the initial W_V, W_O and both feed-forward matrices
    gate: bool = False  # g is a learned scalar per sublayer, initially 0; without a gate, g = 1
    # Initial value of l, a learned vector per sublayer (LayerScale; Touvron et al. 2021). 0: l = 1.
    layer_scale: float = 0.0
    warmup_hint: int = 0  # warm-up steps without which training is known to fail; 0: none

    def __post_init__(self):
        for part in ("branch_gain", "branch_scale"):
            value = getattr(self, part)
            if value is not None and value <= 0:
                raise UserError(f"model.norm_placement.{part}: {value} must be more than 0")
        if self.layer_scale < 0:
            raise UserError(f"model.norm_placement.layer_scale: {self.layer_scale} is less than 0")

    def in_stack(self, side: str, encoder_layers: int, decoder_layers: int) -> "Placement":
        """Returns the placement in one stack, with numbers for all parts that depend on depth."""
        return Placement(**dataclasses.asdict(self))
