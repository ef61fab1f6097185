"""A plan as a page of text."""

import math

from transformer.output import columns, count, human_count, human_time, human_tokens, with_unit
from transformer.parallel.sharding import batch_parts, format_bytes
from transformer.planning.hlo import largest
from transformer.planning.plan import Plan, name_of
from transformer.planning.roofline import Roofline
from transformer.sweeps import Sweep

_STATE = "parameters, optimizer and gradients"


def compare(plans: dict[str, Plan], sweep: Sweep) -> str:
    """Returns a table of the training steps of a sweep's arms, and the cost of all its runs."""
    counted = any(plan.kernels for plan in plans.values())
    price = next(iter(plans.values())).price
    bounds = ["step at least", "bound by", "MFU at most", "chip-hours of a run"]
    bounds += ["price of a run"] * (price is not None) + ["attention"]
    rows = [["", "parameters", "FLOPs per token", "peak memory", *bounds, *["kernels"] * counted]]
    has_none = (plan for plan in plans.values() if plan.config.model.position == "none")
    base = next(has_none, next(iter(plans.values()))).kernel_cycles
    for name, plan in plans.items():
        part, roof = plan.train, plan.train.roofline
        times = [seconds(plan.step), roof.bound, f"{plan.mfu:.1%}"] if plan.step else []
        least = [*times, *map(_few, [*plan.run.values()][1:])] or [""] * (len(bounds) - 1)
        peak = format_bytes(part.peak) + ("" if plan.fits else " (!)")
        used = " ".join(part.compiled.attention) if part.compiled else ""
        flops = human_count(plan.model_flops / plan.tokens)
        cost = f"{plan.kernel_cycles / base:.3f}" if base and plan.kernel_cycles else ""
        cost = cost or ("not analyzed" if plan.kernels else "none")
        rows.append([name, f"{plan.parameters:,}", flops, peak, *least, used, *[cost] * counted])
    notes = ["kernels: cycles, relative to the arm without positions, or else the first"] * counted
    if all(plan.run for plan in plans.values()):
        of_arm = sweep.tuning_runs + len(sweep.seeds) * (2 if sweep.tune else 1)
        hours = of_arm * sum(plan.run["chip_hours"] for plan in plans.values())
        runs = f"{len(plans) * of_arm} runs ({of_arm} of each arm)"
        notes.append(f"{runs}: at least {_cost(hours, price)}, without evaluation and checkpoints")
    return "\n".join(table(rows) + [""] * bool(notes) + notes) + "\n"


def kernels(plan: Plan) -> list[str]:
    """Returns a table of the schedules of the attention kernels of a training step."""
    shapes = [(*x.operands[0][1][-2:], x.operands[1][1][-2]) for x in plan.kernels]
    rows = {"queries x keys, d_head": [f"{T:,} x {S:,}, {H}" for T, H, S in shapes]}
    rows["heads x sequences"] = [f"{x.heads:,}" for x in plan.kernels]
    names = {"calls": "calls", "trips": "tiles of a head", "bundles": "cycles of a tile"}
    names |= {"spills": "spills in a tile", "cycles": "cycles of a call", "least": "of products"}
    number = lambda x, field: f"{getattr(x, field):,.0f}" if x.cycles else "not analyzed"
    rows |= {name: [number(x, field) for x in plan.kernels] for field, name in names.items()}
    rows["ratio"] = [f"{x.cycles / x.least:.2f}" if x.cycles else "" for x in plan.kernels]
    rows["VMEM at most"] = [format_bytes(x.vmem) for x in plan.kernels]
    header = ["attention kernels", *(x.name for x in plan.kernels)]
    lines = table([header, *([f"  {name}", *cells] for name, cells in rows.items())])
    return lines if plan.kernels else ["no attention kernels in a training step"]


