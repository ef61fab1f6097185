"""Mappings between outside tensors and our parameters. The weights of a family are a table of them.

An outside tensor holds one or several of our parameters. Our kernels are [inputs..., outputs...],
with heads as separate axes; a PyTorch linear layer is [outputs, inputs]. Our paths are those of
unrolled layers (`decoder/layers_3/...`), whatever the layout of the model."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

Shape = tuple[int, ...]
QKV = ("query", "key", "value")  # the linear layers at the start of attention


@dataclasses.dataclass(frozen=True)
class Weight:
    """The outside tensor `theirs`, which holds our parameters `ours`."""

    theirs: str
    ours: tuple[str, ...]
    shape: Callable[[list[Shape]], Shape]  # shapes of ours -> the tensor's
    read: Callable[[np.ndarray, list[Shape]], list[np.ndarray]]  # (tensor, shapes of ours) -> ours
    write: Callable[[list[np.ndarray]], np.ndarray]  # the inverse of `read`


@dataclasses.dataclass(frozen=True)
class Copy:
    """A tensor equal to the tensor `of`, such as a tied output layer. Files may omit it."""

    theirs: str
    of: str
    written: bool = False  # needed where Transformers would initialize a missing tensor at random
    compared: bool = True  # its numbers must be those of `of`; False where Transformers ignores it


def expert(ours: str, index: int) -> str:
    """Returns the path of one expert's part of a parameter of all experts, [experts, ...]."""
    return f"{ours}#{index}"


def by_expert(shapes: Mapping[str, Shape], parts: Iterable[str]) -> dict[str, Shape]:
    """Returns shapes by path, where those of `parts` that `expert` returned replace the whole."""
    whole = {part: part.partition("#")[0] for part in parts if "#" in part}
    others = {name: shape for name, shape in shapes.items() if name not in whole.values()}
    return others | {part: shapes[name][1:] for part, name in whole.items()}


def same(theirs: str, ours: str) -> Weight:
    """A tensor that holds one parameter unchanged."""
    return _joined(theirs, (ours,), lambda shape: shape)


def vector(theirs: str, *ours: str) -> Weight:
    """Biases whose heads are flattened into one axis, concatenated."""
    return _joined(theirs, ours, lambda shape: (math.prod(shape),))


def matrix(theirs: str, *ours: str, inputs: int = 1, transposed: bool = True) -> Weight:
    """The matrix of a linear layer, [outputs, inputs], or [inputs, outputs] if not `transposed`.
    The first `inputs` axes of our kernels are their inputs. Outputs of several are concatenated."""
    as_matrix = lambda shape: (math.prod(shape[:inputs]), math.prod(shape[inputs:]))
    return _joined(theirs, ours, as_matrix, transposed)


def _joined(
    theirs: str, ours: tuple[str, ...], reshaped: Callable, transposed=False, merged=False
) -> Weight:
    """Parameters that are reshaped (`reshaped`: shape -> new shape), then concatenated along their
    last axis. `merged`: the last two axes become one. `transposed`: as a matrix, transposed."""

    def concatenated(shapes):
        parts = [reshaped(shape) for shape in shapes]
        return (*parts[0][:-1], sum(part[-1] for part in parts))

    def shape(shapes):
        joined = concatenated(shapes)
        joined = (*joined[:-2], joined[-2] * joined[-1]) if merged else joined
        return joined[::-1] if transposed else joined

    def read(x, shapes):
        x = (x.T if transposed else x).reshape(concatenated(shapes))
        ends = np.cumsum([reshaped(shape)[-1] for shape in shapes])
        parts = np.split(x, ends[:-1], axis=-1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    def write(xs):
        parts = [x.reshape(reshaped(x.shape)) for x in xs]
        x = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
        x = x.reshape(*x.shape[:-2], -1) if merged else x
        return x.T if transposed else x

    return Weight(theirs, ours, shape, read, write)


def linear(theirs: str, ours: str, bias: bool, inputs=1, transposed=True) -> Iterator[Weight]:
    """Yields the matrix of a linear layer and, with `bias`, its bias."""
    yield matrix(f"{theirs}.weight", f"{ours}/kernel", inputs=inputs, transposed=transposed)
    if bias:
        yield vector(f"{theirs}.bias", f"{ours}/bias")


def attention(
    theirs: str, ours: str, bias: bool, names=("q_proj", "k_proj", "v_proj", "out_proj")
) -> Iterator[Weight]:
    """Yields the four linear layers of attention. `names`: of query, key, value and output."""
    for name, part in zip(names, (*QKV, "out"), strict=True):
        yield from linear(f"{theirs}.{name}", f"{ours}/{part}", bias, inputs=1 + (part == "out"))


def norm(theirs: str, ours: str, offset: bool = True, gain: bool = True) -> Iterator[Weight]:
    """Yields the gain and offset of a LayerNorm or RMSNorm."""
    if gain:
        yield same(f"{theirs}.weight", f"{ours}/gain")
    if offset:
        yield same(f"{theirs}.bias", f"{ours}/offset")


def fused(theirs: str, ours: str, bias: bool, parts=QKV, transposed=True) -> Iterator[Weight]:
    """Yields the linear layers `parts` of `ours`, with the same inputs, as one: outputs joined."""
    yield matrix(f"{theirs}.weight", *(f"{ours}/{x}/kernel" for x in parts), transposed=transposed)
    if bias:
        yield vector(f"{theirs}.bias", *(f"{ours}/{x}/bias" for x in parts))


def interleaved(theirs: str, *ours: str) -> Weight:
    """Parameters of the same shape, whose entries alternate along the last axis."""
    return _joined(theirs, ours, lambda shape: (*shape, 1), merged=True)


def fused_by_head(theirs: str, ours: str, bias: bool) -> Iterator[Weight]:
    """Yields query, key and value layers as one, with rows [heads, 3, d_head] (NeoX, BLOOM)."""
    by_head = lambda shape: shape  # of kernels [D, N, H] or biases [N, H]
    for name, kind in (("weight", "kernel"), ("bias", "bias"))[: 1 + bias]:
        parts = tuple(f"{ours}/{part}/{kind}" for part in QKV)
        yield _joined(f"{theirs}.{name}", parts, by_head, transposed=True, merged=True)
