"""The published numbers of chips, and the topologies that are built from them.

TPUs: cloud.google.com/tpu/docs, and Austin et al., "How to Scale Your Model" (2025). GPUs: NVIDIA's
data sheets, dense bfloat16. Times computed from these rates are lower bounds."""

import math
import re
from typing import NamedTuple

from transformer.errors import UserError

GIB = 2**30
HOST = 8  # GPUs per host; each is connected to all others
_DCN = 6.25e9  # 200 Gbit/s per host of four chips


class Chip(NamedTuple):
    """The published numbers of one chip. A rate of 0 is unknown."""

    title: str
    flops: float  # bfloat16 multiplications and additions per second
    hbm: float  # bytes
    hbm_rate: float  # bytes per second
    link_rate: float  # bytes per second and direction: of a torus's link, or of all of a GPU's
    outer_rate: float  # bytes per second and direction to another slice or GPU host: a chip's share
    axes: int = 0  # axes of a TPU's torus; a chip has a link in both directions along each
    devices: int = 1  # JAX devices per chip
    cores: int = 1  # cores per chip, which the product's name counts: v5p-128 has 64 chips
    pod: tuple[int, int] = (0, 0)  # the largest slice: chips, and chips along an axis
    mxu: int = 0  # side of each of a core's four matrix units; 0: unknown
    mode: str = ""  # libtpu's mode in which a chip's two cores are one device, if not the default

    @property
    def clock(self) -> float:
        """Cycles per second: a matrix unit does mxu^2 multiplications and additions in each."""
        return self.flops / (self.cores * 4 * 2 * self.mxu**2) if self.mxu else 0.0


CHIPS = {
    "v4": Chip("TPU v4", 275e12, 32 * GIB, 1.228e12, 45e9, _DCN, axes=3, cores=2, pod=(4096, 16),
               mxu=128, mode="megacore"),
    "v5e": Chip("TPU v5e", 197e12, 16 * GIB, 0.819e12, 45e9, _DCN, axes=2, pod=(256, 16), mxu=128),
    "v5p": Chip("TPU v5p", 459e12, 95 * GIB, 2.765e12, 90e9, _DCN, axes=3, cores=2, pod=(8960, 28),
                mxu=128),
    "v6e": Chip("TPU v6e", 918e12, 32 * GIB, 1.64e12, 90e9, _DCN, axes=2, pod=(256, 16), mxu=256),
    "tpu7x": Chip("TPU7x", 2307e12, 192 * GIB, 7.37e12, 90e9, _DCN, axes=3, devices=2, cores=2,
                  pod=(9216, 36)),
    "a100": Chip("A100 80 GB", 312e12, 80e9, 2.039e12, 300e9, 25e9),
    "h100": Chip("H100 SXM", 989e12, 80e9, 3.35e12, 450e9, 50e9),
    "h200": Chip("H200 SXM", 989e12, 141e9, 4.8e12, 450e9, 50e9),
    "b200": Chip("B200 SXM", 2250e12, 180e9, 8.0e12, 900e9, 50e9),
    "cpu": Chip("CPU", 0, 0, 0, 0, 0),
}  # fmt: skip


class Topology(NamedTuple):
    """A number of chips of one kind, in one or several slices."""

    kind: str
    shape: tuple[int, ...]  # chips along each axis of a slice's torus; for GPUs, their number
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
        """The number of JAX devices."""
        return self.chips * self.chip.devices

    def __str__(self) -> str:
        slice_name = f"{self.kind}:{'x'.join(map(str, self.shape))}"
        return slice_name if self.slices == 1 else f"{self.slices} slices of {slice_name}"


def topology(text: str, slices: int = 1) -> Topology:
    """Parses `v5p:4x4x8` (shape), `v5p-256` (name), `h100:64` or `cpu:8`. Raises UserError."""
    wrong = lambda problem: UserError(f"--topology: {text!r} {problem}")
    match = re.fullmatch(r"([a-z0-9]+?)(?:litepod)?([:-])(\d+(?:x\d+)*)", text.strip().lower())
    if not match:
        way_out = f"write v5p:4x4x8, v5p-256, h100:64 or cpu:8; the chips are {', '.join(CHIPS)}"
        raise wrong(f"is not a machine; {way_out}")
    kind, separator, size = match.groups()
    kind = {"v5": "v5e"}.get(kind, kind)
    if kind not in CHIPS:
        raise UserError(f"--topology: no chip {kind!r}; choose from: {', '.join(CHIPS)}")
    chip, shape = CHIPS[kind], tuple(map(int, size.split("x")))
    if slices < 1:
        raise UserError(f"--slices: {slices} is too small; set 1 or more")
    if slices > 1 and not chip.axes:
        raise UserError(f"--slices: {slices} is for TPUs only; leave it out")
    if not all(shape):
        raise wrong("has no chips; set every size to 1 or more")
    if not chip.axes:
        if len(shape) > 1:
            way_out = f"write their number, {kind}:{math.prod(shape)}"
            raise wrong(f"has a shape, but {chip.title}s have none; {way_out}")
        return Topology(kind, shape)
    example, of_a_slice = f"{kind}:{'x'.join(['4'] * chip.axes)}", f"a {chip.title} slice has"
    if separator == "-":
        count = shape[0] // chip.cores
        if len(shape) > 1 or shape[0] % chip.cores or count & (count - 1):
            power = "a power of two" + ", twice the number of chips" * (chip.cores > 1)
            way_out = f"the number after the dash is {power}; or write the shape, {example}"
            raise wrong(f"does not exist; {way_out}")
        quotient, remainder = divmod(count.bit_length() - 1, chip.axes)
        usual = [2 ** (quotient + (axis < remainder)) for axis in range(chip.axes)]
        shape = tuple(sorted(usual, key=lambda n: (n == 1, n)))  # even, ascending, ones last
    if len(shape) != chip.axes:
        raise wrong(f"has the wrong number of axes; {of_a_slice} {chip.axes} axes, like {example}")
    if math.prod(shape) > chip.pod[0] or max(shape) > chip.pod[1]:
        limit = f"{of_a_slice} {chip.pod[0]:,} chips at most, {chip.pod[1]} along an axis"
        raise wrong(f"is too large; {limit}; use several slices with --slices")
    return Topology(kind, shape, slices)
