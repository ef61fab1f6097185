"""The arrays of a compiled program in HBM: those kept for the backward pass, and the largest."""

from transformer.planning.hlo import Computation, HloProgram, Instruction

_MOVES = {
    "bitcast", "copy", "tuple", "opt-barrier", "reshape", "transpose", "slice-done", "copy-done",
    "copy-start", "slice-start",
}  # fmt: skip
"""Opcodes that only move or reshape their operand."""

_FORWARDS = {"tuple", "while", "get-tuple-element", "bitcast", "conditional", "call", "opt-barrier"}
"""Opcodes whose results another instruction has computed."""


def kept(program: HloProgram) -> float:
    """Returns the bytes in HBM that the forward pass keeps for the backward pass.

    These arrays are computed before the transposed part of differentiation and read in it. With
    micro-batches, both passes are in the body of one loop.
    """

    def bytes_kept(computation: Computation) -> float:
        sizes: dict[str, float] = {}
        for op in computation.values():
            if "transpose(" in op.source:
                for name in op.operands:
                    _origins(name, computation, program, sizes)
        return sum(sizes.values())

    bodies = {op.called("body") for op, *_ in program.runs if op.opcode == "while"}
    candidates = [program.computations[name] for name in (program.entry, *sorted(bodies))]
    return max(map(bytes_kept, filter(_both_passes, candidates)), default=0.0)


def _origins(name: str, computation: Computation, program: HloProgram, sizes: dict) -> None:
    """Adds to `sizes` the forward pass's arrays from which `name` is obtained by moving data."""
    op = computation.get(name)
    if op is None or name in sizes or op.opcode in ("parameter", "constant", "iota"):
        return
    if op.opcode in _MOVES or op.opcode.endswith("-done"):
        for operand in op.operands[:1] if op.opcode != "tuple" else op.operands:
            _origins(operand, computation, program, sizes)
    elif op.opcode == "get-tuple-element":
        _element(op, computation, program, sizes)
    elif "transpose(" not in op.source:
        sizes[name] = op.hbm_bytes


def _element(op: Instruction, computation: Computation, program: HloProgram, sizes: dict) -> None:
    """Adds to `sizes` the array that is an element of a tuple.

    That is what a loop computed or, if its body returns the element unchanged, its argument.
    """
    producer, index = computation[op.operands[0]], op.index
    if producer.opcode == "tuple":
        _origins(producer.operands[index], computation, program, sizes)
        return
    if producer.opcode == "while":
        body = program.computations[producer.called("body")]
        root = next(inner_op for inner_op in body.values() if inner_op.root)
        result = body.get(root.operands[index]) if root.opcode == "tuple" else None
        if result is not None and result.opcode == "get-tuple-element" and result.index == index:
            argument = computation[producer.operands[0]]
            if argument.opcode == "tuple":
                _origins(argument.operands[index], computation, program, sizes)
            return
    # A parameter is an argument of a loop's body.
    if producer.opcode != "parameter" and "transpose(" not in producer.source:
        sizes[op.name] = op.hbm_bytes


def largest(program: HloProgram, max_arrays: int = 8) -> list[tuple[float, str, str]]:
    """Returns (bytes, shape, source) of the `max_arrays` largest arrays in HBM on one device."""
    sizes, entry = {}, program.computations[program.entry]
    for op, computation, _, fused in program.runs:
        forwarded = op.opcode in _FORWARDS
        argument = op.opcode == "parameter" and computation is not entry
        in_place = op.source.endswith("dynamic_update_slice")
        if fused or forwarded or argument or in_place:
            continue
        for array in op.arrays:
            if not array.on_chip:
                shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                origin = f"argument {op.literal}" if op.opcode == "parameter" else op.opcode
                sizes.setdefault((shape, op.source or origin), array.bytes)
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    return [(size, *names) for names, size in ranked[:max_arrays]]


def _both_passes(computation: Computation) -> bool:
    passes = {"transpose(" in op.source for op in computation.values() if "jvp(" in op.source}
    return len(passes) == 2
