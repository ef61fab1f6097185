"""The config of the mesh: devices along each axis."""

import dataclasses

from transformer.checks import Effect, one_of, strict
from transformer.errors import UserError

_EFFECTS = (
    Effect(
        ("slices",),
        "more than one device along that axis of the mesh",
        lambda c: c.sizes[c.slices] != 1,
    ),
)


@strict("mesh", _EFFECTS)
@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; -1 takes the rest (one axis at most)."""

    data: int = -1  # rows of the batch; parameters are on every device
    stage: int = 1  # layers (a pipeline); outside of them, rows
    fsdp: int = 1  # rows of the batch; parameters, gradients and optimizer state are spread too
    expert: int = 1  # experts; outside of them, rows
    context: int = 1  # the tokens of a row (ring attention)
    tensor: int = 1  # heads, d_ff and vocabulary (Megatron); between sublayers, the tokens of a row
    slices: str = "data"  # of several slices of TPUs, the axis that goes from one to the next: data | stage | fsdp

    def __post_init__(self):
        one_of("mesh.slices", self.slices, ("data", "stage", "fsdp"))
        sizes = self.sizes
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise UserError(f"mesh.{axis}: {size}; a positive number, or -1 for the rest")
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh: {sizes} has more than one -1; only one axis can take the rest")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it, in the order of the mesh: neighbours on the last talk most."""
        return {
            axis: getattr(self, axis)
            for axis in ("data", "stage", "fsdp", "expert", "context", "tensor")
        }
