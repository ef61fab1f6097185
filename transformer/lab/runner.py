"""Runs a study: what is done is skipped, what was cut off goes on, what dies is noted and the rest goes on.

Every run, or group of runs that are trained together, has a process of its own. On a pod, where every host is given the same command, a run
has a process on each host: all go through the runs in the same order, and the first alone writes what becomes of them.
"""

import contextlib
import math
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformer.claims import keep_renewing
from transformer.errors import UserError, nearest
from transformer.lab.study import Planned, Status, Study, load_study
from transformer.lab.together import alike, train_together
from transformer.parallel.processes import place
from transformer.runs.metrics import columns, human_time
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


def cell(status: Status, steps: int) -> str:
    """A few words."""
    loss = (
        ""
        if math.isnan(status.loss)
        else f" {status.loss:.3f}"
        if abs(status.loss) < 1e5
        else f" {status.loss:.1e}"
    )
    return {
        "done": f"done{loss}",
        "running": f"{status.step / steps:4.0%}{loss}" if status.step else "starting",
        "stopped": f"stopped {status.step / steps:.0%}",
        "trained": "to evaluate",
        "diverged": f"diverged @{status.step:,}",
    }.get(status.kind, status.kind)


def overview(study: Study, statuses: dict[str, Status]) -> list[str]:
    """An arm a line, a seed a column."""
    rows = [["arm", *(f"seed {seed}" for seed in study.sweep.seeds)]]
    for arm, config in study.configs.items():
        rows.append(
            [
                arm,
                *(
                    cell(statuses[f"{arm}/seed-{seed}"], config.train.steps)
                    for seed in study.sweep.seeds
                ),
            ]
        )
    return columns(rows)


class Table:
    """The status of all runs: in a terminal a table that stays in place, in a log a line for what changes and one a minute."""

    def __init__(self, study: Study, stream):
        self._study, self._stream, self._live = study, stream, stream.isatty()
        self._began, self._shown, self._last, self._kinds = time.monotonic(), 0, 0.0, {}
        self._said, self._first = self._began, None

    def show(self, last: bool = False) -> None:
        if not last and time.monotonic() - self._last < 2:
            return
        self._last = time.monotonic()
        statuses = {run.name: run.status() for run in self._study.runs}
        if self._live:
            lines = [*overview(self._study, statuses), self._summary(statuses)]
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(
                (f"\x1b[{self._shown}A" if self._shown else "")
                + "".join(f"\x1b[K{line[:width]}\n" for line in lines)
            )
            self._shown = len(lines)
        else:
            for name, status in statuses.items():
                if self._kinds.get(name) != status.kind and not (
                    name not in self._kinds and status.kind == "waiting"
                ):
                    said = (
                        f"{status.kind}: {status.why}"
                        if status.why
                        else cell(status, self._steps(name))
                    )
                    self._stream.write(f"{name}  {said}\n")
                self._kinds[name] = status.kind
            if time.monotonic() - self._said > 60 and not last:
                self._said = time.monotonic()
                going = [
                    f"{name} {cell(status, self._steps(name))}"
                    for name, status in statuses.items()
                    if status.kind == "running"
                ]
                more = [f"and {len(going) - 4} more"] if len(going) > 4 else []
                self._stream.write(f"{self._summary(statuses)}: {', '.join([*going[:4], *more])}\n")
            if last:
                self._stream.write(
                    "\n".join([*overview(self._study, statuses), self._summary(statuses)]) + "\n"
                )
        if last:
            lacking = False  # once is enough: what one run lacks the others do, too
            for name, status in statuses.items():
                if status.why and (status.kind == "failed" or not lacking):
                    self._stream.write(f"{name}  {status.kind}: {status.why}\n")
                    lacking |= status.kind == "done"
        self._stream.flush()

    def _steps(self, name: str) -> int:
        return self._study.configs[name.partition("/")[0]].train.steps

    def _work(self, name: str) -> float:
        """The floating-point operations of a run's training."""
        return self._study.facts[name.partition("/")[0]].flops_a_step * self._steps(name)

    def _summary(self, statuses: dict[str, Status]) -> str:
        """How many are over, and how long the rest takes at the speed so far."""
        share = lambda name, status: (
            1.0 if status.over else min(status.step / self._steps(name), 1.0)
        )
        done = sum(
            share(name, status) * self._work(name) for name, status in statuses.items()
        ) / sum(map(self._work, statuses))
        self._first = done if self._first is None else self._first
        spent, since = time.monotonic() - self._began, done - self._first
        left = (
            f", {human_time(spent / since * (1 - done))} left" if since > 0.02 and done < 1 else ""
        )
        over = sum(status.over for status in statuses.values())
        return f"{over} of {len(statuses)} runs are over (their {self._study.sweep.metric}; of others train/loss); {human_time(spent)} so far{left}"
