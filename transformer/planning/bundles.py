"""The cycles of a TPU kernel, counted in the instructions that the TPU compiler schedules.

libtpu writes each kernel's final instruction bundles and the units that each bundle occupies, if
`LIBTPU_INIT_ARGS` contains `dump_flags(folder)` before JAX loads it. A bundle takes one cycle.
Memory transfers are not counted. The figures are deterministic for one version of libtpu."""

import dataclasses
import re
from pathlib import Path

UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "FILL", "VSTORE", "SPILL", "SALU")
"""The units of a core, in the order of the compiler's output: matrix products, rows across lanes,
vector arithmetic, ..., loads and stores of spilled registers, scalar arithmetic."""

DELAY = 5  # bundles from a branch to its target, which are executed in either case


def dump_flags(folder: Path) -> str:
    """Returns the flags that make libtpu write its final schedules to a folder."""
    only = "--xla_jf_dump_llo_pass_label_regex=final.*"  # all passes take longer than to compile
    return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true {only}"


@dataclasses.dataclass
class Block:
    """A loop's body or a conditional part of a kernel, or the kernel itself."""

    start: int  # the address of its first bundle
    end: int
    inner: list["Block"] = dataclasses.field(default_factory=list)  # the blocks in it, in order

    @property
    def own(self) -> int:
        """The bundles outside of the inner blocks: cycles each time that the block is executed."""
        return self.end - self.start - sum(block.end - block.start for block in self.inner)


@dataclasses.dataclass
class KernelSchedule:
    """A kernel's blocks, and how many slots of each unit every bundle occupies."""

    kernel: Block
    slots: dict[str, int]  # unit -> slots per cycle
    used: list[tuple[int, ...]]  # by bundle and unit

    def busy(self, block: Block, unit: str) -> float:
        """Returns the cycles that a unit needs at least for a block, without its inner blocks."""
        inside = {a for inner in block.inner for a in range(inner.start, inner.end)}
        addresses = (a for a in range(block.start, block.end) if a not in inside)
        return sum(self.used[a][UNITS.index(unit)] for a in addresses) / self.slots[unit]


@dataclasses.dataclass(frozen=True)
class KernelCycles:
    """The schedule of one kernel of a training step; without `cycles`, it was not analyzed."""

    name: str
    operands: tuple  # bytes per element and shape of its floating-point operands, on one device
    results: int  # the number of its results
    heads: int  # heads times sequences that a call computes
    vmem: int  # bytes of on-chip memory that the kernel may use
    calls: float = 0.0  # in a step
    bundles: int = 0  # of the loop's body, a tile that the mask allows completely
    products: float = 0.0  # cycles that the matrix products of this tile need at least
    spills: int = 0  # slots of this tile's bundles in which registers are spilled or filled
    trips: int = 0  # tiles of one head and sequence
    cycles: int = 0  # of one call

    @property
    def least(self) -> float:
        """The cycles that the matrix products of a call need at least."""
        return self.heads * self.trips * self.products


def read(folder: Path, kernel: str) -> KernelSchedule:
    """Returns the schedule of the only compiled kernel with this name in the folder."""
    (bundles,) = folder.glob(f"*{kernel}*[0-9]-final_bundles.txt")
    (utilization,) = folder.glob(f"*{kernel}*-final_hlo-static-per-bundle-utilization.txt")
    lines = utilization.read_text().splitlines()
    capacity, *used = [tuple(map(int, x.split())) for x in lines if re.fullmatch(r"[\d ]+", x)]
    root = Block(0, len(used))
    for start, end in sorted(_blocks(bundles.read_text()), key=lambda block: (block[0], -block[1])):
        parent = root
        while around := [x for x in parent.inner if x.start <= start and end <= x.end]:
            parent = around[0]
        parent.inner.append(Block(start, end))
    return KernelSchedule(root, dict(zip(UNITS, capacity, strict=True)), used)


def head_cycles(
    schedule: KernelSchedule, blocks: int, chunks: int, *counts: int
) -> tuple[list[Block], int, int]:
    """Returns the blocks of the kinds of tiles, the cycles of a head's sequence, and of a head.

    A kernel is a loop over `blocks`. In it, one conditional part has the loop over tiles, whose
    conditional parts are a tile with a mask and one without, `counts` of each, and first, if tables
    are constant from a distance on, a tile with tables. The other parts are executed once: those
    with a loop, which build or sum a bias table in `chunks` of 128 of its rows, for a head; those
    that clear or write sums, for each of its sequences. Raises ValueError for other kernels."""
    (grid,) = schedule.kernel.inner
    (body,) = grid.inner
    products = lambda block: bool(schedule.busy(block, "MXU") or any(map(products, block.inner)))
    (with_tiles,) = filter(products, body.inner)
    (tile_loop,) = with_tiles.inner
    once = [part for part in body.inner if not products(part)]
    loops = [loop for part in once for loop in part.inner]
    if any(x.inner for x in (*tile_loop.inner, *loops)) or (loops and not chunks):
        raise ValueError("there are other loops than those over tiles and chunks")
    of_head = sum(x.own + chunks * sum(y.own for y in x.inner) for x in once if x.inner)
    total = blocks * (grid.own + body.own) + sum(part.own for part in once if not part.inner)
    total += sum(n * (tile_loop.own + x.own) for n, x in zip(counts, tile_loop.inner, strict=True))
    return tile_loop.inner, total, of_head


def _blocks(text: str) -> list[tuple[int, int]]:
    """Returns (start, end) of all blocks, from branches and their targets."""
    address, starts, branches = 0, {}, []
    for line in text.splitlines():
        if match := re.match(r"\s*(0x[0-9a-f]+|0)\s.*?:", line):
            address = int(match.group(1), 16)
        for region in re.findall(r"Start(?:/End empty)? region (\d+)", line):
            starts[region] = address
        branches += [(address, target) for target in re.findall(r"sbr\.rel .*?\$region(\d+)", line)]
    known = [(branch, branch + DELAY, starts[x]) for branch, x in branches if x in starts]
    conditional = [(after, at) for _, after, at in known if at > after]
    return conditional + [(at, after) for branch, after, at in known if at < branch]  # and loops
