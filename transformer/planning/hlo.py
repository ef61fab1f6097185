"""A compiled program, read from its text: its instructions, and how often each runs.

The compiler's own cost analysis counts the body of a loop once; here a loop has its trip count.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
         "s64": 8, "u64": 8, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "token": 0, "opaque": 0}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a result. `on_chip`: it is kept in on-chip memory and never goes through HBM."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool

    @property
    def bytes(self) -> float:
        return SIZES.get(self.dtype, 4) * math.prod(self.dims)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """%name = arrays opcode(operands), attributes."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool
    literal: str  # what stands in the parentheses of a constant or a parameter

    @property
    def source(self) -> str:
        """Where in the model it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    def called(self, kind: str) -> str | None:
        """The computation that an attribute names: body, condition, calls, to_apply."""
        found = re.search(rf"\b{kind}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    @property
    def index(self) -> int:
        """Which element of a tuple a get-tuple-element takes."""
        return int(re.search(r"index=(\d+)", self.attributes).group(1))

    @property
    def hbm_bytes(self) -> float:
        """Of its results, what stands in HBM."""
        return sum(array.bytes for array in self.arrays if not array.on_chip)


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
    """A module: its computations, and which is entered."""

    computations: dict[str, Computation]
    entry: str

    @staticmethod
    def read(text: str) -> "Program":
        text = re.sub(
            r"kernel_metadata=\{\n.*?\n\}\}", "kernel_metadata={}}", text
        )  # the one attribute over several lines
        computations, entry, current = {}, "", None
        for line in text.splitlines():
            if current is None:
                header = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
                if header:
                    current = computations.setdefault(header.group(2), {})
                    entry = header.group(2) if header.group(1) else entry
            elif line.startswith("}"):
                current = None
            elif found := _instruction(line):
                current[found.name] = found
        return Program(computations, entry)

    @functools.cached_property
    def runs(self) -> list[tuple[Instruction, Computation, float, bool]]:
        """Every instruction with its computation, how often it runs, and whether it is inside of a fusion."""
        return list(self._visit(self.entry, 1.0, False))

    def _visit(self, name: str, times: float, fused: bool) -> Iterator:
        computation = self.computations[name]
        for one in computation.values():
            yield one, computation, times, fused
            if one.opcode == "while":
                yield from self._visit(
                    one.called("body"), times * self.trips(one, computation), fused
                )
            elif one.opcode == "conditional":
                names = re.search(r"branch_computations=\{([^}]*)\}", one.attributes)
                names = (
                    names.group(1).split(",")
                    if names
                    else [one.called("true_computation"), one.called("false_computation")]
                )
                for branch in names:
                    yield from self._visit(branch.strip(" %"), times / len(names), fused)
            elif one.opcode == "fusion" or one.opcode.endswith("-start"):
                if inner := one.called("calls"):
                    yield from self._visit(inner, times, True)
            elif one.opcode == "call" and (inner := one.called("to_apply")):
                yield from self._visit(inner, times, fused)

    def trips(self, loop: Instruction, computation: Computation) -> int:
        """How often a loop's body runs: its condition compares a counter with a constant."""
        found = re.search(r"known_trip_count[^0-9]*(\d+)", loop.attributes)
        if found:
            return int(found.group(1))
        condition, body = (self.computations[loop.called(kind)] for kind in ("condition", "body"))
        bounds = [
            one
            for one in condition.values()
            if one.opcode == "constant" and re.fullmatch(r"\d+", one.literal)
        ]
        if not bounds:
            return 1
        bound = max(bounds, key=lambda one: int(one.literal))
        compared = next(
            (
                one
                for one in condition.values()
                if one.opcode == "compare" and bound.name in one.operands
            ),
            None,
        )
        counter = (
            next((condition[name] for name in compared.operands if name != bound.name), None)
            if compared
            else None
        )
        step = 1
        if counter is not None and counter.opcode == "get-tuple-element":
            index = counter.index
            root = next(one for one in body.values() if one.root)
            if root.opcode == "tuple":  # an unrolled loop counts in larger steps
                step = _added(body, root.operands[index], index) or 1
        return -(-int(bound.literal) // step)


def _added(body: Computation, name: str, index: int) -> int | None:
    """What a loop's body adds to element `index` of what it is given to make `name`; None where that cannot be seen."""
    one = body.get(name)
    while one is not None and one.opcode in ("copy", "bitcast", "get-tuple-element"):
        maker = body[one.operands[0]]
        if one.opcode == "get-tuple-element":
            if maker.opcode == "parameter":
                return 0 if one.index == index else None
            while maker.opcode in ("opt-barrier", "copy"):
                maker = body[maker.operands[0]]
            one = body.get(maker.operands[one.index]) if maker.opcode == "tuple" else None
        else:
            one = maker
    if one is None or one.opcode != "add":
        return None
    numbers = [
        int(body[x].literal)
        for x in one.operands
        if body[x].opcode == "constant" and body[x].literal.isdecimal()
    ]
    others = [x for x in one.operands if body[x].opcode != "constant"]
    before = _added(body, others[0], index) if len(numbers) == len(others) == 1 else None
    return None if before is None else before + numbers[0]


def _instruction(line: str) -> Instruction | None:
    found = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if not found:
        return None
    rest = line[found.end() :]
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _closing(rest, len(opcode))
    inside, attributes = rest[len(opcode) + 1 : close - 1], rest[close:]
    arrays = tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), "S(1)" in layout)
        for dtype, dims, layout in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", shape)
    )
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(
        found.group(2), arrays, opcode.strip(), operands, attributes, bool(found.group(1)), inside
    )


def _closing(text: str, start: int) -> int:
    """The place behind the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return len(text)
