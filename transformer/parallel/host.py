"""The host: settings, made once before the first computation, and memory size."""

import contextlib
import ctypes
import glob
import os
import shutil
import sys
from pathlib import Path


def keep_freed_memory() -> bool:
    """Configures glibc's allocator to keep freed memory instead of returning it to the kernel.

    XLA's CPU backend allocates and frees its buffers every step. By default each allocation is a
    new mapping, and touching it costs a page fault per 4 KB. One arena, no mappings and no trimming
    reduce a step of the quickstart from 95 to 60 ms (python experiments/benchmarks/host_memory.py,
    2 cores of an AMD EPYC 9005). Call this before JAX starts its threads, each of which would take
    an arena. Returns False with accelerators, other allocators, or TRANSFORMER_ALLOCATOR=system."""
    prevented = os.environ.get("TRANSFORMER_ALLOCATOR") == "system"
    if prevented or not sys.platform.startswith("linux") or accelerator():
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_max, arena_max = -1, -4, -8
    return all([mallopt(mmap_max, 0), mallopt(trim_threshold, -1), mallopt(arena_max, 1)])


def run_one_operation_per_device() -> None:
    """Adds XLA flags for simulated devices, unless they are set. Where a device runs several
    operations at once, a waiting collective can block the loop that another device waits for, and
    all deadlock. XLA reads the flags when it starts."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" in flags:
        for name in ("multi_thread_eigen", "enable_concurrency_optimized_scheduler"):
            flags += "" if name in flags else f" --xla_cpu_{name}=false"
        os.environ["XLA_FLAGS"] = flags


def accelerator() -> str:
    """Returns the kind of accelerator of this machine, in words, or ""."""
    if glob.glob("/dev/nvidia[0-9]*") or shutil.which("nvidia-smi"):
        return "an NVIDIA GPU"
    return "a TPU" if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*") else ""


def memory() -> int:
    """Returns the bytes that this process may use, of its machine and container; 0 if unknown."""
    limits = []
    with contextlib.suppress(ValueError, OSError, AttributeError):  # AttributeError: not POSIX
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    with contextlib.suppress(ValueError, OSError):  # ValueError: "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min((size for size in limits if size > 0), default=0)
