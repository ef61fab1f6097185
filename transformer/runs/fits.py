"""Whether an experiment fits a mesh and a host, before anything is allocated."""

import math

from jax.sharding import Mesh

from transformer.checks import plain
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model.mixers import MIXERS
from transformer.parallel.host import memory
from transformer.parallel.sharding import ROWS, Share, human_bytes

BYTES_A_TOKEN = 20
"""Of a batch on the host: inputs, segments, positions, targets and weights, 4 bytes each (data/batching.py)."""


def check_rows(config: Experiment, mesh: Mesh) -> None:
    """A batch must divide over devices and micro-batches, and its rows over devices, in every bucket; layers over stages."""
    stages, model = mesh.shape["stage"], config.model
    if stages > 1 and not model.scan_layers:
        raise UserError(
            f"mesh.stage: {stages}, but layers are not looped; set model.scan_layers=True, or mesh.stage=1"
        )
    if stages > 1 and model.pipeline_rounds > 1 and 0 < model.pipeline_microbatches < stages:
        raise UserError(
            f"model.pipeline_microbatches: {model.pipeline_microbatches} are too few to go round {stages} stages (mesh.stage)"
        )
    in_order = [entry.get("mixer", model.mixer) for entry in model.used_pattern]
    in_order = [spec for spec in in_order if MIXERS.build(spec).in_order]
    if mesh.shape["context"] > 1 and in_order:
        raise UserError(
            f"mesh.context: {mesh.shape['context']}, but model.mixer = {plain(in_order[0])!r} reads tokens one after another; "
            "set mesh.context=1"
        )
    parts = 2 * mesh.shape["context"] if mesh.shape["context"] > 1 else 1  # two chunks each
    for width in config.data.buckets or (config.data.length,):
        for field, tokens in (
            ("length", width),
            ("target_length", width * config.data.decoder_length // config.data.length),
        ):
            if tokens % parts:
                raise UserError(
                    f"data.{field}: {tokens} tokens do not divide over 2 * mesh.context = {parts} parts of a row; change one of them"
                )
        rows = config.data.batch_size * config.data.length // width
        factors = {f"mesh.{axis}": mesh.shape[axis] for axis in ROWS} | {
            "train.accumulate": config.train.accumulate
        }
        if (
            stages > 1
        ):  # outside of the layers rows are spread over stages; inside they come in micro-batches
            factors["mesh.stage"] = math.lcm(stages, model.pipeline_microbatches or stages)
        factors = {name: factor for name, factor in factors.items() if factor > 1}
        if rows % math.prod(factors.values()):
            by = " * ".join(factors).replace(
                "mesh.stage", "(mesh.stage and model.pipeline_microbatches)"
            )
            raise UserError(
                f"data.batch_size: {rows} rows of {width} tokens do not divide over {by} = {' * '.join(map(str, factors.values()))}"
            )


def check_rounds(config: Experiment, mesh: Mesh) -> None:
    """Without stages there is nothing to go round. (A trained run is read on any mesh, as its layers are laid out.)"""
    rounds = config.model.pipeline_rounds
    if rounds > 1 and mesh.shape["stage"] == 1:
        raise UserError(
            f"model.pipeline_rounds: {rounds} has no effect without stages: mesh.stage > 1; "
            "set that, or leave model.pipeline_rounds at 1"
        )


def check_batch(config: Experiment, share: Share) -> None:
    """Raises UserError if this process's rows of a batch, as the host lays them out, are more than its memory holds."""
    data = config.data
    tokens = data.length + (data.decoder_length if config.model.two_sides else 0)
    rows = data.batch_size * len(share.here) // share.parts
    needed, room = rows * tokens * BYTES_A_TOKEN, memory()
    if room and needed > room:
        raise UserError(
            f"data.batch_size: {data.batch_size:,} rows of {tokens:,} tokens take {human_bytes(needed)} of this host's "
            f"memory a batch, which has {human_bytes(room)}; lower data.batch_size"
        )
