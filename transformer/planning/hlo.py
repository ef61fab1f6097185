"""A compiled program, parsed from its HLO text: how often its instructions run, and its arrays.

XLA's own cost analysis counts the body of a loop once. Here a loop counts with its trip count."""

import dataclasses
import functools
import itertools
import math
import re

SIZES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
    "f8e4m3fn": 1, "f8e5m2": 1, "token": 0, "opaque": 0,
}  # fmt: skip
"""Bytes per element of each HLO type."""

_MOVES = set("bitcast copy tuple opt-barrier reshape transpose copy-start slice-start".split())
"""Opcodes that only move or reshape their operand, besides those that end in "-done"."""

_FORWARDS = {"tuple", "while", "get-tuple-element", "bitcast", "conditional", "call", "opt-barrier"}
"""Opcodes whose results another instruction has computed."""


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of a result. If `on_chip`, it is kept in on-chip memory and never in HBM."""

    dtype: str
    dims: tuple[int, ...]
    on_chip: bool

    @property
    def bytes(self) -> float:
        return SIZES.get(self.dtype, 4) * math.prod(self.dims)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One HLO instruction: `%name = arrays opcode(operands), attributes`."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    root: bool
    literal: str  # the text in parentheses, such as a constant or the index of a parameter

    @property
    def source(self) -> str:
        """The operation of the model that it belongs to."""
        return match[1] if (match := re.search(r'op_name="([^"]*)"', self.attributes)) else ""

    def called(self, kind: str) -> str | None:
        """Returns the computation that attribute `kind` names: body, condition, calls, ..."""
        pattern = rf"\b{kind}=%?([\w.\-]+)"
        return match[1] if (match := re.search(pattern, self.attributes)) else None

    @property
    def index(self) -> int:
        """The index of the tuple element that a get-tuple-element selects."""
        return int(re.search(r"index=(\d+)", self.attributes).group(1))

    @property
    def hbm_bytes(self) -> float:
        """Bytes of its results in HBM."""
        return sum(array.bytes for array in self.arrays if not array.on_chip)


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """An HLO module: its computations, and the name of its entry computation."""

    computations: dict[str, Computation]
    entry: str

    @staticmethod
    def read(text: str) -> "HloProgram":
        """Parses the HLO text of a compiled module."""
        # The only attribute that spans several lines
        text = re.sub(r"kernel_metadata=\{\n.*?\n\}\}", "kernel_metadata={}}", text)
        computations, entry, current = {}, "", None
        for line in text.splitlines():
            if current is None:
                if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
                    current = computations.setdefault(header.group(2), {})
                    entry = header.group(2) if header.group(1) else entry
            elif line.startswith("}"):
                current = None
            elif instruction := _parse(line):
                current[instruction.name] = instruction
        return HloProgram(computations, entry)

    @functools.cached_property
    def runs(self) -> list[tuple[Instruction, Computation, float, bool]]:
        """Every instruction with its computation, how often it runs, and whether it is fused."""
        return list(self._visit(self.entry, 1.0, False))

    def _visit(self, name: str, times: float, fused: bool):
        computation = self.computations[name]
        for op in computation.values():
            yield op, computation, times, fused
            if op.opcode == "while":
                yield from self._visit(op.called("body"), times * self.trips(op), fused)
            elif op.opcode == "conditional":
                names = [op.called("true_computation"), op.called("false_computation")]
                if match := re.search(r"branch_computations=\{([^}]*)\}", op.attributes):
                    names = match.group(1).split(",")
                for branch in names:
                    yield from self._visit(branch.strip(" %"), times / len(names), fused)
            elif op.opcode == "fusion" or op.opcode.endswith("-start"):
                if inner := op.called("calls"):
                    yield from self._visit(inner, times, True)
            elif op.opcode == "call" and (inner := op.called("to_apply")):
                yield from self._visit(inner, times, fused)

    def trips(self, loop: Instruction) -> int:
        """Returns how often a loop's body runs. Its condition compares a counter to a constant."""
        if match := re.search(r"known_trip_count[^0-9]*(\d+)", loop.attributes):
            return int(match.group(1))
        condition, body = (self.computations[loop.called(kind)] for kind in ("condition", "body"))
        bounds = [x for x in condition.values() if x.opcode == "constant" and x.literal.isdecimal()]
        if not bounds:
            return 1
        bound = max(bounds, key=lambda op: int(op.literal))
        comparisons = [op for op in condition.values() if op.opcode == "compare"]
        compared = next((op.operands for op in comparisons if bound.name in op.operands), ())
        counter = next((condition[name] for name in compared if name != bound.name), None)
        step = 1
        if counter is not None and counter.opcode == "get-tuple-element":
            root = next(op for op in body.values() if op.root)
            if root.opcode == "tuple":  # an unrolled loop counts in larger steps
                step = _increment(body, root.operands[counter.index], counter.index) or 1
        return -(-int(bound.literal) // step)


def _increment(body: Computation, name: str, index: int) -> int | None:
    """Returns what a loop's body adds to element `index` to obtain `name`, or None if unknown."""
    op = body.get(name)
    while op is not None and op.opcode in ("copy", "bitcast", "get-tuple-element"):
        producer = body[op.operands[0]]
        if op.opcode == "get-tuple-element":
            if producer.opcode == "parameter":
                return 0 if op.index == index else None
            while producer.opcode in ("opt-barrier", "copy"):
                producer = body[producer.operands[0]]
            op = body.get(producer.operands[op.index]) if producer.opcode == "tuple" else None
        else:
            op = producer
    if op is None or op.opcode != "add":
        return None
    added = [body[x].literal for x in op.operands if body[x].opcode == "constant"]
    constants = [int(literal) for literal in added if literal.isdecimal()]
    terms = [x for x in op.operands if body[x].opcode != "constant"]
    previous = _increment(body, terms[0], index) if len(constants) == len(terms) == 1 else None
    return None if previous is None else previous + constants[0]


def _parse(line: str) -> Instruction | None:
    if not (match := re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)):
        return None
    remainder = line[match.end() :]
    end = _closing(remainder, 0) if remainder.startswith("(") else remainder.index(" ")
    shape, remainder = remainder[:end], remainder[end:].lstrip()
    opcode, _, _ = remainder.partition("(")
    close = _closing(remainder, len(opcode))
    literal, attributes = remainder[len(opcode) + 1 : close - 1], remainder[close:]
    arrays = tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), "S(1)" in layout)
        for dtype, dims, layout in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", shape)
    )
    operands = tuple(re.findall(r"%([\w.\-]+)", literal))
    root, name = match.groups()
    return Instruction(name, arrays, opcode.strip(), operands, attributes, bool(root), literal)


