"""The device mesh of a config, and the platform it must be on."""

import contextlib
import glob
import importlib.util
import math
import shutil
from collections.abc import Iterator

import jax
import numpy as np
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from transformer.errors import UserError
from transformer.parallel.config import MeshConfig
from transformer.parallel.host import keep_freed_memory, memory
from transformer.parallel.processes import start_processes
from transformer.parallel.sharding import RULES, human_bytes


def start(platform: str, config: MeshConfig) -> Mesh:
    """Everything about the machine, before the first computation: the host set, processes joined, the platform checked, the mesh made."""
    if not _accelerator_on_this_machine():
        keep_freed_memory()  # before JAX starts its threads, each of which would take an arena of its own
    look_for_no_tpu()
    start_processes()
    check_platform(platform)
    return make_mesh(config)


def look_for_no_tpu() -> None:
    """Before JAX's first computation: where libtpu is there to plan with alone, it would look for a TPU, and complain at length."""
    here = not jax.config.jax_platforms and importlib.util.find_spec("libtpu")
    if here and not _accelerator_on_this_machine() and _no_tpu():
        jax.config.update("jax_platforms", "cpu")


def check_platform(wanted: str) -> str:
    """The platform JAX runs on. Raises UserError where that is not what the config asks for: never train on CPU by accident."""
    try:
        found = jax.default_backend()
    except (
        RuntimeError,
        AssertionError,
    ) as e:  # JAX asserts where JAX_PLATFORMS names what it has no plugin for
        reason = (str(e).splitlines() or [f"no platform {jax.config.jax_platforms!r} here"])[0]
        raise UserError(
            f"platform: JAX cannot start ({reason}); see JAX_PLATFORMS, and the extras [gpu] and [tpu]"
        ) from None
    found = "gpu" if found in ("cuda", "rocm") else found
    if wanted == "auto" and found == "cpu" and (seen := _accelerator_on_this_machine()):
        raise UserError(
            f"platform: this machine has {seen}, but JAX found only the CPU (install the extra [gpu] or [tpu], "
            "and see that no other process holds the device); to train on the CPU all the same: --config.platform=cpu"
        )
    allowed = {"auto": (found,), "accelerator": ("gpu", "tpu")}.get(wanted, (wanted,))
    if found not in allowed:
        raise UserError(
            f"platform: {wanted!r} is asked for, but JAX runs on {found!r} here; for that: --config.platform={found}"
        )
    return found


def _accelerator_on_this_machine() -> str:
    if glob.glob("/dev/nvidia[0-9]*") or shutil.which("nvidia-smi"):
        return "an NVIDIA GPU"
    return "a TPU" if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") else ""


def _no_tpu() -> bool:
    """Whether no TPU is on the bus, as JAX itself looks for one."""
    try:
        from jax._src.hardware_utils import num_available_tpu_chips_and_device_id as chips
    except ImportError:  # it is no part of JAX's public surface
        return False
    return not chips()[0]


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """The mesh, axes in the config's order, of these devices (all of this machine). Raises UserError if it needs more than there are."""
    devices = jax.devices() if devices is None else devices
    processes = len({device.process_index for device in devices})
    sizes = config.sizes
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if len(devices) % fixed:
            raise UserError(
                f"mesh: the given axes take {fixed} devices, which does not divide the {len(devices)} there are; {_spell(sizes)}"
            )
        sizes = {
            axis: len(devices) // fixed if size == -1 else size for axis, size in sizes.items()
        }
    needed = math.prod(sizes.values())
    if needed > len(devices):
        raise UserError(
            f"mesh: {_spell(sizes)} needs {needed} devices, but there are {len(devices)} ({devices[0].platform}); lower an axis or set it to -1"
        )
    if needed < len(devices) and processes > 1:
        raise UserError(
            f"mesh: {_spell(sizes)} leaves {len(devices) - needed} of {len(devices)} devices idle, of {processes} processes; set an axis to -1"
        )
    placed = (
        arrange(sizes, config.slices, devices)
        if needed == len(devices)
        else np.asarray(devices[:needed])
    )
    return Mesh(
        placed.reshape(*sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def arrange(sizes: dict[str, int], across: str, devices: list) -> np.ndarray:
    """The devices as an array of these sizes, neighbours in it being neighbours in the machine; of several slices of TPUs, the outer part
    of axis `across` goes from one to the next."""
    slices = (
        len({getattr(device, "slice_index", 0) for device in devices})
        if devices[0].platform == "tpu"
        else 1
    )
    if slices == 1:
        return mesh_utils.create_device_mesh(
            tuple(sizes.values()), devices, allow_split_physical_axes=True
        )
    if sizes[across] % slices:
        raise UserError(
            f"mesh.{across}: {sizes[across]} does not divide over {slices} slices; make it a multiple, or choose another axis with mesh.slices"
        )
    inner = [size // slices if axis == across else size for axis, size in sizes.items()]
    outer = [slices if axis == across else 1 for axis in sizes]
    return mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=True
    )


def check_memory(shapes, mesh: Mesh, what: str) -> None:
    """Raises UserError if `what`, arrays of these shapes and shardings, is more than a device holds, whatever else it needs."""
    needed = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(shapes)
    )
    devices = mesh.local_devices
    limit = (devices[0].memory_stats() or {}).get("bytes_limit") or memory() // len(
        devices
    )  # simulated ones share the host's
    if limit and needed > limit:
        raise UserError(
            f"model: {what} take {human_bytes(needed)} a device, which has {human_bytes(limit)}; "
            "lower model.d_model or its layers, or spread it with mesh.fsdp"
        )


def _spell(sizes: dict[str, int]) -> str:
    return (
        " ".join(f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1) or "one device"
    )


@contextlib.contextmanager
def use(mesh: Mesh) -> Iterator[Mesh]:
    """The mesh and the rules in force: what is traced inside is sharded."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        yield mesh
