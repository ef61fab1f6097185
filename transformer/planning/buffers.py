"""The arrays that a compiled program keeps in HBM: what training keeps for the backward pass, and the largest by name."""

from transformer.planning.hlo import Computation, Instruction, Program

_MOVES = {"bitcast", "copy", "tuple", "opt-barrier", "reshape", "transpose", "slice-done", "copy-done", "copy-start", "slice-start"}  # fmt: skip
"""Instructions whose result is their operand."""

_HANDED_ON = {
    "tuple",
    "while",
    "get-tuple-element",
    "bitcast",
    "conditional",
    "call",
    "opt-barrier",
}
"""Instructions whose results another has made."""


def kept(program: Program) -> float:
    """Bytes in HBM of what the forward pass leaves for the backward pass: made before differentiation's transposed part, read in it. (Of
    micro-batches, both are in one loop's body.)"""

    def of(computation: Computation) -> float:
        found: dict[str, float] = {}
        for one in computation.values():
            if "transpose(" in one.source:
                for name in one.operands:
                    _origins(name, computation, program, found)
        return sum(found.values())

    bodies = {one.called("body") for one, *_ in program.runs if one.opcode == "while"}
    mixed = [
        c
        for name in (program.entry, *sorted(bodies))
        if _both_passes(c := program.computations[name])
    ]
    return max(map(of, mixed), default=0.0)


def _origins(
    name: str, computation: Computation, program: Program, found: dict[str, float]
) -> None:
    """Adds the bytes of the arrays that `name` is made of by moving alone, but for arguments and what the backward pass made."""
    one = computation.get(name)
    if one is None or name in found or one.opcode in ("parameter", "constant", "iota"):
        return
    if one.opcode in _MOVES or one.opcode.endswith("-done"):
        for operand in one.operands[:1] if one.opcode != "tuple" else one.operands:
            _origins(operand, computation, program, found)
    elif one.opcode == "get-tuple-element":
        _element(one, computation, program, found)
    elif "transpose(" not in one.source:
        found[name] = one.hbm_bytes


def _element(
    one: Instruction, computation: Computation, program: Program, found: dict[str, float]
) -> None:
    """An element of a tuple: of a loop's, what the loop made; or, where it only hands it on, what it was given."""
    maker, index = computation[one.operands[0]], one.index
    if maker.opcode == "parameter":  # a loop's body was given it
        return None
    if maker.opcode == "tuple":
        return _origins(maker.operands[index], computation, program, found)
    if maker.opcode == "while":
        body = program.computations[maker.called("body")]
        root = next(each for each in body.values() if each.root)
        handed = body.get(root.operands[index]) if root.opcode == "tuple" else None
        if handed is not None and handed.opcode == "get-tuple-element" and handed.index == index:
            given = computation[maker.operands[0]]
            return (
                _origins(given.operands[index], computation, program, found)
                if given.opcode == "tuple"
                else None
            )
    if "transpose(" not in maker.source:
        found[one.name] = one.hbm_bytes
    return None


def largest(program: Program, most: int = 8) -> list[tuple[float, str, str]]:
    """(bytes, shape, where it comes from) of the largest arrays in HBM that one device makes."""
    seen = {}
    for one, computation, _, fused in program.runs:
        handed_on = one.opcode in _HANDED_ON
        argument = (
            one.opcode == "parameter" and computation is not program.computations[program.entry]
        )
        in_place = one.source.endswith("dynamic_update_slice")
        if fused or handed_on or argument or in_place:
            continue
        for array in one.arrays:
            if not array.on_chip:
                spelled = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                where = one.source or (
                    f"argument {one.literal}" if one.opcode == "parameter" else one.opcode
                )
                seen.setdefault((spelled, where), array.bytes)
    return [
        (size, shape, where)
        for (shape, where), size in sorted(seen.items(), key=lambda item: -item[1])[:most]
    ]


def _both_passes(computation: Computation) -> bool:
    """Whether instructions of both the forward and the backward pass stand in it."""
    passes = {"transpose(" in one.source for one in computation.values() if "jvp(" in one.source}
    return len(passes) == 2
