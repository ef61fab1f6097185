"""DeepNorm: a post-norm whose residual scale and initialization follow the depth of the model."""

import dataclasses

from transformer.model.placements.base import PLACEMENTS, Placement


@PLACEMENTS.register("deepnorm")
class DeepNorm(Placement):
    """norm(alpha x + f(x)), with initial branch weights scaled by beta (Wang et al. 2022, DeepNet).

    Table 1 of the paper gives alpha (`residual_scale`) and beta (`branch_gain`) for N encoder and M
    decoder layers, or for a single stack of L layers."""

    out_norm: bool = True
    residual_scale: float | None = None  # None: alpha
    branch_gain: float | None = None  # None: beta

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
