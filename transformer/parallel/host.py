"""The host: its settings, made once before the first computation, and its memory."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path


def keep_freed_memory() -> bool:
    """Tells glibc's allocator to keep memory that is freed, instead of handing it back to the kernel.

    XLA's CPU backend allocates and frees its buffers every step; by default each comes from a fresh mapping, and touching it
    costs a page fault per 4 KB: 28,000 faults and a third of the time of a step of the quickstart. One arena, no mappings, no
    trimming: 95 -> 60 ms a step (python experiments/benchmarks/host_memory.py, 2 cores of an AMD EPYC 9005). False where the
    allocator is not glibc's.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_max, arena_max = -1, -4, -8
    return all([mallopt(mmap_max, 0), mallopt(trim_threshold, -1), mallopt(arena_max, 1)])


def memory() -> int:
    """Bytes of memory this process may use at most: the machine's, or its container's where that is less; 0 where neither is told."""
    found = []
    with contextlib.suppress(
        ValueError, OSError, AttributeError
    ):  # AttributeError: not a POSIX machine
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(ValueError, OSError):  # ValueError: "max"
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min((size for size in found if size > 0), default=0)
