"""The work of a compiled program on one device: FLOPs, HBM traffic, collectives and kernels.

HLO text does not show the work of TPU kernels. It follows from their names and operand shapes."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from transformer.model.config import ModelConfig
from transformer.planning.bundles import KernelCycles
from transformer.planning.hlo import Computation, HloProgram, Instruction
from transformer.planning.model_flops import mask_of, tile_counts

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute",
)  # fmt: skip

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "iota", "while", "conditional", "call", "async-start", "async-update",
    "async-done", "opt-barrier", "domain", "add-dependency",
}  # fmt: skip
"""Opcodes that move no data themselves."""


def flops(program: HloProgram) -> float:
    """Returns the multiplications and additions of all matrix products."""
    return sum(times * _flops(op, computation) for op, computation, times, _ in program.runs)


def hbm_bytes(program: HloProgram) -> float:
    """Returns the bytes that all instructions outside fusions read from and write to HBM."""
    runs = [run for *run, fused in program.runs if not fused]
    return sum(times * _traffic(op, computation, program) for op, computation, times in runs)


def _traffic(op: Instruction, computation: Computation, program: HloProgram) -> float:
    if op.opcode in _FREE or op.opcode.endswith("-done"):
        return 0.0
    operands = [computation[name] for name in op.operands if name in computation]
    if op.opcode.endswith("-start"):  # the result holds both the source and the destination
        moved = op.arrays[1] if len(op.arrays) > 1 else op.arrays[0]
        return moved.bytes * ((not moved.on_chip) + bool(operands and operands[0].hbm_bytes))
    if op.opcode in ("dynamic-slice", "gather", "slice"):
        read = sum(array.bytes for array in op.arrays) if operands[0].hbm_bytes else 0.0
        return op.hbm_bytes + read
    if op.opcode in ("dynamic-update-slice", "scatter"):
        part = operands[1] if op.opcode == "dynamic-update-slice" else operands[-1]
        return 2 * sum(array.bytes for array in part.arrays)
    if op.opcode != "fusion" or not (inner := program.computations.get(op.called("calls"))):
        return op.hbm_bytes + sum(operand.hbm_bytes for operand in operands)
    return _fusion_traffic(op, operands, inner)


def _fusion_traffic(op: Instruction, operands: list[Instruction], inner: Computation) -> float:
    """Returns the bytes that a fusion reads and writes. An operand that is only sliced or gathered
    from counts with the parts read, a result that only updates an operand with the part updated.
    The TPU compiler spreads a collective over several fusions; its buffers count where it ends."""
    total = updated = 0.0
    root = list(inner.values())[-1]
    results = root.operands if root.opcode == "tuple" else ()
    for array, name in zip(op.arrays, results, strict=False):
        if not array.on_chip and inner[name].opcode in ("parameter", *COLLECTIVES):
            updated += array.bytes

    def find_uses(name: str) -> Iterator[tuple[Instruction, bool]]:
        """Yields (user, whether it slices or updates the array), following bitcasts."""
        for user in (x for x in inner.values() if name in x.operands):
            itself = [(user, user.operands[0] == name)]
            yield from find_uses(user.name) if user.opcode == "bitcast" else itself

    for parameter in (p for p in inner.values() if p.opcode == "parameter"):
        number = int(parameter.literal)
        if number >= len(operands) or not operands[number].hbm_bytes:
            continue
        operand, uses = operands[number], list(find_uses(parameter.name))
        if {use.opcode for use, _ in uses} <= {"tuple", *COLLECTIVES}:
            continue
        opcodes = {use.opcode if first else "" for use, first in uses}
        if opcodes and opcodes <= {"dynamic-slice", "gather", "slice"}:
            total += sum(array.bytes for use, _ in uses for array in use.arrays)
        elif opcodes == {"dynamic-update-slice"}:
            written = [inner[use.operands[1]] for use, _ in uses if use.operands[1] in inner]
            total += sum(array.bytes for part in written for array in part.arrays)
            updated += operand.hbm_bytes
        else:
            total += operand.hbm_bytes
    return total + max(op.hbm_bytes - updated, 0.0)


def _flops(op: Instruction, computation: Computation) -> float:
    if op.opcode not in ("dot", "convolution") or len(op.operands) < 2:
        return 0.0
    left, right = (computation[name].arrays[0].dims for name in op.operands[:2])
    out = op.arrays[0].dims
    if op.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes).group(1)
        return 2.0 * math.prod(out) * math.prod(left[int(n)] for n in contracted.split(",") if n)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes).groups()
    batches = int((re.search(r"batch_group_count=(\d+)", op.attributes) or [0, 1])[1])
    matrix = right[labels[1].index("o")] * right[labels[1].index("i")]
    total = 2.0 * left[labels[0].index("b")] / batches * matrix
    window = re.search(r"window=\{([^}]*)\}", op.attributes)
    options = dict(re.findall(r"(\w+)=([\w\-x]+)", window.group(1))) if window else {}

    def option(name: str, axis: int, default: int = 1) -> int:
        """Returns a number of the window along an axis; of a padding low_high, the low one."""
        return int(options[name].split("x")[axis].split("_")[0]) if name in options else default

    for axis in range(len(labels[0]) - 2):
        spread_in, spread_kernel = option("lhs_dilate", axis), option("rhs_dilate", axis)
        length, out_length = left[labels[0].index(str(axis))], out[labels[2].index(str(axis))]
        starts = np.arange(out_length)[:, None] * option("stride", axis)
        source = starts + np.arange(option("size", axis)) * spread_kernel - option("pad", axis, 0)
        inside = (source >= 0) & (source <= (length - 1) * spread_in)
        total *= np.sum(inside & (source % spread_in == 0))
    return float(total)


class Collective(NamedTuple):
    """A collective: its kind and size, the groups that communicate, and how often it runs. `bytes`
    is the size of a device's operand, or of its result for an all-gather."""

    kind: str
    bytes: float
    groups: np.ndarray  # [groups, devices per group]; for collective-permute [pairs, 2]
    times: float
    between_slices: bool = False  # with the counterparts in all slices; then no `groups`


