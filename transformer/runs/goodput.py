"""Goodput: the share of the paid time in which a run trained."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from transformer.errors import UserError

TRAINED, PAID = "time/trained_seconds", "time/paid_seconds"


class Goodput:
    """The seconds in which a run trained and those that were paid, over all of its processes.

    Compilation, evaluations, checkpoints and steps that were lost and repeated are not training.
    The time of a process is paid from its start or, if `TRANSFORMER_PAID_SINCE` is set, from that
    time (Unix seconds), at which the machine started. The end of a process that died is its last
    log line.
    """

    def __init__(self, log: Path, lines: Sequence[dict], resume_step: int, began: float):
        """`lines` are those of the file `log`, of earlier processes. This one began at `began`."""
        kept = [line for line in lines if line["step"] <= resume_step]
        total = lambda name, lines: max((line.get(name, 0.0) for line in lines), default=0.0)
        self._trained, self._paid = total(TRAINED, kept), total(PAID, lines)
        if since := os.environ.get("TRANSFORMER_PAID_SINCE"):
            if not since.isdecimal():
                problem = f"{since!r} must be a time in Unix seconds"
                raise UserError(f"TRANSFORMER_PAID_SINCE: {problem}, such as $(date +%s)")
            began = min(began, max(float(since), log.stat().st_mtime if lines else 0.0))
        self._began = began

    def add(self, trained: float) -> dict[str, float]:
        """Adds seconds of training, and returns both sums until now."""
        self._trained += trained
        paid = self._paid + time.time() - self._began
        return {TRAINED: round(self._trained, 2), PAID: round(paid, 2)}

    def record(self) -> dict[str, float]:
        """What the manifest records when a process ends."""
        values = self.add(0.0)
        seconds = {name.removeprefix("time/"): value for name, value in values.items()}
        return seconds | {"share": round(share(values), 4)}


def share(values: dict[str, float]) -> float:
    """The goodput: trained over paid seconds."""
    return values[TRAINED] / max(values[PAID], 0.01)
