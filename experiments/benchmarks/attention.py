"""Attention in blocks against the plain one: time of values and gradients, and what they need of memory.

    python experiments/benchmarks/attention.py [--lengths=512,1024,2048,4096] [--longest=32768]

One row, 8 heads of 64, causal, float32; the two take turns. `--longest` runs in blocks alone: its logits would take
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
    """(a call that computes it, bytes of its temporaries)."""
    where = Tokens(jnp.arange(length)[None], jnp.ones((1, length), jnp.int32), order="rows")
    given = Inputs(SAME_SEGMENT & CAUSAL, where, where, None, SIZE**-0.5)
    inputs = [jax.random.normal(jax.random.key(i), (1, length, HEADS, SIZE)) for i in range(3)]
    loss = lambda *qkv: jnp.sum(BACKENDS[backend].attend(*qkv, given) ** 2)
    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*inputs).compile()
    return lambda: jax.block_until_ready(
        program(*inputs)
    ), program.memory_analysis().temp_size_in_bytes


def seconds(call) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def main() -> None:
    options = dict(a.removeprefix("--").partition("=")[::2] for a in sys.argv[1:])
    for length in map(int, options.get("lengths", "512,1024,2048,4096").split(",")):
        (plain, held), (blocks, less) = (
            compiled(name, length) for name in ("reference", "blockwise")
        )
        times = [(seconds(plain), seconds(blocks)) for _ in range(6)][1:]
        a, b = (min(column) for column in zip(*times, strict=True))
        print(
            f"{length:>6}  plain {a:6.2f} s {held / 1e6:7.0f} MB   in blocks {b:6.2f} s {less / 1e6:5.0f} MB   {a / b:.2f}x"
        )
    longest = int(options.get("longest", 32_768))
    blocks, less = compiled("blockwise", longest)
    print(f"{longest:>6}  in blocks {seconds(blocks):.1f} s {less / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
