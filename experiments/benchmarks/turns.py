"""Times several systems in turn, each in its own process, for decoding.py and throughput.py.

The systems never compute at the same time, and a drift of the machine's speed affects all of them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

SAME_ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_ARENA_MAX": "1"
}  # fmt: skip
"""The settings of transformer.parallel.host, as environment variables."""


def serve(work: Callable[[], Any], first: Any) -> None:
    """Prints `first`, then works for each line of standard input and prints the seconds.

    `work` has been called twice by then, so that everything is compiled.
    """
    for _ in range(2):
        work()
    print(json.dumps(first), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        work()
        print(time.perf_counter() - start, flush=True)


def in_turn(
    sides: Mapping[str, tuple[Sequence[str], Mapping[str, str]]], rounds: int
) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Starts one process for each side and times them in turn.

    `sides` maps names to (command line, additional environment) of processes that call `serve`.
    Returns what each side printed first, and its seconds by round.
    """
    processes, first = {}, {}
    for side, (arguments, environment) in sides.items():
        processes[side] = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        first[side] = json.loads(processes[side].stdout.readline())  # warm before the next starts
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, process in processes.items():
            process.stdin.write("go\n")
            process.stdin.flush()
            times[side].append(float(process.stdout.readline()))
    for process in processes.values():
        process.stdin.close()
        process.wait()
    return first, times
