"""Compiles an experiment's programs for a machine that you do not have.

Programs for TPUs are compiled by the TPU compiler in libtpu (extra [tpu]), which needs no TPU.
Those for GPUs and CPUs are compiled for simulated CPU devices, whose compiler shards arrays and
inserts collectives as the machine's does, but allocates buffers differently. No array is made."""

import contextlib
import functools
import importlib.util
import os
import re
import time
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from transformer.config import Experiment
from transformer.data.batching import assemble
from transformer.data.store import Texts
from transformer.decoding.prefill import advance, prefill, unrolled
from transformer.errors import UserError
from transformer.model.attention_backends import record
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.parallel.sharding import BATCH, local_bytes
from transformer.planning.chips import Topology
from transformer.planning.hlo import HloProgram
from transformer.runs.fits import check_divisibility
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state
from transformer.training.step import make_eval_step, make_train_step

PROGRAMS = ("train", "evaluate", "prefill", "decode")


class TooLarge(Exception):
    """Raised for a program that needs `needed` bytes, which is more memory than a chip has."""

    def __init__(self, needed: float, buffers: list[tuple[float, str, str]]):
        super().__init__(f"{needed:.3g} bytes")
        self.needed, self.buffers = needed, buffers


class Compiled(NamedTuple):
    """A compiled program, what attention it uses, and the bytes that a device needs for it."""

    program: HloProgram
    inputs: float  # arguments besides the state
    memory: Any  # as XLA reports it
    attention: dict[str, str]  # backend -> why no other is used
    seconds: float  # of compilation


