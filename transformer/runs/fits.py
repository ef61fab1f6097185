"""Checks that an experiment fits a mesh and a host, before anything is allocated."""

import math

from jax.sharding import Mesh

from transformer.checks import plain
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.mixers.base import MIXERS
from transformer.output import count
from transformer.parallel.host import memory
from transformer.parallel.sharding import BATCH_AXES, Share, format_bytes

BYTES_PER_TOKEN = 20
"""Bytes per token of a host's batch: inputs, segments, positions, targets and weights, 4 each."""


def check_stages(model: ModelConfig, mesh: Mesh) -> None:
    """Raises UserError if the layers cannot be divided into pipeline stages."""
    stages = mesh.shape["stage"]
    if stages == 1:
        return
    if not model.scan_layers:
        raise UserError(f"mesh.stage: {stages}, but layers are not scanned; set model.scan_layers")
    for side in model.sides:
        periods = model.num_layers(side) // model.period(side)
        if periods % (stages * model.pipeline_rounds):
            parts = f"{stages} stages and model.pipeline_rounds = {model.pipeline_rounds}"
            whole = f"{side}, which repeats {periods} times a period of"
            problem = f"{parts} do not divide the {whole} {count(model.period(side), 'layer')}"
            raise UserError(f"mesh.stage: {problem}; change one of them")
    if model.pipeline_rounds > 1 and 0 < model.pipeline_microbatches < stages:
        problem = f"{model.pipeline_microbatches} is fewer than mesh.stage"
        raise UserError(f"model.pipeline_microbatches: {problem}; use at least {stages}, or 0")


def check_divisibility(config: Experiment, mesh: Mesh) -> None:
    """Raises UserError if sequences cannot be divided over the mesh. In each bucket, batches divide
    over devices and micro-batches, sequences over devices."""
    check_stages(config.model, mesh)
    stages, context, model = mesh.shape["stage"], mesh.shape["context"], config.model
    specs = [entry.get("mixer", model.mixer) for entry in model.used_pattern]
    reads = [f"mixer = {plain(spec)!r}" for spec in specs if MIXERS.build(spec).in_order]
    reads += [f"canon = {model.canon!r}"] * bool(model.canon)
    if context > 1 and reads:
        problem = f"model.{reads[0]} reads tokens in order"
        raise UserError(f"mesh.context: {context}, but {problem}; set mesh.context=1")
    parts = 2 * context if context > 1 else 1  # two chunks per device
    for width in config.data.buckets or (config.data.length,):
        decoder_width = width * config.data.decoder_length // config.data.length
        for field, tokens in (("length", width), ("target_length", decoder_width)):
            if tokens % parts:
                over = f"2 * mesh.context = {parts} parts of a sequence"
                problem = f"{tokens} tokens do not divide over {over}"
                raise UserError(f"data.{field}: {problem}; change one of them")
        sequences = config.data.batch_size * config.data.length // width
        factors = {f"mesh.{axis}": mesh.shape[axis] for axis in BATCH_AXES}
        factors["train.accumulate"] = config.train.accumulate
        if stages > 1:
            # Sequences are sharded over stages outside of the layers, and split inside of them.
            factors["mesh.stage"] = math.lcm(stages, model.pipeline_microbatches or stages)
        factors = {name: factor for name, factor in factors.items() if factor > 1}
        if sequences % math.prod(factors.values()):
            stage = "(mesh.stage and model.pipeline_microbatches)"
            by = " * ".join(factors).replace("mesh.stage", stage)
            by += f" = {' * '.join(map(str, factors.values()))}"
            problem = f"{sequences} sequences of {width} tokens do not divide over {by}"
            raise UserError(f"data.batch_size: {problem}")


def check_training(config: Experiment, share: Share) -> None:
    """Raises UserError for rounds without stages, or if a batch exceeds this host's memory. Other
    commands have no such batch, and read a trained run in its own layout."""
    data, rounds = config.data, config.model.pipeline_rounds
    if rounds > 1 and share.mesh.shape["stage"] == 1:
        way_out = "set mesh.stage > 1, or leave this at 1"
        raise UserError(f"model.pipeline_rounds: {rounds} has no effect without stages; {way_out}")
    tokens = data.length + (data.decoder_length if config.model.is_encoder_decoder else 0)
    sequences = data.batch_size * len(share.here) // share.parts
    needed, available = sequences * tokens * BYTES_PER_TOKEN, memory()
    if available and needed > available:
        batch = f"{data.batch_size:,} sequences of {tokens:,} tokens take {format_bytes(needed)}"
        problem = f"{batch} of this host's memory, which has {format_bytes(available)}"
        raise UserError(f"data.batch_size: {problem}; lower data.batch_size")
