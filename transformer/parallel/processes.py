"""Processes: start-up, detection of lost processes, barriers and agreement.

A process is one of several if the machine configures it so (JAX detects Cloud TPU, GKE, SLURM and
Open MPI), or if three variables do, which launch/local.py sets:

    TRANSFORMER_COORDINATOR=host:port    the address of process 0
    TRANSFORMER_PROCESSES=4              the number of processes
    TRANSFORMER_PROCESS=0                the index of this process

With these variables, even a single CPU process computes reductions with gloo, as several do. So 1,
2 and 4 processes give bit-identical results on the same mesh.

When a process dies, the others end within seconds. Process 0 keeps a connection to every other one.
A process that loses its connection prints one line with the number of the lost process, and exits
with code 1. JAX's heartbeats detect a machine that stops responding, and abort with a stack trace.
With TRANSFORMER_TRACEBACKS=1 every traceback is printed."""

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

from transformer.errors import TemporaryError, UserError
from transformer.output import flush

WAIT = 300  # seconds that a process waits for the others at start-up
HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as dead
DAY = 24 * 3600  # seconds that connected processes wait, unless one dies
_BYE = b"bye\n"  # what a process sends when it ends without a fault
_ending = threading.Lock()


def start_processes() -> bool:
    """Connects this process to the others, before JAX's first computation. Returns False if no
    processes are configured. Raises TemporaryError with the missing processes."""
    if jax.distributed.is_initialized():
        return True
    if (settings := _from_variables() or _from_cluster()) is None:
        return False
    coordinator, count, index, _ = settings
    wait = _seconds("TRANSFORMER_WAIT", WAIT)
    heartbeat = _seconds("TRANSFORMER_HEARTBEAT", HEARTBEAT)
    connections = _connect(coordinator, count, index, wait)
    for i, connection in connections.items():
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        threading.Thread(target=_listen, args=(i, connection, connections), daemon=True).start()
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    timeouts = {"initialization_timeout": int(wait), "heartbeat_timeout_seconds": int(heartbeat)}
    timeouts |= {"shutdown_timeout_seconds": 60}
    jax.distributed.initialize(*settings, cluster_detection_method="deactivate", **timeouts)
    atexit.register(_leave, connections)  # before JAX's shutdown, which waits for the others
    return True


def _listen(number: int, connection: socket.socket, connections: dict[int, socket.socket]) -> None:
    """Ends this process when the connection to another closes without a goodbye."""
    try:
        message = connection.recv(64)
    except ConnectionResetError:
        message = b""
    except OSError:  # a network fault: JAX's heartbeats decide
        return
    if message == _BYE:
        return
    lost = int(message) if message.strip().isdigit() else number
    _broadcast(connections, b"%d\n" % lost)
    if lost:  # Leaves time for an error of this process. Without process 0, JAX aborts at once.
        time.sleep(1)
    exit_after_loss(f"process {lost} of this run")


def _broadcast(connections: dict[int, socket.socket], message: bytes) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(message)


def _leave(connections: dict[int, socket.socket]) -> None:
    """Sends a goodbye, or ends at once if an exception ended Python (sys.last_value, where an
    interactive Python keeps all exceptions), so that other processes notice."""
    if hasattr(sys, "last_value") and not hasattr(sys, "ps1"):
        flush()
        os._exit(130 if isinstance(sys.last_value, KeyboardInterrupt) else 1)
    _broadcast(connections, _BYE)


def exit_after_loss(who: str) -> NoReturn:
    """Ends this process, which would wait for a lost one, with exit code 1 and one line, once."""
    if not _ending.acquire(blocking=False):
        time.sleep(60)  # the other thread ends the process
    flush()
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {who} ended or cannot be reached; see its log", file=sys.stderr, flush=True)
    os._exit(1)


def is_lost_process(error: BaseException) -> bool:
    """Returns whether an error means that a collective or coordination service lost a process."""
    phrases = ("gloo", "coordination", "connection reset", "connection closed", "socket closed")
    # The type depends on the status that XLA returns: "UNKNOWN: Gloo AllGather failed".
    by_status = isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error)) is not None
    raised = isinstance(error, RuntimeError) or by_status
    return raised and any(phrase in str(error).lower() for phrase in phrases)