def _closing(text: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depths = itertools.accumulate((x == "(") - (x == ")") for x in text[start:])
    return next((end for end, depth in enumerate(depths, start + 1) if depth == 0), len(text))


def kept(program: HloProgram) -> float:
    """Returns the bytes in HBM that the forward pass keeps for the backward pass: arrays computed
    before the transposed part and read in it. With micro-batches, both are in one loop's body."""

    def bytes_kept(computation: Computation) -> float:
        passes = {"transpose(" in op.source for op in computation.values() if "jvp(" in op.source}
        if len(passes) < 2:
            return 0.0
        sizes: dict[str, float] = {}
        for op in (x for x in computation.values() if "transpose(" in x.source):
            for name in op.operands:
                _origins(name, computation, program, sizes)
        return sum(sizes.values())

    bodies = {op.called("body") for op, *_ in program.runs if op.opcode == "while"}
    candidates = [program.computations[name] for name in (program.entry, *sorted(bodies))]
    return max(map(bytes_kept, candidates))


def _origins(name: str, computation: Computation, program: HloProgram, sizes: dict) -> None:
    """Adds to `sizes` the forward pass's arrays from which `name` is obtained by moving data. An
    element of a tuple is a loop's result or, if its body returns it unchanged, its argument."""
    op = computation.get(name)
    if op is None or name in sizes or op.opcode in ("parameter", "constant", "iota"):
        return
    source, moved = op, ()
    if op.opcode == "get-tuple-element":
        source = computation[op.operands[0]]
        if unchanged := source.opcode == "while" and _returns_argument(source, op.index, program):
            source = computation[source.operands[0]]
        if source.opcode == "tuple":
            moved = (source.operands[op.index],)
        elif unchanged or source.opcode == "parameter":  # an argument of a loop's body
            return
    elif op.opcode in _MOVES or op.opcode.endswith("-done"):
        moved = op.operands if op.opcode == "tuple" else op.operands[:1]
    for operand in moved:
        _origins(operand, computation, program, sizes)
    if not moved and "transpose(" not in source.source:
        sizes[name] = op.hbm_bytes


def _returns_argument(loop: Instruction, index: int, program: HloProgram) -> bool:
    """Returns whether a loop's body returns element `index` of its argument unchanged."""
    body = program.computations[loop.called("body")]
    root = next(op for op in body.values() if op.root)
    result = body.get(root.operands[index]) if root.opcode == "tuple" else None
    return result is not None and result.opcode == "get-tuple-element" and result.index == index


def largest(program: HloProgram, max_arrays: int = 8) -> list[tuple[float, str, str]]:
    """Returns (bytes, shape, source) of the `max_arrays` largest arrays in HBM on one device."""
    sizes, entry = {}, program.computations[program.entry]
    for op, computation, _, fused in program.runs:
        argument = op.opcode == "parameter" and computation is not entry
        in_place = op.source.endswith("dynamic_update_slice")
        if fused or op.opcode in _FORWARDS or argument or in_place:
            continue
        for array in [x for x in op.arrays if not x.on_chip]:
            shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
            origin = f"argument {op.literal}" if op.opcode == "parameter" else op.opcode
            sizes.setdefault((shape, op.source or origin), array.bytes)
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return [(size, *names) for names, size in ranked[:max_arrays]]
