"""A sweep in its directory: DIR/sweep.json, and a run directory for every arm and seed, DIR/ARM/seed-S.

What state a run is in is read from its directory alone, so any number of machines that share it agree.
"""

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from transformer.config import Experiment
from transformer.config_io import from_mapping, to_mapping
from transformer.errors import UserError
from transformer.files import read_json, write_whole
from transformer.lab.guard import Facts
from transformer.sweeps import Grid, Point, Sweep
from transformer.training.metrics import read_metrics
from transformer.training.rundir import flat

STALE = 90.0
"""A claim that nobody has renewed for so many seconds is of a machine that died."""


@dataclasses.dataclass(frozen=True)
class Status:
    """Where a run stands: waiting, running, stopped, trained, done, diverged or failed; at which step, with which training loss, or when it is
    done with which value of the metric that decides."""

    kind: str
    step: int = 0
    loss: float = float("nan")
    why: str = ""

    @property
    def over(self) -> bool:
        return self.kind in ("done", "diverged")


@dataclasses.dataclass(frozen=True)
class Planned:
    """A run that a study consists of."""

    study: Path
    arm: str
    config: Experiment
    metric: str = ""  # that decides

    @property
    def name(self) -> str:
        return f"{self.arm}/seed-{self.config.seed}"

    @property
    def folder(self) -> Path:
        return self.study / self.name

    def status(self) -> Status:
        """Read from its directory."""
        lines = read_metrics(self.folder)
        losses = [line for line in lines if "train/loss" in line]
        at = {"step": losses[-1]["step"], "loss": losses[-1]["train/loss"]} if losses else {}
        if diverged := [line for line in lines if line.get("train/diverged")]:
            return Status("diverged", diverged[-1]["step"])
        judged = any(key.startswith("test/") for line in lines for key in line)
        if judged and self._tested() == self.config.train.steps:
            decided = [line[self.metric] for line in lines if self.metric in line]
            tested = sorted({key for line in lines for key in line if key.startswith("test/")})
            lacks = (
                ""
                if decided
                else f"without {self.metric}; there is {', '.join(tested[:9])}{', ...' * (len(tested) > 9)}"
            )
            return Status(
                "done", self.config.train.steps, decided[-1] if decided else float("nan"), lacks
            )
        if self.claimed():
            return Status("running", **at)
        if self._failure.exists():
            return Status("failed", **at, why=self._failure.read_text().strip())
        saved = self.saved()
        if not saved:
            return Status("waiting")
        return Status(
            "trained" if saved == self.config.train.steps else "stopped",
            saved,
            at.get("loss", float("nan")),
        )

    def saved(self) -> int:
        """The step of its last checkpoint; 0: none."""
        return max(
            (
                int(folder.name)
                for folder in (self.folder / "checkpoints").glob("[0-9]*")
                if folder.name.isdigit()
            ),
            default=0,
        )

    def _tested(self) -> int | None:
        """At which step it was evaluated, as test.json says."""
        try:
            return read_json(self.folder / "test.json").get("step")
        except (UserError, FileNotFoundError, AttributeError):
            return None

    # ---- who works on it

    @property
    def _claim(self) -> Path:
        return self.study / "claims" / self.name.replace("/", ".")

    @property
    def _failure(self) -> Path:
        return self._claim.with_name(self._claim.name + ".failed")

    @property
    def log(self) -> Path:
        """What was said while it ran, or while the runs did that it was trained together with."""
        return self.study / "logs" / (self.name.replace("/", ".") + ".log")

    def claim(self) -> bool:
        """Takes it, for this process, unless somebody has it."""
        self._claim.parent.mkdir(parents=True, exist_ok=True)
        seen = self._claimant()
        if seen is not None and self._lives(seen):
            return False
        if seen is not None and not self._clear(seen):
            return False
        try:
            with self._claim.open("x") as file:
                file.write(_claimant(os.getpid()))
        except FileExistsError:  # another was faster
            return False
        self._failure.unlink(missing_ok=True)
        return True

    def hand_over(self, pid: int) -> None:
        """To a process on this machine, which renews the claim from now on and has it whatever becomes of this one."""
        write_whole(self._claim, _claimant(pid))

    def keep(self) -> None:
        """Takes it unless this process has it, or that which began this one. Raises UserError where another works on it."""
        mine = _claimant(os.getpid())
        if self._claimant() not in (mine, _claimant(os.getppid())) and not self.claim():
            raise UserError(
                f"--runs: another process works on {self.name} ({self._claimant()}); wait for its end"
            )

    def renew(self) -> None:
        """To be called now and then by who has it; whom it was taken from, since it did not for long, does not take it back."""
        with contextlib.suppress(FileNotFoundError):
            if self._claimant() == _claimant(os.getpid()):
                os.utime(self._claim)

    def release(self, failure: str = "") -> None:
        """Gives it back, of a process of this machine that has ended, or of this one; `failure`: why it was not done."""
        if failure:
            write_whole(self._failure, failure + "\n")
        seen = self._claimant()
        if seen is not None and (seen == _claimant(os.getpid()) or not self._lives(seen)):
            self._claim.unlink(missing_ok=True)

    def claimed(self) -> bool:
        """Whether a living process has it."""
        seen = self._claimant()
        return seen is not None and self._lives(seen)

    def _claimant(self) -> str | None:
        """Who has, or had, it: a host and a process; "" where that is just being written."""
        try:
            return self._claim.read_text()
        except FileNotFoundError:
            return None

    def _lives(self, claimant: str) -> bool:
        """By whether it still renews its claim, or, on this machine, by whether the process is there."""
        host, _, pid = claimant.partition(" ")
        try:
            fresh = time.time() - self._claim.stat().st_mtime < STALE
        except FileNotFoundError:
            return False
        return fresh and not (
            host == socket.gethostname() and pid.isdecimal() and not _runs(int(pid))
        )

    def _clear(self, dead: str) -> bool:
        """Takes a dead claim away: one machine alone, though several may have found it dead."""
        aside = self._claim.with_name(
            f"{self._claim.name}.{socket.gethostname()}.{os.getpid()}.dead"
        )
        try:
            self._claim.rename(aside)
        except FileNotFoundError:
            return False
        if aside.read_text() != dead:  # it is another's, made since
            aside.rename(self._claim)
            return False
        aside.unlink()
        return True