def collectives(program: HloProgram) -> list[Collective]:
    """Returns all collectives of a program."""
    found = []
    for op, computation, times, fused in program.runs:
        transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', op.attributes)
        if op.opcode == "send" and transfer:
            size = sum(array.bytes for array in computation[op.operands[0]].arrays)
            kind = transfer.group(1).lower().replace("_", "-")
            found.append(Collective(kind, size, np.zeros((0, 0), int), times, True))
        kind, scatters = op.opcode.removesuffix("-start"), fused and _scatters(op, computation)
        # An asynchronous collective appears in each fusion that it overlaps. Only its start counts.
        if kind not in COLLECTIVES or (fused and not scatters and not _starts(op, computation)):
            continue
        operands = [computation[name] for name in op.operands if name in computation]
        size = sum(array.bytes for operand in operands for array in operand.arrays)
        if scatters:
            kind = "reduce-scatter"
        elif kind == "all-reduce" and operands and all(_writes_part(x, program) for x in operands):
            kind = "all-gather"  # written as a sum of zero-padded parts, on a large torus
        elif kind == "all-gather":
            size *= _groups(op).shape[1]
        found.append(Collective(kind, size, _groups(op), times))
    return found


def _writes_part(op: Instruction, program: HloProgram) -> bool:
    inner = program.computations.get(op.called("calls") or "") if op.opcode == "fusion" else None
    root = next((inner_op for inner_op in inner.values() if inner_op.root), op) if inner else op
    return root.opcode in ("dynamic-update-slice", "pad")


def _starts(op: Instruction, computation: Computation) -> bool:
    start = 'custom_call_target="AsyncCollectiveStart"'
    return any(op.name in x.operands and start in x.attributes for x in computation.values())


def _scatters(op: Instruction, computation: Computation) -> bool:
    """Returns whether a fused all-reduce keeps a part of the sum, as a TPU's reduce-scatter."""
    asynchronous = any("AsyncCollective" in other.attributes for other in computation.values())
    slices = [x.operands[0] for x in computation.values() if x.opcode == "dynamic-slice"]
    return op.opcode == "all-reduce" and op.name in slices and not asynchronous


