"""Detection of hangs: a training step that takes far longer than those before it."""

import collections
import faulthandler
import os
import socket
import statistics
import sys
import threading
import time

import jax

from transformer.output import flush, human_time

LEAST = 300.0  # the shortest default deadline, in seconds


class Watchdog:
    """Ends this process, with exit code 1, when a step takes longer than a deadline. It prints the
    step, the host and the stacks of all threads. The run's other processes lose their connection
    and end, too, and a launcher can restart the run. The deadline is `seconds` or, if that is 0,
    ten times the median of the last 100 steps and at least 300 s. The first step, which compiles,
    evaluations and checkpoints are not watched."""

    def __init__(self):
        self.seconds, self._last = 0.0, collections.deque(maxlen=100)
        self._current: tuple[int, float, float] | None = None  # step, its start, its deadline
        self._closed = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def step_done(self, step: int) -> None:
        """Watches the step after `step` from now on. Times `step` unless that was paused."""
        now = time.monotonic()
        if self._current is not None:
            self._last.append(now - self._current[1])
        median = statistics.median(self._last) if self._last else 0.0
        self._current = step + 1, now, self.seconds or max(LEAST, 10 * median)

    def pause(self) -> None:
        """Stops watching until the next `step_done`."""
        self._current = None

    def close(self) -> None:
        """Stops watching for good."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            if (current := self._current) is None:
                continue
            step, began, deadline = current
            if (elapsed := time.monotonic() - began) > deadline and not self._closed.is_set():
                where = f"process {jax.process_index()} on {socket.gethostname()}"
                problem = f"step {step:,} has taken {human_time(elapsed)} in {where}"
                why = "another host, a collective or the input pipeline hangs"
                flush()
                print(f"error: {problem}; {why}; the stacks of all threads:", file=sys.stderr)
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)
