"""The plan of an experiment on a machine: memory, a step's time at least, the run's, its price; on a page and as JSON."""

import dataclasses
import math
import re
from collections.abc import Callable, Sequence

import jax

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.mapping import to_mapping
from transformer.planning.buffers import kept, largest
from transformer.planning.chips import Topology
from transformer.planning.kernels import kernel
from transformer.planning.model_flops import model_flops
from transformer.planning.programs import PROGRAMS, Compiled, Programs, TooLarge
from transformer.planning.roofline import Roofline, roofline


@dataclasses.dataclass(frozen=True)
class Part:
    """One program: what it needs and what it does; `too_large` where the compiler found no way to fit it in."""

    memory: dict[str, float]  # bytes of a device, by kind; their sum is the peak
    roofline: Roofline | None
    compiled: Compiled | None
    too_large: TooLarge | None = None

    @property
    def peak(self) -> float:
        return self.too_large.needed if self.too_large else sum(self.memory.values())


@dataclasses.dataclass(frozen=True)
class Plan:
    """An experiment on a machine that is not here."""

    config: Experiment
    topology: Topology
    mesh: dict[str, int]
    parameters: int
    model_flops: float  # of a training step
    tokens: int  # of a training step
    parts: dict[str, Part]
    price: float | None = None  # of a chip for an hour

    @property
    def train(self) -> Part | None:
        return self.parts.get("train")

    @property
    def room(self) -> float:
        """Bytes of HBM that JAX has of a device."""
        return self.topology.chip.hbm / self.topology.chip.devices

    def fits_in(self, part: Part) -> bool:
        """Whether a device has room for it. Of what another compiler than the machine's says only what must be held counts."""
        held = sum(
            size
            for kind, size in part.memory.items()
            if self.topology.is_tpu or kind != "temporaries"
        )
        return not part.too_large and (not self.room or held <= self.room)

    @property
    def fits(self) -> bool:
        return all(map(self.fits_in, self.parts.values()))

    @property
    def step(self) -> float | None:
        """Seconds of a training step at least."""
        return self.train.roofline.step if self.train and self.train.roofline else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation at most (Chowdhery et al. 2022): what the model needs, over what the chips could do in that time."""
        return self.step and self.model_flops / (
            self.step * self.topology.chips * self.topology.chip.flops
        )

    @property
    def run(self) -> dict[str, float]:
        """Of the whole run, at that pace: seconds, chip-hours, and money where there is a price."""
        if not self.step:
            return {}
        whole = self.step * self.config.train.steps
        hours = whole / 3600 * self.topology.chips
        return {"seconds": whole, "chip_hours": hours} | (
            {} if self.price is None else {"money": hours * self.price}
        )

    def to_json(self) -> dict:
        """All of it, for programs."""

        def one(part: Part) -> dict:
            found = {
                "peak_bytes": part.peak,
                "fits": self.fits_in(part),
                "memory_bytes": part.memory,
            }
            if part.compiled:
                roof = part.roofline
                found |= {
                    "compile_seconds": part.compiled.seconds, "attention": part.compiled.attention, "flops": roof.flops, "hbm_bytes": roof.hbm_bytes,
                    "seconds_at_least": roof.seconds, "bound_by": roof.bound,
                    "messages": {kind: dataclasses.asdict(traffic) for kind, traffic in roof.traffic.items()},
                    "largest_buffers": [[size, shape, name_of(where)] for size, shape, where in largest(part.compiled.program, 12)],
                }  # fmt: skip
            return found

        return {
            "topology": str(self.topology), "chip": self.topology.chip.title, "chips": self.topology.chips, "mesh": self.mesh, "hbm_bytes": self.room,
            "parameters": self.parameters, "tokens_per_step": self.tokens, "model_flops_per_step": self.model_flops,
            "model_flops_per_token": self.model_flops / self.tokens, "step_seconds_at_least": self.step, "mfu_at_most": self.mfu,
            "run": self.run, "price_per_chip_hour": self.price, "programs": {name: one(part) for name, part in self.parts.items()},
            "config": to_mapping(self.config),
        }  # fmt: skip


def make_plan(
    config: Experiment, topology: Topology, devices: list, *, only: Sequence[str] = PROGRAMS, price: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Plan:  # fmt: skip
    """Compiles what is asked for. `tell` is told what is being done. Raises UserError for what cannot be laid out on the machine."""
    programs = Programs(config, devices)
    in_order, parts = list(programs.mesh.devices.flat), {}
    if not set(only) & set(programs.names):
        raise UserError(
            f"--only: this experiment has no {' or '.join(only)}; it has {', '.join(programs.names)}"
        )
    for name in programs.names:
        if name not in only:
            continue
        tell(f"compiling {name} for {topology} ...")
        holds = _holdings(programs, name)
        try:
            compiled = programs.compile(name)
        except TooLarge as e:
            parts[name] = Part(holds, None, None, e)
            continue
        activations = min(kept(compiled.program), compiled.temporaries)
        holds["cache and inputs"] = programs.bytes(programs.inputs(name))
        holds["padding"] = max(compiled.arguments - sum(holds.values()), 0)
        holds |= {"activations": activations} if name == "train" else {}
        holds |= {
            "temporaries": compiled.temporaries - holds.get("activations", 0),
            "results, code": compiled.results + compiled.code,
        }
        parts[name] = Part(
            holds,
            roofline(compiled.program, topology, in_order, lambda one: kernel(one, config.model)),
            compiled,
        )
    batch, params = programs.batch, programs.state.params
    tokens = math.prod(batch["inputs"].shape) + (
        math.prod(batch["source"].shape) if "source" in batch else 0
    )
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    return Plan(
        config,
        topology,
        dict(programs.mesh.shape),
        parameters,
        model_flops(config, batch, params),
        tokens,
        parts,
        price,
    )


def _holdings(programs: Programs, name: str) -> dict[str, float]:
    """Bytes that a device holds before a program begins, by kind."""
    state = programs.state
    holds = {"parameters": programs.bytes(state.params)}
    if name == "train":
        holds["optimizer"] = programs.bytes(state.opt_state)
        if state.ema is not None:
            holds["moving average"] = programs.bytes(state.ema)
    return holds


def name_of(where: str) -> str:
    """Where a buffer comes from, as a person would say it: `state.params['decoder']['layers']` -> `params/decoder/layers`."""
    where = re.sub(r"\[\\*['\"]?([^\]'\"\\]*)\\*['\"]?\]", r"/\1", where.removeprefix("state."))
    return re.sub(r"^jit\(\w+\)/", "", where)
