"""The table from logical names to mesh axes, with shardings, checks and a summary derived from it.

Parameters and activations carry logical names. This table alone maps them to the mesh axes of
MeshConfig: `fsdp` is ZeRO-3, and `tensor` is that of Megatron. The batch is sharded over all axes
that would otherwise hold copies of the same sequences."""

import dataclasses
import functools
import math

import jax
import numpy as np
from flax.core import meta
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from transformer.errors import UserError, nearest

RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    # parameters
    ("vocab", "tensor"), ("heads", "tensor"), ("kv_heads", "tensor"), ("ff", "tensor"),
    ("transform", "tensor"), ("embed", "fsdp"), ("layers", "stage"), ("expert", "expert"),
    ("head", None), ("rounds", None), ("positions", None), ("buckets", None), ("norm", None),
    ("streams", None),  # weights of residual streams
    # activations
    ("batch", ("data", "stage", "fsdp", "expert")), ("length", "context"),
    ("stream", ("context", "tensor")),  # at norms and dropout (Korthikanti et al. 2022)
    ("expert_batch", ("data", "stage", "fsdp")),  # sequences dispatched to their experts
    ("capacity", None),  # the capacity slots of experts
    ("activation_heads", "tensor"), ("activation_ff", "tensor"), ("activation_vocab", "tensor"),
    ("activation_embed", None),
)  # fmt: skip

BATCH_AXES = dict(RULES)["batch"]  # the mesh axes that shard the batch
BATCH = P(BATCH_AXES)


def batch_parts(sizes: dict[str, int]) -> int:
    """Returns the number of parts into which a mesh of these sizes splits a batch."""
    return math.prod(sizes[axis] for axis in BATCH_AXES)


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of a batch that this process reads: of `parts` equal parts, those of its devices."""

    mesh: Mesh

    @property
    def parts(self) -> int:
        return batch_parts(self.mesh.shape)

    @functools.cached_property
    def here(self) -> list[int]:
        """The indices of this process's parts."""
        slices = NamedSharding(self.mesh, BATCH).addressable_devices_indices_map((self.parts,))
        return sorted({part.start or 0 for (part,) in slices.values()})

    def sequences(self, count: int) -> np.ndarray:
        """Returns the indices of this process's sequences in a batch of `count` sequences."""
        size = count // self.parts
        return np.concatenate([np.arange(part * size, (part + 1) * size) for part in self.here])

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns the global, sharded batch, of which `batch` holds this process's sequences."""
        sharding = NamedSharding(self.mesh, BATCH)
        if jax.process_count() == 1:
            return jax.device_put(batch, sharding)
        total = lambda x: (len(x) // len(self.here) * self.parts, *x.shape[1:])
        shapes = {name: total(x) for name, x in batch.items()}
        return jax.make_array_from_process_local_data(sharding, batch, shapes)


def place(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Returns a sharded array, of which every process holds the whole value `x`."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def is_box(x) -> bool:
    """Returns whether `x` is a parameter boxed with the logical names of its axes."""
    return isinstance(x, meta.AxisMetadata)


def path_name(path) -> str:
    """Returns a tree path as a string: `params/decoder/layers/...`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def shardings(abstract_boxed, mesh: Mesh):
    """Returns a NamedSharding for every leaf of a boxed abstract tree. Raises UserError for an
    array without logical names, an unknown name, two dimensions on one axis, or uneven parts."""
    table = dict(RULES)

    def sharding_of(path, leaf):
        wrong = lambda problem: UserError(f"{path_name(path)}: {problem}")
        if not is_box(leaf):
            if leaf.size > 1:
                way_out = "wrap its initializer in nn.with_logical_partitioning(initializer, names)"
                raise wrong(f"a parameter without logical axes; {way_out}")
            return NamedSharding(mesh, P())
        names, shape = leaf.names, leaf.value.shape
        if len(names) != len(shape):  # a statistic unlike its parameter (Adafactor)
            return NamedSharding(mesh, P())
        spec, used = [], set()
        for name, size in zip(names, shape, strict=True):
            if name is not None and name not in table:
                way_out = nearest(name, table)
                raise wrong(f"the sharding table has no logical name {name!r}; {way_out}")
            axes = table.get(name)
            axes = (axes,) if isinstance(axes, str) else axes or ()
            # A dimension of size 1, such as a single head, is replicated.
            axes = tuple(axis for axis in axes if mesh.shape[axis] > 1) if size > 1 else ()
            if clash := used & set(axes):
                problem = f"two of its dimensions {names} map to mesh axis {clash.pop()!r}"
                raise wrong(f"{problem}; change a name or RULES")
            if size % (parts := math.prod(mesh.shape[axis] for axis in axes)):
                devices = " x ".join(f"mesh.{axis}={mesh.shape[axis]}" for axis in axes)
                problem = f"size {size} is not divisible by {parts} devices ({devices})"
                raise wrong(f"dimension {name!r} of {problem}; change the size or the mesh")
            used |= set(axes)
            spec.append(axes if len(axes) > 1 else axes[0] if axes else None)
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(sharding_of, abstract_boxed, is_leaf=is_box)


def format_bytes(n: float) -> str:
    """Formats a number of bytes: 1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def local_bytes(tree) -> int:
    """Returns the bytes of these sharded arrays, or of their shapes, that a device holds."""
    size = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(map(size, jax.tree.leaves(tree)))


def unbox(tree):
    """Returns the arrays (or their shapes) without their logical names."""
    return jax.tree.map(lambda x: x.value if is_box(x) else x, tree, is_leaf=is_box)
