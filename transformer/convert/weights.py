"""Mappings between outside tensors and our parameters. The weights of a family are a table of them.

An outside tensor holds one or several of our parameters. Our kernels are [inputs..., outputs...],
with heads as separate axes; a PyTorch linear layer is [outputs, inputs]. Our paths are those of
unrolled layers (`decoder/layers_3/...`), whatever the layout of the model.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from transformer.model.config import ModelConfig

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Weight:
    """The outside tensor `theirs`, which holds our parameters `ours`.

    `shape(shapes of ours)` returns the tensor's shape, `read(tensor, shapes of ours)` our
    parameters, and `write(ours)` the tensor. `read` and `write` are inverse to each other.
    """

    theirs: str
    ours: tuple[str, ...]
    shape: Callable[[list[Shape]], Shape]
    read: Callable[[np.ndarray, list[Shape]], list[np.ndarray]]
    write: Callable[[list[np.ndarray]], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Copy:
    """A tensor with the same numbers as the tensor `of`, such as a tied output layer.

    Files may omit it.
    """

    theirs: str
    of: str
    written: bool = False
    """Whether to write it. Needed where Transformers does not tie the two: it would initialize a
    missing tensor at random."""

    compared: bool = True
    """Whether its numbers must equal those of `of`. False where Transformers ignores the tensor."""


def tied(config: ModelConfig, head: str, table: str) -> tuple[Copy, ...]:
    """Returns the output layer of a language model as a copy of the embedding, if they are tied."""
    return (Copy(head, table),) if config.tie_embeddings else ()


def expert(ours: str, index: int) -> str:
    """Returns the path of one expert's part of a parameter of all experts, [experts, ...]."""
    return f"{ours}#{index}"


def by_expert(shapes: Mapping[str, Shape], parts: Iterable[str]) -> dict[str, Shape]:
    """Returns the shapes by path, where those of `parts` that `expert` returned replace the whole.

    `shapes` are those of whole parameters.
    """
    whole = {part: part.partition("#")[0] for part in parts if "#" in part}
    others = {name: shape for name, shape in shapes.items() if name not in whole.values()}
    return others | {part: shapes[name][1:] for part, name in whole.items()}


def same(theirs: str, ours: str) -> Weight:
    """A tensor that holds one parameter unchanged."""
    return Weight(
        theirs, (ours,), lambda shapes: shapes[0], lambda x, shapes: [x], lambda xs: xs[0]
    )


def flat(theirs: str, ours: str) -> Weight:
    """A bias whose heads are flattened into one axis."""
    return Weight(
        theirs,
        (ours,),
        lambda shapes: (math.prod(shapes[0]),),
        lambda x, shapes: [x.reshape(shapes[0])],
        lambda xs: xs[0].reshape(-1),
    )


def row(theirs: str, ours: str) -> Weight:
    """A vector, stored as a matrix with one row."""
    return Weight(
        theirs,
        (ours,),
        lambda shapes: (1, *shapes[0]),
        lambda x, shapes: [x[0]],
        lambda xs: xs[0][None],
    )


def matrix(theirs: str, ours: str, inputs: int = 1, transposed: bool = True) -> Weight:
    """The matrix of a linear layer, [outputs, inputs], or [inputs, outputs] if not `transposed`.

    The first `inputs` axes of our kernel are its inputs.
    """
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
    """Yields the matrix of a linear layer and, with `bias`, its bias."""
    yield matrix(f"{theirs}.weight", f"{ours}/kernel", inputs, transposed)
    if bias:
        yield flat(f"{theirs}.bias", f"{ours}/bias")


def attention(
    theirs: str,
    ours: str,
    bias: bool,
    names: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "out_proj"),
) -> Iterator[Weight]:
    """Yields the four linear layers of attention. `names`: of query, key, value and output."""
    for name, part in zip(names, ("query", "key", "value", "out"), strict=True):
        yield from linear(f"{theirs}.{name}", f"{ours}/{part}", bias, inputs=1 + (part == "out"))


def norm(theirs: str, ours: str, offset: bool = True, gain: bool = True) -> Iterator[Weight]:
    """Yields the gain and offset of a LayerNorm or RMSNorm."""
    if gain:
        yield same(f"{theirs}.weight", f"{ours}/gain")
    if offset:
        yield same(f"{theirs}.bias", f"{ours}/offset")


def fused(
    theirs: str, ours: tuple[str, ...], bias: bool, transposed: bool = True
) -> Iterator[Weight]:
    """Yields several linear layers with the same inputs as one, with concatenated outputs."""
    turn = (lambda x: x.T) if transposed else (lambda x: x)
    flip = (lambda shape: shape[::-1]) if transposed else (lambda shape: shape)

    def split(columns, shapes, sizes):
        parts = np.split(columns, np.cumsum(sizes)[:-1], axis=-1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    yield Weight(
        f"{theirs}.weight",
        tuple(f"{name}/kernel" for name in ours),
        lambda shapes: flip((shapes[0][0], sum(math.prod(s[1:]) for s in shapes))),
        lambda x, shapes: split(turn(x), shapes, [math.prod(s[1:]) for s in shapes]),
        lambda xs: turn(np.concatenate([_as_matrix(x, 1) for x in xs], axis=1)),
    )
    if bias:
        yield Weight(
            f"{theirs}.bias",
            tuple(f"{name}/bias" for name in ours),
            lambda shapes: (sum(map(math.prod, shapes)),),
            lambda x, shapes: split(x, shapes, [math.prod(s) for s in shapes]),
            lambda xs: np.concatenate([x.reshape(-1) for x in xs]),
        )


def fused_by_head(theirs: str, ours: tuple[str, ...], bias: bool) -> Iterator[Weight]:
    """Yields the query, key and value layers as one, interleaved by head (GPT-NeoX, BLOOM).

    The rows of its matrix are [heads, 3, d_head].
    """

    def read(x, shapes):  # kernel [D, N, H] from [N * 3 * H, D]
        heads, size = shapes[0][-2:]
        per_head = x.reshape(heads, len(ours), size, *x.shape[1:])
        parts = [per_head[:, i] for i in range(len(ours))]
        return [np.moveaxis(part, -1, 0) for part in parts] if x.ndim == 2 else parts

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
