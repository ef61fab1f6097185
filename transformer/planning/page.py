"""A plan as a page of text for a person."""

import math

from transformer.parallel.sharding import human_bytes
from transformer.planning.buffers import largest
from transformer.planning.plan import Part, Plan, name_of
from transformer.planning.roofline import Roofline
from transformer.runs.metrics import human_count, human_time


def compare(plans: dict[str, Plan]) -> str:
    """Several experiments side by side, for a person."""
    rows = [
        [
            "",
            "parameters",
            "FLOP a token",
            "peak",
            "a step at least",
            "bound by",
            "MFU at most",
            "attention",
        ]
    ]
    for name, plan in plans.items():
        part, roof = plan.train, plan.train.roofline
        known = [seconds(plan.step), roof.bound, f"{plan.mfu:.1%}"] if plan.step else ["", "", ""]
        peak = human_bytes(part.peak) + ("" if plan.fits else " (!)")
        used = " ".join(part.compiled.attention) if part.compiled else ""
        rows.append(
            [
                name,
                f"{plan.parameters:,}",
                human_count(plan.model_flops / plan.tokens),
                peak,
                *known,
                used,
            ]
        )
    return "\n".join(table(rows)) + "\n"


def remedies(plan: Plan) -> list[str]:
    """What would make a training step fit, the most promising first."""
    config, mesh, room = plan.config, plan.mesh, plan.room
    held = sum(
        plan.train.memory.get(kind, 0.0) for kind in ("parameters", "optimizer", "moving average")
    )
    parameters, found = plan.train.memory["parameters"], []
    needed = held + parameters  # with gradients
    if needed > 0.8 * room:
        if mesh["data"] > 1:
            found.append(
                f"mesh.fsdp={mesh['fsdp'] * mesh['data']} mesh.data=1: parameters, optimizer and gradients over {mesh['data']} times as many devices, "
                f"{human_bytes(needed / mesh['data'])} a device instead of {human_bytes(needed)}"
            )
        if config.optimizer.name == "adamw":
            found.append(
                f"optimizer.name=adafactor: without two moments, about {human_bytes(2 * parameters)} a device less"
            )
        spread = plan.topology.devices // mesh["data"]
        found.append(
            f"{math.ceil(needed / (0.7 * room)) * spread} devices or more, with mesh.fsdp over all: parameters, optimizer and gradients alone take "
            f"{human_bytes(needed)} of {human_bytes(room)} a device, and 0.3 of that is left for all else"
        )
    if config.model.remat != "full":
        found.append(
            "model.remat=full: only the stream between layers is kept for the backward pass"
        )
    rows = config.data.batch_size // math.prod(
        mesh[axis] for axis in ("data", "stage", "fsdp", "expert")
    )
    if more := [n for n in range(config.train.accumulate + 1, rows + 1) if rows % n == 0]:
        found.append(f"train.accumulate={more[0]}: fewer rows at a time (up to {more[-1]})")
    if mesh["tensor"] == 1 and config.model.kv_heads % 2 == 0:
        found.append(
            "mesh.tensor=2: heads, d_ff, vocabulary and the stream between sublayers over two devices"
        )
    found.append("mesh.context=2: the tokens of a row over two devices")
    return found


def page(plan: Plan) -> str:
    """Memory, times and messages of every program, and what would help where one does not fit."""
    config, topology, chip = plan.config, plan.topology, plan.topology.chip
    spelled = (
        " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1) or "one device"
    )
    lines = [
        f"machine     {topology}: {topology.chips} x {chip.title}"
        + (f", {human_bytes(chip.hbm)} each" if chip.hbm else "")
        + (f", {chip.devices} devices a chip" if chip.devices > 1 else ""),
        f"mesh        {spelled}",
        *(
            [
                "compiled    for simulated devices: temporaries and memory traffic are those of the CPU's compiler"
            ]
            if not topology.is_tpu
            else []
        ),
        f"model       {plan.parameters:,} parameters, {human_count(plan.model_flops / plan.tokens)}FLOP a token in training",
        f"batch       {plan.tokens:,} tokens; {config.train.steps:,} steps are {human_count(plan.tokens * config.train.steps)} tokens",
    ]
    if plan.parts.keys() & {"prefill", "decode"}:
        length, rows = (
            config.model.max_length,
            config.decoding.batch_size * config.decoding.beam_size,
        )
        lines.append(
            f"decoding    {rows} rows, prompts of {max(length // 2, 1):,} tokens, a cache of {length:,}"
        )
    lines += _attention(plan)
    lines += ["", *_memory(plan)]
    if any(part.roofline and part.roofline.seconds for part in plan.parts.values()):
        lines += ["", *_times(plan)]
    if plan.train:
        lines += ["", *_messages(plan.train.roofline)] if plan.train.roofline else []
        lines += ["", *found] if (found := _buffers(plan.train)) else []
    for name, part in plan.parts.items():
        if not plan.fits_in(part):
            lines += [
                "",
                f"IT DOES NOT FIT: {name} takes {human_bytes(part.peak)} of {human_bytes(plan.room)} a device.",
            ]
            lines += (
                ["What would help:", *(f"  {line}" for line in remedies(plan))]
                if name == "train"
                else []
            )
    return "\n".join(lines) + "\n"


