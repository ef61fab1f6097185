r"""Are results right on this TPU or GPU, and how fast is it? One script, in under eight minutes.

    pip install -e '.[tpu]'               (or '.[gpu]')
    python experiments/benchmarks/accelerator.py [--minutes=7] [--out=accelerator] [--small]

    checks     values and gradients of every position scheme, by every attention backend that
               runs here, against the plain path in float32 (accelerator_checks.py)
    attention  every scheme at 2,048 to 32,768 tokens, forward and backward
    step       training steps of scale/decoder_1b.py and vaswani_big.py, with fewer layers and
               sequences
    decoding   prefill, decoding and beam search of the same two models (accelerator_speed.py)

Runs on one device. Writes OUT.json, with every case, and OUT.md, a table. A case that fails is
recorded and does not end the run. Cases for which no time or memory is left are named. Programs are
compiled in parallel, a few at a time; nothing is compiled while another case is measured. Exits
with 1 if a check failed or could not be computed.

`--sections=checks,step` and `--schemes=none,t5` run a part. `--small` has small shapes: on a CPU,
where fused kernels are interpreted, it tests this script in two minutes.

To print the results in docs/benchmarks.md, copy OUT.json to experiments/benchmarks/machines/ and
run docs/generate.py.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECTIONS = ("checks", "attention", "step", "decoding")
BAD = ("FAILED", "error")
"""Statuses of a check that make the script exit with 1."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to compile and run.

    build: traces and compiles, in a thread.
    run: receives what `build` returned and yields rows: dicts with at least a status, and, if they
        are not about the whole case, a name. Statuses are passed, FAILED, measured, unsupported,
        does not fit, skipped and error.
    """

    section: str
    name: str
    build: Callable[[], Any]
    run: Callable[[Any], Iterable[dict]]

    def row(self, **facts) -> dict:
        return {"section": self.section, "name": self.name} | facts


def failure(e: Exception) -> dict:
    """Returns the row of a case that raised an exception."""
    memory = any(x in str(e) for x in ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory"))
    memory &= "vmem" not in str(e)  # a kernel that asks for too much on-chip memory is an error
    why = f"{type(e).__name__}: {e}".strip().splitlines()[0][:300]
    return {"status": "does not fit" if memory else "error", "why": why}


def perform(cases: Iterable[Case], deadline: float, workers: int) -> Iterator[dict]:
    """Compiles and runs the cases, a batch at a time, and yields their rows.

    A batch is skipped if less time is left than the previous one took.
    """
    taken, left = 0.0, iter(cases)
    while batch := list(itertools.islice(left, workers)):
        start, programs = time.monotonic(), []
        if start + taken <= deadline:
            with concurrent.futures.ThreadPoolExecutor(workers) as pool:
                programs = [pool.submit(case.build) for case in batch]
        for index, case in enumerate(batch):
            if not programs or time.monotonic() > deadline:
                yield case.row(status="skipped", why="no time left")
                continue
            try:
                for row in case.run(programs[index].result()):
                    yield case.row(**row)
            except Exception as e:  # one failing case must not end the run
                yield case.row(**failure(e))
            programs[index] = None  # frees the memory of the program
        taken = max(time.monotonic() - start, 0.0) if programs else taken


def machine() -> dict:
    """Returns the facts about this machine and checkout."""
    import jax
    import jaxlib

    device = jax.devices()[0]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "memory_bytes": ((device.memory_stats() or {}) if device.platform != "cpu" else {}).get(
            "bytes_limit"
        ),
        "runtime": getattr(device.client, "platform_version", "").splitlines()[0],
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def text(row: dict) -> str:
    """Returns the result of a row in a few words."""
    if row["status"] not in ("passed", "FAILED", "measured"):
        return f"{row['status']}: {row['why']}" if row.get("why") else row["status"]
    words = []
    if "error" in row:
        words.append(f"{row['status']}, error {row['error']:.1e} of {row['allowed']:.1e} allowed")
    if "seconds" in row:
        words.append(f"{1e3 * row['seconds']:.3g} ms")
    if "tokens_per_second" in row:
        words.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    if "flops_per_second" in row:
        words.append(f"{row['flops_per_second'] / 1e12:.3g} TFLOP/s")
    if "peak_share" in row:
        words.append(f"{row['peak_share']:.0%} of peak")
    return ", ".join(words) + (f" ({row['backend']})" if row.get("backend") else "")


def summary(rows: list[dict]) -> dict[str, str]:
    """Returns (name -> result) of all measurements, and one line per kind of check."""
    groups: dict[str, list[dict]] = {}
    for row in rows:
        if row["section"] == "checks" and "dtype" in row:
            groups.setdefault(f"checks: {row['backend']}, {row['dtype']}", []).append(row)
    results = {}
    for name, group in groups.items():
        tried = [row for row in group if row["status"] in ("passed", *BAD)]
        passed = sum(row["status"] == "passed" for row in tried)
        repeated = sum(row.get("repeats", False) for row in tried)
        words = f"{passed} of {len(tried)} passed, {repeated} deterministic"
        results[name] = words if tried else "none supported"
    return results | {row["name"]: text(row) for row in rows if row["section"] != "checks"}


def table(runs: list[dict], names: Iterable[str] | None = None) -> str:
    """Returns a Markdown table: a row per name (default: all), a column per machine.

    Without a run, there is one empty column, which says so.
    """
    columns = {f"{run['machine']['device']}": summary(run["rows"]) for run in runs}
    columns = columns or {"no TPU or GPU has run it yet": {}}
    names = list(dict.fromkeys(n for c in columns.values() for n in c)) if names is None else names
    lines = [["measurement", *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(cells.get(name, "") for cells in columns.values())] for name in names]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page(run: dict) -> str:
    """Returns a run as Markdown: the machine, the table, and every case that has no result."""
    facts = ", ".join(f"{k} {v}" for k, v in run["machine"].items() if v)
    unsupported: dict[str, dict] = {}
    lines = []
    for row in run["rows"]:
        if row["status"] == "unsupported" and "position" in row:
            reason = f"{row['backend']}, {row['dtype']}: {row['why']}"
            unsupported.setdefault(reason, {})[row["position"]] = None
        elif row["status"] not in ("passed", "measured"):
            lines.append(f"{row['name']}: {text(row)}")
    lines += [f"{reason} ({', '.join(names)})" for reason, names in unsupported.items()]
    title = "## Failed, skipped or not supported\n\n" if lines else ""
    return f"{facts}\n\n{table([run])}\n{title}" + "".join(f"- {line}\n" for line in lines)


def headline() -> list[str]:
    """Returns the names of the results that docs/benchmarks.md prints."""
    import accelerator_checks
    import accelerator_speed

    checks = [
        f"checks: {backend}, {dtype}"
        for backend in ("blockwise", "flash")
        for dtype in accelerator_checks.DTYPES
    ]
    return [*checks, *accelerator_speed.headline()]


def all_cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yields the cases of the chosen sections, the most important first."""
    import accelerator_checks
    import accelerator_speed

    schemes = options.schemes and options.schemes.split(",")
    checks = accelerator_checks.cases(options.small, schemes)
    speed = accelerator_speed.cases(options.small, schemes)
    # Schemes, the usual attention shape, models; then masks and options, and all other shapes
    order = itertools.chain(checks[0], speed[0], checks[1], speed[1])
    yield from (case for case in order if case.section in options.sections.split(","))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=7.0, help="time budget")
    parser.add_argument("--out", default="accelerator", help="writes OUT.json and OUT.md")
    parser.add_argument("--small", action="store_true", help="small shapes, to test the script")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--schemes", default="", help="default: all")
    options = parser.parse_args(arguments)
    if unknown := set(options.sections.split(",")) - set(SECTIONS):
        parser.error(f"--sections: no {', '.join(unknown)}; choose from {', '.join(SECTIONS)}")
    return options


