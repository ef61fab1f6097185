"""Searches for the best layouts of an experiment: mesh, remat policy and micro-batches.

Meshes are tried in the order of the bytes that they send, by a formula. On each mesh, less and less
is kept for the backward pass until the step fits. A layout is not compiled if its state, or what
its layers keep for the backward pass, is larger than a chip's memory."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import jax

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.mapping import apply_overrides
from transformer.model.config import ModelConfig
from transformer.model.network import abstract_params
from transformer.parallel.sharding import batch_parts, format_bytes
from transformer.planning.chips import Topology
from transformer.planning.page import seconds, table
from transformer.planning.plan import Plan, make_plan

LADDER = (("none", 1), ("dots", 1), *(("full", 2**n) for n in range(7)))
"""(remat, factor on train.accumulate), from fast and large to slow and small."""


def search(
    config: Experiment, topology: Topology, devices: list, max_plans: int,
    report: Callable[[str], None], price: float | None = None,
) -> list[Plan]:  # fmt: skip
    """Compiles up to `max_plans` layouts, and returns their plans, those that fit first, by the
    time of a step. `report` receives lines of progress. Raises UserError if none could be tried."""
    plans: list[Plan] = []
    reasons = collections.Counter()
    size = sum(x.size for x in jax.tree.leaves(abstract_params(config.model)))
    # Parameters, gradients, optimizer moments and the moving average
    copies = 2 + config.optimizer.rule.moments + bool(config.train.ema_decay)
    state = size * (4 if config.model.param_dtype == "float32" else 2) * copies
    room = topology.chip.hbm / topology.chip.devices
    rung = 0  # the rung on which the previous mesh fit; the next mesh needs about as much
    for mesh in sorted(_meshes(config, topology), key=lambda mesh: _sent_bytes(config, size, mesh)):
        held = state / (mesh["stage"] * mesh["fsdp"] * mesh["expert"] * mesh["tensor"])
        if held > 0.9 * room:
            part = f"{format_bytes(held)} of {format_bytes(room)} per device"
            reasons[f"parameters, gradients and optimizer take {part}"] += 1
            continue
        for index, (remat, times) in list(enumerate(LADDER))[rung:]:
            accumulate = config.train.accumulate * times
            if config.data.batch_size % (accumulate * batch_parts(mesh)):
                size_field = f"data.batch_size: {config.data.batch_size}"
                reasons[f"{size_field} is not divisible by the devices"] += 1
                continue
            base = config.on(dataclasses.replace(config.mesh, **mesh))
            changed = apply_overrides(base, {"model.remat": remat, "train.accumulate": accumulate})
            if held + _kept_bytes(changed, mesh) > room:
                reasons["the layers keep too much for the backward pass"] += 1
                continue
            if len(plans) == max_plans:
                break
            report(f"{len(plans) + 1}/{max_plans}: {_describe(changed)}")
            try:
                plan = make_plan(changed, topology, devices, only=("train",), price=price)
            except UserError as e:  # such as heads that are not divisible
                reasons[str(e)] += 1
                break
            plans.append(plan)
            if plan.fits:
                rung = index
                break
    if not plans:
        reasons = reasons or {"no mesh has this number of devices and slices": 1}
        raise UserError(f"--search: nothing to try on {topology}; {max(reasons, key=reasons.get)}")
    return sorted(plans, key=lambda plan: (not plan.fits, plan.step or math.inf, plan.train.peak))


def page(plans: list[Plan]) -> str:
    """Returns a table of the plans, and the flags of the best one."""
    priced = any(plan.price is not None for plan in plans)
    bounds = ["step at least", "bound by", "MFU at most", *["price at least"] * priced]
    rows = [["", "mesh, remat, micro-batches", "peak memory", *bounds]]
    for number, plan in enumerate(plans, 1):
        share = f"{format_bytes(plan.train.peak)} ({plan.train.peak / plan.room:.0%})"
        results = ["" if plan.fits else "does not fit", "", ""]
        if plan.fits and plan.step:
            bound = plan.train.roofline.bound if plan.topology.is_tpu else ""
            results = [seconds(plan.step), bound, f"{plan.mfu:.1%}"]
        if priced:
            results.append(f"{plan.run['money']:,.2f}" if plan.fits and plan.step else "")
        rows.append([str(number), _describe(plan.config), share, *results])
    lines, best = table(rows), plans[0]
    if not best.fits:
        lines += ["", f"none of these fits; try --search={2 * len(plans)}, or more devices"]
    else:
        flags = [f"--config.mesh.{axis}={size}" for axis, size in best.config.mesh.sizes.items()]
        flags.append(f"--config.model.remat={best.config.model.remat}")
        flags.append(f"--config.train.accumulate={best.config.train.accumulate}")
        lines += ["", f"best: {' '.join(flags)}"]
    return "\n".join(lines) + "\n"


def _meshes(config: Experiment, topology: Topology) -> Iterator[dict[str, int]]:
    """Yields the sizes of all axes. Stages, experts and context keep the sizes of the config."""
    fixed = {axis: max(config.mesh.sizes[axis], 1) for axis in ("stage", "expert", "context")}
    left, heads = topology.devices // math.prod(fixed.values()), config.model.kv_heads
    across = topology.slices if config.mesh.slices == "data" else 1
    for tensor, copies in itertools.product((1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)):
        data = across * copies
        if left % (tensor * data) == 0 and heads % tensor == 0:
            yield {"data": data, "fsdp": left // (tensor * data), "tensor": tensor} | fixed


def _stacks(config: Experiment, mesh: dict[str, int]) -> Iterator[tuple[str, ModelConfig, float]]:
    """Yields each stack, its config, and its layers times the tokens on a device at a time."""
    data, model = config.data, config.model
    parts = batch_parts(mesh) * mesh["context"] * config.train.accumulate
    for side, length in zip(model.sides, (data.length, data.decoder_length), strict=False):
        yield side, model.stack(side), model.num_layers(side) * data.batch_size * length / parts


def _kept_bytes(config: Experiment, mesh: dict[str, int]) -> float:
    """Returns a lower bound of the bytes that the layers keep for the backward pass."""
    streams, hidden = {"none": (4, 3), "dots": (3, 2), "full": (1, 0)}[config.model.remat]

    def width(side: str, model: ModelConfig) -> int:
        begin = lambda x: model.last_placement(side).begin(x, model.residuals(side))
        x = jax.ShapeDtypeStruct((1, 1, model.d_model), model.dtype)
        carried = sum(stream.size for stream in jax.tree.leaves(jax.eval_shape(begin, x)))
        return (streams - 1) * model.d_model + carried + hidden * model.ff_size

    kept = sum(width(*stack) * tokens for *stack, tokens in _stacks(config, mesh))
    return kept * (2 if config.model.dtype == "bfloat16" else 4) / mesh["tensor"]


def _sent_bytes(config: Experiment, size: float, mesh: dict[str, int]) -> float:
    """Returns about the bytes that a device sends in a step. fsdp gathers parameters twice and
    scatters gradients, data sums gradients, tensor moves the residual stream between sublayers."""
    size = size * 2 / (mesh["tensor"] * mesh["stage"] * mesh["expert"])
    weights = 3 * size * (1 - 1 / mesh["fsdp"]) + 2 * size / mesh["fsdp"] * (1 - 1 / mesh["data"])
    stream = 16 * sum(model.d_model * tokens for _, model, tokens in _stacks(config, mesh))
    return weights * config.train.accumulate + stream * (1 - 1 / mesh["tensor"])


def _describe(config: Experiment) -> str:
    sizes = [f"{axis} {size}" for axis, size in config.mesh.sizes.items() if size > 1]
    return f"{', '.join(sizes) or 'one device'}; {config.model.remat}; {config.train.accumulate}"
