"""A sweep in its directory: DIR/sweep.json, and a run directory for every arm and seed, DIR/ARM/seed-S.

What state a run is in is read from its directory alone, so any number of machines that share it agree.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path

from transformer.claims import Claim
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.files import read_json, write_whole
from transformer.lab.guard import Facts
from transformer.mapping import from_mapping, to_mapping
from transformer.runs.metrics import read_metrics
from transformer.runs.rundir import flat
from transformer.sweeps import Grid, Point, Sweep


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
        if self.claim.alive():
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
    def claim(self) -> Claim:
        """The claim of the process that works on it."""
        return Claim(self.study / "claims" / self.name.replace("/", "."))

    @property
    def _failure(self) -> Path:
        file = self.claim.file
        return file.with_name(file.name + ".failed")

    @property
    def log(self) -> Path:
        """What was said while it ran, or while the runs did that it was trained together with."""
        return self.study / "logs" / (self.name.replace("/", ".") + ".log")

    def take(self) -> bool:
        """Claims it for this process, unless another works on it; an earlier failure is forgotten."""
        if not self.claim.take():
            return False
        self._failure.unlink(missing_ok=True)
        return True

    def keep(self) -> None:
        """Claims it, unless this process has it, or that which began this one. Raises UserError where another works on it."""
        if not self.claim.held_by(os.getpid(), os.getppid()) and not self.take():
            raise UserError(f"--runs: {self.claim.who()} works on {self.name}; wait for its end")

    def release(self, failure: str = "") -> None:
        """Gives it back, of a process of this machine that has ended, or of this one; `failure`: why it was not done."""
        if failure:
            write_whole(self._failure, failure + "\n")
        self.claim.release()


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
