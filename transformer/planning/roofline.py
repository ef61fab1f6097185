"""The least time of a program: compute, memory traffic and collectives at published rates.

This is the roofline model (Williams et al. 2009). A step takes at least as long as the slowest of
these parts. Collectives on different axes of a torus run in parallel. Those on the same axis share
its links. The times are lower bounds; none has been measured on hardware."""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from transformer.planning.chips import HOST, Topology
from transformer.planning.hlo import HloProgram, Instruction
from transformer.planning.work import Collective, KernelWork, collectives, flops, hbm_bytes


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind that a device takes part in."""

    count: float = 0.0
    inner: float = 0.0  # bytes sent within the slice (or host)
    outer: float = 0.0  # bytes sent beyond it


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The work of one device, and the least seconds of each part; None if the rate is unknown."""

    flops: float
    hbm_bytes: float
    traffic: dict[str, Traffic]
    seconds: dict[str, float] | None

    @property
    def step(self) -> float | None:
        """Seconds of a step whose parts all run at the same time: those of the slowest part."""
        return self.seconds and max(self.seconds.values())

    @property
    def bound(self) -> str:
        """The slowest part."""
        return max(self.seconds, key=self.seconds.get) if self.seconds else ""


def roofline(
    program: HloProgram, topology: Topology, devices: list,
    kernel: Callable[[Instruction], KernelWork] = lambda op: KernelWork(),
) -> Roofline:  # fmt: skip
    """Returns the roofline of a program on devices in the order of the mesh. `kernel` returns the
    work of a call that the HLO text does not contain."""
    chip, share = topology.chip, topology.chip.devices
    kernels = [(kernel(op), n) for op, _, n, _ in program.runs if op.opcode == "custom-call"]
    computed = flops(program) + sum(times * call.flops for call, times in kernels)
    moved = hbm_bytes(program) - sum(times * call.untouched for call, times in kernels)
    # Coordinates in the torus, and the slice; for a GPU, local index and host
    in_torus = lambda device: (*device.coords, getattr(device, "slice_index", None) or 0)
    in_host = lambda device: (device.id % HOST, device.id // HOST)
    coordinates_of = np.array(list(map(in_torus if topology.is_tpu else in_host, devices)))
    traffic, outer = collections.defaultdict(Traffic), 0.0
    links = collections.defaultdict(float)  # axis of the torus -> seconds in which it is in use
    for message in collectives(program):
        if message.between_slices:
            total = message.bytes * (topology.slices if message.kind == "all-gather" else 1)
            message, slices, link_counts = message._replace(bytes=total), topology.slices, {}
        else:
            coordinates = coordinates_of[message.groups]  # [groups, members, coordinates and slice]
            if coordinates.shape[1] < 2:
                continue
            crosses = (coordinates[..., -1] != coordinates[:, :1, -1]).any(axis=1)
            slices = len(np.unique(coordinates[crosses.argmax(), :, -1])) if crosses.any() else 1
            link_counts = _links(coordinates, topology)
        inner, beyond = sent(message, slices)
        known = traffic[message.kind]
        count, within = known.count + message.times, known.inner + inner
        traffic[message.kind] = Traffic(count, within, known.outer + beyond)
        outer += beyond
        for axis in link_counts if chip.link_rate else ():
            links[axis] += inner / (sum(link_counts.values()) * chip.link_rate)
    seconds = None
    if chip.flops:
        least = lambda flops: flops * share / chip.flops
        # The schedule of a kernel's instructions may take longer than its products at full rate.
        scheduled = lambda call: call.cycles / (chip.clock * chip.cores / share or np.inf)
        waits = [times * max(scheduled(x) - least(x.flops), 0.0) for x, times in kernels]
        seconds = {"compute": least(computed) + sum(waits)}
        if topology.is_tpu:  # the fusions of a GPU's compiler are unknown
            seconds["HBM"] = moved * share / chip.hbm_rate
        seconds |= {"network": max(links.values(), default=0.0), "slices": outer / chip.outer_rate}
    return Roofline(computed, moved, dict(traffic), seconds)


def sent(message: Collective, slices: int = 1) -> tuple[float, float]:
    """Returns the bytes that a device sends (and receives) within its slice and beyond it. Assumes
    the best known algorithms. On a ring of n devices, all-gather and reduce-scatter send (n-1)/n of
    the whole array, all-reduce twice that, all-to-all (n-1)/n of the device's array, and
    collective-permute all of it. The devices of a slice share the traffic beyond it, except that of
    all-to-all and collective-permute, which counts in full."""
    n = max(message.groups.shape[1] // slices, 1)
    inner, outer = 1 - 1 / n, (1 - 1 / slices) / n
    total = message.times * message.bytes
    if message.kind in ("all-gather", "reduce-scatter", "all-reduce"):
        total *= 2 if message.kind == "all-reduce" else 1
        return total * inner, total * outer
    if message.kind in ("all-to-all", "ragged-all-to-all"):
        return total * (n - 1) / (n * slices), total * (1 - 1 / slices)
    return (total, 0.0) if slices == 1 else (0.0, total)


def _links(coordinates: np.ndarray, topology: Topology) -> dict[int, int]:
    """Returns torus axis -> links over which a device sends to its group; for GPUs, {0: 1}."""
    if not topology.is_tpu:
        return {0: 1}
    # Axes of 16 chips wrap around (two dimensions), or all if all are multiples of 4 (three).
    shape = topology.shape
    wraps = lambda size: all(n % 4 == 0 for n in shape) if len(shape) == 3 else size % 16 == 0
    spans = {axis: len(np.unique(coordinates[0, :, axis])) for axis in range(len(shape))}
    in_ring = lambda axis: wraps(shape[axis]) and spans[axis] == shape[axis]
    return {axis: 1 + in_ring(axis) for axis, span in spans.items() if span > 1} or {0: 1}
