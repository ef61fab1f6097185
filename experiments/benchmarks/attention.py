"""Compares the time and memory of blockwise and reference attention, forward and backward.

    python experiments/benchmarks/attention.py [--lengths=512,1024,2048,4096] [--longest=32768]

One sequence, 8 heads of size 64, causal, float32. The two backends run in turn. At the `--longest`
length, only blockwise attention runs: the logits of reference attention would take
8 * 32,768^2 * 4 bytes = 34 GB.
"""

import sys
import time

import jax
import jax.numpy as jnp

from transformer.model.attention_backends import BACKENDS, Inputs
from transformer.model.masks import CAUSAL, SAME_SEGMENT, Tokens

HEADS, SIZE = 8, 64


def compiled(backend: str, length: int):
    """Returns a call that computes the gradients, and the bytes of its temporaries."""
    tokens = Tokens(jnp.arange(length)[None], jnp.ones((1, length), jnp.int32), order="contiguous")
    inputs = Inputs(SAME_SEGMENT & CAUSAL, tokens, tokens, None, SIZE**-0.5)
    arrays = [jax.random.normal(jax.random.key(i), (1, length, HEADS, SIZE)) for i in range(3)]
    loss = lambda *qkv: jnp.sum(BACKENDS[backend].attend(*qkv, inputs) ** 2)
    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays).compile()
    return lambda: jax.block_until_ready(
        program(*arrays)
    ), program.memory_analysis().temp_size_in_bytes


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    options = dict(a.removeprefix("--").partition("=")[::2] for a in sys.argv[1:])
    for length in map(int, options.get("lengths", "512,1024,2048,4096").split(",")):
        (reference, reference_bytes), (blockwise, blockwise_bytes) = (
            compiled(name, length) for name in ("reference", "blockwise")
        )
        times = [(seconds(reference), seconds(blockwise)) for _ in range(6)][1:]
        reference_s, blockwise_s = (min(column) for column in zip(*times, strict=True))
        print(
            f"{length:>6}  reference {reference_s:6.2f} s {reference_bytes / 1e6:7.0f} MB   "
            f"blockwise {blockwise_s:6.2f} s {blockwise_bytes / 1e6:5.0f} MB   "
            f"{reference_s / blockwise_s:.2f}x"
        )
    longest = int(options.get("longest", 32_768))
    blockwise, blockwise_bytes = compiled("blockwise", longest)
    print(f"{longest:>6}  blockwise {seconds(blockwise):.1f} s {blockwise_bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
