"""`plan --kernels`: the cycles of an experiment's attention kernels, on a machine without a TPU."""

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from transformer.planning import page
from transformer.planning.bundles import UNITS, Block, KernelCycles, KernelSchedule, head_cycles
from transformer.planning.model_flops import tile_counts

ROOT = Path(__file__).parent.parent
LIBTPU = "0.0.42.1"
FILE = """
from transformer import vary

def get_config():
    model = dict(
        family="decoder", vocab_size=512, d_model=256, d_ff=256, num_heads=2,
        num_decoder_layers=2, max_length=1024, position="none", dtype="bfloat16",
    )
    data = dict(corpus="pydoc", objective="causal_lm", length=1024, batch_size=4)
    return dict(model=model, data=data, train=dict(steps=10))

def sweep():
    return vary("model.position", "t5", "none")
"""


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("window", [0, 100, 700])
@pytest.mark.parametrize("tile", [(512, 512), (256, 512)])
@pytest.mark.parametrize(("T", "S"), [(2048, 2048), (1024, 2048), (512, 512)])
def test_tiles_are_counted_as_the_mask_allows(causal, window, T, S, tile):
    distance = np.arange(T)[:, None] + S - T - np.arange(S)
    allowed = (distance >= 0) | (not causal)
    if window:
        allowed &= abs(distance) < window
    (t, s), numbers = tile, ".".join(map(str, (T, S, causal, window, *tile)))
    tiles = allowed.reshape(T // t, t, S // s, s).swapaxes(1, 2)
    full, some = tiles.all((2, 3)), tiles.any((2, 3))
    expected = np.sum(some & ~full), np.sum(full)
    assert tile_counts(f"/x/pairs.{numbers}/flash_forward") == expected


def test_kernels_with_other_loops_are_not_analyzed():
    """A grid of one body: a part that clears, then a loop over a masked tile and a full one."""
    used = [tuple(int(unit == "MXU" and 10 <= a < 20) for unit in UNITS) for a in range(30)]
    part = lambda start, end, *inner: Block(start, end, list(inner))
    tile_loop = part(9, 21, part(10, 14), part(14, 20))
    body = part(1, 26, part(2, 5), part(9, 21, tile_loop))
    schedule = lambda body: KernelSchedule(
        part(0, 30, part(0, 28, body)), dict.fromkeys(UNITS, 1), used
    )
    kinds, sequence, once = head_cycles(schedule(body), 2, 0, 2, 1)
    assert [tile.own for tile in kinds] == [4, 6]
    assert (sequence, once) == (2 * (3 + 10) + 3 + 2 * 4 + 6 + 3 * 2, 0)
    with_loop = part(1, 26, part(2, 8, part(3, 5)), part(9, 21, tile_loop))
    assert head_cycles(schedule(with_loop), 2, 7, 2, 1)[2] == 4 + 7 * 2
    third_kind = part(9, 21, part(10, 12), part(12, 14), part(14, 20))
    near = part(1, 26, part(2, 5), part(9, 21, third_kind))
    assert head_cycles(schedule(near), 2, 0, 5, 2, 1)[1] == 2 * (3 + 10) + 3 + 7 * 2 + 6 + 8 * 2
    without_masks = part(1, 26, part(9, 21, part(10, 20)))
    for other, chunks in ((part(1, 26), 0), (without_masks, 0), (with_loop, 0), (near, 0)):
        with pytest.raises(ValueError, match="unpack|other loops|shorter|longer"):
            head_cycles(schedule(other), 2, chunks, 2, 1)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    (folder / "small.py").write_text(FILE)
    command = [sys.executable, "-m", "transformer", "plan", f"--config={folder / 'small.py'}"]
    command += ["--topology=v5e:2x2", "--arms", "--kernels", f"--json={folder / 'plan.json'}"]
    command += ["--price=1e6"]
    cache = folder / "cache"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not cache.exists(), "JAX cannot load cached programs for absent devices"
    return json.loads((folder / "plan.json").read_text()), done.stdout


def test_cycles_of_kernels_bound_the_step(planned):
    plans, _ = planned
    for plan in (plans["none"], plans["t5"]):
        train = plan["programs"]["train"]
        cycles = sum(kernel["calls"] * kernel["cycles"] for kernel in plan["kernels"])
        assert [kernel["name"] for kernel in plan["kernels"]] == ["flash_forward", "flash_backward"]
        # The kernels take longer than their products, and nothing else differs.
        products = 2.0 * 512**2 * 3 * 7 * 128 * 2 * 2  # tiles, products, heads, layers
        longer = cycles / (197e12 / 2**17) - products / 197e12
        assert longer > 1e-6
        assert train["seconds_at_least"]["compute"] == pytest.approx(
            train["flops"] / 197e12 + longer, rel=1e-6
        )


def test_all_runs_are_priced_together(planned):
    """The file has two arms and three seeds."""
    plans, text = planned
    titles, *rows = [re.split("  +", line.strip()) for line in text.splitlines()[:3]]
    number = lambda x: float(x.replace(",", ""))
    total = 0
    for name, *cells in rows:
        hours = plans[name]["step_seconds_at_least"] * 10 / 3600 * 4
        cost = dict(zip(titles, cells, strict=True))
        assert number(cost["chip-hours of a run"]) == pytest.approx(hours, rel=0.05)
        assert number(cost["price of a run"]) == pytest.approx(hours * 1e6, rel=0.05)
        total += 3 * hours
    found = re.search(r"6 runs \(3 of each arm\): at least (.*) chip-hours, price (.*) \(", text)
    assert number(found[1]) == pytest.approx(total, rel=0.05)
    assert number(found[2]) == pytest.approx(total * 1e6, rel=0.01)


def test_arms_are_compared_by_the_cycles_of_their_kernels(planned):
    plans, text = planned
    total = lambda arm: sum(kernel["calls"] * kernel["cycles"] for kernel in plans[arm]["kernels"])
    column = {line.split()[0]: line.split()[-1] for line in text.splitlines()[1:3]}
    assert 1.02 < total("t5") / total("none") < 1.5
    assert list(column.values()) == [f"{total('t5') / total('none'):.3f}", "1.000"]
    assert "relative to the arm without positions" in text


@pytest.mark.skipif(importlib.metadata.version("libtpu") != LIBTPU, reason="another libtpu")
def test_cycles_of_the_pinned_compiler(planned):
    figures = ("name", "calls", "heads", "trips", "bundles", "products", "spills", "cycles")
    kernels = [tuple(kernel[x] for x in figures) for kernel in planned[0]["none"]["kernels"]]
    assert kernels == [
        ("flash_forward", 2.0, 2, 3, 1119, 905.0, 1127, 10604),
        ("flash_backward", 2.0, 2, 3, 2297, 2156.0, 1150, 16772),
    ]


def test_the_page_prints_every_kernel():
    shape = (2, (1, 2, 1024, 128))
    kernel = KernelCycles(
        "flash_forward", (shape, shape, shape), 2, 2, 2**20, 4.0, 1000, 800.0, 30, 3, 9600
    )
    other = dataclasses.replace(kernel, name="flash_backward", cycles=0)
    plan = type("Plan", (), {"kernels": [kernel, other]})
    lines = page.kernels(plan)
    assert lines[0].split() == ["attention", "kernels", "flash_forward", "flash_backward"]
    cells = {line[2:26].strip(): line[26:].split() for line in lines[1:]}
    assert cells["cycles of a tile"] == ["1,000", "not", "analyzed"]
    assert cells["of products"] == ["4,800", "not", "analyzed"]
    assert cells["ratio"] == ["2.00"] and cells["VMEM at most"][:2] == ["1.0", "MiB"]
