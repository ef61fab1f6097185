"""Processes: started once, everywhere alike; who is missing is named; where they wait for each other has a name.

One process of several is told so by the machine (Cloud TPU, GKE, SLURM, Open MPI: JAX finds out by itself) or by three variables,
which launch/local.py sets:

    TRANSFORMER_COORDINATOR=host:port    where process 0 can be reached
    TRANSFORMER_PROCESSES=4              how many there are
    TRANSFORMER_PROCESS=0                which of them this one is

On CPUs a single process that is told so adds up as several do (gloo), so that 1, 2 and 4 processes give the same bits on one mesh.

A process that dies ends the others within seconds. Process 0 keeps a connection to each of them, which ends when a process does; whoever
notices prints one line that names it and exits with code 1. A machine that goes silent is missed by JAX's own heartbeats, whose answer is to
abort with a stack trace. With TRANSFORMER_TRACEBACKS=1 every traceback is printed.
"""

import atexit
import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NoReturn

import jax
import numpy as np

from transformer.errors import UserError
from transformer.output import flush

WAIT = 300
"""Seconds that a process waits for the others at the start."""

HEARTBEAT = 30
"""Seconds of silence after which a process counts as dead."""

DAY = 24 * 3600
"""How long processes that have found each other wait: for a death they need not wait, they are told of it."""


def start_processes() -> bool:
    """Joins this process to the others, before JAX's first computation. False if there are none. Raises UserError, which names those
    that have not arrived in time."""
    if jax.distributed.is_initialized():
        return True
    where = _told() or _found()
    if where is None:
        return False
    coordinator, count, index, local_devices = where
    wait, heartbeat = (
        _seconds("TRANSFORMER_WAIT", WAIT),
        _seconds("TRANSFORMER_HEARTBEAT", HEARTBEAT),
    )
    others = _gather(coordinator, count, index, wait)
    _watch(others)
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator, count, index, local_devices, cluster_detection_method="deactivate",
        initialization_timeout=int(wait), heartbeat_timeout_seconds=int(heartbeat), shutdown_timeout_seconds=60,
    )  # fmt: skip
    atexit.register(_part, others)  # before JAX's own farewell, which waits for the others
    return True


_BYE = b"bye\n"
"""What a process says that ends as it should."""


def _watch(others: dict[int, socket.socket]) -> None:
    """Ends this process when a connection to one of the others ends without a good-bye."""
    for number, connection in others.items():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        args = number, connection, others
        threading.Thread(target=_listen, args=args, daemon=True).start()


def _listen(number: int, connection: socket.socket, others: dict[int, socket.socket]) -> None:
    try:
        said = connection.recv(64)
    except ConnectionResetError:
        said = b""
    except OSError:  # the network: JAX's heartbeats decide
        return
    if said == _BYE:
        return
    lost = int(said) if said.strip().isdigit() else number
    _tell(others, b"%d\n" % lost)
    if (
        lost
    ):  # an error of this process's own comes first; but without process 0, JAX aborts at once
        time.sleep(1)
    end_alone(f"process {lost} of this run")


def _tell(others: dict[int, socket.socket], message: bytes) -> None:
    for connection in others.values():
        with contextlib.suppress(OSError):
            connection.sendall(message)


def _part(others: dict[int, socket.socket]) -> None:
    """Says good-bye, unless an exception has ended the interpreter: then this process ends at once, and
    the others notice. Python has printed the exception, and keeps it (an interactive one, any)."""
    if hasattr(sys, "last_value") and not hasattr(sys, "ps1"):
        flush()
        os._exit(130 if isinstance(sys.last_value, KeyboardInterrupt) else 1)
    _tell(others, _BYE)


_ending = threading.Lock()


def end_alone(who: str) -> NoReturn:
    """Ends this process, which would wait for a lost one, with one line and exit code 1. The first thread that calls it speaks."""
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # the other thread ends the process
    flush()
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {who} ended or cannot be reached; see its log", file=sys.stderr, flush=True)
    os._exit(1)


