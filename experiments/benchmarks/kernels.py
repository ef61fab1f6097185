"""How many cycles does fused attention take on a TPU with a scheme that depends on distance?

    python experiments/benchmarks/kernels.py --chips=v5e,v5p,v6e

The TPU compiler in libtpu (extra [tpu]) compiles the kernels of one head for each chip, and their
scheduled instructions are counted (transformer/planning/bundles.py). No TPU is needed. Memory
transfers are not counted. `fixed` is a bias without parameters (alibi, sandwich), `learned` one
with parameters (t5, kerple), whose backward pass also computes the gradient of its vector. `shaw`,
`transformer_xl` and `deberta` are those schemes. --units also prints the cycles that each unit of
the core needs for a tile.

Shapes    8,192 tokens, d_head 128, bfloat16, causal mask, one sequence per head
Hardware  any Linux x86-64 machine; the figures depend on the version of libtpu alone
Compare   the kernel without a position scheme
"""

import argparse
import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from transformer.planning.bundles import UNITS, KernelSchedule, dump_flags, head_cycles, read

T, H = 8192, 128
"""Tokens, and head size."""

TILES = {"v5e": 512, "v5p": 512, "v6e": 1024}
"""Queries and keys per tile, as in transformer/model/attention_backends/flash/call.py. Schemes in
NEAR have 512 on every chip."""

SCHEMES = ("none", "fixed", "learned", "shaw", "transformer_xl", "deberta")

NEAR = ("shaw", "deberta")
"""Schemes whose tables are constant from a distance on: tiles beyond it need no tables."""


def usual_tile(chip: str, scheme: str) -> int:
    """Returns the queries and keys per tile that the kernels have on a chip."""
    return 512 if scheme in NEAR else TILES[chip]


def device_of(chip: str):
    """Returns a device that the compiler knows, and this machine does not have."""
    from transformer.planning import chips, programs

    shape = "2x2x1" if chip in ("v4", "v5p") else "2x2"
    return programs.start(chips.topology(f"{chip}:{shape}", 1))[0]


