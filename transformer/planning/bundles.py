"""The cycles of a TPU kernel, counted in the instructions that the TPU compiler schedules.

libtpu writes each kernel's final instruction bundles and the units that each bundle occupies, if
`LIBTPU_INIT_ARGS` contains `dump_flags(folder)` before JAX loads it. A bundle takes one cycle.
Memory transfers are not counted. The figures are deterministic for one version of libtpu.
"""

import dataclasses
import re
from pathlib import Path

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
"""The units of a core, in the order of the compiler's output: matrix products, rows across lanes,
vector arithmetic, ..., loads and stores of spilled registers, scalar arithmetic."""

DELAY = 5
"""Bundles from a branch to its target, which are executed in either case."""


def dump_flags(folder: Path) -> str:
    """Returns the flags that make libtpu write its schedules to a folder."""
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


@dataclasses.dataclass
class Block:
    """A loop's body or a conditional part of a kernel, or the kernel itself.

    start, end: the addresses of its bundles.
    inner: the loops and conditional parts in it, in order.
    """

    start: int
    end: int
    is_loop: bool
    inner: list["Block"] = dataclasses.field(default_factory=list)

    @property
    def own(self) -> int:
        """The bundles outside of the inner blocks: cycles each time that the block is executed."""
        return self.end - self.start - sum(block.end - block.start for block in self.inner)

    def find(self, path: tuple[int, ...]) -> "Block":
        """Returns the inner block at these indices."""
        return self.inner[path[0]].find(path[1:]) if path else self


@dataclasses.dataclass
class KernelSchedule:
    """A kernel's blocks, and how many slots of each unit every bundle occupies."""

    kernel: Block
    slots: dict[str, int]  # unit -> slots per cycle
    used: list[tuple[int, ...]]  # by bundle and unit

    def busy(self, block: Block, unit: str) -> float:
        """Returns the cycles that a unit needs at least for a block, without its inner blocks."""
        inside = {a for inner in block.inner for a in range(inner.start, inner.end)}
        column = UNITS.index(unit)
        addresses = (a for a in range(block.start, block.end) if a not in inside)
        return sum(self.used[a][column] for a in addresses) / self.slots[unit]


def read(folder: Path, kernel: str) -> KernelSchedule:
    """Returns the schedule of the only compiled kernel with this name in the folder."""
    (bundles,) = folder.glob(f"*{kernel}*[0-9]-final_bundles.txt")
    (utilization,) = folder.glob(f"*{kernel}*-final_hlo-static-per-bundle-utilization.txt")
    lines = utilization.read_text().splitlines()
    numbers = [tuple(map(int, x.split())) for x in lines if re.fullmatch(r"[\d ]+", x)]
    capacity, *used = numbers
    root = Block(0, len(used), False)
    for start, end, is_loop in sorted(_blocks(bundles.read_text()), key=lambda b: (b[0], -b[1])):
        _insert(root, Block(start, end, is_loop))
    return KernelSchedule(root, dict(zip(UNITS, capacity, strict=True)), used)


def _blocks(text: str) -> list[tuple[int, int, bool]]:
    """Returns (start, end, whether it is a loop) of all blocks, from branches and their targets."""
    address, starts, branches = 0, {}, []
    for line in text.splitlines():
        if match := re.match(r"\s*(0x[0-9a-f]+|0)\s.*?:", line):
            address = int(match.group(1), 16)
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", line):
            starts[region] = address
        branches += [(address, target) for target in re.findall(r"sbr\.rel .*?\$region(\d+)", line)]
    blocks = []
    for branch, target in branches:
        after, at = branch + DELAY, starts.get(target)
        if at is not None and at > after:
            blocks.append((after, at, False))
        elif at is not None and at < branch:
            blocks.append((at, after, True))
    return blocks


def _insert(parent: Block, block: Block) -> None:
    """Adds a block to the innermost block that contains it."""
    for inner in parent.inner:
        if inner.start <= block.start and block.end <= inner.end:
            return _insert(inner, block)
    parent.inner.append(block)
