"""How many queries and keys per tile of fused attention take the fewest cycles on a TPU?

    python experiments/benchmarks/tile_sizes.py --chips=v5e,v5p,v6e

Kernels are compiled and their scheduled instructions counted as in kernels.py, with tiles of as
many queries as keys. A row has the cycles of a head, forward and backward, for each size and, in
parentheses, the cycles per pair of a query and a key in a tile without masked pairs, relative to
tiles of 512 x 512. Large tiles compute more pairs that a causal mask forbids, so a size may take
fewer cycles per pair and more per head.

The table `COST` in transformer/model/attention_backends/flash/call.py has the rounded cycles per
pair. The kernels choose a size by this table and the length of the sequences.

Shapes    8,192 tokens, bfloat16, causal mask, one sequence per head
Hardware  any Linux x86-64 machine; the figures depend on the version of libtpu alone
Compare   tiles of 512 x 512
"""

import argparse

from kernels import measure

SIZES = (128, 256, 512, 1024)

CASES = [
    (128, "none"), (128, "learned"), (128, "shaw"), (128, "transformer_xl"), (128, "deberta"),
    (64, "none"), (64, "learned"), (256, "none"), (256, "learned"),
]  # fmt: skip
"""Head sizes and schemes."""


def row(chip: str, d_head: int, scheme: str) -> list[str]:
    """Returns the cells of a row. That of a size that needs more memory than the chip has is
    empty."""
    heads, per_pair = {}, {}
    for size in SIZES:
        try:
            kernels = measure(chip, scheme, size, d_head).values()
        except SystemExit:
            continue
        heads[size] = sum(kernel["head"] for kernel in kernels)
        per_pair[size] = sum(kernel["tile"] for kernel in kernels) / size**2
    cell = lambda size: f"{heads[size]:,.0f} ({per_pair[size] / per_pair[512]:.2f})"
    cells = [cell(size) if size in heads else "" for size in SIZES]
    return [chip, str(d_head), scheme, *cells]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chips", default="v5e,v5p,v6e")
    args = parser.parse_args()
    line = lambda *cells: print("| " + " | ".join(cells) + " |", flush=True)
    line("chip", "d_head", "scheme", *(f"{size} x {size}" for size in SIZES))
    line(*["---"] * (3 + len(SIZES)))
    for chip in args.chips.split(","):
        for case in CASES:
            line(*row(chip, *case))


if __name__ == "__main__":
    main()