def main(arguments: list[str] | None = None) -> int:
    start = time.monotonic()
    options = parse(arguments)
    if options.small:  # compiling takes most of the time
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    import jax

    from transformer.parallel.mesh import check_platform, disable_tpu_search

    disable_tpu_search()
    if check_platform("auto") == "cpu" and not options.small:
        print("accelerator.py: JAX found no TPU or GPU; on a CPU, set --small", file=sys.stderr)
        return 2
    run = {"machine": machine(), "small": options.small, "minutes": options.minutes, "rows": []}
    print(f"{run['machine']['device']}, jax {jax.__version__}", flush=True)
    workers = max((os.cpu_count() or 2) // 2, 2)
    for row in perform(all_cases(options), start + 60 * options.minutes, min(workers, 16)):
        run["rows"].append(row)
        print(f"{time.monotonic() - start:6.1f} s  {row['name']}: {text(row)}", flush=True)
        Path(f"{options.out}.json").write_text(json.dumps(run, indent=1) + "\n")
    run["seconds"] = round(time.monotonic() - start, 1)
    Path(f"{options.out}.json").write_text(json.dumps(run, indent=1) + "\n")
    Path(f"{options.out}.md").write_text(page(run))
    statuses = [row["status"] for row in run["rows"] if row["section"] == "checks"]
    failed = sum(status in BAD for status in statuses)
    counts = f"{statuses.count('passed')} passed, {failed} failed"
    skipped = statuses.count("skipped") + statuses.count("does not fit")
    print(f"checks: {counts}, {skipped} skipped; {options.out}.json, {options.out}.md")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
