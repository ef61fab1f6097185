"""An experiment's programs, compiled for a machine that is not here.

For TPUs with their own compiler, which libtpu (extra [tpu]) brings without a TPU; for GPUs and CPUs with that of simulated CPU devices: it
splits arrays over devices and sends messages as theirs does, and keeps them elsewhere. On shapes alone: nothing is allocated.
"""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from transformer.config import Experiment
from transformer.decoding.prefill import advance, prefill
from transformer.errors import UserError
from transformer.model.attention_backends import record
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.planning.chips import Topology
from transformer.planning.hlo import Program
from transformer.planning.sample import batch_shapes
from transformer.runs.fits import check_rows
from transformer.training.optimizer import build_optimizer
from transformer.training.state import TrainState, abstract_state
from transformer.training.step import make_eval_step, make_train_step

PROGRAMS = ("train", "evaluate", "prefill", "decode")


class TooLarge(Exception):
    """A program needs more memory than a chip has. `needed` bytes, as the compiler says."""

    def __init__(self, needed: float, buffers: list[tuple[float, str, str]]):
        super().__init__(f"{needed:.3g} bytes")
        self.needed, self.buffers = needed, buffers


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program, what it does, and the bytes a device needs for it."""

    program: Program
    arguments: int
    results: int  # beyond those that take their argument's place
    temporaries: int
    code: int
    attention: dict[str, str]  # backend -> why not another
    seconds: float  # to compile it

    @property
    def peak(self) -> int:
        return self.arguments + self.results + self.temporaries + self.code


def start(topology: Topology) -> list:
    """The devices of a machine that is not here. To be called before JAX's first computation. Raises UserError without libtpu, or for a
    shape that there is not."""
    jax.config.update("jax_platforms", "cpu")
    if not topology.is_tpu:
        with contextlib.suppress(RuntimeError):  # a process that has begun has its devices
            jax.config.update("jax_num_cpu_devices", topology.devices)
        found = jax.devices()
        if len(found) < topology.devices:
            raise UserError(
                f"--topology: {topology} has {topology.devices} devices, but this process has begun with {len(found)}"
            )
        return found[: topology.devices]
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "--topology: the compiler for TPUs is not here; pip install -e '.[tpu]' (no TPU is needed)"
        )
    # libtpu would ask a machine of Google's cloud what it is, and complain that it is none; and want a TPU for itself.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }  # fmt: skip
    from jax.experimental import topologies

    name, more = (
        str(dataclasses.replace(topology, slices=1)),
        {"num_slices": topology.slices} if topology.slices > 1 else {},
    )
    more |= {"chip_config_name": topology.chip.mode} if topology.chip.mode else {}
    if math.prod(topology.shape) < 4:  # less than a host has
        more["chips_per_host_bounds"] = (*topology.shape, 1)[:3]
    try:
        return list(topologies.get_topology_desc(name, "tpu", **more).devices)
    except Exception as e:  # whatever libtpu says
        host = (
            "2x4, then multiples of 4" if topology.chip.axes == 2 else "2x2x1, then multiples of 4"
        )
        reason = (str(e).splitlines() or [type(e).__name__])[0][:160]
        raise UserError(
            f"--topology: there is no {topology}; shapes are 1x1, 2x2, {host} ({reason})"
        ) from None


class Programs:
    """An experiment on a mesh: its state's and batch's shapes, and its programs, compiled when asked for."""

    def __init__(self, config: Experiment, devices: list):
        self.config, self.mesh = config, make_mesh(config.mesh, devices)
        check_rows(config, self.mesh)
        self.model, self.optimizer = (
            build_model(config.model),
            build_optimizer(config.optimizer, config.train.steps),
        )
        with use(self.mesh):
            self.state, self.placed = abstract_state(config, self.model, self.optimizer, self.mesh)
            self.batch = batch_shapes(config, self.mesh)
        self._memory_lies = None  # known when prefill is compiled

    @property
    def names(self) -> tuple[str, ...]:
        """Those that this experiment has."""
        return (
            PROGRAMS
            if self.config.objective.writes and self.config.model.family != "encoder"
            else PROGRAMS[:2]
        )

    def compile(self, name: str) -> Compiled:
        """Raises TooLarge."""
        with use(self.mesh):
            jitted, given = getattr(self, f"_{name}")()
            with record() as attention:
                compiled, seconds = self._compiled(jitted, given)
            if name == "prefill":
                self._memory_lies = compiled.output_shardings[1]
        memory = compiled.memory_analysis()
        return Compiled(
            Program.read(compiled.as_text()), memory.argument_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes,
            memory.temp_size_in_bytes, memory.generated_code_size_in_bytes, attention, seconds,
        )  # fmt: skip

    @staticmethod
    def _compiled(jitted, given):
        """(the compiled program, the seconds that took)."""
        began = time.perf_counter()
        with _too_large():
            return jitted.lower(*given).compile(), time.perf_counter() - began

    def inputs(self, name: str) -> dict | tuple:
        """What a program is given beside the state."""
        with use(self.mesh):
            return getattr(self, f"_{name}")()[1][1:]

    def _train(self):
        step = make_train_step(self.config, self.model, self.optimizer, self.mesh, self.placed)
        return step, (self.state, self.batch)

    def _evaluate(self):
        step = make_eval_step(self.config, self.model, self.mesh, self.placed.params)
        return step, (self.state.params, self.batch)

    def _prefill(self):
        """Reading as much as a batch's rows hold, in half of the model's room."""
        model, rows = self.config.model, self.rows
        array = lambda length, kind: jax.ShapeDtypeStruct(
            (rows, length), kind, sharding=self._everywhere
        )
        with_mask = lambda length: (array(length, jnp.int32), array(length, jnp.bool_))
        half = max(model.max_length // 2, 1)
        given = (
            (*with_mask(1), *with_mask(half)) if model.two_sides else (*with_mask(half), None, None)
        )
        run = lambda params, prompt, real, source, source_real: prefill(
            self.model, params, prompt, model.max_length, source, real, source_real
        )
        return jax.jit(run, keep_unused=True), (self.state.params, *given)

    def _decode(self):
        """One more token a row. The memory lies as prefill leaves it."""
        jitted, given = self._prefill()
        if self._memory_lies is None:
            self._memory_lies = self._compiled(jitted, given)[0].output_shardings[1]
        _, memory = jax.eval_shape(jitted, *given)
        placed = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
        memory = jax.tree.map(placed, memory, self._memory_lies)
        tokens = jax.ShapeDtypeStruct((self.rows,), jnp.int32, sharding=self._everywhere)
        run = lambda params, tokens, memory: advance(self.model, params, tokens, memory)
        return jax.jit(run, donate_argnums=2, keep_unused=True), (self.state.params, tokens, memory)

    @property
    def rows(self) -> int:
        """That are decoded at a time: each of a batch as often as it has beams."""
        return self.config.decoding.batch_size * self.config.decoding.beam_size

    @property
    def _everywhere(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    def bytes(self, tree: TrainState | dict) -> int:
        """What a device holds of these arrays."""
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(tree)
        )


@contextlib.contextmanager
def _too_large() -> Iterator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        found = re.search(
            r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT])(?=\)| of \S+ hbm)", str(e)
        )  # and not of a core's own memory
        if "RESOURCE_EXHAUSTED" not in str(e) or not found:
            raise
        size = lambda number, unit: float(number) * 2 ** (10 * ("KMGT".index(unit) + 1))
        buffers = re.findall(
            r"Size: ([\d.]+)([KMGT])(?:.*\n)*?\s+(?:Operator: op_name=\"([^\"]*)\"(?:.*\n)*?\s+)?Shape: (\S+)",
            str(e),
        )
        raise TooLarge(
            size(*found.groups()),
            [(size(n, unit), shape, where) for n, unit, where, shape in buffers],
        ) from None
