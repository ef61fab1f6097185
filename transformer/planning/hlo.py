"""What a compiled program does, read from its text: loops with their trip counts, multiplications, bytes, messages.

The compiler's own cost analysis counts the body of a loop once; here every instruction is counted as often as it runs.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator

import numpy as np

SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4,
         "s64": 8, "u64": 8, "f64": 8, "c64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "token": 0, "opaque": 0}  # fmt: skip

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota", "while",
         "conditional", "call", "async-start", "async-update", "async-done", "opt-barrier", "domain", "add-dependency"}  # fmt: skip
"""Instructions that move nothing themselves."""

_MOVES = {
    "bitcast",
    "copy",
    "tuple",
    "opt-barrier",
    "reshape",
    "transpose",
    "slice-done",
    "copy-done",
    "copy-start",
    "slice-start",
}
"""Instructions whose result is their operand."""


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
    def hbm_bytes(self) -> float:
        """Of its results, what stands in HBM."""
        return sum(array.bytes for array in self.arrays if not array.on_chip)


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective: its kind, how many bytes a device has before (or, gathering, behind) it, the groups of devices that talk, how often."""

    kind: str
    bytes: float
    groups: np.ndarray  # [groups, devices of one]; for collective-permute [pairs, 2]
    times: float
    source: str
    between_slices: bool = False  # each device with those at its place in all other slices; `groups` are not told then


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
                yield from self._visit(one.called("body"), times * self.trips(one, computation), fused)
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
        bounds = [one for one in condition.values() if one.opcode == "constant" and re.fullmatch(r"\d+", one.literal)]
        if not bounds:
            return 1
        bound = max(bounds, key=lambda one: int(one.literal))
        compared = next(
            (one for one in condition.values() if one.opcode == "compare" and bound.name in one.operands), None
        )
        counter = (
            next((condition[name] for name in compared.operands if name != bound.name), None) if compared else None
        )
        step = 1
        if counter is not None and counter.opcode == "get-tuple-element":
            index = _index(counter)
            root = next(one for one in body.values() if one.root)
            if root.opcode == "tuple":  # an unrolled loop counts in larger steps
                step = _added(body, root.operands[index], index) or 1
        return -(-int(bound.literal) // step)

    @functools.cached_property
    def flops(self) -> float:
        """Multiplications and additions of matrix products, on one device."""
        return sum(times * _flops(one, computation) for one, computation, times, _ in self.runs)

    @functools.cached_property
    def hbm_bytes(self) -> float:
        """Bytes that go through one device's HBM: what every instruction outside of fusions reads and writes there."""
        return sum(times * self._traffic(one, computation) for one, computation, times, fused in self.runs if not fused)

    def _traffic(self, one: Instruction, computation: Computation) -> float:
        if one.opcode in _FREE or one.opcode.endswith("-done"):
            return 0.0
        read = [computation[name] for name in one.operands if name in computation]
        if one.opcode.endswith("-start"):  # what is moved, read here and written there: its result names both places
            moved = one.arrays[1] if len(one.arrays) > 1 else one.arrays[0]
            return moved.bytes * ((not moved.on_chip) + bool(read and read[0].hbm_bytes))
        if one.opcode in ("dynamic-slice", "gather", "slice"):
            return one.hbm_bytes + (sum(array.bytes for array in one.arrays) if read[0].hbm_bytes else 0.0)
        if one.opcode in ("dynamic-update-slice", "scatter"):
            part = read[1] if one.opcode == "dynamic-update-slice" else read[-1]
            return 2 * sum(array.bytes for array in part.arrays)
        if one.opcode != "fusion" or not (inner := self.computations.get(one.called("calls"))):
            return one.hbm_bytes + sum(operand.hbm_bytes for operand in read)
        return _fusion_traffic(one, read, inner)

    @functools.cached_property
    def messages(self) -> list[Message]:
        """What a device sends, in which groups, how often."""
        found = []
        for one, computation, times, fused in self.runs:
            if one.opcode == "send" and (told := re.search(r'_xla_megascale_transfer_type="(\w+)"', one.attributes)):
                size = sum(array.bytes for array in computation[one.operands[0]].arrays)
                kind = told.group(1).lower().replace("_", "-")
                found.append(Message(kind, size, np.zeros((0, 0), int), times, one.source, between_slices=True))
            kind = one.opcode.removesuffix("-start")
            scatters = fused and _scatters(one, computation)
            # Inside of fusions a message stands once for every piece of work that it goes on beside; it is sent where it starts.
            if kind not in COLLECTIVES or (fused and not scatters and not _starts(one, computation)):
                continue
            operands = [computation[name] for name in one.operands if name in computation]
            size = sum(array.bytes for operand in operands for array in operand.arrays)
            if scatters:
                kind = "reduce-scatter"
            elif kind == "all-reduce" and operands and all(map(self._puts_a_part, operands)):
                kind = "all-gather"  # as the compiler for TPUs spells it on a large torus: each adds its part, in zeros, to all others'
            elif kind == "all-gather":
                size *= _groups(one).shape[1]
            found.append(Message(kind, size, _groups(one), times, one.source))
        return found

    @functools.cached_property
    def kept(self) -> float:
        """Bytes in HBM of what the forward pass leaves for the backward pass: made before differentiation's transposed part, read in it. (Of
        micro-batches, both are in one loop's body.)"""

        def of(computation: Computation) -> float:
            found: dict[str, float] = {}
            for one in computation.values():
                if "transpose(" in one.source:
                    for name in one.operands:
                        self._origins(name, computation, found)
            return sum(found.values())

        bodies = {one.called("body") for one, *_ in self.runs if one.opcode == "while"}
        mixed = [c for name in (self.entry, *sorted(bodies)) if _both_passes(c := self.computations[name])]
        return max(map(of, mixed), default=0.0)

    def _origins(self, name: str, entry: Computation, found: dict[str, float]) -> None:
        """Adds the bytes of the arrays that `name` is made of by moving alone, but for arguments and what the backward pass made."""
        one = entry.get(name)
        if one is None or name in found or one.opcode in ("parameter", "constant", "iota"):
            return
        if one.opcode in _MOVES or one.opcode.endswith("-done"):
            for operand in one.operands[:1] if one.opcode != "tuple" else one.operands:
                self._origins(operand, entry, found)
        elif one.opcode == "get-tuple-element":
            self._element(one, entry, found)
        elif "transpose(" not in one.source:
            found[name] = one.hbm_bytes

    def _element(self, one: Instruction, entry: Computation, found: dict[str, float]) -> None:
        """An element of a tuple: of a loop's, what the loop made; or, where it only hands it on, what it was given."""
        maker, index = entry[one.operands[0]], _index(one)
        if maker.opcode == "parameter":  # a loop's body was given it
            return None
        if maker.opcode == "tuple":
            return self._origins(maker.operands[index], entry, found)
        if maker.opcode == "while":
            body = self.computations[maker.called("body")]
            root = next(each for each in body.values() if each.root)
            handed = body.get(root.operands[index]) if root.opcode == "tuple" else None
            if (
                handed is not None
                and handed.opcode == "get-tuple-element"
                and f"index={index}," in handed.attributes + ","
            ):
                given = entry[maker.operands[0]]
                return self._origins(given.operands[index], entry, found) if given.opcode == "tuple" else None
        if "transpose(" not in maker.source:
            found[one.name] = one.hbm_bytes
        return None

    def _puts_a_part(self, one: Instruction) -> bool:
        """Whether it puts an array into a larger one."""
        inner = self.computations.get(one.called("calls") or "") if one.opcode == "fusion" else None
        root = next((each for each in inner.values() if each.root), one) if inner else one
        return root.opcode in ("dynamic-update-slice", "pad")

    def largest(self, most: int = 8) -> list[tuple[float, str, str]]:
        """(bytes, shape, where it comes from) of the largest arrays in HBM that one device makes."""
        seen = {}
        for one, computation, _, fused in self.runs:
            handed_on = one.opcode in (
                "tuple",
                "while",
                "get-tuple-element",
                "bitcast",
                "conditional",
                "call",
                "opt-barrier",
            )
            argument = one.opcode == "parameter" and computation is not self.computations[self.entry]
            if (
                fused or handed_on or argument or one.source.endswith("dynamic_update_slice")
            ):  # the last is written in place
                continue
            for array in one.arrays:
                if not array.on_chip:
                    spelled = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                    where = one.source or (f"argument {one.literal}" if one.opcode == "parameter" else one.opcode)
                    seen.setdefault((spelled, where), array.bytes)
        return [(size, shape, where) for (shape, where), size in sorted(seen.items(), key=lambda item: -item[1])[:most]]


def _starts(one: Instruction, computation: Computation) -> bool:
    return any(
        one.name in user.operands and 'custom_call_target="AsyncCollectiveStart"' in user.attributes
        for user in computation.values()
    )


def _scatters(one: Instruction, computation: Computation) -> bool:
    """Whether a fusion adds up and keeps its part: how the compiler for TPUs spells a reduce-scatter that nothing goes on beside."""
    asynchronous = any("AsyncCollective" in other.attributes for other in computation.values())
    kept = any(other.opcode == "dynamic-slice" and other.operands[0] == one.name for other in computation.values())
    return one.opcode == "all-reduce" and kept and not asynchronous


def _both_passes(computation: Computation) -> bool:
    """Whether instructions of both the forward and the backward pass stand in it."""
    passes = {"transpose(" in one.source for one in computation.values() if "jvp(" in one.source}
    return len(passes) == 2


def _index(one: Instruction) -> int:
    """Which element of a tuple a get-tuple-element takes."""
    return int(re.search(r"index=(\d+)", one.attributes).group(1))


def _added(body: Computation, name: str, index: int) -> int | None:
    """What a loop's body adds to element `index` of what it is given to make `name`; None where that cannot be seen."""
    one = body.get(name)
    while one is not None and one.opcode in ("copy", "bitcast", "get-tuple-element"):
        maker = body[one.operands[0]]
        if one.opcode == "get-tuple-element":
            if maker.opcode == "parameter":
                return 0 if _index(one) == index else None
            while maker.opcode in ("opt-barrier", "copy"):
                maker = body[maker.operands[0]]
            one = body.get(maker.operands[_index(one)]) if maker.opcode == "tuple" else None
        else:
            one = maker
    if one is None or one.opcode != "add":
        return None
    numbers = [
        int(body[x].literal) for x in one.operands if body[x].opcode == "constant" and body[x].literal.isdecimal()
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
    return Instruction(found.group(2), arrays, opcode.strip(), operands, attributes, bool(found.group(1)), inside)


def _closing(text: str, start: int) -> int:
    """The place behind the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return len(text)


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
            found += uses(user.name) if user.opcode == "bitcast" else [(user, user.operands[0] == operand)]
        return found

    total, updated = 0.0, 0.0
    for parameter in (p for p in inner.values() if p.opcode == "parameter"):
        operand = read[int(parameter.literal)] if int(parameter.literal) < len(read) else None
        if operand is None or not operand.hbm_bytes:
            continue
        taken = uses(parameter.name)
        if taken and all(first and use.opcode in ("dynamic-slice", "gather", "slice") for use, first in taken):
            total += sum(array.bytes for use, _ in taken for array in use.arrays)
        elif taken and all(first and use.opcode == "dynamic-update-slice" for use, first in taken):
            total += sum(
                array.bytes for use, _ in taken if use.operands[1] in inner for array in inner[use.operands[1]].arrays
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
    total = 2.0 * left[labels[0].index("b")] / batches * right[labels[1].index("o")] * right[labels[1].index("i")]
    window = re.search(r"window=\{([^}]*)\}", one.attributes)
    options = dict(re.findall(r"(\w+)=([\w\-x]+)", window.group(1))) if window else {}
    get = lambda name, default, axis: options[name].split("x")[axis] if name in options else default
    for axis in range(len(labels[0]) - 2):
        size, stride = int(get("size", "1", axis)), int(get("stride", "1", axis))
        low = int(get("pad", "0_0", axis).split("_")[0])
        spread_in, spread_kernel = int(get("lhs_dilate", "1", axis)), int(get("rhs_dilate", "1", axis))
        length, outs = left[labels[0].index(str(axis))], out[labels[2].index(str(axis))]
        at = np.arange(outs)[:, None] * stride + np.arange(size)[None] * spread_kernel - low
        total *= np.sum((at >= 0) & (at <= (length - 1) * spread_in) & (at % spread_in == 0))
    return float(total)


def _groups(one: Instruction) -> np.ndarray:
    """int[groups, devices of one]."""
    text = one.attributes
    if found := re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}", text):
        return np.array([list(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)\}", found.group(1))])
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
        return np.array([list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", found.group(1))])
    return np.zeros((1, 1), int)