def process_index_and_count() -> tuple[int, int]:
    """Returns (index, number of processes) without connecting, for a process that starts others."""
    settings = _from_variables() or _from_cluster()
    return (settings[2], settings[1]) if settings else (0, 1)


def _seconds(name: str, default: float) -> float:
    value = os.environ.get(name, "")
    if value and not value.isdecimal():
        raise UserError(f"{name}: {value!r} is not a number of seconds; set a whole number")
    return float(value or default)


def _from_variables() -> tuple[str, int, int, None] | None:
    names = ("TRANSFORMER_COORDINATOR", "TRANSFORMER_PROCESSES", "TRANSFORMER_PROCESS")
    values = [os.environ.get(name, "") for name in names]
    if not any(values):
        return None
    for name, value in zip(names, values, strict=True):
        if not value or (name != names[0] and not value.isdecimal()):
            way_out = f"set {', '.join(names)} together: host:port, a number, and a number from 0"
            raise UserError(f"{name}: {value!r} is not valid; {way_out}")
    coordinator, count, index = values[0], int(values[1]), int(values[2])
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65535:
        way_out = "set both, with a port below 65535"
        raise UserError(f"{names[0]}: {coordinator!r} is not host:port; {way_out}")
    if index >= count:
        present = f"there are {count} processes ({names[1]})"
        raise UserError(f"{names[2]}: {index}, but {present}; count from 0")
    return coordinator, count, index, None


def _from_cluster() -> tuple[str, int, int, list[int] | None] | None:
    several = (
        int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1
        or int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1)) > 1
        or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
        or "MEGASCALE_COORDINATOR_ADDRESS" in os.environ
    )
    if not several and not os.path.exists("/dev/accel0") and not os.path.exists("/dev/vfio/0"):
        return None
    from jax._src.clusters import ClusterEnv

    detected = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, WAIT)
    coordinator, count, _, _ = detected
    return detected if coordinator and count and count > 1 else None


def _connect(coordinator: str, count: int, index: int, wait: float) -> dict[int, socket.socket]:
    """Connects all processes to process 0, one port above the coordinator's, and returns the
    connections once all have arrived. JAX's own service would not name missing processes."""
    host, _, port = coordinator.rpartition(":")
    deadline = time.monotonic() + wait
    if index:
        return {0: _connect_to_first(host.strip("[]"), int(port) + 1, index, count, deadline, wait)}
    hosts = {0: socket.gethostname()}
    connections: dict[int, socket.socket] = {}
    try:
        socket.create_server(("", int(port))).close()  # JAX does not report that its port is in use
        server = socket.create_server(("", int(port) + 1))
    except OSError as e:
        problem = f"port {port} or the port above it is in use ({e.strerror})"
        raise UserError(f"process 0: {problem}; choose another coordinator port") from None
    with server:
        while len(hosts) < count and (remaining := deadline - time.monotonic()) > 0:
            server.settimeout(remaining)
            with contextlib.suppress(OSError, ValueError, TypeError):  # none, or an unrelated one
                connection, _ = server.accept()
                connection.settimeout(10)
                number, total, hostname = json.loads(_read_line(connection))
                if total != count:
                    where = f"process {number} on {hostname}"
                    counts = f"{total} processes, but process 0 for {count}"
                    conflict = f"{where} is set up for {counts}; set the same number for all"
                elif number in hosts:
                    twice = f"process {number} runs twice, on {hosts[number]} and {hostname}"
                    conflict = f"{twice}; give each process a different number"
                else:
                    hosts[number], connections[number] = hostname, connection
                    continue
                _reply([connection], UserError(conflict))
        missing = [str(i) for i in range(count) if i not in hosts]
        noun = "process" if len(missing) == 1 else "processes"
        present = ", ".join(f"{i} ({hostname})" for i, hostname in sorted(hosts.items()))
        late = f"{noun} {', '.join(missing)} of {count} did not connect within {wait:.0f} s"
        way_out = "see the logs of the missing processes"
        problem = TemporaryError(f"{late}; connected: {present}; {way_out}")
        _reply(connections.values(), problem if missing else None)
    if missing:
        raise problem
    return connections


