"""How one outside tensor holds one or several of our parameters: a table of these is a family's weights.

Our kernels are [inputs..., outputs...], with heads as axes of their own; a PyTorch linear layer is [outputs, inputs]. Paths of
ours are those of unrolled layers (`decoder/layers_3/...`), whatever the layout of the model at hand.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np

from transformer.model.config import ModelConfig

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """The tensor `theirs` holds the parameters `ours`.

    shape(shapes of ours) -> the tensor's shape; read(tensor, shapes of ours) -> ours; write(ours)
    -> tensor. The last two are each other's inverse.
    """

    theirs: str
    ours: tuple[str, ...]
    shape: Callable[[list[Shape]], Shape]
    read: Callable[[np.ndarray, list[Shape]], list[np.ndarray]]
    write: Callable[[list[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A tensor that holds the same numbers as the tensor `of`, such as a tied output layer. A file
    may do without it."""

    theirs: str
    of: str
    written: bool = (
        False  # Transformers does not tie the two: without it, it would draw new numbers
    )
    compared: bool = True  # False: Transformers does not use it, whatever it holds


def tied(config: ModelConfig, head: str, table: str) -> tuple[Copy, ...]:
    """The output layer of a language model, where it is the embedding."""
    return (Copy(head, table),) if config.tie_embeddings else ()


def same(theirs: str, ours: str) -> Weight:
    """One for one."""
    return Weight(
        theirs, (ours,), lambda shapes: shapes[0], lambda x, shapes: [x], lambda xs: xs[0]
    )


def flat(theirs: str, ours: str) -> Weight:
    """A bias, the heads of which stand side by side."""
    return Weight(
        theirs,
        (ours,),
        lambda shapes: (math.prod(shapes[0]),),
        lambda x, shapes: [x.reshape(shapes[0])],
        lambda xs: xs[0].reshape(-1),
    )


def row(theirs: str, ours: str) -> Weight:
    """A vector, as a matrix of one row."""
    return Weight(
        theirs,
        (ours,),
        lambda shapes: (1, *shapes[0]),
        lambda x, shapes: [x[0]],
        lambda xs: xs[0][None],
    )


def matrix(theirs: str, ours: str, inputs: int = 1, transposed: bool = True) -> Weight:
    """A linear layer's weight, [outputs, inputs] (or, not `transposed`, [inputs, outputs]); `inputs` axes of ours are its inputs."""
    turn = (lambda x: x.T) if transposed else (lambda x: x)
    flip = (lambda shape: shape[::-1]) if transposed else (lambda shape: shape)
    return Weight(
        theirs,
        (ours,),
        lambda shapes: flip((math.prod(shapes[0][:inputs]), math.prod(shapes[0][inputs:]))),
        lambda x, shapes: [turn(x).reshape(shapes[0])],
        lambda xs: turn(_as_matrix(xs[0], inputs)),
    )


def linear(
    theirs: str, ours: str, bias: bool, inputs: int = 1, transposed: bool = True
) -> Iterator[Weight]:
    """A linear layer: its matrix and, where it has one, its bias."""
    yield matrix(f"{theirs}.weight", f"{ours}/kernel", inputs, transposed)
    if bias:
        yield flat(f"{theirs}.bias", f"{ours}/bias")


def attention(
    theirs: str,
    ours: str,
    bias: bool,
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "out_proj"),
) -> Iterator[Weight]:
    """The four linear layers of an attention, by their names for query, key, value and output."""
    for name, part in zip(names, ("query", "key", "value", "out"), strict=True):
        yield from linear(f"{theirs}.{name}", f"{ours}/{part}", bias, inputs=1 + (part == "out"))


def norm(theirs: str, ours: str, offset: bool = True, gain: bool = True) -> Iterator[Weight]:
    """A LayerNorm or RMSNorm."""
    if gain:
        yield same(f"{theirs}.weight", f"{ours}/gain")
    if offset:
        yield same(f"{theirs}.bias", f"{ours}/offset")


def fused(
    theirs: str, ours: tuple[str, ...], bias: bool, transposed: bool = True
) -> Iterator[Weight]:
    """Several linear layers of the same inputs in one, their outputs one after another."""
    turn = (lambda x: x.T) if transposed else (lambda x: x)
    flip = (lambda shape: shape[::-1]) if transposed else (lambda shape: shape)

    def split(columns, shapes, sizes):
        parts = np.split(columns, np.cumsum(sizes)[:-1], axis=-1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    yield Weight(
        f"{theirs}.weight", tuple(f"{name}/kernel" for name in ours),
        lambda shapes: flip((shapes[0][0], sum(math.prod(s[1:]) for s in shapes))),
        lambda x, shapes: split(turn(x), shapes, [math.prod(s[1:]) for s in shapes]),
        lambda xs: turn(np.concatenate([_as_matrix(x, 1) for x in xs], axis=1)),
    )  # fmt: skip
    if bias:
        yield Weight(
            f"{theirs}.bias", tuple(f"{name}/bias" for name in ours),
            lambda shapes: (sum(map(math.prod, shapes)),),
            lambda x, shapes: split(x, shapes, [math.prod(s) for s in shapes]),
            lambda xs: np.concatenate([x.reshape(-1) for x in xs]),
        )  # fmt: skip


def fused_by_head(theirs: str, ours: tuple[str, ...], bias: bool) -> Iterator[Weight]:
    """Queries, keys and values of head 1, then of head 2, and so on: rows are [heads, 3, d_head] (GPT-NeoX, BLOOM)."""

    def read(x, shapes):  # kernel [D, N, H] from [N * 3 * H, D]
        heads, size = shapes[0][-2:]
        per_head = x.reshape(heads, len(ours), size, *x.shape[1:])
        return [
            np.moveaxis(per_head[:, i], -1, 0) if x.ndim == 2 else per_head[:, i]
            for i in range(len(ours))
        ]

    def write(xs):
        xs = [np.moveaxis(x, 0, -1) if x.ndim == 3 else x for x in xs]  # [N, H, D] or [N, H]
        joined = np.stack(xs, axis=1)
        return joined.reshape(-1, *joined.shape[3:])

    def shape(shapes):  # of kernels [D, N, H] or biases [N, H]
        *inputs, heads, size = shapes[0]
        return (heads * len(ours) * size, *inputs)

    yield Weight(f"{theirs}.weight", tuple(f"{name}/kernel" for name in ours), shape, read, write)
    if bias:
        yield Weight(f"{theirs}.bias", tuple(f"{name}/bias" for name in ours), shape, read, write)


def _as_matrix(x: np.ndarray, inputs: int) -> np.ndarray:
    return x.reshape(math.prod(x.shape[:inputs]), -1)
