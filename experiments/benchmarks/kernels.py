"""How many cycles does fused attention take on a TPU with a bias that depends on distance?

    python experiments/benchmarks/kernels.py --chips=v5e,v5p,v6e

The TPU compiler in libtpu (extra [tpu]) compiles the kernels of one head for each chip, and their
scheduled instructions are counted (transformer/planning/bundles.py). No TPU is needed. Memory
transfers are not counted. `fixed` is a bias without parameters (alibi, sandwich), `learned` one
with parameters (t5, kerple), whose backward pass also computes the gradient of its vector.

Shapes    8,192 tokens, d_head 128, bfloat16, causal mask, one sequence per head
Hardware  any Linux x86-64 machine; the figures depend on the version of libtpu alone
Compare   the kernel without a bias
"""

import argparse
import os
import tempfile
from pathlib import Path

from transformer.planning.bundles import KernelSchedule, dump_flags, head_cycles, read

T, H, TILE = 8192, 128, 512
"""Tokens, head size, and queries and keys per tile."""


def compile_kernels(chip: str, bias: str) -> None:
    """Compiles the forward and the backward kernel. libtpu writes their schedules."""
    import jax
    import jax.numpy as jnp

    from transformer.model.attention_backends.flash.backward import backward
    from transformer.model.attention_backends.flash.forward import forward
    from transformer.model.attention_backends.flash.settings import Settings
    from transformer.model.attention_backends.flash.tiles import LANES, Limits
    from transformer.planning import chips, programs

    machine = chips.topology(f"{chip}:2x2x1" if chip in ("v4", "v5p") else f"{chip}:2x2", 1)
    device = jax.sharding.SingleDeviceSharding(programs.start(machine)[0])
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype, sharding=device)
    reach = 2 * TILE - LANES
    settings = Settings(TILE, TILE, reach, heads=2, vmem=60 * 2**20)
    tokens = array(1, T, dtype=jnp.int32)
    vector = None if bias == "none" else array(2, T + reach - 1, dtype=jnp.float32)
    x, of_query = array(1, 2, T, H), array(1, 2, T, dtype=jnp.float32)
    args = (x, x, x, Limits(tokens, None, tokens, tokens, tokens), vector, array(6, dtype="int32"))
    jax.jit(lambda *args: forward(settings, *args)).lower(*args).compile()
    run = lambda *args: backward(settings, *args, learned=bias == "learned")
    jax.jit(run).lower(*args, of_query, of_query, x).compile()


def cycles(schedule: KernelSchedule) -> dict[str, float]:
    """Returns the cycles of a full tile, those of the products in it, and those of a whole head."""
    blocks, chunks = T // TILE, (T + 2 * TILE - 128 - 128) // 128
    diagonal, below = blocks, blocks * (blocks - 1) // 2
    full, sequence, once = head_cycles(schedule, blocks, chunks, diagonal, below)
    products = schedule.busy(full, "MXU")
    return {"tile": full.own, "products": products, "head": sequence + once}


def measure(chip: str, bias: str) -> dict[str, dict[str, float]]:
    """Returns the cycles of both kernels, from a process of its own: libtpu reads flags once."""
    with tempfile.TemporaryDirectory() as folder:
        process = os.fork()
        if not process:
            os.environ["LIBTPU_INIT_ARGS"] = dump_flags(Path(folder))
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 2)
            status = 1
            try:
                compile_kernels(chip, bias)
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(process, 0)[1]:
            raise SystemExit(f"the compiler failed for {chip} with bias {bias!r}")
        return {
            name: cycles(read(Path(folder), f"flash_{name}")) for name in ("forward", "backward")
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chips", default="v5e,v5p,v6e")
    print(
        "| chip | kernel | bias | cycles of a tile | of them products | cycles of a head | ratio |"
    )
    print("|---|---|---|---|---|---|---|")
    for chip in parser.parse_args().chips.split(","):
        results = {bias: measure(chip, bias) for bias in ("none", "fixed", "learned")}
        for kernel in ("forward", "backward"):
            for bias, result in results.items():
                row, plain = result[kernel], results["none"][kernel]
                if (kernel, bias) == ("forward", "learned"):  # the kernel of fixed
                    continue
                print(
                    f"| {chip} | {kernel} | {bias} | {row['tile']:,} | {row['products']:,.0f} "
                    f"| {row['head']:,} | {row['head'] / plain['head']:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
