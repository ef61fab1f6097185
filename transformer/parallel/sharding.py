"""The table from logical names to mesh axes, and what follows from it: shardings, checks, and a page to read at start.

Parameters and activations carry logical names; this table alone says where they go. Megatron's layout on `tensor`
(heads, feed-forward, vocabulary; between sublayers the tokens), ZeRO-3 on `fsdp` (every matrix along d_model), layers on `stage`, experts
on `expert`, tokens of a row on `context`; and rows of the batch on all axes that would otherwise see the same ones.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
from flax.core import meta
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from transformer.errors import UserError, nearest

RULES: tuple[tuple[str, str | tuple[str, ...] | None], ...] = (
    # parameters
    ("vocab", "tensor"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("head", None),
    ("ff", "tensor"),
    ("layers", "stage"),
    ("rounds", None),
    ("expert", "expert"),
    ("positions", None),
    ("buckets", None),
    ("norm", None),
    ("transform", "tensor"),
    # activations
    ("batch", ("data", "stage", "fsdp", "expert")),
    ("length", "context"),
    (
        "stream",
        ("context", "tensor"),
    ),  # tokens between sublayers, where norms and dropout act (Korthikanti et al. 2022)
    ("expert_batch", ("data", "stage", "fsdp")),  # rows that have come to their experts,
    ("places", None),  # and where they sit there
    ("activation_embed", None),
    ("activation_heads", "tensor"),
    ("activation_ff", "tensor"),
    ("activation_vocab", "tensor"),
)

ROWS = dict(RULES)["batch"]
"""The mesh axes that a batch's rows are spread over."""

BATCH = P(ROWS)


def row_parts(mesh: Mesh) -> int:
    """Into how many parts a batch's rows are split."""
    return math.prod(mesh.shape[axis] for axis in ROWS)


@dataclasses.dataclass(frozen=True)
class Share:
    """Which rows of a batch this process reads: of `parts` equal parts, side by side, those that its devices hold."""

    mesh: Mesh

    @property
    def parts(self) -> int:
        return row_parts(self.mesh)

    @functools.cached_property
    def here(self) -> list[int]:
        """The numbers of this process's parts."""
        slices = (
            NamedSharding(self.mesh, BATCH).addressable_devices_indices_map((self.parts,)).values()
        )
        return sorted({at.start or 0 for (at,) in slices})

    def rows(self, count: int) -> np.ndarray:
        """Of a batch of `count` rows, the numbers of this process's."""
        size = count // self.parts
        return np.concatenate([np.arange(part * size, (part + 1) * size) for part in self.here])

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """This process's rows, and everyone's, as arrays spread over the mesh."""
        sharding = NamedSharding(self.mesh, BATCH)
        if jax.process_count() == 1:
            return jax.device_put(batch, sharding)

        def one(x: np.ndarray) -> jax.Array:
            size = len(x) // len(self.here)
            shape = (size * self.parts, *x.shape[1:])
            first = {
                part * size: n * size for n, part in enumerate(self.here)
            }  # of a part: there, here
            return jax.make_array_from_callback(
                shape, sharding, lambda at: x[first[at[0].start or 0] :][:size]
            )

        return {name: one(x) for name, x in batch.items()}


def _is_box(x) -> bool:
    return isinstance(x, meta.AxisMetadata)


def path_name(path) -> str:
    """`params/decoder/layers/...` for a tree path."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path
    )


def shardings(abstract_boxed, mesh: Mesh):
    """A NamedSharding for every leaf of a boxed abstract tree. Raises UserError, with the parameter's name, for a logical name
    the table does not know, for two dimensions on one mesh axis, and for a dimension that does not divide."""
    table = dict(RULES)

    def one(path, leaf):
        if not _is_box(leaf):
            return NamedSharding(mesh, P())
        names, shape = leaf.names, leaf.value.shape
        if len(names) != len(
            shape
        ):  # a statistic with other dimensions than its parameter (Adafactor): small
            return NamedSharding(mesh, P())
        spec, used = [], set()
        for name, size in zip(names, shape, strict=True):
            if name is not None and name not in table:
                raise UserError(
                    f"{path_name(path)}: the sharding table has no logical name {name!r}; {nearest(name, table)}"
                )
            axes = table.get(name)
            axes = (axes,) if isinstance(axes, str) else axes or ()
            axes = (
                tuple(axis for axis in axes if mesh.shape[axis] > 1) if size > 1 else ()
            )  # one head: replicated
            if clash := used & set(axes):
                raise UserError(
                    f"{path_name(path)}: two of its dimensions {names} go to mesh axis {clash.pop()!r}; see RULES"
                )
            if size % (parts := math.prod(mesh.shape[axis] for axis in axes)):
                raise UserError(
                    f"{path_name(path)}: dimension {name!r} of {size} does not divide over {parts} devices "
                    f"({' x '.join(f'mesh.{a}={mesh.shape[a]}' for a in axes)}); change the size or the mesh"
                )
            used |= set(axes)
            spec.append(axes if len(axes) > 1 else axes[0] if axes else None)
        while spec and spec[-1] is None:
            spec.pop()
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(one, abstract_boxed, is_leaf=_is_box)


def describe(abstract, placed, mesh: Mesh, most: int = 6) -> str:
    """For a person: the mesh, the largest parameters with spec and bytes per device, and the total."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract)
    specs = jax.tree.leaves(placed)
    rows, total, here = [], 0, 0
    for (path, leaf), sharding in zip(leaves, specs, strict=True):
        local = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        total += math.prod(leaf.shape)
        here += local
        rows.append((math.prod(leaf.shape), path_name(path), leaf.shape, sharding.spec, local))
    rows.sort(key=lambda row: -row[0])
    mesh_line = (
        " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
        or "one device"
    )
    kind = mesh.devices.flat[0].device_kind
    lines = [f"mesh        {mesh_line}  ({mesh.size} {kind} device{'s' * (mesh.size > 1)})"]
    lines.append(f"parameters  {total:,} ({human_bytes(here)} a device)")
    for _, name, shape, spec, local in rows[:most]:
        where = ", ".join("·" if s is None else str(s) for s in spec) or "replicated"
        lines.append(
            f"            {name:<58} {'x'.join(map(str, shape)):>16}  {where:<18} {human_bytes(local):>9}"
        )
    if len(rows) > most:
        lines.append(f"            and {len(rows) - most} more")
    return "\n".join(lines)


def human_bytes(n: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def unbox(tree):
    """The arrays (or their shapes) without their logical names."""
    return jax.tree.map(lambda x: x.value if _is_box(x) else x, tree, is_leaf=_is_box)
