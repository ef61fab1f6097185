"""Collects the metrics of training steps from the device, averages them and logs them."""

import contextlib
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from transformer.errors import UserError
from transformer.runs.metrics import MetricsLog, Progress


class Diverged(UserError):
    """The loss is NaN or infinite. This is a result, which the log records."""


class Recorder:
    """Logs token-weighted means and the speed every `every` steps.

    `push(step, metrics)` reads the metrics of the previous step, which the device has finished by
    then, so the host never waits for the step it has just started. `window` holds the sums since
    the last log line. It is saved with a checkpoint, so that a resumed run has the same curve as an
    uninterrupted one. `together` is the number of runs that share the measured time. A line also
    has the mean number of CPU cores that other processes have used since the start, because they
    may have slowed the run down.
    """

    def __init__(
        self,
        log: MetricsLog,
        progress: Progress,
        rate: Callable,
        every: int,
        steps: int,
        window: dict[str, float],
        together: int = 1,
    ):
        self._log, self._progress, self._rate = log, progress, rate
        self._every, self._steps = every, steps
        self._together = {"time/together": together} if together > 1 else {}
        self.window = dict(window)
        self._late: tuple[int, dict] | None = None
        # Start of the open interval. None until the first step, which compiles, is done.
        self._mark: float | None = None
        self._timed_tokens, self._timed_steps = 0.0, 0
        self._aside, self._began = False, (time.perf_counter(), _cpu_of_others())

    def push(self, step: int, metrics: dict) -> None:
        """Takes the metrics of a step that has just started. Raises Diverged for the one before."""
        self.flush()
        self._late = step, metrics

    def flush(self) -> None:
        """Waits for the last step that was pushed and records its metrics."""
        if self._late is None:
            return
        (step, metrics), self._late = self._late, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not math.isfinite(values["objective"]):
            self._log.write(step, **{"train/diverged": True})
            problem = f"the loss is {values['objective']} at step {step:,}"
            way_out = "lower optimizer.learning_rate, lengthen optimizer.warmup_steps"
            raise Diverged(f"training diverged: {problem}; {way_out} or set optimizer.clip_norm")
        for name, value in values.items():
            total = value if name == "tokens" else value * values["tokens"]
            self.window[name] = self.window.get(name, 0.0) + total
        if self._mark is None:
            self._mark = time.perf_counter()
        else:
            self._timed_tokens += values["tokens"]
            self._timed_steps += 1
        if step % self._every == 0 or step == self._steps:
            self._line(step)

    def _line(self, step: int) -> None:
        now = time.perf_counter()
        tokens = self.window.pop("tokens")
        means = {f"train/{name}": value / max(tokens, 1.0) for name, value in self.window.items()}
        self.window = {}
        spent, steps = max(now - self._mark, 1e-9), max(self._timed_steps, 1)
        speed = self._timed_tokens / spent
        self._mark, self._timed_tokens, self._timed_steps = now, 0.0, 0
        lr = float(self._rate(step - 1))
        timing = {"time/tokens_per_second": round(speed, 1)} | self._together if speed else {}
        timing["memory/peak_bytes"] = peak_memory()
        others = _cpu_of_others() - self._began[1]
        if math.isfinite(others):
            cores = others / max(time.perf_counter() - self._began[0], 0.01)
            timing["time/other_cores"] = round(max(cores, 0.0), 2)
        values = means | {"train/tokens": tokens, "train/learning_rate": lr} | timing
        self._log.write(step, **values)
        self._progress.show(step, means["train/loss"], lr, speed, spent / steps)

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Excludes the time of its body from the measured training time. Nested uses count once.

        For evaluations and checkpoints of this run, or of one trained together with it.
        """
        self.flush()
        start, was_aside, self._aside = time.perf_counter(), self._aside, True
        yield
        self._aside = was_aside
        if self._mark is not None and not was_aside:
            self._mark += time.perf_counter() - start


def _cpu_of_others() -> float:
    """Returns the CPU seconds that all other processes have used since boot; NaN if unknown."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text().split()[1:9]))
    except (OSError, ValueError):  # not Linux
        return math.nan
    busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and iowait
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def peak_memory() -> int:
    """Returns the peak memory in bytes of the fullest device or, on CPUs, of the process."""
    statistics = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats.get("peak_bytes_in_use", 0) for stats in statistics if stats]
    unit = 1 if sys.platform == "darwin" else 1024
    return max(peaks) if peaks else unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