def remedies(plan: Plan) -> list[str]:
    """Returns the changes that would make a training step fit, the most promising first."""
    config, mesh, room = plan.config, plan.mesh, plan.room
    memory, changes = plan.train.memory, []
    parameters = memory["parameters"]
    held = parameters + memory.get("optimizer", 0.0) + memory.get("moving average", 0.0)
    needed = held + parameters  # with gradients
    if needed > 0.8 * room:
        if mesh["data"] > 1:
            flags = f"mesh.fsdp={mesh['fsdp'] * mesh['data']} mesh.data=1"
            devices = f"over {mesh['data']} times as many devices"
            sizes = f"{format_bytes(needed / mesh['data'])} instead of {format_bytes(needed)} each"
            changes.append(f"{flags}: shards {_STATE} {devices}, {sizes}")
        if config.optimizer.rule.name == "adamw":
            saved = f"which saves about {format_bytes(2 * parameters)} per device"
            changes.append(f"optimizer.name=adafactor: avoids AdamW's two moments, {saved}")
        number = math.ceil(needed / (0.7 * room)) * (plan.topology.devices // mesh["data"])
        rest = "mesh.fsdp over all, which leaves 30% of their memory for everything else"
        alone = f"{_STATE} alone take {format_bytes(needed)} of {format_bytes(room)} per device"
        changes.append(f"{number} devices or more, with {rest}: {alone}")
    if config.model.remat != "full":
        stream = "the residual stream between layers"
        changes.append(f"model.remat=full: keeps only {stream} for the backward pass")
    sequences = config.data.batch_size // batch_parts(mesh)
    larger = range(config.train.accumulate + 1, sequences + 1)
    if divisors := [n for n in larger if sequences % n == 0]:
        counts = f"{divisors[0]} (up to {divisors[-1]})"
        changes.append(f"train.accumulate={counts}: uses smaller micro-batches")
    if mesh["tensor"] == 1 and config.model.kv_heads % 2 == 0:
        sharded = "heads, d_ff, vocabulary and, between sublayers, the residual stream"
        changes.append(f"mesh.tensor=2: shards {sharded} over two devices")
    changes.append("mesh.context=2: shards sequences over two devices")
    return changes


def page(plan: Plan) -> str:
    """Returns the memory, times and collectives of every program, and what would make it fit."""
    config, topology, chip = plan.config, plan.topology, plan.topology.chip
    sizes = [f"{axis} {size}" for axis, size in plan.mesh.items() if size > 1]
    memory = f", {format_bytes(chip.hbm)} each" if chip.hbm else ""
    memory += f", {chip.devices} devices per chip" if chip.devices > 1 else ""
    simulated = "simulated devices: temporaries and HBM traffic are the CPU compiler's"
    flops = with_unit(plan.model_flops / plan.tokens, "FLOPs")
    steps = f"{config.train.steps:,} steps are {human_tokens(plan.tokens * config.train.steps)}"
    lines = [f"machine     {topology}: {topology.chips} x {chip.title}{memory}"]
    lines.append(f"mesh        {' x '.join(sizes) or 'one device'}")
    lines += [f"compiled    for {simulated}"] * (not topology.is_tpu)
    lines.append(f"model       {plan.parameters:,} parameters, {flops} per token in training")
    lines.append(f"batch       {plan.tokens:,} tokens; {steps} tokens")
    if plan.parts.keys() & {"prefill", "decode"}:
        length = config.model.max_length
        sequences = config.decoding.batch_size * config.decoding.beam_size
        prompts = f"prompts of {max(length // 2, 1):,} tokens, a cache of {length:,}"
        lines.append(f"decoding    {count(sequences, 'sequence')}, {prompts}")
    lines += _attention(plan)
    compiled = {name: part.compiled for name, part in plan.parts.items() if part.compiled}
    durations = [f"{x.seconds:.0f} s for {name}" for name, x in compiled.items()]
    lines += [f"compiling   {', '.join(durations)}"] if durations else []
    lines += ["", *_memory(plan)]
    if any(part.roofline and part.roofline.seconds for part in plan.parts.values()):
        lines += ["", *_times(plan)]
    if train := plan.train:
        place = "slice" if topology.is_tpu else "host"
        lines += ["", *_collectives(train.roofline, place)] if train.roofline else []
        buffers = largest(train.compiled.program) if train.compiled else train.too_large.buffers[:8]
        lines += ["", "largest buffers of a training step"] if buffers else []
        for size, shape, source in buffers:
            lines.append(f"  {format_bytes(size):>10}  {shape:<28} {name_of(source)[-90:]}")
    for name, part in plan.parts.items():
        if not plan.fits_in(part):
            sizes = f"{format_bytes(part.peak)} of {format_bytes(plan.room)} per device"
            lines += ["", f"IT DOES NOT FIT: {name} takes {sizes}."]
            if name == "train":
                lines += ["What would help:", *(f"  {line}" for line in remedies(plan))]
    return "\n".join(lines) + "\n"


def _attention(plan: Plan) -> list[str]:
    programs: dict[str, list[str]] = {}
    for name, part in plan.parts.items():
        for backend, why in part.compiled.attention.items() if part.compiled else ():
            programs.setdefault(backend + (f" ({why})" if why else ""), []).append(name)
    note = "" if plan.topology.is_tpu else "; the machine may use another"
    return [f"attention   {name}: {', '.join(users)}{note}" for name, users in programs.items()]


def _memory(plan: Plan) -> list[str]:
    kinds = dict.fromkeys(kind for part in plan.parts.values() for kind in part.memory)
    rows = [["memory per device", *plan.parts]]
    size = lambda part, kind: format_bytes(part.memory[kind]) if kind in part.memory else ""
    rows += [[f"  {x}", *(size(part, x) for part in plan.parts.values())] for x in kinds]
    of_room = lambda part: f" ({part.peak / plan.room:.0%})" if plan.room else ""
    share = lambda part: format_bytes(part.peak) + (" (!)" if part.too_large else of_room(part))
    if any(part.too_large for part in plan.parts.values()):
        other = lambda part: format_bytes(max(part.peak - sum(part.memory.values()), 0))
        cells = [other(part) if part.too_large else "" for part in plan.parts.values()]
        rows.append(["  everything else", *cells])
    peak = f"  peak of {format_bytes(plan.room)}" if plan.room else "  peak"
    return table([*rows, [peak, *map(share, plan.parts.values())]])


def _times(plan: Plan) -> list[str]:
    chip, parts = plan.topology.chip, {n: part for n, part in plan.parts.items() if part.roofline}
    rates = {"compute": with_unit(chip.flops, "FLOP/s"), "HBM": with_unit(chip.hbm_rate, "B/s")}
    rows = [["minimum time", *parts]]
    for kind in ("compute", "HBM", "network", "slices"):
        if any(part.roofline.seconds.get(kind) for part in parts.values()):
            rate = f" at {rates[kind]}" if kind in rates else ""
            times = (seconds(part.roofline.seconds.get(kind, 0.0)) for part in parts.values())
            rows.append([f"  {kind}{rate}", *times])
    rows.append(["  step", *(seconds(part.roofline.step) for part in parts.values())])
    if plan.topology.is_tpu:
        rows.append(["  bound by", *(part.roofline.bound for part in parts.values())])
    lines = table(rows)
    if not plan.topology.is_tpu:
        where = "where it dominates, as in decoding, these times are far too short"
        lines.append(f"  HBM traffic is unknown; {where}")
    if plan.config.model.dtype == "float32":
        slower = "model.dtype is float32, whose products take longer"
        lines.append(f"  the compute rate is that of bfloat16, but {slower}")
    if plan.step and plan.step < 1e-3:
        latencies = "the latencies of programs and collectives"
        lines.append(f"  {latencies} are not included, and exceed this time")
    if plan.step:
        rate, run = plan.tokens / plan.step, plan.run
        per_chip = f"{human_tokens(rate / plan.topology.chips)} tokens/s per chip"
        per_day = f"{human_tokens(rate * 86400)} tokens per day in total"
        lines.append(f"  MFU at most {plan.mfu:.1%}; {per_chip}, {per_day}")
        least = human_time(run["seconds"]) + " min" * (run["seconds"] < 3600)
        least += f", {_cost(run['chip_hours'], plan.price)}"
        lines.append(f"  run: at least {least}, without evaluation and checkpoints")
    if "decode" in parts and plan.topology.is_tpu:
        decoding, step = plan.config.decoding, parts["decode"].roofline.step
        beams = f" of {decoding.beam_size} beams" if decoding.beam_size > 1 else ""
        speed = f"{human_tokens(decoding.batch_size / step)} tokens/s"
        lines.append(f"  decoding: {speed} for {count(decoding.batch_size, 'sequence')}{beams}")
    return lines


def _collectives(roof: Roofline, place: str) -> list[str]:
    places = f"within the {place}", f"between {place}s"
    rows = [["sent per device in one training step", "count", *places]]
    for kind, traffic in sorted(roof.traffic.items(), key=lambda x: -x[1].inner - x[1].outer):
        outer = format_bytes(traffic.outer) if traffic.outer else ""
        rows.append([f"  {kind}", f"{traffic.count:,.0f}", format_bytes(traffic.inner), outer])
    if not any(row[-1] for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    return table(rows) if roof.traffic else ["no collectives between devices"]


def table(rows: list[list[str]]) -> list[str]:
    """Returns rows as aligned lines: the first column to the left, all others to the right."""
    widths = [max(12, *map(len, column)) for column in zip(*rows, strict=True)]
    return columns([[name, *map(str.rjust, cells, widths[1:])] for name, *cells in rows])


def _cost(chip_hours: float, price: float | None) -> str:
    money = f", price {_few(chip_hours * price)} ({price:g} per chip-hour)" if price else ""
    return f"{_few(chip_hours)} chip-hours{money}"


def _few(x: float) -> str:
    """Formats a number with few digits: 4301.03 -> '4,301', 0.0312 -> '0.031'."""
    return f"{x:,.0f}" if x >= 10 else f"{x:.2g}"


def seconds(s: float) -> str:
    """Formats seconds: 0.00021 -> '0.21 ms'."""
    return f"{s:.2f} s" if s >= 1 else f"{1e3 * s:.1f} ms" if s >= 1e-3 else f"{1e6 * s:.0f} us"
