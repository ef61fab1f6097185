"""The plan of an experiment on a machine: memory, least time of a step and the run, and price."""

import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

import jax

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.mapping import to_mapping
from transformer.output import elapsed
from transformer.parallel.sharding import local_bytes
from transformer.planning.bundles import KernelCycles
from transformer.planning.chips import Topology
from transformer.planning.hlo import kept, largest
from transformer.planning.model_flops import model_flops
from transformer.planning.programs import PROGRAMS, Compiled, Programs, TooLarge
from transformer.planning.roofline import Roofline, roofline
from transformer.planning.work import kernel


class Part(NamedTuple):
    """One program: its memory and work, or `too_large` if the compiler could not fit it."""

    memory: dict[str, float]  # bytes on a device, by kind; the sum is the peak
    roofline: Roofline | None
    compiled: Compiled | None
    too_large: TooLarge | None = None

    @property
    def peak(self) -> float:
        return self.too_large.needed if self.too_large else sum(self.memory.values())


class Plan(NamedTuple):
    """The plan of an experiment on a machine that you do not have."""

    config: Experiment
    topology: Topology
    mesh: dict[str, int]
    parameters: int
    model_flops: float  # of a training step
    tokens: int  # of a training step
    parts: dict[str, Part]
    price: float | None = None  # of one chip for one hour
    kernels: Sequence[KernelCycles] = ()  # the attention kernels of a training step, if counted

    @property
    def kernel_cycles(self) -> float:
        """The cycles of all attention kernels in a training step; 0 if one is not known."""
        each = [kernel.calls * kernel.cycles for kernel in self.kernels]
        return sum(each) if all(each) else 0.0

    @property
    def train(self) -> Part | None:
        return self.parts.get("train")

    @property
    def room(self) -> float:
        """Bytes of HBM per JAX device."""
        return self.topology.chip.hbm / self.topology.chip.devices

    def fits_in(self, part: Part) -> bool:
        """Whether a device has room for a program. Temporaries count if a TPU's, not if a CPU's."""
        held = sum(part.memory.values())
        if not self.topology.is_tpu:
            held -= part.memory.get("temporaries", 0)
        return not part.too_large and (not self.room or held <= self.room)

    @property
    def fits(self) -> bool:
        return all(map(self.fits_in, self.parts.values()))

    @property
    def step(self) -> float | None:
        """The least seconds of a training step."""
        return self.train.roofline.step if self.train and self.train.roofline else None

    @property
    def mfu(self) -> float | None:
        """The largest possible model FLOPs utilization (Chowdhery et al. 2022). That is the model's
        FLOPs, relative to those that the chips could compute in a step's time."""
        chips, flops = self.topology.chips, self.topology.chip.flops
        return self.step and self.model_flops / (self.step * chips * flops)

    @property
    def run(self) -> dict[str, float]:
        """Seconds, chip-hours and, with a price, money of the whole run at that pace."""
        if not self.step:
            return {}
        seconds = self.step * self.config.train.steps
        hours = seconds / 3600 * self.topology.chips
        money = {} if self.price is None else {"money": hours * self.price}
        return {"seconds": seconds, "chip_hours": hours} | money

    def to_json(self) -> dict:
        def part_to_json(part: Part) -> dict:
            fits = self.fits_in(part)
            entry = {"peak_bytes": part.peak, "fits": fits, "memory_bytes": part.memory}
            if part.compiled:
                roof, buffers = part.roofline, largest(part.compiled.program, 12)
                entry |= {
                    "compile_seconds": part.compiled.seconds, "attention": part.compiled.attention,
                    "flops": roof.flops, "hbm_bytes": roof.hbm_bytes,
                    "seconds_at_least": roof.seconds, "bound_by": roof.bound,
                    "collectives": {k: dataclasses.asdict(x) for k, x in roof.traffic.items()},
                    "largest_buffers": [[*sizes, name_of(source)] for *sizes, source in buffers],
                }  # fmt: skip
            return entry

        return {
            "topology": str(self.topology), "chip": self.topology.chip.title,
            "chips": self.topology.chips, "mesh": self.mesh, "hbm_bytes": self.room,
            "parameters": self.parameters, "tokens_per_step": self.tokens,
            "model_flops_per_step": self.model_flops,
            "model_flops_per_token": self.model_flops / self.tokens,
            "step_seconds_at_least": self.step, "mfu_at_most": self.mfu, "run": self.run,
            "kernels": [dataclasses.asdict(kernel) for kernel in self.kernels],
            "kernel_cycles": self.kernel_cycles, "price_per_chip_hour": self.price,
            "programs": {name: part_to_json(part) for name, part in self.parts.items()},
            "config": to_mapping(self.config),
        }  # fmt: skip


def make_plan(
    config: Experiment, topology: Topology, devices: list, *, only: Sequence[str] = PROGRAMS,
    price: float | None = None, kernels: Sequence[KernelCycles] = (), report=lambda line: None,
) -> Plan:  # fmt: skip
    """Compiles the programs in `only` and returns their plan. `report` receives lines of progress.
    `kernels` bound the time (cycles.py). Raises UserError if the layout is impossible."""
    programs = Programs(config, devices)
    mesh_devices, parts = list(programs.mesh.devices.flat), {}
    names = [name for name in programs.names if name in only]
    if not names:
        way_out = f"choose from {', '.join(programs.names)}"
        raise UserError(f"--only: this experiment has no program {' or '.join(only)}; {way_out}")
    for name in names:
        report(f"compiling {name} for {topology} ...")
        held = {"parameters": programs.state.params}
        if name == "train":
            held |= {"optimizer": programs.state.opt_state, "moving average": programs.state.ema}
        memory = {kind: local_bytes(x) for kind, x in held.items() if x is not None}
        try:
            with elapsed("elapsed"):
                compiled = programs.compile(name)
        except TooLarge as e:
            parts[name] = Part(memory, None, None, e)
            continue
        memory["cache and inputs"], used = compiled.inputs, compiled.memory
        memory["padding"] = max(used.argument_size_in_bytes - sum(memory.values()), 0)
        if name == "train":
            memory["activations"] = min(kept(compiled.program), used.temp_size_in_bytes)
        memory["temporaries"] = used.temp_size_in_bytes - memory.get("activations", 0)
        # Some results reuse the memory of an argument.
        results = used.output_size_in_bytes - used.alias_size_in_bytes
        memory["results, code"] = results + used.generated_code_size_in_bytes
        work = lambda op: kernel(op, config.model, kernels)
        roof = roofline(compiled.program, topology, mesh_devices, work)
        parts[name] = Part(memory, roof, compiled)
    params, mesh = programs.state.params, dict(programs.mesh.shape)
    parameters = sum(x.size for x in jax.tree.leaves(params))
    flops, tokens = model_flops(config, programs.batch, params), programs.tokens
    return Plan(config, topology, mesh, parameters, flops, tokens, parts, price, kernels)


def name_of(where: str) -> str:
    """Returns a readable name: `state.params['decoder']['layers']` -> `params/decoder/layers`."""
    where = re.sub(r"\[\\*['\"]?([^\]'\"\\]*)\\*['\"]?\]", r"/\1", where.removeprefix("state."))
    return re.sub(r"^jit\(\w+\)/", "", where)
