"""The config of the mesh: the number of devices along each axis."""

from typing import Literal

from transformer.checks import Effect, strict
from transformer.errors import UserError

_SEVERAL = "more than one device along that axis of the mesh"
_EFFECTS = (Effect(("slices",), _SEVERAL, lambda c: c.sizes[c.slices] != 1),)


@strict("mesh", _EFFECTS)
class MeshConfig:
    """The number of devices along each axis. One axis may be -1 and takes the remaining devices."""

    data: int = -1  # shards the batch; parameters are replicated
    stage: int = 1  # shards layers (pipeline parallelism); outside the layers, the batch
    fsdp: int = 1  # shards the batch, parameters, gradients and optimizer state
    expert: int = 1  # shards experts; outside the experts, the batch
    context: int = 1  # shards sequences (ring attention)
    tensor: int = 1  # shards heads, d_ff and vocabulary (Megatron); between sublayers, sequences
    slices: Literal["data", "stage", "fsdp"] = "data"  # the axis that spans several TPU slices

    def __post_init__(self):
        for axis, size in (sizes := self.sizes).items():
            if size < 1 and size != -1:
                way_out = "set 1 or more, or -1 for the remaining devices"
                raise UserError(f"mesh.{axis}: {size} is not a number of devices; {way_out}")
        if list(sizes.values()).count(-1) > 1:
            raise UserError(f"mesh: {sizes} has more than one -1; set at most one axis to -1")

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> devices along it, in mesh order. Neighbors along the last communicate most."""
        axes = ("data", "stage", "fsdp", "expert", "context", "tensor")
        return {axis: getattr(self, axis) for axis in axes}