def _attention(plan: Plan) -> list[str]:
    """Which inner attention each program uses, and why not another; alike ones together."""
    used: dict[str, list[str]] = {}
    for name, part in plan.parts.items():
        for backend, why in part.compiled.attention.items() if part.compiled else ():
            used.setdefault(backend + (f" ({why})" if why else ""), []).append(name)
    mark = "" if plan.topology.is_tpu else "; on that machine perhaps another"
    return [f"attention   {what}: {', '.join(names)}{mark}" for what, names in used.items()]


def _memory(plan: Plan) -> list[str]:
    kinds = dict.fromkeys(kind for part in plan.parts.values() for kind in part.memory)
    rows = [["a device's memory", *plan.parts]]
    for kind in kinds:
        rows.append(
            [
                f"  {kind}",
                *(
                    human_bytes(part.memory[kind]) if kind in part.memory else ""
                    for part in plan.parts.values()
                ),
            ]
        )
    share = lambda part: (
        f"{human_bytes(part.peak)} {'(!)' if part.too_large else f'({part.peak / plan.room:.0%})' if plan.room else ''}"
    )
    if any(part.too_large for part in plan.parts.values()):
        rest = lambda part: (
            human_bytes(max(part.peak - sum(part.memory.values()), 0)) if part.too_large else ""
        )
        rows.append(["  all else", *map(rest, plan.parts.values())])
    rows.append(
        [
            f"  peak of {human_bytes(plan.room)}" if plan.room else "  peak",
            *(share(part).strip() for part in plan.parts.values()),
        ]
    )
    rows.append(
        [
            "  compiled in",
            *(
                f"{part.compiled.seconds:.0f} s" if part.compiled else "-"
                for part in plan.parts.values()
            ),
        ]
    )
    return table(rows)


def _times(plan: Plan) -> list[str]:
    chip, parts = (
        plan.topology.chip,
        {name: part for name, part in plan.parts.items() if part.roofline},
    )
    rates = {
        "compute": f"{human_count(chip.flops)}FLOP/s",
        "HBM": f"{human_count(chip.hbm_rate)}B/s",
    }
    rows = [["at least", *parts]]
    for kind in ("compute", "HBM", "network", "slices"):
        if any(part.roofline.seconds.get(kind) for part in parts.values()):
            at = f" at {rates[kind]}" if kind in rates else ""
            rows.append(
                [
                    f"  {kind}{at}",
                    *(seconds(part.roofline.seconds.get(kind, 0.0)) for part in parts.values()),
                ]
            )
    rows.append(["  a step", *(seconds(part.roofline.step) for part in parts.values())])
    if plan.topology.is_tpu:
        rows.append(["  bound by", *(part.roofline.bound for part in parts.values())])
    lines = table(rows)
    if not plan.topology.is_tpu:
        lines.append(
            "  HBM's part is not known here; where it takes longer, as in decoding, these are far too short"
        )
    if plan.config.model.dtype == "float32":
        lines.append("  the rate is bfloat16's, and model.dtype is float32: products take longer")
    if plan.step and plan.step < 1e-3:
        lines.append(
            "  what it takes to start a program or a message is not counted, and is more than that"
        )
    if plan.step:
        day = plan.tokens / plan.step * 86400
        lines.append(
            f"  MFU at most {plan.mfu:.1%}; {human_count(plan.tokens / plan.step / plan.topology.chips)} tokens/s a chip, {human_count(day)} a day"
        )
        run = plan.run
        money = f", {_few(run['money'])} at {plan.price:g} each" if "money" in run else ""
        lines.append(
            f"  the run at least: {human_time(run['seconds'])}, {_few(run['chip_hours'])} chip-hours{money}, without evaluation and checkpoints"
        )
    if "decode" in parts and plan.topology.is_tpu:
        decoding, each = plan.config.decoding, parts["decode"].roofline.step
        beams = f" of {decoding.beam_size} beams" if decoding.beam_size > 1 else ""
        lines.append(
            f"  decoding: {human_count(decoding.batch_size / each)} tokens/s for {decoding.batch_size} rows{beams}"
        )
    return lines


def _messages(roof: Roofline) -> list[str]:
    rows = [["sent in a training step, by a device", "count", "within", "beyond"]]
    for kind, traffic in sorted(
        roof.traffic.items(), key=lambda item: -item[1].inner - item[1].outer
    ):
        rows.append(
            [
                f"  {kind}",
                f"{traffic.count:,.0f}",
                human_bytes(traffic.inner),
                human_bytes(traffic.outer) if traffic.outer else "",
            ]
        )
    return table(rows) if roof.traffic else ["no messages between devices"]


def _buffers(part: Part, most: int = 8) -> list[str]:
    found = largest(part.compiled.program, most) if part.compiled else part.too_large.buffers[:most]
    return found and [
        "largest buffers of a training step",
        *(
            f"  {human_bytes(size):>10}  {shape:<28} {name_of(where)[-90:]}"
            for size, shape, where in found
        ),
    ]


def table(rows: list[list[str]]) -> list[str]:
    """Rows as lines, the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(max(w, 12))
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _few(x: float) -> str:
    """4301.03 -> '4,301', 0.0312 -> '0.031'."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def seconds(s: float) -> str:
    """0.00021 -> '0.21 ms'."""
    return f"{s:.2f} s" if s >= 1 else f"{1e3 * s:.1f} ms" if s >= 1e-3 else f"{1e6 * s:.0f} us"
