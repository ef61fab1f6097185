"""How long a program takes at least: its compute, its memory traffic and its messages at the chips' published rates (Williams et al. 2009).

A step cannot be faster than the slowest of them alone; how much slower it is, only a machine tells.
"""

import collections
import dataclasses
from collections.abc import Callable

import numpy as np

from transformer.planning.chips import HOST, WRAPPED, Topology
from transformer.planning.hlo import Instruction, Message, Program


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
    program: Program, topology: Topology, devices: list, kernel_flops: Callable[[Instruction], float] = lambda one: 0.0
) -> Roofline:
    """`devices` in the order of the mesh. `kernel_flops`: of a kernel the compiler cannot look into."""
    chip, share = topology.chip, topology.chip.devices
    flops = program.flops + sum(
        times * kernel_flops(one) for one, _, times, _ in program.runs if one.opcode == "custom-call"
    )
    where = np.array([_place(device, topology) for device in devices])
    traffic, inner, outer = collections.defaultdict(Traffic), 0.0, 0.0
    for message in program.messages:
        at = where[message.groups]  # [groups, members, coordinates and slice]
        if at.shape[1] < 2:
            continue
        crosses = bool((at[..., -1] != at[:, :1, -1]).any())
        size, was = sent(message), traffic[message.kind]
        traffic[message.kind] = Traffic(
            was.count + message.times, was.inner + size * (not crosses), was.outer + size * crosses
        )
        if crosses:
            outer += size
        elif chip.link_rate:
            inner += size / _rate(at, topology)
    seconds = None
    if chip.flops:
        seconds = {
            "compute": flops * share / chip.flops, "HBM": program.hbm_bytes * share / chip.hbm_rate,
            "network": inner * share, "slices": outer * share / chip.outer_rate,
        }  # fmt: skip
    return Roofline(flops, program.hbm_bytes, dict(traffic), seconds)


def sent(message: Message) -> float:
    """Bytes that a device sends (and gets) with the best algorithm on a ring of n: gathering and scattering (n - 1) / n of the whole,
    adding up twice that, exchanging (n - 1) / n of its own, handing on all of it."""
    share = 1 - 1 / message.groups.shape[1]
    of_whole = {
        "all-gather": share,
        "reduce-scatter": share,
        "all-reduce": 2 * share,
        "all-to-all": share,
        "ragged-all-to-all": share,
    }
    return message.times * message.bytes * of_whole.get(message.kind, 1.0)


def _place(device, topology: Topology) -> tuple[int, ...]:
    """Coordinates in the torus, and the slice; of a GPU its host alone."""
    if topology.is_tpu:
        return (*device.coords, getattr(device, "slice_index", None) or 0)
    return (device.id % HOST, device.id // HOST)


def _rate(at: np.ndarray, topology: Topology) -> float:
    """Bytes a second that a device sends to its group: over all links of all axes of the torus that the group spans."""
    if not topology.is_tpu:
        return topology.chip.link_rate
    spans = [int(np.unique(at[0, :, axis]).size) for axis in range(at.shape[-1] - 1)]
    whole = WRAPPED[topology.chip.axes]
    ways = sum(
        2 if size == length and length % whole == 0 else 1
        for size, length in zip(spans, _lengths(topology, at), strict=True)
        if size > 1
    )
    return max(ways, 1) * topology.chip.link_rate


def _lengths(topology: Topology, at: np.ndarray) -> tuple[int, ...]:
    """Chips along each coordinate."""
    return (topology.shape + (1,) * at.shape[-1])[: at.shape[-1] - 1]