def start(topology: Topology) -> list:
    """Returns the devices of a machine that you do not have. Call it before JAX's first
    computation. Raises UserError without libtpu or such a topology."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)  # cached programs could not be loaded
    if not topology.is_tpu:
        with contextlib.suppress(RuntimeError):  # JAX has started: its devices are fixed
            jax.config.update("jax_num_cpu_devices", topology.devices)
        devices = jax.devices()
        if len(devices) < topology.devices:
            problem = f"{topology} has {topology.devices} devices"
            found = f"this process has started with {len(devices)}"
            raise UserError(f"--topology: {problem}, but {found}; start another process")
        return devices[: topology.devices]
    if importlib.util.find_spec("libtpu") is None:
        way_out = "run pip install -e '.[tpu]' (no TPU is needed)"
        raise UserError(f"--topology: the TPU compiler is not installed; {way_out}")
    # Without these, libtpu queries Google Cloud's metadata server and claims a TPU for itself.
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }  # fmt: skip
    from jax.experimental import topologies

    name = str(topology._replace(slices=1))
    options = {"num_slices": topology.slices} if topology.slices > 1 else {}
    options |= {"chip_config_name": topology.chip.mode} if topology.chip.mode else {}
    if topology.chips < 4 * topology.slices:  # fewer than a host has
        options["chips_per_host_bounds"] = (*topology.shape, 1)[:3]
    try:
        return list(topologies.get_topology_desc(name, "tpu", **options).devices)
    except Exception as e:  # libtpu raises errors of several types
        shapes = f"1x1, 2x2, {'2x4' if topology.chip.axes == 2 else '2x2x1'}, then multiples of 4"
        reason = (str(e).splitlines() or [type(e).__name__])[0][:160]
        message = f"--topology: {topology} does not exist; shapes are {shapes} ({reason})"
        raise UserError(message) from None


class Programs:
    """An experiment on a mesh: shapes of state and batch, and programs, compiled on demand."""

    def __init__(self, config: Experiment, devices: list):
        self.config, self.mesh = config, make_mesh(config.mesh, devices)
        check_divisibility(config, self.mesh)
        self.model = build_model(config.model)
        self.optimizer = build_optimizer(config.optimizer, config.train.steps, config.model)
        with use(self.mesh) as mesh:
            self.state, self.shardings = abstract_state(config, self.model, self.optimizer, mesh)
            self.batch = batch_shapes(config, self.mesh)
        self.tokens = sum(x.size for k, x in self.batch.items() if k in ("inputs", "source"))
        generates = config.objective.generates_text and config.model.family != "encoder"
        self.names = PROGRAMS if generates else PROGRAMS[:2]
        self._sequences = config.decoding.batch_size * config.decoding.beam_size
        sharding = NamedSharding(self.mesh, P())
        self._replicated = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        self._memory_shardings = None  # set when prefill is compiled

    def compile(self, name: str) -> Compiled:
        """Compiles a program. Raises TooLarge."""
        with use(self.mesh):
            jitted, args = getattr(self, f"_{name}")()
            with record() as attention:
                compiled, seconds = _compile(jitted, args)
            if name == "prefill":
                self._memory_shardings = compiled.output_shardings[1]
        program, memory = HloProgram.read(compiled.as_text()), compiled.memory_analysis()
        return Compiled(program, local_bytes(args[1:]), memory, attention, seconds)

    def trace(self, name: str):
        """Returns the traced program, a jaxpr."""
        with use(self.mesh):
            jitted, args = getattr(self, f"_{name}")()
            return jitted.trace(*args).jaxpr

    def _train(self):
        step = make_train_step(self.config, self.model, self.optimizer, self.mesh, self.shardings)
        return step, (self.state, self.batch)

    def _evaluate(self):
        step = make_eval_step(self.config, self.model, self.mesh, self.shardings.params)
        return step, (self.state.params, self.batch)

    def _prefill(self):
        """The program that reads a batch of prompts (or sources) of half the maximum length."""
        model = self.config.model
        array = lambda length, dtype: self._replicated((self._sequences, length), dtype)
        with_mask = lambda length: (array(length, jnp.int32), array(length, jnp.bool_))
        half = with_mask(max(model.max_length // 2, 1))
        args = (*with_mask(1), *half) if model.is_encoder_decoder else (*half, None, None)
        run = lambda params, prompt, real, source, source_real: prefill(
            self.model, params, prompt, model.max_length, source, real, source_real
        )
        return jax.jit(run, keep_unused=True), (self.state.params, *args)

    def _decode(self):
        """The program that decodes one token per sequence, with memory sharded as in prefill."""
        jitted, args = self._prefill()
        if self._memory_shardings is None:
            self._memory_shardings = _compile(jitted, args)[0].output_shardings[1]
        _, memory = jax.eval_shape(jitted, *args)
        with_sharding = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
        memory = jax.tree.map(with_sharding, memory, self._memory_shardings)
        tokens = self._replicated((self._sequences,), jnp.int32)
        run = lambda params, tokens, memory: advance(*unrolled(self.model, params), tokens, memory)
        return jax.jit(run, donate_argnums=2, keep_unused=True), (self.state.params, tokens, memory)


def _compile(jitted, args):
    """Returns the compiled program and the seconds that it took. Raises TooLarge."""
    start = time.perf_counter()
    try:
        return jitted.lower(*args).compile(), time.perf_counter() - start
    except jax.errors.JaxRuntimeError as e:
        # HBM, not a core's on-chip memory
        match = re.search(r"(?:HLO temporaries \(|Used )([\d.]+)([KMGT])(?=\)| of \S+ hbm)", str(e))
        if "RESOURCE_EXHAUSTED" not in str(e) or not match:
            raise
        size = lambda number, unit: float(number) * 2 ** (10 * ("KMGT".index(unit) + 1))
        operator = r"(?:Operator: op_name=\"([^\"]*)\"(?:.*\n)*?\s+)?"
        buffers = re.findall(rf"Size: ([\d.]+)([KMGT])(?:.*\n)*?\s+{operator}Shape: (\S+)", str(e))
        buffers = [(size(*number), shape, source) for *number, source, shape in buffers]
        raise TooLarge(size(*match.groups()), buffers) from None


def batch_shapes(config: Experiment, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a training batch of full length, sharded over the mesh."""
    data, sharding = config.data, NamedSharding(mesh, BATCH)
    sequences = config.objective.sequences(_SyntheticStore(config), "train", config)
    segments = sequences.segments(0, lambda: np.random.default_rng(0))
    sample = assemble([segments], data.length, data.decoder_length)
    struct = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    return {k: struct((data.batch_size, *x.shape[1:]), x.dtype) for k, x in sample.items()}


class _SyntheticStore:
    """The part of a store that objectives read: texts of one repeated token, half of them short."""

    def __init__(self, config: Experiment):
        size = config.model.vocab_size - config.objective.reserved
        short = max(min(config.data.length, config.data.decoder_length) // 2, 2)
        self._lengths = np.array([short, config.data.length] * 8)
        self._per_text = config.objective.columns[-1] == "label"
        self.meta = {"classes": ["-", "answer"]}
        special = {"pad": 0, "bos": 1, "eos": 2, "mask": None, "source_prefix_ids": []}
        pieces = {"text_ids": np.array([3]), "starts_word": np.ones(size, bool)}
        pieces |= {"vocab_size": size, "find": lambda piece: None}
        self.tokenizer = types.SimpleNamespace(**special, **pieces)

    def texts(self, part: str, side: int) -> Texts:
        ends = np.cumsum(self._lengths)
        ids = np.full(ends[-1], 3, np.int32)
        ids[ends - 1] = self.tokenizer.eos
        return Texts(ids, ends)

    def labels(self, part: str) -> np.ndarray:
        return np.zeros(len(self._lengths) if self._per_text else self._lengths.sum(), np.int32)
