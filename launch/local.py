"""Several processes on this machine, each with simulated devices: a pod on a laptop.

    python launch/local.py --processes=2 --devices=4 -- train --config=experiments/smoke.py --workdir=runs/smoke --config.mesh.fsdp=2

Everything behind `--` is what `python -m transformer` is given. Every process has the same command and three variables (see
transformer/parallel/processes.py). Lines of process 0 come as they are, those of the others with their number before them;
what gloo says of its connections, and the stack trace of XLA when process 0 is lost, are left out unless TRANSFORMER_TRACEBACKS=1.

If one process dies, the others end within seconds. If all stopped to be restarted (a preemption: exit code 143), or one died, the
command is started again, `--restarts` times at most. Ctrl-C and SIGTERM go to all, and nothing is started again.
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

from shell import Parser, check_command, check_numbers, parse

PATIENCE = 60  # seconds that the others have to notice that one is dead

TRACEBACKS = os.environ.get("TRANSFORMER_TRACEBACKS", "") not in ("", "0")
NOISE = re.compile(
    rb"\[Gloo\] Rank| is connected to \d+ peer"  # gloo's connections
    # what XLA prints before it aborts because process 0 is gone
    rb"|[EF]\d{4} .*(coordination_service|client\.h)|Additional GRPC error|:UNKNOWN:Error received"
    rb"|RPC: /xla\.coordination|\*\*\* Check failure stack trace| +@ +0x[0-9a-f]+ "
)
"""Lines of the processes that are left out, unless TRANSFORMER_TRACEBACKS=1."""

STOPPED = 143  # the exit code of a run that has saved, to go on


def variables(index: int, count: int, devices: int, port: int) -> dict[str, str]:
    """What process `index` is told."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}".strip()
    # Many simulated devices share few cores: a slow one is no dead one. And as much as possible one operation after another on each:
    # where several run at once, a collective that waits can hold up the loop that another device waits for, and all stand still.
    flags += (
        " --xla_cpu_multi_thread_eigen=false --xla_cpu_enable_concurrency_optimized_scheduler=false"
    )
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600 --xla_cpu_collective_timeout_seconds=600"
    return {
        "TRANSFORMER_COORDINATOR": f"localhost:{port}", "TRANSFORMER_PROCESSES": str(count), "TRANSFORMER_PROCESS": str(index),
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags,
        # A lost process is reported by transformer/parallel/processes.py; what XLA's own service logs of it is left out.
        "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3"),
    }  # fmt: skip


def free_port() -> int:
    """A port that is free, and the one above it."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("", 0))
            port = one.getsockname()[1]
            try:
                two.bind(("", port + 1))
                return port
            except OSError:
                continue


def run(command: list[str], count: int, devices: int, port: int, told: list[int]) -> int:
    """Starts all, waits for all; 0, or the first exit code that was not. Signals that came to this process are noted in `told`."""
    processes, copies = [], []
    for index in range(count):
        environment = os.environ | variables(index, count, devices, port)
        # In a session of its own: a terminal's Ctrl-C comes through this process, once. Process 0 may draw on a terminal by its stderr.
        errors = subprocess.STDOUT if index else None
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
        to, mark = (sys.stderr, f"[{index}] ") if index else (sys.stdout, "")
        copies.append(threading.Thread(target=_copy, args=(process.stdout, to, mark), daemon=True))
        processes.append(process)
        copies[-1].start()

    def pass_on(number: int, frame) -> None:
        told.append(number)
        for process in processes:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        code = _wait(processes)
        for copy in copies:
            copy.join(timeout=5)  # longer only if a process has left one of its own behind
        return code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _copy(stream, to, mark: str) -> None:
    """Line by line. If nobody reads any more, the process is told so by the end of its stream."""
    with stream, contextlib.suppress(BrokenPipeError):
        for line in stream:
            if TRACEBACKS or not NOISE.match(line):
                to.write(mark + line.decode(errors="replace"))
                to.flush()


def _wait(processes: list[subprocess.Popen]) -> int:
    first = 0  # the first exit code that was not zero
    until = None
    while True:
        codes = [process.poll() for process in processes]
        for index, code in enumerate(codes):
            if code and not first:
                first, until = code, time.monotonic() + PATIENCE
                how = (
                    f"was killed by {signal.Signals(-code).name}"
                    if code < 0
                    else f"ended with exit code {code}"
                )
                if code == STOPPED:
                    how = f"was stopped (exit code {code}); the same command goes on from there"
                print(f"process {index} of {len(processes)} {how}", file=sys.stderr)
        if None not in codes:
            return first
        if until and time.monotonic() > until:
            for process in processes:
                process.kill()
        time.sleep(0.1)


def main(argv: list[str] | None = None) -> int:
    parser = Parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--devices", type=int, default=1, help="simulated devices of each process")
    parser.add_argument("--port", type=int, default=0, help="of the coordinator; 0: a free one")
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        help="how often to start again after a preemption or a death",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would run")
    args = parse(parser, argv)
    check_command(args.command, Path.cwd(), travels=False)
    check_numbers(args, processes=1, devices=1, restarts=0)
    command = [sys.executable, "-m", "transformer", *args.command]
    if args.dry_run:
        for index in range(args.processes):
            told = variables(index, args.processes, args.devices, args.port or 12355)
            print(
                " ".join(f"{name}={shlex.quote(value)}" for name, value in told.items()),
                shlex.join(command),
                "&",
            )
        return 0
    for attempt in range(args.restarts + 1):
        told: list[int] = []
        code = run(command, args.processes, args.devices, args.port or free_port(), told)
        again = (
            attempt < args.restarts and code and code != 2 and not told
        )  # 2: a mistake, which would be made again
        if not again:
            break
        print(f"starting again ({attempt + 1} of {args.restarts})", file=sys.stderr)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