def _groups(op: Instruction) -> np.ndarray:
    text, numbers = op.attributes, lambda s: [int(n) for n in s.split(",")]
    if match := re.search(r"(?:source_target_pairs|replica_groups)=\{((?:\{[\d,]+\},?)+)\}", text):
        return np.array([numbers(group) for group in re.findall(r"\{([\d,]+)\}", match.group(1))])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match.group(1))}
        axis_names = re.findall(r"'(\w+)'", match.group(2))
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        axes = [list(sizes).index(name) for name in axis_names]
        group_size = math.prod(sizes[name] for name in axis_names)
        return np.moveaxis(ids, axes, range(-len(axes), 0)).reshape(-1, group_size)
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims = numbers(match.group(1)), numbers(match.group(2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(numbers(match.group(3))) if match.group(3) else ids).reshape(shape)
    return np.zeros((1, 1), int)


class KernelWork(NamedTuple):
    """The work of one kernel call."""

    flops: float = 0.0  # multiplications and additions
    untouched: float = 0.0  # bytes of operands and results that it neither reads nor writes
    cycles: float = 0.0  # of its scheduled instructions, all cores together; 0: unknown


def kernel(op: Instruction, model: ModelConfig, known: Sequence[KernelCycles] = ()) -> KernelWork:
    """Returns the work of an instruction that calls a kernel, and no work for any other. `known`
    are the kernels whose cycles were counted (cycles.py)."""
    if match := re.match(r"flash_(forward|backward)", op.name):
        key = match.group(), tuple(_operands(op)), len(op.arrays)
        cycles = [x.cycles for x in known if key == (x.name, x.operands, x.results)]
        return _attention(match.group(1), op)._replace(cycles=min(cycles, default=0.0))
    if match := re.match(r"t?gmm\b", op.name):
        return _grouped(match.group(), op, model)
    return KernelWork()


def _attention(part: str, op: Instruction) -> KernelWork:
    """Returns the work of flash attention over the tiles that the mask can allow: 2 products of
    queries and keys forward, 5 backward. Those with a position scheme's tables are not counted."""
    (*heads, _, size), _, (*_, d_value) = [dims for _, dims in _operands(op) if len(dims) > 2][:3]
    pairs = sum(tile_counts(op.source)) * math.prod(mask_of(op.source)[4:])
    # Width d_head: q k, and the gradients of q and k. Width d_value: w v, and those of w and v.
    by_keys, by_values = {"forward": (1, 1), "backward": (3, 2)}[part]
    return KernelWork(2.0 * math.prod(heads) * pairs * (by_keys * size + by_values * d_value))


def _grouped(part: str, op: Instruction, model: ModelConfig) -> KernelWork:
    """Returns the work of a grouped product (`gmm`), of rows by their experts' matrices, or of its
    gradient by the matrices (`tgmm`), for a device's own experts and a balanced router."""
    (size, (rows, inner)), (_, second) = _operands(op)[:2]
    result = op.arrays[0].dims
    matrices, products = (second, result) if part == "gmm" else (result, second)
    local_experts, outer = matrices[0], products[-1]
    kinds = [layer.feed_forward_kind for side in model.sides for layer in model.layers(side)]
    experts = max(kind.num_experts for kind in kinds if hasattr(kind, "num_experts"))
    local = rows * local_experts / experts
    return KernelWork(2.0 * local * inner * outer, (rows - local) * (inner + outer) * size)


def _operands(op: Instruction) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (bytes per element, shape) of the floating-point operands of a call."""
    layouts = op.attributes.partition("operand_layout_constraints")[2].partition("}}")[0]
    matches, sizes = re.findall(r"\b(bf16|f32)\[([\d,]+)\]", layouts), {"bf16": 2, "f32": 4}
    return [(sizes[dtype], tuple(map(int, dims.split(",")))) for dtype, dims in matches]
