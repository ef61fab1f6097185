"""What a compiled program does on one device: multiplications, and bytes that go through its HBM."""

import collections
import math
import re

import numpy as np

from transformer.planning.hlo import Computation, Instruction, Program

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota", "while",
         "conditional", "call", "async-start", "async-update", "async-done", "opt-barrier", "domain", "add-dependency"}  # fmt: skip
"""Instructions that move nothing themselves."""


def flops(program: Program) -> float:
    """Multiplications and additions of matrix products."""
    return sum(times * _flops(one, computation) for one, computation, times, _ in program.runs)


def hbm_bytes(program: Program) -> float:
    """Bytes that go through HBM: what every instruction outside of fusions reads and writes there."""
    return sum(
        times * _traffic(one, computation, program)
        for one, computation, times, fused in program.runs
        if not fused
    )


def _traffic(one: Instruction, computation: Computation, program: Program) -> float:
    if one.opcode in _FREE or one.opcode.endswith("-done"):
        return 0.0
    read = [computation[name] for name in one.operands if name in computation]
    if one.opcode.endswith(
        "-start"
    ):  # what is moved, read here and written there: its result names both places
        moved = one.arrays[1] if len(one.arrays) > 1 else one.arrays[0]
        return moved.bytes * ((not moved.on_chip) + bool(read and read[0].hbm_bytes))
    if one.opcode in ("dynamic-slice", "gather", "slice"):
        return one.hbm_bytes + (
            sum(array.bytes for array in one.arrays) if read[0].hbm_bytes else 0.0
        )
    if one.opcode in ("dynamic-update-slice", "scatter"):
        part = read[1] if one.opcode == "dynamic-update-slice" else read[-1]
        return 2 * sum(array.bytes for array in part.arrays)
    if one.opcode != "fusion" or not (inner := program.computations.get(one.called("calls"))):
        return one.hbm_bytes + sum(operand.hbm_bytes for operand in read)
    return _fusion_traffic(one, read, inner)


def _fusion_traffic(one: Instruction, read: list[Instruction], inner: Computation) -> float:
    """Of an operand that is only sliced or looked up in, the parts; of a result that only updates a part of an operand, the part."""
    users = collections.defaultdict(list)
    for user in inner.values():
        for name in user.operands:
            users[name].append((user, name))

    def uses(name: str) -> list[tuple[Instruction, bool]]:
        """(instruction, whether it takes the array as what is sliced or updated), through bitcasts."""
        found = []
        for user, operand in users[name]:
            found += (
                uses(user.name)
                if user.opcode == "bitcast"
                else [(user, user.operands[0] == operand)]
            )
        return found

    total, updated = 0.0, 0.0
    for parameter in (p for p in inner.values() if p.opcode == "parameter"):
        operand = read[int(parameter.literal)] if int(parameter.literal) < len(read) else None
        if operand is None or not operand.hbm_bytes:
            continue
        taken = uses(parameter.name)
        if taken and all(
            first and use.opcode in ("dynamic-slice", "gather", "slice") for use, first in taken
        ):
            total += sum(array.bytes for use, _ in taken for array in use.arrays)
        elif taken and all(first and use.opcode == "dynamic-update-slice" for use, first in taken):
            total += sum(
                array.bytes
                for use, _ in taken
                if use.operands[1] in inner
                for array in inner[use.operands[1]].arrays
            )
            updated += operand.hbm_bytes
        else:
            total += operand.hbm_bytes
    return total + max(one.hbm_bytes - updated, 0.0)


def _flops(one: Instruction, computation: Computation) -> float:
    if one.opcode not in ("dot", "convolution") or len(one.operands) < 2:
        return 0.0
    left, right = (computation[name].arrays[0].dims for name in one.operands[:2])
    out = one.arrays[0].dims
    if one.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes).group(1)
        return 2.0 * math.prod(out) * math.prod(left[int(n)] for n in contracted.split(",") if n)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes).groups()
    batches = int((re.search(r"batch_group_count=(\d+)", one.attributes) or [0, 1])[1])
    total = (
        2.0
        * left[labels[0].index("b")]
        / batches
        * right[labels[1].index("o")]
        * right[labels[1].index("i")]
    )
    window = re.search(r"window=\{([^}]*)\}", one.attributes)
    options = dict(re.findall(r"(\w+)=([\w\-x]+)", window.group(1))) if window else {}
    get = lambda name, default, axis: options[name].split("x")[axis] if name in options else default
    for axis in range(len(labels[0]) - 2):
        size, stride = int(get("size", "1", axis)), int(get("stride", "1", axis))
        low = int(get("pad", "0_0", axis).split("_")[0])
        spread_in, spread_kernel = (
            int(get("lhs_dilate", "1", axis)),
            int(get("rhs_dilate", "1", axis)),
        )
        length, outs = left[labels[0].index(str(axis))], out[labels[2].index(str(axis))]
        at = np.arange(outs)[:, None] * stride + np.arange(size)[None] * spread_kernel - low
        total *= np.sum((at >= 0) & (at <= (length - 1) * spread_in) & (at % spread_in == 0))
    return float(total)
