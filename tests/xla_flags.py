"""The XLA flags that tests run with, as far as the installed XLA knows them."""

import os
import subprocess
import sys

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Small models that run once: what counts is the time to compile them. The last flag saves a third of it.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    # As much as possible one operation after another on each device: where several run at once, a collective that waits can hold
    # up the loop that another device waits for, and one step in a thousand stands still. After four minutes XLA then ends the
    # process, and `make test` starts it again.
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "--xla_cpu_collective_call_terminate_timeout_seconds=240",
    "--xla_cpu_collective_timeout_seconds=240",
)


def known_flags() -> str:
    """Those of FLAGS that the installed XLA knows, asked in processes of their own: it ends a process that sets another one.

    The first test process asks; its workers inherit the answer.
    """
    if "TRANSFORMER_TEST_FLAGS" not in os.environ:
        starts = "import jax; jax.devices()"
        takes = lambda *flags: (
            not subprocess.run(
                [sys.executable, "-c", starts],
                env=os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
                capture_output=True,
            ).returncode
        )
        flags = FLAGS if takes(*FLAGS) else [flag for flag in FLAGS if takes(flag)]
        os.environ["TRANSFORMER_TEST_FLAGS"] = " ".join(flags)
    return os.environ["TRANSFORMER_TEST_FLAGS"]
