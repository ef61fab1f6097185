"""What devices send each other in a compiled program: collectives, with their bytes and groups, as often as they run."""

import dataclasses
import math
import re

import numpy as np

from transformer.planning.hlo import Computation, Instruction, Program

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
)


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective: its kind, how many bytes a device has before (or, gathering, behind) it, the groups of devices that talk, how often."""

    kind: str
    bytes: float
    groups: np.ndarray  # [groups, devices of one]; for collective-permute [pairs, 2]
    times: float
    source: str
    between_slices: bool = (
        False  # each device with those at its place in all other slices; `groups` are not told then
    )


def messages(program: Program) -> list[Message]:
    """What a device sends, in which groups, how often."""
    found = []
    for one, computation, times, fused in program.runs:
        if one.opcode == "send" and (
            told := re.search(r'_xla_megascale_transfer_type="(\w+)"', one.attributes)
        ):
            size = sum(array.bytes for array in computation[one.operands[0]].arrays)
            kind = told.group(1).lower().replace("_", "-")
            found.append(
                Message(kind, size, np.zeros((0, 0), int), times, one.source, between_slices=True)
            )
        kind = one.opcode.removesuffix("-start")
        scatters = fused and _scatters(one, computation)
        # Inside of fusions a message stands once for every piece of work that it goes on beside; it is sent where it starts.
        if kind not in COLLECTIVES or (fused and not scatters and not _starts(one, computation)):
            continue
        operands = [computation[name] for name in one.operands if name in computation]
        size = sum(array.bytes for operand in operands for array in operand.arrays)
        if scatters:
            kind = "reduce-scatter"
        elif (
            kind == "all-reduce"
            and operands
            and all(_puts_a_part(operand, program) for operand in operands)
        ):
            kind = "all-gather"  # as the compiler for TPUs spells it on a large torus: each adds its part, in zeros, to all others'
        elif kind == "all-gather":
            size *= _groups(one).shape[1]
        found.append(Message(kind, size, _groups(one), times, one.source))
    return found


def _puts_a_part(one: Instruction, program: Program) -> bool:
    """Whether it puts an array into a larger one."""
    inner = program.computations.get(one.called("calls") or "") if one.opcode == "fusion" else None
    root = next((each for each in inner.values() if each.root), one) if inner else one
    return root.opcode in ("dynamic-update-slice", "pad")


def _starts(one: Instruction, computation: Computation) -> bool:
    return any(
        one.name in user.operands and 'custom_call_target="AsyncCollectiveStart"' in user.attributes
        for user in computation.values()
    )


def _scatters(one: Instruction, computation: Computation) -> bool:
    """Whether a fusion adds up and keeps its part: how the compiler for TPUs spells a reduce-scatter that nothing goes on beside."""
    asynchronous = any("AsyncCollective" in other.attributes for other in computation.values())
    kept = any(
        other.opcode == "dynamic-slice" and other.operands[0] == one.name
        for other in computation.values()
    )
    return one.opcode == "all-reduce" and kept and not asynchronous


def _groups(one: Instruction) -> np.ndarray:
    """int[groups, devices of one]."""
    text = one.attributes
    if found := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        return np.array(
            [
                list(map(int, pair.split(",")))
                for pair in re.findall(r"\{(\d+,\d+)\}", found.group(1))
            ]
        )
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found.group(1))}
        along = re.findall(r"'(\w+)'", found.group(2))
        ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        axes = [list(sizes).index(name) for name in along]
        rest = [i for i in range(len(sizes)) if i not in axes]
        return ids.transpose(*rest, *axes).reshape(-1, math.prod(sizes[name] for name in along))
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        numbers = lambda s: [int(n) for n in s.split(",")]
        shape, dims = numbers(found.group(1)), numbers(found.group(2))
        ids = np.arange(math.prod(dims)).reshape(dims)
        return (ids.transpose(numbers(found.group(3))) if found.group(3) else ids).reshape(shape)
    if found := re.search(r"replica_groups=\{((?:\{[\d,]+\},?)+)\}", text):
        return np.array(
            [
                list(map(int, group.split(",")))
                for group in re.findall(r"\{([\d,]+)\}", found.group(1))
            ]
        )
    return np.zeros((1, 1), int)