def is_loss(error: BaseException) -> bool:
    """Whether an error says that another process is gone: a collective or the coordination service lost its connection."""
    signs = ("gloo", "coordination", "connection reset", "connection closed", "socket closed")
    # JAX raises either kind, by the status that XLA returns: "UNKNOWN: Gloo AllGather failed".
    by_status = isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error)) is not None
    raised = isinstance(error, RuntimeError) or by_status
    return raised and any(sign in str(error).lower() for sign in signs)


def place() -> tuple[int, int]:
    """Which process this is and of how many, without joining them: of a process that starts others, which will."""
    where = _told() or _found()
    return (where[2], where[1]) if where else (0, 1)


def _seconds(name: str, default: float) -> float:
    value = os.environ.get(name, "")
    if value and not value.isdecimal():
        raise UserError(f"{name}: {value!r}; a number of seconds")
    return float(value or default)


def _told() -> tuple[str, int, int, None] | None:
    """What the three variables say."""
    names = ("TRANSFORMER_COORDINATOR", "TRANSFORMER_PROCESSES", "TRANSFORMER_PROCESS")
    given = [os.environ.get(name, "") for name in names]
    if not any(given):
        return None
    for name, value in zip(names, given, strict=True):
        if not value or (name != names[0] and not value.isdecimal()):
            raise UserError(
                f"{name}: {value!r}; {', '.join(names)} go together: host:port, a number, a number from 0"
            )
    coordinator, count, index = given[0], int(given[1]), int(given[2])
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        raise UserError(f"{names[0]}: {coordinator!r}; it must be host:port, the port under 65535")
    if index >= count:
        raise UserError(
            f"{names[2]}: {index}, but there are {count} processes ({names[1]}), from 0"
        )
    return coordinator, count, index, None


def _found() -> tuple[str, int, int, list[int] | None] | None:
    """What JAX finds out about a cluster that this process is part of; None if it is alone."""
    environment = os.environ
    several = (
        int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1
        or int(environment.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
        or "," in environment.get("TPU_WORKER_HOSTNAMES", "")
        or "MEGASCALE_COORDINATOR_ADDRESS" in environment
    )
    if not several and not os.path.exists("/dev/accel0") and not os.path.exists("/dev/vfio/0"):
        return None
    from jax._src import clusters

    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, WAIT
    )
    coordinator, count, index, local_devices = found
    return (
        (coordinator, count, index, local_devices) if coordinator and count and count > 1 else None
    )


def _gather(coordinator: str, count: int, index: int, wait: float) -> dict[int, socket.socket]:
    """Every process tells process 0, one port above the coordinator's, that it is there; all go on when all are. (JAX's own service
    would abort, and not say who is missing.) Returns the connections: those of process 0 to all others, of another to process 0."""
    host, _, port = coordinator.rpartition(":")
    until = time.monotonic() + wait
    if index:
        return {0: _report_to(host.strip("[]"), int(port) + 1, index, count, until, wait)}
    here = {0: socket.gethostname()}
    connections: dict[int, socket.socket] = {}
    try:
        socket.create_server(("", int(port))).close()  # JAX's own, which would not say so
        server = socket.create_server(("", int(port) + 1))
    except OSError as e:
        raise UserError(
            f"process 0: port {port} or the one above it is taken ({e.strerror}); choose another coordinator port"
        ) from None
    with server:
        while len(here) < count and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(
                OSError, ValueError, TypeError
            ):  # a stranger at the door, or none
                connection, _ = server.accept()
                connection.settimeout(10)
                number, of, name = json.loads(_read_line(connection))
                if of != count:
                    _answer(
                        [connection],
                        f"process {number} on {name} was told of {of} processes, process 0 of {count}",
                    )
                    continue
                if number in here:
                    _answer(
                        [connection],
                        f"process {number} is there twice: on {here[number]} and {name}",
                    )
                    continue
                here[number] = name
                connections[number] = connection
        missing = [str(i) for i in range(count) if i not in here]
        there = ", ".join(f"{i} ({name})" for i, name in sorted(here.items()))
        problem = (
            f"of {count} processes {', '.join(missing)} did not arrive in {wait:.0f} s; there are {there}; see their logs"
            if missing
            else ""
        )
        _answer(connections.values(), problem)
    if problem:
        raise UserError(problem)
    return connections