def compile_kernels(chip: str, scheme: str, tile: int, d_head: int) -> None:
    """Compiles the forward and the backward kernel. libtpu writes their schedules."""
    import jax
    import jax.numpy as jnp

    from transformer.model.attention_backends.flash.backward import backward
    from transformer.model.attention_backends.flash.forward import forward
    from transformer.model.attention_backends.flash.settings import Settings
    from transformer.model.attention_backends.flash.tiles import EACH, LANES, NONE, Limits
    from transformer.model.positions.base import Lines, Terms
    from transformer.parallel.config import MeshConfig
    from transformer.parallel.mesh import make_mesh, use

    device = device_of(chip)
    sharding = jax.sharding.SingleDeviceSharding(device)
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    reach = 2 * tile - LANES
    vector = array(2, T + reach - 1, dtype=jnp.float32)
    table = array(2, T + reach, d_head, dtype=jnp.float32)
    f32 = functools.partial(array, dtype=jnp.float32)
    of_query, knots, line = f32(1, 2, T), f32(2, 1090), f32(2, 1089)
    terms = {
        "none": Terms(1.0),
        "fire": Terms(1.0, vector, lines=Lines(knots, line, line), rows_BxNxT=of_query),
        "shaw": Terms(1.0, keys_NxDxH=table, values_NxDxV=table, ends=(-16, 16)),
        "transformer_xl": Terms(1.0, vector, keys_NxDxH=table),
        "deberta": Terms(1.0, vector, keys_NxDxH=table, queries_NxDxH=table, ends=(-128, 127)),
    }.get(scheme, Terms(1.0, vector))
    vmem = 60 * max(1, d_head // 128) * 2**20
    settings = Settings(tile, tile, reach, heads=2, vmem=vmem)
    tokens, kinds = array(1, T, dtype=jnp.int32), None
    if terms.ends:
        settings = settings._replace(kinds=(EACH, NONE))
        kinds = array(1, T // tile, T // tile, dtype=jnp.int32)
    x = array(1, 2, T, d_head)
    limits = Limits(tokens, None, tokens, tokens, tokens, kinds)
    args = (x, x, x, limits, terms, array(6, dtype="int32"))
    with use(make_mesh(MeshConfig(data=1), [device])):
        jax.jit(lambda *args: forward(settings, *args)).lower(*args).compile()
        run = lambda *args: backward(settings, *args, learned=scheme not in ("none", "fixed"))
        jax.jit(run).lower(*args, of_query, of_query, x).compile()


def cycles(schedule: KernelSchedule, scheme: str, tile: int) -> dict[str, float]:
    """Returns the cycles of a whole head, those of a tile, and those that each unit needs for it.

    The kernels of the schemes in NEAR have a third kind of tile: one with tables, which occurs on
    the diagonal and next to it. For these, the cycles of that tile are returned.
    """
    blocks, chunks = T // tile, (T + 2 * tile - 128 - 128) // 128
    tiles = blocks * (blocks + 1) // 2
    near = 2 * blocks - 1
    counts = (near, 0, tiles - near) if scheme in NEAR else (blocks, tiles - blocks)
    kinds, of_sequence, of_head = head_cycles(schedule, blocks, chunks, *counts)
    shown = kinds[0 if scheme in NEAR else -1]
    units = {unit: schedule.busy(shown, unit) for unit in UNITS}
    return {"head": of_sequence + of_head, "tile": shown.own, **units}


def with_knots(schedule: KernelSchedule, tile: int) -> tuple[float, float]:
    """Returns the cycles of a tile of "fire" without a mask and a knot, and those of each knot.

    The tile is computed in parts of 16,384 elements, in a loop. In it, a loop over knots selects
    lines. In the backward kernel, a loop over lines follows, with a loop over the same parts.
    """
    inside = lambda block: [block, *(x for inner in block.inner for x in inside(inner))]
    has_products = lambda block: schedule.busy(block, "MXU") > 0
    full = list(filter(has_products, inside(schedule.kernel)))[-1]
    select, *gradient = full.inner
    (knots,), parts = select.inner[0].inner, tile**2 // 2**14
    before, each = full.own + parts * (select.own + select.inner[0].own), parts * knots.own
    if gradient:
        (lines,) = gradient[0].inner
        of_line = lines.own + parts * lines.inner[0].own
        before, each = before + of_line, each + of_line
    return before, each


def measure(chip: str, scheme: str, tile: int = 0, d_head: int = H) -> dict[str, dict[str, float]]:
    """Returns the cycles of both kernels; without `tile`, with the usual one."""
    tile = tile or usual_tile(chip, scheme)
    return {
        name: cycles(schedule, scheme, tile)
        for name, schedule in compiled(chip, scheme, tile, d_head).items()
    }


def compiled(chip: str, scheme: str, tile: int, d_head: int) -> dict[str, KernelSchedule]:
    """Returns the schedules of both kernels."""
    args, kernels = (chip, scheme, tile, d_head), ("flash_forward", "flash_backward")
    if (found := schedules(compile_kernels, args, kernels)) is None:
        raise SystemExit(f"the compiler failed for {chip} with {scheme!r}")
    return dict(zip(("forward", "backward"), found, strict=True))


def schedules(compiled: Callable, args: tuple, kernels: tuple[str, ...]):
    """Returns the schedules of the kernels that compiled(*args) compiles, or None if it fails.

    It runs in a process of its own, because libtpu reads its flags once.
    """
    with tempfile.TemporaryDirectory() as folder:
        process = os.fork()
        if not process:
            os.environ["LIBTPU_INIT_ARGS"] = dump_flags(Path(folder))
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2)
            status = 1
            try:
                compiled(*args)
                status = 0
            finally:
                os._exit(status)
        failed = os.waitpid(process, 0)[1]
        return None if failed else [read(Path(folder), kernel) for kernel in kernels]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chips", default="v5e,v5p,v6e")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--units", action="store_true")
    args = parser.parse_args()
    columns = ("chip", "tile", "kernel", "scheme", "cycles of a tile", "of them products")
    columns = (*columns, "cycles of a head", "ratio", *(UNITS if args.units else ()))
    line = lambda *cells: print("| " + " | ".join(cells) + " |", flush=True)
    line(*columns)
    line(*["---"] * len(columns))
    for chip in args.chips.split(","):
        results = {scheme: measure(chip, scheme) for scheme in args.schemes.split(",")}
        for result in results.values():
            result["both"] = {"head": result["forward"]["head"] + result["backward"]["head"]}
        for kernel in ("forward", "backward", "both"):
            for scheme, result in results.items():
                if (kernel, scheme) == ("forward", "learned"):  # the kernel of fixed
                    continue
                row, plain = result[kernel], results["none"][kernel]
                of_tile = [f"{row[x]:,.0f}" if x in row else "" for x in ("tile", "MXU")]
                ratio = f"{row['head'] / plain['head']:.3f}"
                units = [f"{row[unit]:,.0f}" if unit in row else "" for unit in UNITS]
                units = units if args.units else []
                size = " x ".join([str(usual_tile(chip, scheme))] * 2)
                line(chip, size, kernel, scheme, *of_tile, f"{row['head']:,}", ratio, *units)
    for chip in args.chips.split(",") if args.schemes == ",".join(SCHEMES) else ():
        tile = usual_tile(chip, "fire")
        for name, schedule in compiled(chip, "fire", tile, H).items():
            of_tile, of_knot = with_knots(schedule, tile)
            print(f"{chip}: fire, {name}: {of_tile:,} cycles of a tile, {of_knot:,} of each knot")


if __name__ == "__main__":
    main()
