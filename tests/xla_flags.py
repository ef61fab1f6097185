"""The XLA flags of the test processes, restricted to those that the installed XLA accepts."""

import os
import subprocess
import sys

FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # Small models run once, so compilation takes most of the time. The third flag saves a third of
    # it, and the fourth a seventh.
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    # Run operations on each device one after another as far as possible. When several run at once,
    # a waiting collective can block the loop that another device waits for, and about one step in
    # a thousand hangs. XLA then terminates the process after four minutes, and `make test` starts
    # it again.
    "--xla_cpu_multi_thread_eigen=false",
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "--xla_cpu_collective_call_terminate_timeout_seconds=240",
    "--xla_cpu_collective_timeout_seconds=240",
)


def known_flags() -> str:
    """Returns the flags of FLAGS that the installed XLA accepts.

    They are tested in separate processes, because XLA terminates a process that sets an unknown
    flag. Only the first test process tests them; its workers inherit the result.
    """
    if "TRANSFORMER_TEST_FLAGS" not in os.environ:
        program = "import jax; jax.devices()"
        accepts = lambda *flags: (
            not subprocess.run(
                [sys.executable, "-c", program],
                env=os.environ | {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"},
                capture_output=True,
            ).returncode
        )
        flags = FLAGS if accepts(*FLAGS) else [flag for flag in FLAGS if accepts(flag)]
        os.environ["TRANSFORMER_TEST_FLAGS"] = " ".join(flags)
    return os.environ["TRANSFORMER_TEST_FLAGS"]


def one_device_flags() -> str:
    """Returns the accepted flags without the simulated devices, for commands that tests start."""
    return known_flags().replace(FLAGS[0], "").strip()
