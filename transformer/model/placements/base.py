"""The parts of the residual formula, which every placement fills in.

    y = out_norm( a * x + gate * res_norm( dropout( f( in_norm(x) ) ) ) )

An absent norm is the identity. A placement says which norms there are, whether the stack ends in
one, how branches are initialized and how long to warm up. A config may change each part.
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
    """The parts of the formula, and what goes with them.

    Register a subclass with `@PLACEMENTS.register("name")`. It gives the parts other defaults.
    """

    in_norm: bool = False  # normalize the input of the sublayer
    res_norm: bool = False  # normalize the output of the sublayer
    out_norm: bool = False  # normalize the sum
    final_norm: bool = False  # end the stack in a norm; needed where the stream is not normalized
    residual_scale: float = 1.0  # a; 0 means no residual connection
    branch_gain: float = 1.0  # scales the initial W_V, W_O and both feed-forward matrices
    gate: bool = False  # a learned scalar for each sublayer, initially 0
    warmup_hint: int = 0  # warm-up steps without which training is known to fail; 0: none

    def __post_init__(self):
        if self.branch_gain is not None and self.branch_gain <= 0:
            raise UserError(
                f"model.norm_placement.branch_gain: {self.branch_gain} must be more than 0"
            )

    def in_stack(self, side: str, encoder_layers: int, decoder_layers: int) -> "Placement":
        """The parts in one stack of a model. Parts that depend on depth are numbers there."""
        return Placement(**dataclasses.asdict(self))
