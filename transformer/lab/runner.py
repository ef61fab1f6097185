"""Runs a study: skips finished runs, resumes interrupted ones, records failures, shows progress.

A failure does not stop the other runs. Each run, or each group of runs that are trained together,
has its own process. On a pod, every host runs the same command, and a run has a process on each
host. All hosts process the runs in the same order, and only the first records their state."""

import contextlib
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from transformer import buckets
from transformer.claims import start_renewing
from transformer.errors import UserError, nearest
from transformer.lab.study import PlannedRun, Status, Study, load_study
from transformer.lab.together import program_key, train_together
from transformer.output import columns, human_time, listed
from transformer.parallel.processes import process_index_and_count
from transformer.runs import loop
from transformer.runs.metrics import Diverged

MOST_PARAMETERS = 100_000_000  # in all, of runs that are trained together
PATIENCE = 5.0  # seconds between checks of runs that other processes have claimed
STOPPED = (143, -signal.SIGTERM)
"""Exit codes of a process that received SIGTERM, after it has saved its state if necessary."""


def groups(study: Study, runs: Sequence[PlannedRun], max_group: int) -> list[list[PlannedRun]]:
    """Groups up to `max_group` runs that can be trained as one program. Others stay alone."""
    by_kind: dict[object, list[list[PlannedRun]]] = {}
    for run in runs:
        room = min(max_group, MOST_PARAMETERS // max(study.facts[run.arm].parameters, 1))
        kind = program_key(run.config) if room > 1 else None
        batches = by_kind.setdefault(kind or run.name, [[]])
        if len(batches[-1]) >= max(room, 1):
            batches.append([])
        batches[-1].append(run)
    return [group for batches in by_kind.values() for group in batches]


def share_of(study: Study, shard: tuple[int, int], max_group: int) -> list[list[PlannedRun]]:
    """Returns the groups of machine shard[0] of shard[1], without finished runs."""
    # The assignment ignores which runs are finished: machines may start at different times.
    share = groups(study, study.runs, max_group)[shard[0] - 1 :: shard[1]]
    return [unfinished for group in share if (unfinished := _unfinished(group))]


def _unfinished(runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    return [run for run in runs if not run.status().is_finished]


def run_study(
    study: Study, *, jobs: int, shard: tuple[int, int], max_group: int, host=(0, 1)
) -> int:
    """Runs the unfinished runs of a study, up to `jobs` at a time, as machine shard[0] of shard[1]
    and host[0] of host[1] of a pod. Returns 0 if all finished, 1 if some failed, 143 if stopped."""
    waiting, table = share_of(study, shard, max_group), Table(study, sys.stderr)
    first, alone = host[0] == 0, host[1] == 1
    working, failed, interrupted, next_check = [], [], False, 0.0
    with _stopping() as stopped, contextlib.ExitStack() as at_end:
        at_end.callback(lambda: [child.wait() for child in working])
        while (waiting and not stopped()) or working:
            for group in waiting[:] if time.monotonic() >= next_check else ():
                if len(working) == jobs or stopped():
                    break
                waiting.remove(group)
                if child := _begin(study, group, host):
                    working.append(child)
                # Runs claimed by other processes are checked again, in case those processes die.
                claimed = [run for run in group if not (child and run in child.runs)]
                if alone and (unfinished := _unfinished(claimed)):
                    waiting.append(unfinished)
                    next_check = time.monotonic() + PATIENCE
            for child in list(working):
                if stopped():
                    child.stop()
                if (code := child.process.poll()) is not None:
                    working.remove(child)
                    failed, next_check = failed + child.end(code), 0.0
                    interrupted |= code in STOPPED
                    if not alone and code in (*STOPPED, 2):  # all hosts stop, or one is missing
                        waiting.clear()
            if first:
                table.show()
            time.sleep(0.3)
    if first:
        table.show(last=True)
    return 143 if interrupted or stopped() else 1 if failed else 0


class _Child:
    """A process that trains and evaluates runs. On a pod, this is the process of host `index`."""

    def __init__(self, study: Study, runs: list[PlannedRun], index: int):
        self.runs, self.stopping, self.first = runs, False, index == 0
        log = runs[0].log if self.first else runs[0].log.with_suffix(f".process-{index}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self.began = log.open("ab"), log.stat().st_size if log.exists() else 0
        command = [sys.executable, "-m", "transformer", "sweep"]
        command += [f"--workdir={study.folder}", f"--runs={','.join(run.name for run in runs)}"]
        streams = {"stdin": subprocess.DEVNULL, "stdout": self.log, "stderr": self.log}
        self.process = subprocess.Popen(command, **streams, start_new_session=True)
        for run in runs if self.first else ():
            run.claim.hand_over(self.process.pid)

    def stop(self) -> None:
        """Sends SIGTERM once, so that the process saves and exits."""
        if not self.stopping:
            self.stopping = True
            self.process.send_signal(signal.SIGTERM)

    def wait(self) -> None:
        """Stops the process if it is running, and waits for its end."""
        self.stop()
        self.end(self.process.wait())

    def end(self, code: int) -> list[PlannedRun]:
        """Releases the claims on its runs, and returns the runs that failed."""
        self.log.close()
        stopped = code in STOPPED or (self.stopping and code < 0)  # killed while importing JAX
        failed = []
        for run in self.runs:
            if self.first:
                run.release()
            if code and not stopped and not run.status().is_finished:
                failed.append(run)
                if self.first and run.status().kind != "failed":  # else the process gave a reason
                    run.release(_reason(code, self.runs[0].log, self.began))
        return failed


def _begin(study: Study, runs: list[PlannedRun], host: tuple[int, int]) -> _Child | None:
    """Starts a process for those runs that are unfinished and not claimed by another process."""
    (index, count), unfinished = host, _unfinished(runs)
    if count == 1:
        unfinished = [run for run in unfinished if run.take()]
    elif index == 0:  # all hosts start these runs, so an old claim must not stop the first host
        for run in unfinished:
            run.release()
            run.take()
    return _Child(study, unfinished, index) if unfinished else None


def _reason(code: int, log: Path, began: int) -> str:
    """Returns why a process failed: its exit code, and the last error in its log since `began`."""
    if code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"ended by {signal.Signals(-code).name}{hint}; see {buckets.shown(log)}"
    text = log.read_bytes()[began:].decode(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    error = ([x for x in lines if x.startswith("error:")] or lines or [""])[-1]
    return f"exit code {code}: {error.removeprefix('error: ')[:200]}; see {buckets.shown(log)}"


def train_and_evaluate(folder: Path, names: Sequence[str], evaluate: Callable) -> int:
    """Trains or resumes the named runs of a study, and evaluates them. Those alike and at one step
    are trained together, or else one by one. Failed runs are recorded. Returns the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # training saves before it exits
    runs = {run.name: run for run in load_study(folder).runs}
    if unknown := [name for name in names if name not in runs]:
        raise UserError(f"--runs: no run {unknown[0]!r}; {nearest(unknown[0], runs)}")
    chosen = [runs[name] for name in names]
    claimed = chosen if process_index_and_count()[0] == 0 else []
    for run in claimed:
        run.keep()
    start_renewing([run.claim for run in claimed])
    try:
        return _train_and_evaluate(chosen, evaluate)
    finally:
        for run in claimed:
            run.release()


def _train_and_evaluate(chosen: Sequence[PlannedRun], evaluate: Callable) -> int:
    loop.received_signals.clear()
    failed: list[PlannedRun] = []
    unfinished = lambda run: not run.status().is_finished and run.saved() < run.config.train.steps

    @contextlib.contextmanager
    def isolated(run: PlannedRun) -> Iterator[None]:
        """Records the failure of a run, so that other runs continue. A lone run reraises."""
        try:
            yield
        except Diverged as e:
            print(f"{run.name}: {e}", file=sys.stderr)
        except Exception as e:
            if len(chosen) == 1:
                raise
            _log_error(run.name, e)
            failed.append(run)
            run.release(f"{_spell(e)}; see {buckets.shown(chosen[0].log)}")

    by_step: dict[object, list[PlannedRun]] = {}
    for run in filter(unfinished, chosen):
        by_step.setdefault((program_key(run.config) or run.name, run.saved()), []).append(run)
    for group in by_step.values():
        if len(group) > 1:
            try:
                train_together([run.config for run in group], [run.folder for run in group])
            except Exception as e:
                names = ", ".join(run.name for run in group)
                _log_error(f"{names}: trained one by one, because training together failed", e)
        for run in group:
            if not loop.received_signals and unfinished(run):
                with isolated(run):
                    if loop.train(run.config, run.folder) < run.config.train.steps:
                        return 143  # on a pod, another host may have received the signal
        if loop.received_signals:
            return 143
    for run in chosen:
        if run not in failed and not run.status().is_finished:
            with isolated(run):
                evaluate(run)
    return 1 if failed else 0


def _log_error(subject: str, error: Exception) -> None:
    """Logs an error in one line, with a traceback unless it is a UserError."""
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    print(f"error: {subject}: {_spell(error)}", file=sys.stderr)


def _spell(error: Exception) -> str:
    short = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return str(error) if isinstance(error, UserError) else short


@contextlib.contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Yields a function that returns True after SIGINT (a second one raises), SIGTERM or SIGHUP."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    heeded = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]  # as under nohup
    with loop.recorded(heeded) as received:
        yield lambda: bool(received)


def cell(status: Status, steps: int) -> str:
    """Returns the status of a run as the text of a table cell."""
    digits = ".3f" if abs(status.value) < 1e5 else ".1e"
    loss = "" if np.isnan(status.value) else f" {status.value:{digits}}"
    return {
        "done": f"done{loss}",
        "running": f"{status.step / steps:4.0%}{loss}" if status.step else "starting",
        "stopped": f"stopped {status.step / steps:.0%}",
        "trained": "to evaluate",
        "diverged": f"diverged @{status.step:,}",
    }.get(status.kind, status.kind)


class Table:
    """Shows all runs: a table in a terminal, else a line per change and a summary every minute."""

    def __init__(self, study: Study, stream):
        self._study, self._stream, self._live = study, stream, stream.isatty()
        self._began, self._shown, self._last, self._kinds = time.monotonic(), 0, 0.0, {}
        self._printed, self._first = self._began, None
        self._started: dict[str, float] = {}  # when a run was first seen starting
        self._steps = {run.name: run.config.train.steps for run in study.runs}
        self._work = [study.facts[x.arm].flops_per_step * x.config.train.steps for x in study.runs]

    def show(self, last: bool = False) -> None:
        if not last and time.monotonic() - self._last < 2:
            return
        self._last = time.monotonic()
        statuses = {run.name: run.status() for run in self._study.runs}
        lines = [*self._table(statuses), self._summary(statuses)]
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            up = f"\x1b[{self._shown}A" if self._shown else ""
            self._stream.write(up + "".join(f"\x1b[K{line[:width]}\n" for line in lines))
            self._shown = len(lines)
        else:
            for name, status in statuses.items():
                if self._kinds.get(name, "waiting") != status.kind:
                    why = f"{status.kind}: {status.why}" if status.why else ""
                    self._stream.write(f"{name}  {why or cell(status, self._steps[name])}\n")
                self._kinds[name] = status.kind
            if time.monotonic() - self._printed > 60 and not last:
                self._printed = time.monotonic()
                running = {name: s for name, s in statuses.items() if s.kind == "running"}
                cells = [f"{name} {cell(s, self._steps[name])}" for name, s in running.items()]
                self._stream.write(f"{lines[-1]}: {listed(cells, 4, last=', ')}\n")
            if last:
                self._stream.write("\n".join(lines) + "\n")
        if last:
            reported = False  # other finished runs lack the same metric; it is reported once
            for name, status in statuses.items():
                if status.why and (status.kind == "failed" or not reported):
                    self._stream.write(f"{name}  {status.kind}: {status.why}\n")
                    reported |= status.kind == "done"
        self._stream.flush()

    def _table(self, statuses: dict[str, Status]) -> list[str]:
        """Returns a table of arms and seeds. Runs that start, which compile, show how long for."""
        cells = {}
        for name, status in statuses.items():
            cells[name] = cell(status, self._steps[name])
            if status.kind == "running" and not status.step:
                seconds = time.monotonic() - self._started.setdefault(name, time.monotonic())
                cells[name] += f" {human_time(seconds)}"
        seeds = self._study.sweep.seeds
        rows = [[x, *(cells[f"{x}/seed-{seed}"] for seed in seeds)] for x in self._study.configs]
        return columns([["arm", *(f"seed {seed}" for seed in seeds)], *rows])

    def _summary(self, statuses: dict[str, Status]) -> str:
        """Returns the number of finished runs, and the remaining time at the present speed."""
        share = lambda x, steps: 1.0 if x.is_finished else min(x.step / steps, 1.0)
        shares = [share(status, self._steps[name]) for name, status in statuses.items()]
        done = float(np.average(shares, weights=self._work))
        self._first = done if self._first is None else self._first
        spent, progress = time.monotonic() - self._began, done - self._first
        known = progress > 0.02 and done < 1
        remaining = f", {human_time(spent / progress * (1 - done))} left" if known else ""
        over = sum(status.is_finished for status in statuses.values())
        values = f"values: {self._study.sweep.metric}, or train/loss of unfinished runs"
        elapsed = f"{human_time(spent)} elapsed{remaining}"
        return f"{over} of {len(statuses)} runs finished ({values}); {elapsed}"