def _answer(connections: Iterable[socket.socket], problem: str) -> None:
    """Tells each of them what is wrong, and closes its connection; or that all is well ("")."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall((json.dumps(problem) + "\n").encode())
            if problem:
                connection.close()


def _report_to(
    host: str, port: int, index: int, count: int, until: float, wait: float
) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(
                (host, port), timeout=max(until - time.monotonic(), 0.1)
            )
            connection.sendall((json.dumps([index, count, socket.gethostname()]) + "\n").encode())
            connection.settimeout(max(until - time.monotonic(), 0) + 30)
            problem = json.loads(_read_line(connection))
            break
        except (OSError, ValueError):
            if time.monotonic() > until:
                raise UserError(
                    f"process {index}: process 0 did not answer at {host}:{port} in {wait:.0f} s; see its log, and that the port is open"
                ) from None
            time.sleep(0.2)
    if problem:
        raise UserError(problem)
    return connection


def _read_line(connection: socket.socket) -> bytes:
    """A line and no byte of what comes after it, which a buffered reader would take as well."""
    line = b""
    while not line.endswith(b"\n") and (byte := connection.recv(1)):
        line += byte
    return line


def is_first() -> bool:
    """Whether this process speaks and writes for all."""
    return jax.process_index() == 0


def barrier(name: str, wait: float = DAY) -> None:
    """Waits until all processes are here. Raises UserError, which names who was late, after `wait` seconds, and at once when they
    cannot be reached."""
    if jax.process_count() == 1:
        return
    until = time.monotonic() + wait
    try:
        _service().wait_at_barrier(name, int(wait * 1000))
    except RuntimeError as e:
        reason = " ".join(line.strip() for line in str(e).splitlines() if line.strip())[:300]
        late = time.monotonic() >= until
        what = f"waited {wait:.0f} s for" if late else "cannot wait for"
        raise UserError(f"{what} the other processes at {name!r}: {reason}") from None


def _service():
    """The client of JAX's coordination service: barriers, and a few words that all processes can read."""
    from jax._src import distributed

    return distributed.global_state.client


def stop_agreed(wanted: bool, step: int, run: int) -> bool:
    """Whether to stop after this step: of one process, if it is wanted; of several, at a step that all have agreed on.

    Whoever wants to stop says: four steps from now. No process is then further than three: it waits for the metrics of the step before
    the one it starts, and these need everyone."""
    if jax.process_count() == 1:
        return wanted
    key = f"transformer/run {run} stops at step"
    at = _stop_at(key)
    if wanted and not at:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was faster
            _service().key_value_set(key, str(step + 4))
        at = _stop_at(key)
    return 0 < at <= step


def _stop_at(key: str) -> int:
    """The step that was agreed on; 0: none."""
    try:
        return int(_service().key_value_try_get(key))
    except jax.errors.JaxRuntimeError:
        return 0


@contextlib.contextmanager
def first_before_the_others(name: str) -> Iterator[None]:
    """Process 0 does what is inside first; then, when it is done, all others."""
    if not is_first():
        barrier(name)
    yield
    if is_first():
        barrier(name)


def everyones(mine: np.ndarray) -> np.ndarray:
    """Each process's array of one shape and type, stacked on a new first axis. All processes must call this."""
    if jax.process_count() == 1:
        return mine[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(mine))


def agree(what: str, value: str) -> None:
    """Raises UserError unless all processes have the same `value`."""
    all_of_them = everyones(np.frombuffer(value.encode()[:64].ljust(64), np.uint8))
    if odd := [
        i for i, other in enumerate(all_of_them) if not np.array_equal(other, all_of_them[0])
    ]:
        raise UserError(f"{what}: process {odd[0]} has another than process 0; give all the same")


def worst(kind: int) -> int:
    """The largest of all processes' values; each must call this. 0 is no fault, and the larger the number, the worse."""
    return int(np.max(everyones(np.array(kind, np.int32))))
