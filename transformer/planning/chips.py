"""What a chip can do, by its maker's published numbers, and how many of them make a machine.

TPUs: cloud.google.com/tpu/docs, and Austin et al., "How to Scale Your Model" (2025). GPUs: NVIDIA's data sheets, dense bfloat16.
Seconds that follow from these are bounds: nothing runs faster.
"""

import dataclasses
import math
import re

from transformer.errors import UserError, nearest

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip. A rate of 0 is not known."""

    title: str
    flops: float  # bfloat16 multiplications and additions a second
    hbm: float  # bytes
    hbm_rate: float  # bytes a second
    link_rate: float  # bytes a second in one direction: of one link to a neighbour on a torus; of a GPU, of all its links within a host
    outer_rate: float  # bytes a second in one direction to another slice, or another host of GPUs; a chip's share
    axes: int = 0  # of a TPU's torus: each chip has a link to either side on each
    devices: int = 1  # that JAX sees of one chip
    cores: int = 1  # that the product's name counts: v5p-128 has 64 chips
    pod: tuple[int, int] = (0, 0)  # the largest slice: chips, and chips along an axis
    mode: str = (
        ""  # in which libtpu takes a chip's two cores for one device, where that is not its default
    )


_DCN = 6.25e9  # 200 Gbit/s of a host with four chips

CHIPS = {
    "v4": Chip(
        "TPU v4",
        275e12,
        32 * GIB,
        1.228e12,
        45e9,
        _DCN,
        axes=3,
        cores=2,
        mode="megacore",
        pod=(4096, 16),
    ),
    "v5e": Chip("TPU v5e", 197e12, 16 * GIB, 0.819e12, 45e9, _DCN, axes=2, pod=(256, 16)),
    "v5p": Chip("TPU v5p", 459e12, 95 * GIB, 2.765e12, 90e9, _DCN, axes=3, cores=2, pod=(8960, 28)),
    "v6e": Chip("TPU v6e", 918e12, 32 * GIB, 1.64e12, 90e9, _DCN, axes=2, pod=(256, 16)),
    "tpu7x": Chip(
        "TPU7x", 2307e12, 192 * GIB, 7.37e12, 90e9, _DCN, axes=3, devices=2, cores=2, pod=(9216, 36)
    ),
    "a100": Chip("A100 80 GB", 312e12, 80e9, 2.039e12, 300e9, 25e9),
    "h100": Chip("H100 SXM", 989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": Chip("H200 SXM", 989e12, 141e9, 4.8e12, 450e9, 50e9),
    "b200": Chip("B200 SXM", 2250e12, 180e9, 8.0e12, 900e9, 50e9),
    "cpu": Chip("CPU", 0, 0, 0, 0, 0),
}

HOST = 8
"""GPUs of one host, each joined to all others."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """So many chips of a kind, perhaps in several slices."""

    kind: str
    shape: tuple[int, ...]  # chips along each axis of a slice's torus; of GPUs, their number
    slices: int = 1

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def is_tpu(self) -> bool:
        return self.chip.axes > 0

    @property
    def chips(self) -> int:
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """As JAX counts them."""
        return self.chips * self.chip.devices

    def __str__(self) -> str:
        one = f"{self.kind}:{'x'.join(map(str, self.shape))}"
        return one if self.slices == 1 else f"{self.slices} slices of {one}"


def topology(text: str, slices: int = 1) -> Topology:
    """`v5p:4x4x8` by its shape, `v5p-256` by the product's name, `h100:64`, `cpu:8`. Raises UserError for what is none."""
    found = re.fullmatch(r"([a-z0-9]+?)(?:litepod)?([:-])(\d+(?:x\d+)*)", text.strip().lower())
    if not found:
        raise UserError(
            f"--topology: {text!r}; write v5p:4x4x8, v5p-256, h100:64 or cpu:8; there are {', '.join(CHIPS)}"
        )
    kind, mark, size = found.groups()
    kind = {"v5": "v5e"}.get(kind, kind)
    if kind not in CHIPS:
        raise UserError(f"--topology: no chip {kind!r}; {nearest(kind, CHIPS)}")
    chip, shape = CHIPS[kind], tuple(map(int, size.split("x")))
    if slices < 1 or (slices > 1 and not chip.axes):
        raise UserError(f"--slices: {slices}; " + ("of TPUs alone" if slices > 1 else "1 or more"))
    if not all(shape):
        raise UserError(f"--topology: {text!r} has no chips")
    if not chip.axes:
        if len(shape) > 1:
            raise UserError(
                f"--topology: {text!r}; of {chip.title}s tell the number, {kind}:{math.prod(shape)}"
            )
        return Topology(kind, shape)
    if mark == "-":
        if (
            len(shape) > 1
            or shape[0] % chip.cores
            or (count := shape[0] // chip.cores) & (count - 1)
        ):
            raise UserError(
                f"--topology: there is no {text!r}: the number behind the dash is a power of two{', twice its chips' if chip.cores > 1 else ''}; "
                f"or write its shape, {kind}:{'x'.join(['4'] * chip.axes)}"
            )
        shape = _usual(count, chip.axes)
    if len(shape) != chip.axes:
        raise UserError(
            f"--topology: {text!r}; a {chip.title} slice has {chip.axes} axes, like {kind}:{'x'.join(['4'] * chip.axes)}"
        )
    if math.prod(shape) > chip.pod[0] or max(shape) > chip.pod[1]:
        raise UserError(
            f"--topology: {text!r}: a slice of {chip.title} has {chip.pod[0]:,} chips at most, {chip.pod[1]} along an axis; take several, with --slices"
        )
    return Topology(kind, shape, slices)


def _usual(count: int, axes: int) -> tuple[int, ...]:
    """The shape a slice of so many chips (a power of two) comes in: as even as it can be, growing."""
    shape = [1] * axes
    while math.prod(shape) < count:
        at = len(shape) - 1 - shape[::-1].index(min(shape))
        shape[at] *= 2
    return tuple(sorted(shape, key=lambda n: (n == 1, n)))