def _reply(connections: Iterable[socket.socket], problem: UserError | None) -> None:
    """Sends each process its error and closes the connection, or None and keeps it open."""
    reply = problem and [problem.exit_code, str(problem)]
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.sendall((json.dumps(reply) + "\n").encode())
            if problem:
                connection.close()


def _connect_to_first(host: str, port: int, index: int, count: int, deadline: float, wait: float):
    while True:
        try:
            remaining = max(deadline - time.monotonic(), 0.1)
            connection = socket.create_connection((host, port), timeout=remaining)
            connection.sendall((json.dumps([index, count, socket.gethostname()]) + "\n").encode())
            connection.settimeout(max(deadline - time.monotonic(), 0) + 30)
            reply = json.loads(_read_line(connection))
            break
        except (OSError, ValueError):
            if time.monotonic() > deadline:
                problem = f"process 0 did not answer at {host}:{port} within {wait:.0f} s"
                way_out = "see its log, and check that the port is open"
                raise TemporaryError(f"process {index}: {problem}; {way_out}") from None
            time.sleep(0.2)
    if reply:
        code, problem = reply
        raise (TemporaryError if code == TemporaryError.exit_code else UserError)(problem)
    return connection


def _read_line(connection: socket.socket) -> bytes:
    """Reads one line. A buffered reader would also consume bytes after it."""
    return connection.makefile("rb", buffering=0).readline()


def is_first() -> bool:
    """Returns whether this is process 0, which prints and writes for all."""
    return jax.process_index() == 0


def barrier(name: str, wait: float = DAY) -> None:
    """Waits until all processes have reached the barrier `name`. Raises TemporaryError with late
    processes after `wait` s, or at once if one is unreachable."""
    if jax.process_count() == 1:
        return
    deadline = time.monotonic() + wait
    try:
        _service().wait_at_barrier(name, int(wait * 1000))
    except RuntimeError as e:
        reason = " ".join(line.strip() for line in str(e).splitlines() if line.strip())[:300]
        failure = f"waited {wait:.0f} s for" if time.monotonic() >= deadline else "cannot wait for"
        raise TemporaryError(f"{failure} the other processes at {name!r}: {reason}") from None


def _service():
    """Returns the client of JAX's coordination service: barriers and a shared key-value store."""
    from jax._src import distributed

    return distributed.global_state.client


def stop_agreed(stop_requested: bool, step: int, run: int) -> bool:
    """Returns whether to stop after this step. A single process stops if `stop_requested`. Several
    stop at a step that they agree on: the first that wants to stop sets it to four steps later.
    None is more than three steps ahead: each waits for all to finish the step before."""
    if jax.process_count() == 1:
        return stop_requested
    key = f"transformer/run {run} stops at step"
    if stop_requested:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # it is already set
            _service().key_value_set(key, str(step + 4))
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # no process wants to stop
        return int(_service().key_value_try_get(key)) <= step
    return False


@contextlib.contextmanager
def process_zero_first(name: str) -> Iterator[None]:
    """Runs the body on process 0 first, and then on all others."""
    if not is_first():
        barrier(name)
    yield
    if is_first():
        barrier(name)


def gather_from_all(mine: np.ndarray) -> np.ndarray:
    """Stacks all processes' arrays, of one shape and type, on a new axis 0. Each must call this."""
    if jax.process_count() == 1:
        return mine[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(mine))


def agree(what: str, value: str) -> None:
    """Raises UserError, which names `what`, unless `value` is the same on all processes."""
    values = gather_from_all(np.frombuffer(value.encode()[:64].ljust(64), np.uint8))
    if others := [i for i, other in enumerate(values) if not np.array_equal(other, values[0])]:
        raise UserError(f"{what} differs between processes 0 and {others[0]}; use the same on all")


def max_over_processes(kind: int) -> int:
    """Returns the maximum over all processes; each must call this. 0: no fault; larger: worse."""
    return int(np.max(gather_from_all(np.array(kind, np.int32))))
