"""The device mesh of a config, and the platform that JAX must run on."""

import contextlib
import importlib.util
import math
from collections.abc import Iterator

import jax
import numpy as np
from flax import linen as nn
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from transformer.errors import UserError
from transformer.parallel.config import MeshConfig
from transformer.parallel.host import accelerator, memory
from transformer.parallel.processes import start_processes
from transformer.parallel.sharding import RULES, format_bytes, local_bytes


def start(platform: str, config: MeshConfig) -> Mesh:
    """Prepares processes and platform before the first computation, and returns the mesh."""
    disable_tpu_search()
    start_processes()
    check_platform(platform)
    return make_mesh(config)


def disable_tpu_search() -> None:
    """Keeps JAX from searching, with long warnings, for a TPU if libtpu is here to plan."""
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms or not importlib.util.find_spec("libtpu") or accelerator():
        return
    with contextlib.suppress(ImportError):  # not part of JAX's public API
        from jax._src.hardware_utils import num_available_tpu_chips_and_device_id as tpus

        if not tpus()[0]:
            jax.config.update("jax_platforms", "cpu")


def check_platform(target: str) -> str:
    """Returns JAX's platform. Raises UserError if it is not the config's: no CPU by accident."""
    try:
        backend = jax.default_backend()
    except (RuntimeError, AssertionError) as e:  # AssertionError: JAX_PLATFORMS has no plugin
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        reason = (str(e).splitlines() or [f"no platform {platforms!r}"])[0]
        way_out = "check JAX_PLATFORMS, or install the extra [gpu] or [tpu]"
        raise UserError(f"platform: JAX cannot start ({reason}); {way_out}") from None
    backend = "gpu" if backend in ("cuda", "rocm") else backend
    if target == "auto" and backend == "cpu" and (kind := accelerator()):
        check = "install the extra [gpu] or [tpu] and check that no other process holds the device"
        way_out = f"{check}, or train on the CPU with --config.platform=cpu"
        raise UserError(f"platform: this machine has {kind}, but JAX found only the CPU; {way_out}")
    allowed = {"auto": (backend,), "accelerator": ("gpu", "tpu")}.get(target, (target,))
    if backend not in allowed:
        way_out = f"to train on the {backend.upper()}, set --config.platform={backend}"
        problem = f"the config sets {target!r}, but JAX runs on {backend!r}"
        raise UserError(f"platform: {problem}; {way_out}")
    return backend


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """Returns the mesh of all or these devices. Raises UserError if the axes do not fit them."""
    devices = jax.devices() if devices is None else devices
    processes, sizes = len({device.process_index for device in devices}), config.sizes
    axes = [f"mesh.{axis}={size}" for axis, size in sizes.items() if size != 1]
    wanted, found = " ".join(axes) or "one device", f"there are {len(devices)}"
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values():
        if len(devices) % fixed:
            needed = f"a multiple of {fixed} devices"
            raise UserError(f"mesh: {wanted} needs {needed}, but {found}; change the fixed axes")
        sizes = {axis: size if size > 0 else len(devices) // fixed for axis, size in sizes.items()}
    needed = math.prod(sizes.values())
    if needed > len(devices):
        found += f" ({devices[0].platform})"
        way_out = "lower an axis or set it to -1"
        raise UserError(f"mesh: {wanted} needs {needed} devices, but {found}; {way_out}")
    if needed < len(devices) and processes > 1:
        idle = f"{len(devices) - needed} of {len(devices)} devices idle"
        where = f"in a run of {processes} processes"
        raise UserError(f"mesh: {wanted} leaves {idle} {where}; set an axis to -1")
    uses_all = needed == len(devices)
    placed = arrange(sizes, config.slices, devices) if uses_all else np.asarray(devices[:needed])
    types = (AxisType.Auto,) * len(sizes)
    return Mesh(placed.reshape(*sizes.values()), tuple(sizes), axis_types=types)


def arrange(sizes: dict[str, int], across: str, devices: list) -> np.ndarray:
    """Returns the devices as an array of these sizes; neighbors in it are neighbors in the machine.
    With several TPU slices, the outer part of axis `across` spans the slices."""
    is_tpu, split = devices[0].platform == "tpu", {"allow_split_physical_axes": True}
    slices = len({getattr(device, "slice_index", 0) for device in devices}) if is_tpu else 1
    if slices == 1:
        return mesh_utils.create_device_mesh(tuple(sizes.values()), devices, **split)
    if sizes[across] % slices:
        way_out = "make it a multiple, or choose another axis with mesh.slices"
        problem = f"{sizes[across]} is not divisible by {slices} slices"
        raise UserError(f"mesh.{across}: {problem}; {way_out}")
    inner = [size // slices if axis == across else size for axis, size in sizes.items()]
    outer = [slices if axis == across else 1 for axis in sizes]
    return mesh_utils.create_hybrid_device_mesh(inner, outer, devices, **split)


def check_memory(shapes, mesh: Mesh, what: str) -> None:
    """Raises UserError if `what`, arrays of these shapes and shardings, exceed device memory."""
    needed, devices = local_bytes(shapes), mesh.local_devices
    # Simulated devices share the host's memory.
    limit = (devices[0].memory_stats() or {}).get("bytes_limit") or memory() // len(devices)
    if limit and needed > limit:
        problem = f"{what} take {format_bytes(needed)} per device, which has {format_bytes(limit)}"
        way_out = "lower model.d_model or the number of layers, or shard the model with mesh.fsdp"
        raise UserError(f"model: {problem}; {way_out}")


@contextlib.contextmanager
def use(mesh: Mesh) -> Iterator[Mesh]:
    """Sets the mesh and the sharding rules: computations traced inside are sharded."""
    with jax.set_mesh(mesh), nn.logical_axis_rules(RULES):
        yield mesh
