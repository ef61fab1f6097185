"""What TPUs' kernels do, into which the compiler cannot look: told by their names and the shapes that they are given."""

import dataclasses
import math
import re

from transformer.model.attention_backends.splash import block_size
from transformer.model.config import ModelConfig
from transformer.planning.hlo import Instruction
from transformer.planning.model_flops import allowed_pairs


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Of one call: multiplications and additions; and of the bytes that it is given or gives, how many it never touches."""

    flops: float = 0.0
    untouched: float = 0.0


def kernel(one: Instruction, model: ModelConfig) -> Kernel:
    """What an instruction computes that is a call of a kernel; nothing, if it is not."""
    if found := re.match(r"splash_m[hq]a_(fwd|dq|dkv)", one.name):
        return _attention(found.group(1), one, model)
    if found := re.match(r"t?gmm\b", one.name):
        return _grouped(found.group(), one, model)
    return Kernel()


def _attention(part: str, one: Instruction, model: ModelConfig) -> Kernel:
    """2 products of queries and keys forward, 3 for the gradient by queries, 4 for that by keys and values, over the blocks that the mask
    does not leave out."""
    (*heads, queries, size), (*_, keys, _), (*_, d_value) = [
        dims for _, dims in _given(one) if len(dims) > 2
    ][:3]
    side = "encoder" if "/encoder/" in one.source else "decoder"
    share = (
        1.0
        if "/cross_attention" in one.source
        else allowed_pairs(model, side, queries, block_size(queries))
    )
    # By queries and keys: q k; again, and both gradients of it. By values: w v; again for d w, and the gradient by v.
    by_keys, by_values = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2)}[part]
    return Kernel(
        2.0 * math.prod(heads) * queries * keys * share * (by_keys * size + by_values * d_value)
    )


def _grouped(part: str, one: Instruction, model: ModelConfig) -> Kernel:
    """Rows times their experts' matrices (`gmm`), or the gradient by the matrices (`tgmm`): of the rows of all experts a device goes over
    its own, which are its share where the router is in balance."""
    (size, (rows, inner)), (_, second) = _given(one)[:2]
    here, outer = (
        (second[0], one.arrays[0].dims[-1])
        if part == "gmm"
        else (one.arrays[0].dims[0], second[-1])
    )
    experts = max(kind.num_experts for side in model.sides for kind in _mixtures(model, side))
    own = rows * here / experts
    return Kernel(2.0 * own * inner * outer, (rows - own) * (inner + outer) * size)


def _mixtures(model: ModelConfig, side: str) -> list:
    return [
        layer.feed_forward_kind
        for layer in model.layers(side)
        if hasattr(layer.feed_forward_kind, "num_experts")
    ]


def _given(one: Instruction) -> list[tuple[int, tuple[int, ...]]]:
    """(bytes of a number, shape) of the floating-point arrays that a call is given."""
    given = one.attributes.partition("operand_layout_constraints")[2].partition("}}")[0]
    found = re.findall(r"\b(bf16|f32)\[([\d,]+)\]", given)
    return [
        ({"bf16": 2, "f32": 4}[dtype], tuple(map(int, dims.split(",")))) for dtype, dims in found
    ]
