"""The work of a compiled program on one device: FLOPs of matrix products, and HBM traffic."""

import collections
import math
import re

import numpy as np

from transformer.planning.collectives import COLLECTIVES
from transformer.planning.hlo import Computation, HloProgram, Instruction

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
    """Returns the bytes that a fusion reads and writes.

    An operand that is only sliced or gathered from counts with the parts that are read. A result
    that only updates a part of an operand counts with that part. The TPU compiler spreads a
    collective over several fusions, which pass its buffers on: they count where it ends.
    """
    passed_on = 0.0
    root = list(inner.values())[-1]
    results = root.operands if root.opcode == "tuple" else ()
    for array, name in zip(op.arrays, results, strict=False):
        if not array.on_chip and inner[name].opcode in ("parameter", *COLLECTIVES):
            passed_on += array.bytes
    users = collections.defaultdict(list)
    for user in inner.values():
        for name in user.operands:
            users[name].append((user, name))

    def find_uses(name: str) -> list[tuple[Instruction, bool]]:
        """Returns (user, whether it slices or updates the array), following bitcasts."""
        pairs = []
        for user, operand in users[name]:
            itself = [(user, user.operands[0] == operand)]
            pairs += find_uses(user.name) if user.opcode == "bitcast" else itself
        return pairs

    total, updated = 0.0, passed_on
    for parameter in (p for p in inner.values() if p.opcode == "parameter"):
        number = int(parameter.literal)
        if number >= len(operands) or not operands[number].hbm_bytes:
            continue
        operand, uses = operands[number], find_uses(parameter.name)
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
