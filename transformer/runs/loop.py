"""The training loop."""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax

from transformer import buckets
from transformer.config import Experiment
from transformer.files import disk_errors
from transformer.output import elapsed
from transformer.parallel.mesh import start, use
from transformer.parallel.processes import stop_agreed
from transformer.runs import rundir
from transformer.runs.run import begin


def train(config: Experiment, workdir: str | os.PathLike, verbose: bool = False) -> int:
    """Trains in `workdir`, or resumes the run. Returns the number of completed steps: less than
    `train.steps` after SIGTERM or Ctrl-C. `verbose` prints more details before the first step."""
    workdir = buckets.open_folder(workdir)
    on_mesh = lambda: use(start(config.platform, config.mesh))
    with disk_errors(workdir), on_mesh() as mesh, rundir.locked([workdir]):
        run = begin(config, workdir, mesh, verbose=verbose)
        trace = _profile(run.workdir, config.train.profile, run.step)
        with run, stop_signals() as stopped, trace as profile:
            first, compiling = run.step, elapsed("compiling the training step", run.progress.stream)
            for batch in run.train.stream(run.step, config.train.steps):
                batch = run.subject.share.place(batch)
                with compiling if run.step == first else contextlib.nullcontext():
                    run.state, metrics = run.train_step(run.state, batch)
                run.step += 1
                run.recorder.push(run.step, metrics)
                profile(run.step)
                if run.step < config.train.steps and stopped(run.step):
                    run.save()  # time is short; the resumed run evaluates if it is due
                    break
                if run.evaluation_due():
                    run.evaluate()
                if run.saving_due():
                    run.save()
    return run.step


_RUNS = itertools.count()
"""Numbers the runs of this process, so that an agreed stop applies to one run only."""

received_signals: list[int] = []
"""Signals that this process received while it trained. One after a run's last step does not affect
it: check this list before starting another run."""


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[int], bool]]:
    """Yields a function step -> whether to stop after SIGTERM (preemption) or Ctrl-C. All processes
    stop at one step, whichever received the signal. A second Ctrl-C is instant."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return

    def announce(number: int) -> None:
        received_signals.append(number)
        print("\nstopping soon, after saving a checkpoint", file=sys.stderr)

    with recorded((signal.SIGTERM, signal.SIGINT), announce) as received:
        run = next(_RUNS)
        yield lambda step: stop_agreed(bool(received), step, run)


@contextlib.contextmanager
def recorded(signals: Iterable[int], act: Callable = lambda number: None) -> Iterator[list[int]]:
    """Yields the list of these signals that the process has received while the context is open.
    Calls `act` on each. A second Ctrl-C raises KeyboardInterrupt."""
    received: list[int] = []

    def on_signal(number, frame):
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        act(number)

    previous = {number: signal.signal(number, on_signal) for number in signals}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _profile(workdir: Path, steps: int, start: int) -> Iterator[Callable[[int], None]]:
    """Traces `steps` steps after the first 10 to `workdir/profile`, for TensorBoard or Perfetto."""
    first, tracing = start + 10, contextlib.ExitStack()

    def after_step(step: int) -> None:
        if steps and step == first:
            tracing.enter_context(jax.profiler.trace(str(workdir / "profile")))
        if steps and step == first + steps:
            tracing.close()

    with tracing:
        yield after_step
