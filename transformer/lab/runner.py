"""Runs a study: what is done is skipped, what was cut off goes on, what dies is noted and the rest goes on.

Every run, or group of runs that are trained together, has a process of its own. On a pod, where every host is given the same command, a run
has a process on each host: all go through the runs in the same order, and the first alone writes what becomes of them.
"""

import contextlib
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformer.claims import keep_renewing
from transformer.errors import UserError, nearest
from transformer.lab.overview import Table
from transformer.lab.study import Planned, Study, load_study
from transformer.lab.together import alike, train_together
from transformer.parallel.processes import place
from transformer.runs.recorder import Diverged

MOST_PARAMETERS = 100_000_000
"""Runs are trained together as long as they have no more than so many parameters together."""


def groups(study: Study, runs: Sequence[Planned], most: int) -> list[list[Planned]]:
    """Runs to be trained as one program, `most` at a time; all others by themselves."""
    found: dict[object, list[list[Planned]]] = {}
    for run in runs:
        room = min(most, MOST_PARAMETERS // max(study.facts[run.arm].parameters, 1))
        kind = alike(run.config) if room > 1 else None
        batches = found.setdefault(kind or run.name, [[]])
        if len(batches[-1]) >= max(room, 1):
            batches.append([])
        batches[-1].append(run)
    return [group for batches in found.values() for group in batches]


def share_of(study: Study, shard: tuple[int, int], most: int) -> list[list[Planned]]:
    """The groups of machine shard[0] of shard[1], without what is over. What is whose does not hang on what is over: machines may begin one
    after another."""
    mine = groups(study, study.runs, most)[shard[0] - 1 :: shard[1]]
    return [left for unit in mine if (left := [run for run in unit if not run.status().over])]


def run_study(
    study: Study, *, jobs: int, shard: tuple[int, int], most: int, host: tuple[int, int] = (0, 1)
) -> int:
    """Runs what is left of a study, `jobs` processes at a time; of several machines this is number shard[0] of shard[1], of a pod's
    processes number host[0] of host[1]. Returns the exit code: 0 when all of its runs are over, 1 when some have failed, 143 when it, or
    one of them, was stopped."""
    units, table = share_of(study, shard, most), Table(study, sys.stderr)
    first, alone = host[0] == 0, host[1] == 1
    working, failed, cut, look = [], [], False, 0.0
    with _stopping() as stopped, _leaving_none(working):
        while (units and not stopped()) or working:
            for unit in units[:] if time.monotonic() >= look else ():
                if len(working) == jobs or stopped():
                    break
                units.remove(unit)
                if child := _begin(study, unit, host):
                    working.append(child)
                # What another works on comes again: it is taken over should that one die.
                if alone and (
                    left := [
                        run
                        for run in unit
                        if not (child and run in child.runs) and not run.status().over
                    ]
                ):
                    units.append(left)
                    look = time.monotonic() + PATIENCE
            for child in list(working):
                if stopped():
                    child.stop()
                code = child.process.poll()
                if code is not None:
                    working.remove(child)
                    failed, look = failed + child.end(code), 0.0
                    cut |= code in STOPPED
                    if not alone and code in (
                        *STOPPED,
                        2,
                    ):  # of whichever host: all of them stop, or one is not there any more
                        units.clear()
            if first:
                table.show()
            time.sleep(0.3)
    if first:
        table.show(last=True)
    return 143 if cut or stopped() else 1 if failed else 0


PATIENCE = 5.0
"""Seconds until what others work on is looked at again."""

STOPPED = (143, -signal.SIGTERM)
"""Exit codes of a process that was told to stop: it has saved, or had nothing to."""


@contextlib.contextmanager
def _leaving_none(working: list["_Child"]) -> Iterator[None]:
    """Whatever happens here, no process goes on unwatched."""
    try:
        yield
    finally:
        for child in working:
            child.stop()
            child.end(child.process.wait())


class _Child:
    """A process that trains and evaluates some runs; of a pod, the part of it that is on this host, number `index`."""

    def __init__(self, study: Study, runs: list[Planned], index: int):
        self.runs, self.told, self.first = runs, False, index == 0
        log = runs[0].log if self.first else runs[0].log.with_suffix(f".process-{index}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.began = log.open("ab"), log.stat().st_size if log.exists() else 0
        names = ",".join(run.name for run in runs)
        command = [
            sys.executable,
            "-m",
            "transformer",
            "sweep",
            f"--workdir={study.folder}",
            f"--runs={names}",
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
        )
        for run in runs if self.first else ():
            run.claim.hand_over(self.process.pid)

    def stop(self) -> None:
        """Tells it to save and end, once."""
        if not self.told:
            self.told = True
            self.process.send_signal(signal.SIGTERM)

    def end(self, code: int) -> list[Planned]:
        """Gives its runs back; those that have failed."""
        self.log.close()
        failed = []
        for run in self.runs:
            if self.first:
                run.release()
            if code not in (0, *STOPPED) and not run.status().over:
                failed.append(run)
                if self.first and run.status().kind != "failed":  # else it has said itself why
                    run.release(_reason(code, self.runs[0].log, self.began))
        return failed


def _begin(study: Study, runs: list[Planned], host: tuple[int, int]) -> _Child | None:
    """A process for those of the runs that nobody else has, or has done meanwhile."""
    index, count = host
    left = [run for run in runs if not run.status().over]
    if count == 1:
        left = [run for run in left if run.take()]
    elif index == 0:  # the others begin them too: an old claim must not keep the first from it
        for run in left:
            run.release()
            run.take()
    return _Child(study, left, index) if left else None


def _reason(code: int, log: Path, began: int) -> str:
    """Why a process failed, by its exit code and what it has said since it `began` to write into the log."""
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"ended by {signal.Signals(-code).name}{hint}; see {log}"
    lines = [
        line
        for line in log.read_bytes()[began:].decode(errors="replace").splitlines()
        if line.strip()
    ]
    said = next(
        (line for line in reversed(lines) if line.startswith("error:")), lines[-1] if lines else ""
    )
    return f"exit code {code}: {said.removeprefix('error: ')[:200]}; see {log}"


def work(folder: Path, names: Sequence[str], evaluate: Callable[[Planned], None]) -> int:
    """In a process of its own: trains the named runs of a study, or goes on with them, and evaluates those that are trained. Runs that are
    alike and stand at the same step are trained together, or, where that fails, each by itself; one that dies is noted, and the others go on.
    Returns the exit code."""
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # outside of training, which saves first
    runs = {run.name: run for run in load_study(folder).runs}
    for name in names:
        if name not in runs:
            raise UserError(f"--runs: no run {name!r}; {nearest(name, runs)}")
    chosen = [runs[name] for name in names]
    mine = chosen if place()[0] == 0 else []
    for run in mine:
        run.keep()
    keep_renewing([run.claim for run in mine])
    try:
        return _work(chosen, evaluate)
    finally:
        for run in mine:
            run.release()


def _work(chosen: Sequence[Planned], evaluate: Callable[[Planned], None]) -> int:
    """`work`, on runs that are this process's own."""
    from transformer.runs.loop import heard, train

    heard.clear()
    dead: list[Planned] = []
    unfinished = lambda run: not run.status().over and run.saved() < run.config.train.steps

    @contextlib.contextmanager
    def living(run: Planned) -> Iterator[None]:
        """What becomes of one run is nothing to the others, where there are others."""
        try:
            yield
        except Diverged as e:
            print(f"{run.name}: {e}", file=sys.stderr)
        except Exception as e:
            if len(chosen) == 1:
                raise
            _tell(run.name, e)
            dead.append(run)
            run.release(f"{_said(e)}; see {chosen[0].log}")

    apart: dict[object, list[Planned]] = {}
    for run in chosen:
        if unfinished(run):
            apart.setdefault((alike(run.config) or run.name, run.saved()), []).append(run)
    for group in apart.values():
        if len(group) > 1:
            try:
                train_together([run.config for run in group], [run.folder for run in group])
            except Exception as e:
                _tell(f"{', '.join(run.name for run in group)}: each by itself, since together", e)
        for run in group:
            if not heard and unfinished(run):
                with living(run):
                    if train(run.config, run.folder) < run.config.train.steps:
                        return 143  # on a pod another host may have been told
        if heard:
            return 143
    for run in chosen:
        if run not in dead and not run.status().over:
            with living(run):
                evaluate(run)
    return 1 if dead else 0


def _tell(what: str, error: Exception) -> None:
    """Into the log: a mistake in one line, a fault with its traceback."""
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    print(f"error: {what}: {_said(error)}", file=sys.stderr)


def _said(error: Exception) -> str:
    return (
        str(error)
        if isinstance(error, UserError)
        else f"{type(error).__name__}: {error}".splitlines()[0][:200]
    )


@contextlib.contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """After Ctrl-C, SIGTERM or the end of the terminal the function it yields returns True; a second Ctrl-C interrupts."""
    seen: list[int] = []

    def note(number, frame):
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)

    hears = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]  # nohup
    before = {number: signal.signal(number, note) for number in hears}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- what a person sees
