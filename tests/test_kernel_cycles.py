"""The cycles of kernels, counted in the schedules of the TPU compiler."""

import os
import re
import subprocess
import sys
from pathlib import Path

from transformer.planning.bundles import _blocks

ROOT = Path(__file__).parent.parent


def run_script(name: str, *arguments: str) -> list[str]:
    """Returns the lines that a script of experiments/benchmarks prints."""
    command = [sys.executable, f"experiments/benchmarks/{name}", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    output = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900
    )
    assert output.returncode == 0, (output.stdout + output.stderr)[-2000:]
    return output.stdout.splitlines()


def test_loops_and_conditional_parts_are_read_from_branches():
    bundles = """
     0   :  { nop } /* Start region 1 */
   0x2   : > { %p = sbr.rel (%q) target = $region7 }
   0x7 LB: > { nop } /* Start region 9 :: Start region 3 */
   0x9   : > { %r = sbr.rel (!%q) target = $region9 }
  0x20 PF: > { nop } /* Start/End empty region 7 */
"""
    assert _blocks(bundles) == [(7, 0x20), (7, 14)]


def test_kernels_compile_for_every_chip():
    """A scheme of each kind, soft-capped, packed and grouped. `make kernels` compiles the rest."""
    lines = run_script("compiled_kernels.py", "--only=soft cap")
    compiled = [" ".join(line.split()[:4]) for line in lines]
    assert compiled == [f"{chip}: 4 programs compiled" for chip in ("v5e", "v5p", "v6e")]


def test_schemes_by_distance_cost_few_cycles():
    """The targets are relative to the kernel without a scheme.

    They are 1.05 for biases, 1.15 for their gradients, and 1.6 for both passes of schemes with
    tables of vectors, which `transformer_xl` misses (docs/benchmarks.md).
    """
    lines = run_script("kernels.py", "--chips=v5e")
    rows = [line.strip("| ").split(" | ") for line in lines[2:] if line.startswith("|")]
    heads = {(row[2], row[3]): int(row[6].replace(",", "")) for row in rows}
    assert heads["forward", "fixed"] > heads["forward", "none"] > 100_000
    ratio = lambda kernel, bias: heads[kernel, bias] / heads[kernel, "none"]
    assert ratio("forward", "fixed") <= 1.05
    assert ratio("backward", "fixed") <= 1.05 and ratio("backward", "learned") <= 1.15
    for scheme, target in {"shaw": 1.6, "deberta": 1.6, "transformer_xl": 2.2}.items():
        assert 1.2 < ratio("both", scheme) <= target, scheme
    tiles = {(row[2], row[3]): int(row[4].replace(",", "")) for row in rows if row[4]}
    bent = [re.findall(r"[\d,]{3,}", line) for line in lines if "fire" in line]
    for kernel, cycles in zip(("forward", "backward"), bent, strict=True):
        before, each = (int(x.replace(",", "")) / tiles[kernel, "none"] for x in cycles)
        assert 1.5 < before <= 2.5 and 0.2 < each <= 0.5, kernel
