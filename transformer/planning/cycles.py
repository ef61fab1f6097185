"""The cycles of an experiment's attention kernels on a TPU, from the TPU compiler's schedules.

    python -m transformer plan --config=FILE.py --topology=v5e-16 --kernels

The kernels are found in the traced training step, and each is compiled alone. libtpu writes
schedules only if it is loaded with certain flags (bundles.py), so this runs in its own process. A
kernel is not analyzed if its loops are not those of transformer/model/attention_backends/flash/."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

from transformer.config import Experiment
from transformer.config_io import load_arms, load_experiment
from transformer.errors import UserError
from transformer.planning import programs
from transformer.planning.bundles import KernelCycles, dump_flags, head_cycles, read
from transformer.planning.chips import topology
from transformer.planning.model_flops import equations, mask_of, tile_counts


def _analyze(equation, scope: str, device, folder: Path) -> KernelCycles:
    placed, name = jax.sharding.SingleDeviceSharding(device), equation.params["name"]
    shapes = [(x.aval.shape, x.aval.dtype) for x in equation.invars]
    args = [jax.ShapeDtypeStruct(*shape, sharding=placed) for shape in shapes]
    run = jax.named_scope(name)(lambda *args: equation.primitive.bind(*args, **equation.params))
    operands = tuple((dtype.itemsize, shape) for shape, dtype in shapes if dtype.kind != "i")
    B, N = operands[0][1][:2]
    vmem = equation.params["compiler_params"].vmem_limit_bytes or 0
    kernel = KernelCycles(name, operands, len(equation.outvars), B * N, vmem)
    vectors = [shape for _, shape in operands if shape[:2] == (N, 8) and len(shape) == 3]
    chunks = vectors[0][-1] // 128 - 1 if vectors else 0
    masked, full = tile_counts(scope)
    for path in folder.iterdir():
        path.unlink()
    jax.jit(run).lower(*args).compile()
    try:
        schedule, blocks = read(folder, name), equation.params["grid_mapping"].grid[-1]
        (_, tile), of_sequence, of_head = head_cycles(schedule, blocks, chunks, masked, full)
    except ValueError:  # other loops, or no schedule
        return kernel
    spills = round(sum(schedule.busy(tile, x) * schedule.slots[x] for x in ("SPILL", "FILL")))
    counts = {"products": schedule.busy(tile, "MXU"), "spills": spills, "trips": masked + full}
    cycles = B * N * of_sequence + N * of_head
    return dataclasses.replace(kernel, bundles=tile.own, cycles=cycles, **counts)


def _kernels(config: Experiment, devices: list, folder: Path, done: dict) -> list[KernelCycles]:
    """Returns the attention kernels of a training step. `done` keeps them for other arms."""
    calls: dict[str, float] = {}
    for equation, times, scope in equations(programs.Programs(config, devices).trace("train")):
        if equation.primitive.name == "pallas_call" and "flash_" in equation.params["name"]:
            key = f"{mask_of(scope)} {[x.aval for x in equation.invars]} {equation.params}"
            calls[key] = calls.get(key, 0.0) + times
            if key not in done:
                done[key] = _analyze(equation, scope, devices[0], folder)
    return [dataclasses.replace(done[key], calls=times) for key, times in calls.items()]


def measure(
    file: str, overrides: dict[str, str], machine: str, slices: int = 1, arms: bool = False
) -> dict[str, list[KernelCycles]]:
    """Returns arm -> the attention kernels of its training step; without `arms`, "" -> kernels."""
    with tempfile.TemporaryDirectory() as folder:
        request = json.dumps([file, overrides, machine, slices, arms, folder])
        child = [sys.executable, "-m", "transformer.planning.cycles", request]
        flags = {"LIBTPU_INIT_ARGS": dump_flags(Path(folder) / "schedules")}
        ended = subprocess.run(child, env=os.environ | flags, capture_output=True, text=True)
        if ended.returncode:
            reason = (ended.stderr.strip().splitlines() or ["no message"])[-1][:300]
            raise UserError(f"--kernels: kernels could not be compiled ({reason}); leave it out")
        return pickle.loads((Path(folder) / "kernels").read_bytes())


def main() -> None:
    """Writes what `measure` returns to a file."""
    file, overrides, machine, slices, arms, folder = json.loads(sys.argv[1])
    devices, schedules = programs.start(topology(machine, slices)), Path(folder) / "schedules"
    schedules.mkdir()
    configs = load_arms(file, overrides)[1] if arms else {"": load_experiment(file, overrides)}
    done: dict[str, KernelCycles] = {}
    found = {arm: _kernels(config, devices, schedules, done) for arm, config in configs.items()}
    (Path(folder) / "kernels").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
