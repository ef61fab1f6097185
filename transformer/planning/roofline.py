"""How long a program takes at least: its compute, its memory traffic and its messages at the chips' published rates (Williams et al. 2009).

Messages on different axes of a torus go side by side; those on one share its links.

A step cannot be faster than the slowest of them alone; how much slower it is, only a machine tells.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from transformer.planning.chips import HOST, Topology
from transformer.planning.hlo import Instruction, Program
from transformer.planning.kernels import Kernel
from transformer.planning.messages import Message, messages
from transformer.planning.work import flops, hbm_bytes


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Messages of one kind: how many a device sends, and how many bytes within its slice (or host) and beyond it."""

    count: float = 0.0
    inner: float = 0.0
    outer: float = 0.0


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Of one device: what it does, and the seconds that each part takes at least (None: the chip's rate is not known)."""

    flops: float
    hbm_bytes: float
    traffic: dict[str, Traffic]
    seconds: dict[str, float] | None

    @property
    def step(self) -> float | None:
        """Everything at the same time: the longest."""
        return self.seconds and max(self.seconds.values())

    @property
    def bound(self) -> str:
        """What takes the longest."""
        return max(self.seconds, key=self.seconds.get) if self.seconds else ""


def roofline(
    program: Program,
    topology: Topology,
    devices: list,
    kernel: Callable[[Instruction], Kernel] = lambda one: Kernel(),
) -> Roofline:
    """`devices` in the order of the mesh. `kernel`: what a call does that the compiler cannot look into."""
    chip, share = topology.chip, topology.chip.devices
    kernels = [
        (kernel(one), times) for one, _, times, _ in program.runs if one.opcode == "custom-call"
    ]
    computed = flops(program) + sum(times * one.flops for one, times in kernels)
    moved = hbm_bytes(program) - sum(times * one.untouched for one, times in kernels)
    where = np.array([_place(device, topology) for device in devices])
    traffic, outer = collections.defaultdict(Traffic), 0.0
    links = collections.defaultdict(
        float
    )  # seconds that those of each axis of the torus are in use
    for message in messages(program):
        if message.between_slices:
            whole = message.bytes * (topology.slices if message.kind == "all-gather" else 1)
            message = dataclasses.replace(
                message, bytes=whole, groups=np.zeros((1, topology.slices), int)
            )
            _, beyond = sent(message, topology.slices)
            was = traffic[message.kind]
            traffic[message.kind] = Traffic(
                was.count + message.times, was.inner, was.outer + beyond
            )
            outer += beyond
            continue
        at = where[message.groups]  # [groups, members, coordinates and slice]
        if at.shape[1] < 2:
            continue
        crosses = (at[..., -1] != at[:, :1, -1]).any(axis=1)
        slices = len(np.unique(at[crosses.argmax(), :, -1])) if crosses.any() else 1
        here, beyond = sent(message, slices)
        was = traffic[message.kind]
        traffic[message.kind] = Traffic(
            was.count + message.times, was.inner + here, was.outer + beyond
        )
        outer += beyond
        ways = _ways(at, topology)
        for axis in ways if chip.link_rate else ():
            links[axis] += here / (sum(ways.values()) * chip.link_rate)
    seconds = None
    if chip.flops:
        seconds = {"compute": computed * share / chip.flops}
        if topology.is_tpu:  # what a GPU's compiler fuses is not known here
            seconds["HBM"] = moved * share / chip.hbm_rate
        seconds |= {"network": max(links.values(), default=0.0), "slices": outer / chip.outer_rate}
    return Roofline(computed, moved, dict(traffic), seconds)


def sent(message: Message, slices: int = 1) -> tuple[float, float]:
    """Bytes that a device sends (and gets) within its slice and beyond it, the best way that is known. Of n on a ring: gathering and
    scattering (n - 1) / n of the whole, adding up twice that, exchanging (n - 1) / n of its own, handing on all of it. Over `slices`,
    devices of one slice share what goes beyond it; what is exchanged or handed on is all counted there."""
    n = max(message.groups.shape[1] // slices, 1)
    inner, outer = 1 - 1 / n, (1 - 1 / slices) / n
    total = message.times * message.bytes
    if message.kind in ("all-gather", "reduce-scatter"):
        return total * inner, total * outer
    if message.kind == "all-reduce":
        return 2 * total * inner, 2 * total * outer
    if message.kind in ("all-to-all", "ragged-all-to-all"):
        return total * (n - 1) / (n * slices), total * (1 - 1 / slices)
    return (total, 0.0) if slices == 1 else (0.0, total)


def _place(device, topology: Topology) -> tuple[int, ...]:
    """Coordinates in the torus, and the slice; of a GPU its host alone."""
    if topology.is_tpu:
        return (*device.coords, getattr(device, "slice_index", None) or 0)
    return (device.id % HOST, device.id // HOST)


def _ways(at: np.ndarray, topology: Topology) -> dict[int, int]:
    """Axis of the torus -> how many links of it a device sends over to its group. (Of GPUs one of all links of a host.)"""
    if not topology.is_tpu:
        return {0: 1}
    # Ends are joined along axes of 16 chips (two dimensions), or where all are multiples of 4 (three).
    shape = topology.shape
    wrapped = (
        [size % 16 == 0 for size in shape]
        if len(shape) == 2
        else [all(size % 4 == 0 for size in shape)] * 3
    )
    group = at[0, :, :-1]
    spans = {axis: len(np.unique(group[:, axis])) for axis in range(len(shape))}
    ways = {
        axis: 2 if wrapped[axis] and span == shape[axis] else 1
        for axis, span in spans.items()
        if span > 1
    }
    return ways or {0: 1}
