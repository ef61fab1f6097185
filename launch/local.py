"""Runs a command in several processes with simulated devices on this machine, as a pod would.

    python launch/local.py --processes=2 --devices=4 -- \\
        train --config=experiments/smoke.py --workdir=runs/smoke --config.mesh.fsdp=2

Everything after `--` is passed to `python -m transformer`. All processes run the same command, with
three environment variables (see transformer/parallel/processes.py). Lines of process 0 are printed
unchanged, and lines of the others with their index in front. Gloo's messages about connections, and
XLA's stack trace when process 0 is lost, are omitted unless TRANSFORMER_TRACEBACKS=1.

If one process dies, the others end within seconds. After a death or a preemption (exit code 143),
the command is restarted, at most `--restarts` times. Ctrl-C and SIGTERM are passed on to all
processes, and nothing is restarted after them.
"""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from shell import Parser, check_command, check_numbers, parse, start

PATIENCE = 60  # seconds after the death of a process until the others are killed

TRACEBACKS = os.environ.get("TRANSFORMER_TRACEBACKS", "") not in ("", "0")
NOISE = re.compile(
    rb"\[Gloo\] Rank| is connected to \d+ peer"  # Gloo's connections
    # XLA's output before it aborts because process 0 is lost
    rb"|[EF]\d{4} .*(coordination_service|client\.h)|Additional GRPC error|:UNKNOWN:Error received"
    rb"|RPC: /xla\.coordination|\*\*\* Check failure stack trace| +@ +0x[0-9a-f]+ "
)
"""Lines of the processes that are omitted unless TRANSFORMER_TRACEBACKS=1."""

STOPPED = 143  # the exit code of a run that saved a checkpoint and can resume


def variables(index: int, count: int, devices: int, port: int) -> dict[str, str]:
    """Returns the environment variables of process `index`."""
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} "
        f"--xla_force_host_platform_device_count={devices}".strip()
    )
    # Many simulated devices share few cores, so a slow device must not count as dead.
    flags += (
        " --xla_cpu_collective_call_terminate_timeout_seconds=600"
        " --xla_cpu_collective_timeout_seconds=600"
    )
    return {
        "TRANSFORMER_COORDINATOR": f"localhost:{port}",
        "TRANSFORMER_PROCESSES": str(count),
        "TRANSFORMER_PROCESS": str(index),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": flags,
        # transformer/parallel/processes.py reports lost processes; this omits XLA's logs of them.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
    }


def free_port() -> int:
    """Returns a free port p such that p + 1 is free too."""
    while True:
        with socket.socket() as lower, socket.socket() as upper:
            lower.bind(("", 0))
            port = lower.getsockname()[1]
            try:
                upper.bind(("", port + 1))
                return port
            except OSError:
                continue


def run(command: list[str], count: int, devices: int, port: int, signals: list[int]) -> int:
    """Runs a command in `count` processes. Returns the first nonzero exit code, or 0.

    Signals to this process are passed on to all of them, and appended to `signals`.
    """
    processes, threads = [], []
    for index in range(count):
        environment = os.environ | variables(index, count, devices, port)
        # In a new session, so that a terminal's Ctrl-C reaches the process once, through this one.
        # The stderr of process 0 is not piped, so that it can draw on a terminal.
        errors = subprocess.STDOUT if index else None
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        output, prefix = (sys.stderr, f"[{index}] ") if index else (sys.stdout, "")
        threads.append(
            threading.Thread(target=_copy, args=(process.stdout, output, prefix), daemon=True)
        )
        processes.append(process)
        threads[-1].start()

    def pass_on(number: int, frame) -> None:
        signals.append(number)
        for process in processes:
            process.send_signal(number)

    previous = {
        number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        code = _wait(processes)
        for thread in threads:
            thread.join(timeout=5)  # slower only if a process left a child that writes to the pipe
        return code
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _copy(stream, output, prefix: str) -> None:
    """Copies lines to `output`. If it is closed, closes `stream`, so that the process notices."""
    with stream, contextlib.suppress(BrokenPipeError):
        for line in stream:
            if TRACEBACKS or not NOISE.match(line):
                output.write(prefix + line.decode(errors="replace"))
                output.flush()


def _wait(processes: list[subprocess.Popen]) -> int:
    """Waits for all processes. Returns the first nonzero exit code, or 0."""
    first = 0
    deadline = None
    while True:
        codes = [process.poll() for process in processes]
        for index, code in enumerate(codes):
            if code and not first:
                first, deadline = code, time.monotonic() + PATIENCE
                outcome = (
                    f"was killed by {signal.Signals(-code).name}"
                    if code < 0
                    else f"ended with exit code {code}"
                )
                if code == STOPPED:
                    outcome = f"was stopped (exit code {code}); the same command resumes the run"
                print(f"process {index} of {len(processes)} {outcome}", file=sys.stderr)
        if None not in codes:
            return first
        if deadline and time.monotonic() > deadline:
            for process in processes:
                process.kill()
        time.sleep(0.1)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1, help="simulated devices per process")
    parser.add_argument(
        "--port", type=int, default=0, help="port of the coordinator; 0: a free port"
    )
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        help="maximum number of restarts after preemptions and crashes",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands without running them"
    )
    args = parse(parser, argv)
    check_command(args.command, Path.cwd(), travels=False)
    check_numbers(args, processes=1, devices=1, restarts=0)
    command = [sys.executable, "-m", "transformer", *args.command]
    if args.dry_run:
        for index in range(args.processes):
            environment = variables(index, args.processes, args.devices, args.port or 12355)
            print(
                " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items()),
                shlex.join(command),
                "&",
            )
        return 0
    for attempt in range(args.restarts + 1):
        signals: list[int] = []
        code = run(command, args.processes, args.devices, args.port or free_port(), signals)
        # Exit code 2 is a mistake: a restart would fail in the same way.
        restart = attempt < args.restarts and code and code != 2 and not signals
        if not restart:
            break
        print(f"restarting ({attempt + 1} of {args.restarts})", file=sys.stderr)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    start(main)
