"""Reports the progress of a study, as a table in the terminal or as log lines."""

import math
import shutil
import time

import numpy as np

from transformer.lab.study import Status, Study
from transformer.output import columns, human_time, listed


def cell(status: Status, steps: int) -> str:
    """Returns the status of a run as the text of a table cell."""
    digits = ".3f" if abs(status.value) < 1e5 else ".1e"
    loss = "" if math.isnan(status.value) else f" {status.value:{digits}}"
    return {
        "done": f"done{loss}",
        "running": f"{status.step / steps:4.0%}{loss}" if status.step else "starting",
        "stopped": f"stopped {status.step / steps:.0%}",
        "trained": "to evaluate",
        "diverged": f"diverged @{status.step:,}",
    }.get(status.kind, status.kind)


def overview(study: Study, cells: dict[str, str]) -> list[str]:
    """Returns the lines of a table with one row per arm and one column per seed."""
    rows = [["arm", *(f"seed {seed}" for seed in study.sweep.seeds)]]
    for arm in study.configs:
        rows.append([arm, *(cells[f"{arm}/seed-{seed}"] for seed in study.sweep.seeds)])
    return columns(rows)


class Table:
    """Shows the status of all runs.

    In a terminal, this is a table that is updated in place. Otherwise it is a line for each change
    of status, and a summary every minute.
    """

    def __init__(self, study: Study, stream):
        self._study, self._stream, self._live = study, stream, stream.isatty()
        self._began, self._shown, self._last, self._kinds = time.monotonic(), 0, 0.0, {}
        self._printed, self._first = self._began, None
        self._started: dict[str, float] = {}  # when a run was first seen starting

    def show(self, last: bool = False) -> None:
        if not last and time.monotonic() - self._last < 2:
            return
        self._last = time.monotonic()
        statuses = {run.name: run.status() for run in self._study.runs}
        lines = [*overview(self._study, self._cells(statuses)), self._summary(statuses)]
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            up = f"\x1b[{self._shown}A" if self._shown else ""
            self._stream.write(up + "".join(f"\x1b[K{line[:width]}\n" for line in lines))
            self._shown = len(lines)
        else:
            for name, status in statuses.items():
                if self._kinds.get(name, "waiting") != status.kind:
                    why = f"{status.kind}: {status.why}" if status.why else ""
                    self._stream.write(f"{name}  {why or cell(status, self._steps(name))}\n")
                self._kinds[name] = status.kind
            if time.monotonic() - self._printed > 60 and not last:
                self._printed = time.monotonic()
                running = {name: s for name, s in statuses.items() if s.kind == "running"}
                cells = [f"{name} {cell(s, self._steps(name))}" for name, s in running.items()]
                self._stream.write(f"{lines[-1]}: {listed(cells, 4, last=', ')}\n")
            if last:
                self._stream.write("\n".join(lines) + "\n")
        if last:
            # Other finished runs lack the same metric, so it is reported once.
            reported = False
            for name, status in statuses.items():
                if status.why and (status.kind == "failed" or not reported):
                    self._stream.write(f"{name}  {status.kind}: {status.why}\n")
                    reported |= status.kind == "done"
        self._stream.flush()

    def _cells(self, statuses: dict[str, Status]) -> dict[str, str]:
        """Returns the table's cells. Runs that are starting, which compile, show how long for."""
        cells = {}
        for name, status in statuses.items():
            cells[name] = cell(status, self._steps(name))
            if status.kind == "running" and not status.step:
                seconds = time.monotonic() - self._started.setdefault(name, time.monotonic())
                cells[name] += f" {human_time(seconds)}"
        return cells

    def _steps(self, name: str) -> int:
        return self._study.configs[name.partition("/")[0]].train.steps

    def _work(self, name: str) -> float:
        return self._study.facts[name.partition("/")[0]].flops_per_step * self._steps(name)

    def _summary(self, statuses: dict[str, Status]) -> str:
        """Returns the number of finished runs, and the remaining time at the present speed."""
        share = lambda x, steps: 1.0 if x.is_finished else min(x.step / steps, 1.0)
        shares = [share(status, self._steps(name)) for name, status in statuses.items()]
        done = float(np.average(shares, weights=list(map(self._work, statuses))))
        self._first = done if self._first is None else self._first
        spent, progress = time.monotonic() - self._began, done - self._first
        known = progress > 0.02 and done < 1
        remaining = f", {human_time(spent / progress * (1 - done))} left" if known else ""
        over = sum(status.is_finished for status in statuses.values())
        return (
            f"{over} of {len(statuses)} runs finished (values: {self._study.sweep.metric}, "
            f"or train/loss of unfinished runs); {human_time(spent)} elapsed{remaining}"
        )
