"""The best few ways to lay an experiment out on a machine: mesh, what the backward pass computes again, micro-batches.

Meshes are tried in the order of what they send (a formula); on each, less and less is kept for the backward pass until the step fits.
What cannot fit is not compiled: the state alone, or what the layers' matrix products leave alone, is more than a chip holds.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import jax

from transformer.config import Experiment
from transformer.errors import UserError
from transformer.model.network import build_model
from transformer.parallel.sharding import human_bytes
from transformer.planning.chips import Topology
from transformer.planning.page import seconds, table
from transformer.planning.plan import Plan, make_plan
from transformer.training.state import example_inputs

LADDER = (
    ("none", 1),
    ("dots", 1),
    ("full", 1),
    ("full", 2),
    ("full", 4),
    ("full", 8),
    ("full", 16),
    ("full", 32),
    ("full", 64),
)
"""(remat, times as many micro-batches), from fast and large to slow and small."""


def search(
    config: Experiment,
    topology: Topology,
    devices: list,
    most: int,
    tell: Callable[[str], None],
    price: float | None = None,
) -> list[Plan]:
    """Up to `most` layouts compiled; those that fit, the fastest first, then the others."""
    found: list[Plan] = []
    why_not = collections.Counter()
    size = _size(config)
    state = _state_bytes(config, size)
    room = topology.chip.hbm / topology.chip.devices if topology.chip.hbm else math.inf
    rung = 0  # of the ladder, on which the mesh before fitted in: the next needs about as much
    for mesh in sorted(_meshes(config, topology), key=lambda mesh: _sent(config, size, mesh)):
        if state / _parts(mesh) > 0.9 * room:
            why_not[
                f"parameters, gradients and optimizer take {human_bytes(state / _parts(mesh))} of {human_bytes(room)} a device"
            ] += 1
            continue
        for at in range(rung, len(LADDER)):
            remat, times = LADDER[at]
            changed = _changed(config, mesh, remat, times)
            if changed is None:
                why_not[
                    f"data.batch_size: {config.data.batch_size} rows do not divide over the devices"
                ] += 1
                continue
            if state / _parts(mesh) + _left(changed, mesh) > room:
                why_not["layers leave too much for the backward pass"] += 1
                continue
            if len(found) == most:
                break
            tell(f"{len(found) + 1}/{most}: {_spell(changed)}")
            try:
                plan = make_plan(changed, topology, devices, only=("train",), price=price)
            except UserError as e:  # heads that do not divide, and the like
                why_not[str(e)] += 1
                break
            found.append(plan)
            if plan.fits:
                rung = at
                break
    if not found:
        reason = (
            why_not.most_common(1)[0][0] if why_not else "no mesh has so many devices and slices"
        )
        raise UserError(f"--search: nothing to try on {topology}; {reason}")
    return sorted(found, key=lambda plan: (not plan.fits, plan.step or math.inf, plan.train.peak))


def page(plans: list[Plan]) -> str:
    """For a person, with why."""
    priced = any(plan.price is not None for plan in plans)
    rows = [
        [
            "",
            "mesh, remat, micro-batches",
            "peak",
            "a step at least",
            "bound by",
            "MFU at most",
            *(["the run at least"] if priced else []),
        ]
    ]
    for number, plan in enumerate(plans, 1):
        share = f"{human_bytes(plan.train.peak)}" + (
            f" ({plan.train.peak / plan.room:.0%})" if plan.room else ""
        )
        fits = (
            [
                seconds(plan.step),
                plan.train.roofline.bound if plan.topology.is_tpu else "",
                f"{plan.mfu:.1%}",
            ]
            if plan.fits and plan.step
            else ["does not fit" if not plan.fits else "", "", ""]
        )
        if priced:
            fits.append(f"{plan.run['money']:,.2f}" if plan.fits and plan.step else "")
        rows.append([str(number), _spell(plan.config), share, *fits])
    lines = table(rows)
    best = plans[0]
    if not best.fits:
        lines += ["", f"none of these fits; more may: --search={2 * len(plans)}, or more devices"]
    else:
        flags = " ".join(
            f"--config.mesh.{axis}={size}" for axis, size in best.config.mesh.sizes.items()
        )
        lines += [
            "",
            f"the first: {flags} --config.model.remat={best.config.model.remat} --config.train.accumulate={best.config.train.accumulate}",
        ]
    return "\n".join(lines) + "\n"


def _meshes(config: Experiment, topology: Topology) -> Iterator[dict[str, int]]:
    """Sizes of all axes. Those of stages, experts and parts of a row stay as the config has them."""
    fixed = {axis: max(config.mesh.sizes[axis], 1) for axis in ("stage", "expert", "context")}
    left, heads = topology.devices // math.prod(fixed.values()), config.model.kv_heads
    across = topology.slices if config.mesh.slices == "data" else 1
    for tensor, data in itertools.product(
        (1, 2, 4, 8, 16), (across * n for n in (1, 2, 4, 8, 16, 32))
    ):
        if left % (tensor * data) or heads % tensor:
            continue
        yield {"data": data, "fsdp": left // (tensor * data), "tensor": tensor} | fixed


def _changed(config: Experiment, mesh: dict[str, int], remat: str, times: int) -> Experiment | None:
    """The experiment so laid out; None where rows do not divide."""
    accumulate = config.train.accumulate * times
    if config.data.batch_size % (
        accumulate * mesh["data"] * mesh["stage"] * mesh["fsdp"] * mesh["expert"]
    ):
        return None
    config = config.on(dataclasses.replace(config.mesh, **mesh))
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, remat=remat), train=dataclasses.replace(config.train, accumulate=accumulate)
    )  # fmt: skip


def _parts(mesh: dict[str, int]) -> int:
    """Into how many parts the state is split."""
    return mesh["stage"] * mesh["fsdp"] * mesh["expert"] * mesh["tensor"]


def _size(config: Experiment) -> float:
    """Parameters."""
    shapes = jax.eval_shape(
        build_model(config.model).init, jax.random.key(0), *example_inputs(config)
    )
    return sum(math.prod(x.shape) for x in jax.tree.leaves(shapes))


def _state_bytes(config: Experiment, size: float) -> float:
    """Parameters, gradients and, of AdamW, two moments, or one (Lion), or next to none."""
    moments = {"adamw": 2, "lion": 1}.get(config.optimizer.name, 0) + bool(config.train.ema_decay)
    return size * (4 if config.model.param_dtype == "float32" else 2) * (2 + moments)


def _tokens(config: Experiment, mesh: dict[str, int]) -> float:
    """That a device goes through at once, those of the other side added."""
    length = config.data.length + (config.data.decoder_length if config.model.two_sides else 0)
    return (
        config.data.batch_size
        * length
        / (mesh["data"] * mesh["stage"] * mesh["fsdp"] * mesh["expert"] * mesh["context"])
        / config.train.accumulate
    )


def _left(config: Experiment, mesh: dict[str, int]) -> float:
    """Bytes that layers leave for the backward pass, from below."""
    model = config.model
    width = {
        "none": 4 * model.d_model + 3 * model.d_ff,
        "dots": 3 * model.d_model + 2 * model.d_ff,
        "full": model.d_model,
    }[model.remat]
    layers = max(map(model.num_layers, model.sides))
    return (
        layers
        * _tokens(config, mesh)
        * width
        * (2 if model.dtype == "bfloat16" else 4)
        / mesh["tensor"]
        / mesh["stage"]
    )


def _sent(config: Experiment, size: float, mesh: dict[str, int]) -> float:
    """Bytes that a device sends, about: parameters gathered twice and gradients scattered (fsdp), or added up (data); the stream between
    sublayers gathered and scattered, forward and backward (tensor)."""
    size, model = size * 2 / (mesh["tensor"] * mesh["stage"] * mesh["expert"]), config.model
    parameters = 3 * size * (1 - 1 / mesh["fsdp"]) + 2 * size / mesh["fsdp"] * (
        1 - 1 / mesh["data"]
    )
    layers = sum(map(model.num_layers, model.sides))
    stream = (
        8
        * layers
        * _tokens(config, mesh)
        * model.d_model
        * 2
        * (1 - 1 / mesh["tensor"])
        / mesh["stage"]
    )
    return parameters * config.train.accumulate + stream


def _spell(config: Experiment) -> str:
    sizes = (
        ", ".join(f"{axis} {size}" for axis, size in config.mesh.sizes.items() if size > 1)
        or "one device"
    )
    return f"{sizes}; {config.model.remat}; {config.train.accumulate}"
