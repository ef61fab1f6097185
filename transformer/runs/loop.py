"""The loop: read it from top to bottom."""

import contextlib
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from transformer.config import Experiment
from transformer.files import disk_faults
from transformer.parallel.mesh import start, use
from transformer.parallel.processes import stop_agreed
from transformer.runs import rundir
from transformer.runs.run import begin


def train(config: Experiment, workdir: str | Path) -> int:
    """Trains in `workdir`, or goes on where a run of the same experiment stopped. Returns the steps done, which are fewer
    than `train.steps` after SIGTERM or Ctrl-C; the same call goes on from there."""
    workdir = Path(workdir)
    with (
        disk_faults(workdir),
        use(start(config.platform, config.mesh)) as mesh,
        rundir.alone([workdir]),
    ):
        run = begin(config, workdir, mesh)
        with (
            run,
            stop_signals() as stopped,
            _profile(run.workdir, config.train.profile, run.step) as profile,
        ):
            for batch in run.batches.stream(run.step, config.train.steps):
                run.state, metrics = run.train_step(run.state, run.share.place(batch))
                run.step += 1
                run.recorder.push(run.step, metrics)
                profile(run.step)
                if run.step < config.train.steps and stopped(
                    run.step
                ):  # little time is left: an evaluation that is due comes with the resumption
                    run.save()
                    break
                if run.evaluation_due():
                    run.evaluate()
                if run.saving_due():
                    run.save()
    return run.step


_RUNS = itertools.count()
"""Runs of this process: what was agreed on in one is nothing to the next."""

heard: list[int] = []
"""Signals that came while this process trained. One that comes after a run's last step leaves the run whole; who would begin another asks here."""


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[int], bool]]:
    """After SIGTERM (preemption) or Ctrl-C in any process, the function it yields returns True, in all of them at one step; a second
    Ctrl-C interrupts at once."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return

    def note(number, frame):
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)
        heard.append(number)
        print("\nstopping soon, to save what is done", file=sys.stderr)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        run = next(_RUNS)
        yield lambda step: stop_agreed(bool(seen), step, run)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _profile(workdir: Path, steps: int, start: int) -> Iterator[Callable[[int], None]]:
    """Traces `steps` steps, from the 10th of this start, into `workdir/profile` (open it with TensorBoard or Perfetto)."""
    first = start + 10

    def at(step: int) -> None:
        if steps and step == first:
            jax.profiler.start_trace(str(workdir / "profile"))
        if steps and step == first + steps:
            jax.profiler.stop_trace()

    yield at
