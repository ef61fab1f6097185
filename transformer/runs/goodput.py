"""Goodput: the share of the paid time in which a run trained."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

from transformer.errors import UserError

TRAINED, PAID, SAVING = "time/trained_seconds", "time/paid_seconds", "time/saving_seconds"


class Goodput:
    """The seconds in which a run trained and those that were paid, over all of its processes.
    Compilation, evaluations, checkpoints and steps after the last log line that a run keeps are not
    training. Time is paid from when a process begins the run or from `TRANSFORMER_PAID_SINCE` (Unix
    seconds), when the machine started. A process that died ended at its last log line."""

    def __init__(self, log: Path, lines: list, earlier: Mapping, resume_step: int, began: float):
        """`lines`: of `log`, of earlier processes; `earlier`: their `record`; `began`: this one."""
        kept = [line for line in lines if line["step"] <= resume_step]
        total = lambda name, lines: max((line.get(name, 0.0) for line in lines), default=0.0)
        self._trained = total(TRAINED, kept)
        self.saving = total(SAVING, lines)  # seconds in which training waited for checkpoints
        self._paid = max(total(PAID, lines), earlier.get("paid_seconds", 0.0))
        if since := os.environ.get("TRANSFORMER_PAID_SINCE"):
            if not since.isdecimal():
                problem = f"{since!r} must be a time in Unix seconds"
                raise UserError(f"TRANSFORMER_PAID_SINCE: {problem}, such as $(date +%s)")
            began = min(began, max(float(since), log.stat().st_mtime if lines else 0.0))
        self._began = began

    def add(self, trained: float) -> dict[str, float]:
        """Adds seconds of training, and returns all sums until now."""
        self._trained += trained
        paid = self._paid + max(time.time() - self._began, 0.0)
        sums = {TRAINED: self._trained, PAID: paid, SAVING: self.saving}
        return {name: round(seconds, 2) for name, seconds in sums.items()}

    def record(self) -> dict[str, float]:
        """What the manifest records when a process begins and when it ends."""
        values = self.add(0.0)
        seconds = {name.removeprefix("time/"): value for name, value in values.items()}
        return seconds | {"share": round(share(values), 4)}


def share(values: dict[str, float]) -> float:
    """The goodput: trained over paid seconds."""
    return values[TRAINED] / max(values[PAID], 0.01)