def _claimant(pid: int) -> str:
    return f"{socket.gethostname()} {pid}"


def _runs(pid: int) -> bool:
    """Whether there is such a process here."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@dataclasses.dataclass(frozen=True)
class Study:
    """What was asked, and the runs that answer it, arm by arm."""

    folder: Path
    sweep: Sweep
    configs: Mapping[str, Experiment]  # of the arms, the baseline first
    facts: Mapping[str, Facts]
    file: str = (
        ""  # the experiment file that it came from, what it said, and what the command line changed
    )
    text: str = ""
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def runs(self) -> list[Planned]:
        """Seed by seed, so that what is there early can be compared."""
        with_seed = lambda config, seed: dataclasses.replace(config, seed=seed)
        return [
            Planned(self.folder, arm, with_seed(config, seed), self.sweep.metric)
            for seed in self.sweep.seeds
            for arm, config in self.configs.items()
        ]

    def check(self) -> None:
        """Raises UserError where the directory holds something else; arms and seeds may be added, and as long as no run has begun everything
        may change."""
        if (self.folder / "sweep.json").exists():
            before = load_study(self.folder)
            begun = any(run.folder.exists() for run in before.runs)
            for arm, config in before.configs.items() if begun else ():
                if arm not in self.configs:
                    raise UserError(
                        f"--workdir: {self.folder} holds a sweep that has an arm {arm!r}, which this has not; choose another directory"
                    )
                if config != self.configs[arm]:
                    raise UserError(
                        f"--workdir: {self.folder} holds a sweep whose arm {arm!r} is another: {_difference(config, self.configs[arm])}; choose another directory"
                    )
            gone = [
                run
                for run in before.runs
                if run.config.seed not in self.sweep.seeds and run.folder.exists()
            ]
            if gone:
                raise UserError(
                    f"--workdir: {self.folder} holds a run, {gone[0].name}, of a seed that this sweep has not; keep its seed, or choose another directory"
                )
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise UserError(
                f"--workdir: {self.folder} is not empty and no sweep (no sweep.json); choose another directory"
            )

    def write(self) -> None:
        """sweep.json, if the directory is one for it."""
        self.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        said = {
            field.name: getattr(self.sweep, field.name)
            for field in dataclasses.fields(self.sweep)
            if field.name != "grid"
        }
        arms = {
            arm: {
                "changes": to_mapping(point.changes),
                "called": dict(point.called),
                "facts": dataclasses.asdict(self.facts[arm]),
                "config": to_mapping(self.configs[arm]),
            }
            for arm, point in self.sweep.points.items()
        }
        write_whole(
            self.folder / "sweep.json",
            json.dumps(
                {"file": self.file, "text": self.text, "overrides": dict(self.overrides)}
                | to_mapping(said)
                | {"arms": arms},
                indent=2,
            )
            + "\n",
        )


def load_study(folder: Path) -> Study:
    """The study of a directory. Raises UserError if there is none."""
    file = Path(folder) / "sweep.json"
    if not file.exists():
        raise UserError(f"--workdir: no sweep in {folder} (no sweep.json)")
    said = read_json(file)
    try:
        arms, source = (
            said.pop("arms"),
            {key: said.pop(key) for key in ("file", "text", "overrides") if key in said},
        )
        sweep = Sweep(
            Grid(
                tuple(
                    Point(arm, one["changes"], one.get("called", {})) for arm, one in arms.items()
                )
            ),
            **said | {"seeds": tuple(said["seeds"])},
        )
        configs = {arm: from_mapping(Experiment, one["config"]) for arm, one in arms.items()}
        facts = {
            arm: Facts(
                **{k: tuple(v) if isinstance(v, list) else v for k, v in one["facts"].items()}
            )
            for arm, one in arms.items()
        }
    except (TypeError, KeyError, AttributeError) as e:
        raise UserError(f"{file}: damaged ({type(e).__name__}: {e})") from None
    return Study(Path(folder), sweep, configs, facts, **source)


def _difference(old: Experiment, new: Experiment) -> str:
    """The first field in which two experiments differ."""
    before, now = flat(to_mapping(old)), flat(to_mapping(new))
    return next(
        (
            f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
            for key in {**before, **now}
            if before.get(key) != now.get(key)
        ),
        "nothing",
    )
