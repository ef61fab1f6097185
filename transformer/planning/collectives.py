"""The collectives of a compiled program: their bytes, their groups, and how often they run."""

import dataclasses
import math
import re

import numpy as np

from transformer.planning.hlo import Computation, HloProgram, Instruction

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective: its kind and size, the groups that communicate, and how often it runs.

    `bytes` is the size of a device's operand, or of its result for an all-gather.
    """

    kind: str
    bytes: float
    groups: np.ndarray  # [groups, devices per group]; for collective-permute [pairs, 2]
    times: float
    source: str
    # Each device communicates with its counterparts in all other slices. Then `groups` is empty.
    between_slices: bool = False


def collectives(program: HloProgram) -> list[Collective]:
    """Returns all collectives of a program."""
    collectives = []
    for op, computation, times, fused in program.runs:
        transfer = re.search(r'_xla_megascale_transfer_type="(\w+)"', op.attributes)
        if op.opcode == "send" and transfer:
            size = sum(array.bytes for array in computation[op.operands[0]].arrays)
            kind = transfer.group(1).lower().replace("_", "-")
            no_groups = np.zeros((0, 0), int)
            collectives.append(Collective(kind, size, no_groups, times, op.source, True))
        kind = op.opcode.removesuffix("-start")
        scatters = fused and _scatters(op, computation)
        # An asynchronous collective appears in each fusion that it overlaps. Only its start counts.
        if kind not in COLLECTIVES or (fused and not scatters and not _starts(op, computation)):
            continue
        operands = [computation[name] for name in op.operands if name in computation]
        size = sum(array.bytes for operand in operands for array in operand.arrays)
        writes_parts = operands and all(_writes_a_part(x, program) for x in operands)
        if scatters:
            kind = "reduce-scatter"
        elif kind == "all-reduce" and writes_parts:
            # On a large torus, the TPU compiler writes all-gathers as sums of zero-padded parts.
            kind = "all-gather"
        elif kind == "all-gather":
            size *= _groups(op).shape[1]
        collectives.append(Collective(kind, size, _groups(op), times, op.source))
    return collectives


def _writes_a_part(op: Instruction, program: HloProgram) -> bool:
    inner = program.computations.get(op.called("calls") or "") if op.opcode == "fusion" else None
    root = next((inner_op for inner_op in inner.values() if inner_op.root), op) if inner else op
    return root.opcode in ("dynamic-update-slice", "pad")


def _starts(op: Instruction, computation: Computation) -> bool:
    start = 'custom_call_target="AsyncCollectiveStart"'
    return any(op.name in x.operands and start in x.attributes for x in computation.values())


def _scatters(op: Instruction, computation: Computation) -> bool:
    """Returns whether a fused all-reduce keeps a part of the sum, as a TPU's reduce-scatter."""
    asynchronous = any("AsyncCollective" in other.attributes for other in computation.values())
    slices = [other for other in computation.values() if other.opcode == "dynamic-slice"]
    kept = any(other.operands[0] == op.name for other in slices)
    return op.opcode == "all-reduce" and kept and not asynchronous


def _groups(op: Instruction) -> np.ndarray:
    text, numbers = op.attributes, lambda s: [int(n) for n in s.split(",")]
    if match := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        pairs = re.findall(r"\{(\d+,\d+)\}", match.group(1))
        return np.array([numbers(pair) for pair in pairs])
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match.group(1))}
        axis_names = re.findall(r"'(\w+)'", match.group(2))
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        axes = [list(sizes).index(name) for name in axis_names]
        other_axes = [i for i in range(len(sizes)) if i not in axes]
        group_size = math.prod(sizes[name] for name in axis_names)
        return ids.transpose(*other_axes, *axes).reshape(-1, group_size)
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        shape, dims = numbers(match.group(1)), numbers(match.group(2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(numbers(match.group(3))) if match.group(3) else ids).reshape(shape)
    if match := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", text):
        groups = re.findall(r"\{([\d,]+)\}", match.group(1))
        return np.array([numbers(group) for group in groups])
    return np.zeros((1, 1), int)
