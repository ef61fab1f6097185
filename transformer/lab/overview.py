"""How the runs of a study stand, as a table in the terminal."""

import math
import shutil
import time

from transformer.lab.study import Status, Study
from transformer.runs.metrics import columns, human_time


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
