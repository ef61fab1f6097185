"""Does fused attention take fewer cycles on a TPU than JAX's splash attention?

    python experiments/benchmarks/splash.py --chips=v5e,v5p,v6e

Both kernels are compiled without a position scheme, and their scheduled instructions are counted,
as in kernels.py. Splash attention is compiled with several block sizes, and the best of them
counts, for each pass separately. Its backward pass is the fused one. That pass writes one gradient
of the queries per block of keys; their sum is a program of its own and is not counted here.

Shapes    8,192 tokens, d_head 128, bfloat16, causal mask, one sequence per head
Hardware  any Linux x86-64 machine; the figures depend on the versions of libtpu and JAX alone
Compare   jax.experimental.pallas.ops.tpu.splash_attention
"""

import argparse

from kernels import H, T, device_of, measure, schedules

from transformer.planning.bundles import KernelSchedule

BLOCKS = [
    (512, 512, 512), (512, 1024, 512), (512, 2048, 512), (1024, 512, 512), (1024, 1024, 512),
    (1024, 1024, 1024), (1024, 2048, 512), (1024, 2048, 1024), (2048, 1024, 512), (2048, 2048, 512),
]  # fmt: skip
"""Queries and keys of a tile, and keys of a product in it."""

KERNELS = {"forward": "splash_mha_fwd", "backward": "splash_mha_dkv"}


def compile_splash(chip: str, q: int, k: int, k_product: int) -> None:
    """Compiles both kernels of splash attention. libtpu writes their schedules."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
        splash_attention_mask as masks,
    )

    sizes = splash.BlockSizes(
        block_q=q,
        block_kv=k,
        block_kv_compute=k_product,
        block_q_dkv=q,
        block_kv_dkv=k,
        block_kv_dkv_compute=k_product,
        use_fused_bwd_kernel=True,
    )
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * 2)
    attend = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
    sharding = jax.sharding.SingleDeviceSharding(device_of(chip))
    x = jax.ShapeDtypeStruct((2, T, H), jnp.bfloat16, sharding=sharding)
    total = lambda *args: attend(*args).astype(jnp.float32).sum()
    jax.jit(jax.value_and_grad(total, (0, 1, 2))).lower(x, x, x).compile()


def head_cycles(schedule: KernelSchedule, outer: int, inner: int) -> int:
    """Returns the cycles of a head: `outer` blocks, each with a loop over blocks of size `inner`.

    The grid is a loop over all pairs of blocks. In it, one conditional part is executed for pairs
    that the mask allows. That part has three: before the first pair of a row of blocks, every pair,
    and after the last.
    """
    (grid,) = schedule.kernel.inner
    (pair,) = grid.inner
    once, tile = [], []
    for part in pair.inner:
        (tile if schedule.busy(part, "MXU") else once).append(part)
    (tile,) = tile
    if tile.inner or any(part.inner for part in once):
        raise ValueError("there are other loops than the grid")
    rows, columns = T // outer, T // inner
    tiles = sum(-(-(row + 1) * outer // inner) for row in range(rows))
    of_pairs = rows * columns * grid.own + tiles * (pair.own + tile.own)
    return of_pairs + rows * sum(part.own for part in once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chips", default="v5e,v5p,v6e")
    args = parser.parse_args()
    line = lambda *cells: print("| " + " | ".join(cells) + " |", flush=True)
    line("chip", "kernel", "this project", "splash", "its best blocks", "ratio")
    line(*["---"] * 6)
    for chip in args.chips.split(","):
        ours, best = measure(chip, "none"), {}
        for blocks in BLOCKS:
            compiled = schedules(compile_splash, (chip, *blocks), tuple(KERNELS.values()))
            if compiled is None:  # more memory than the chip has
                continue
            q, k, _ = blocks
            orders = ((q, k), (k, q))
            for kernel, schedule, order in zip(KERNELS, compiled, orders, strict=True):
                best.setdefault(kernel, []).append((head_cycles(schedule, *order), blocks))
        for kernel, results in best.items():
            head, blocks = min(results)
            row = ours[kernel]["head"]
            sizes = " x ".join(map(str, blocks))
            line(chip, kernel, f"{row:,}", f"{head:,}", sizes, f"{row / head:.3f}")


if __name__ == "__main__":
    main()
