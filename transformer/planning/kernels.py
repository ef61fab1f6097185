"""The work of TPU kernels, from their names and operand shapes; the HLO text does not show it."""

import dataclasses
import math
import re
from collections.abc import Sequence

from transformer.model.attention_backends.flash.call import tile_size
from transformer.model.config import ModelConfig
from transformer.planning.bundles import KernelCycles
from transformer.planning.hlo import Instruction
from transformer.planning.model_flops import allowed_share


@dataclasses.dataclass(frozen=True)
class KernelWork:
    """The work of one kernel call."""

    flops: float = 0.0  # multiplications and additions
    untouched: float = 0.0  # bytes of operands and results that it neither reads nor writes
    cycles: float = 0.0  # of its scheduled instructions, all cores together; 0: unknown


def kernel(op: Instruction, model: ModelConfig, known: Sequence[KernelCycles] = ()) -> KernelWork:
    """Returns the work of an instruction that calls a kernel, and no work for any other.

    `known` are the kernels whose cycles were counted (cycles.py).
    """
    if match := re.match(r"flash_(forward|backward)", op.name):
        key = match.group(), tuple(_operands(op)), len(op.arrays)
        cycles = [x.cycles for x in known if key == (x.name, x.operands, x.results)]
        return dataclasses.replace(_attention(match.group(1), op), cycles=min(cycles, default=0.0))
    if match := re.match(r"t?gmm\b", op.name):
        return _grouped(match.group(), op, model)
    return KernelWork()


def _attention(part: str, op: Instruction) -> KernelWork:
    """Returns the work of flash attention over the tiles that the mask can allow.

    The forward pass computes 2 products over queries and keys, and the backward pass 5. Those with
    a position scheme's tables are not counted.
    """
    arrays = [dims for _, dims in _operands(op) if len(dims) > 2]
    (*heads, queries, size), (*_, keys, _), (*_, d_value) = arrays[:3]
    share = allowed_share(op.source, tile_size(queries))
    # Width d_head: q k, and the gradients of q and k. Width d_value: w v, and the gradients of w
    # and v.
    by_keys, by_values = {"forward": (1, 1), "backward": (3, 2)}[part]
    width = by_keys * size + by_values * d_value
    return KernelWork(2.0 * math.prod(heads) * queries * keys * share * width)


def _grouped(part: str, op: Instruction, model: ModelConfig) -> KernelWork:
    """Returns the work of a grouped product (`gmm`) or of its gradient by the matrices (`tgmm`).

    A grouped product multiplies rows by their experts' matrices. A device computes only the rows of
    its experts. The count assumes that the router is balanced.
    """
    (size, (rows, inner)), (_, second_shape) = _operands(op)[:2]
    result_shape = op.arrays[0].dims
    if part == "gmm":
        local_experts, outer = second_shape[0], result_shape[-1]
    else:
        local_experts, outer = result_shape[0], second_shape[-1]
    experts = max(kind.num_experts for side in model.sides for kind in _mixtures(model, side))
    local_rows = rows * local_experts / experts
    untouched = (rows - local_rows) * (inner + outer) * size
    return KernelWork(2.0 * local_rows * inner * outer, untouched)


def _mixtures(model: ModelConfig, side: str) -> list:
    kinds = [layer.feed_forward_kind for layer in model.layers(side)]
    return [kind for kind in kinds if hasattr(kind, "num_experts")]


def _operands(op: Instruction) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (bytes per element, shape) of the floating-point operands of a call."""
    layouts = op.attributes.partition("operand_layout_constraints")[2].partition("}}")[0]
    matches, sizes = re.findall(r"\b(bf16|f32)\[([\d,]+)\]", layouts), {"bf16": 2, "f32": 4}
    return [(sizes[dtype], tuple(map(int, dims.split(",")))) for dtype, dims in matches]
