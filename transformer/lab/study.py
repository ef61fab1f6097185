"""A sweep in its directory: DIR/sweep.json, and DIR/ARM/seed-S for the run of each arm and seed.

The state of a run is read only from its directory, so all machines that share it agree."""

import dataclasses
import itertools
import os
from collections.abc import Mapping
from pathlib import Path

from transformer import buckets
from transformer.claims import Claim
from transformer.config import Experiment
from transformer.errors import UserError
from transformer.files import read_json, write_atomic, write_json
from transformer.lab.guard import Facts
from transformer.mapping import from_mapping, to_mapping
from transformer.registry import load_plugins, save_plugins
from transformer.runs.metrics import read_metrics
from transformer.runs.rundir import different_fields
from transformer.sweeps import Grid, Point, Sweep, Tuned


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of a run."""

    kind: str  # waiting, running, stopped, trained, done, diverged or failed
    step: int = 0
    value: float = float("nan")  # the training loss; of a finished run, the primary metric
    why: str = ""  # the reason for a failure, or the primary metric that a finished run lacks

    @property
    def is_finished(self) -> bool:
        """Whether the run is finished: done or diverged."""
        return self.kind in ("done", "diverged")


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run of a study."""

    study: Path
    arm: str
    config: Experiment
    metric: str = ""  # the primary metric

    @property
    def name(self) -> str:
        return f"{self.arm}/seed-{self.config.seed}"

    @property
    def folder(self) -> Path:
        return self.study / self.name

    def status(self) -> Status:
        """Returns the state, as read from the run's directory."""
        lines = read_metrics(self.folder)
        losses = [line for line in lines if "train/loss" in line]
        progress = {"step": losses[-1]["step"], "value": losses[-1]["train/loss"]} if losses else {}
        if diverged := [line for line in lines if line.get("train/diverged")]:
            return Status("diverged", diverged[-1]["step"])
        tested = sorted({key for line in lines for key in line if key.startswith("test/")})
        if tested and self._tested() == self.config.train.steps:
            if values := [line[self.metric] for line in lines if self.metric in line]:
                return Status("done", self.config.train.steps, values[-1])
            names = ", ".join(tested[:9]) + ", ..." * (len(tested) > 9)
            missing = f"without {self.metric}; there is {names}"
            return Status("done", self.config.train.steps, why=missing)
        if self.claim.alive():
            return Status("running", **progress)
        if self._failure.exists():
            return Status("failed", **progress, why=self._failure.read_text().strip())
        if not (saved := self.saved()):
            return Status("waiting")
        kind = "trained" if saved == self.config.train.steps else "stopped"
        return Status(kind, saved, progress.get("value", float("nan")))

    def saved(self) -> int:
        """Returns the step of the last checkpoint, or 0 if there is none."""
        names = [folder.name for folder in (self.folder / "checkpoints").glob("[0-9]*")]
        return max((int(name) for name in names if name.isdigit()), default=0)

    def _tested(self) -> int | None:
        """Returns the step at which the run was evaluated, according to test.json."""
        try:
            return read_json(self.folder / "test.json").get("step")
        except UserError:
            return None

    @property
    def claim(self) -> Claim:
        """The claim of the process that works on the run."""
        return Claim(self.study / "claims" / self.name.replace("/", "."))

    @property
    def _failure(self) -> Path:
        return self.claim.file.with_name(self.claim.file.name + ".failed")

    @property
    def log(self) -> Path:
        """The log of the run, or of the group of runs that are trained together."""
        return self.study / "logs" / (self.name.replace("/", ".") + ".log")

    def take(self) -> bool:
        """Claims the run unless another process has claimed it, and clears an earlier failure."""
        if not self.claim.take():
            return False
        buckets.delete(self._failure)
        return True

    def keep(self) -> None:
        """Claims the run, for this process or its parent. Raises UserError if another holds it."""
        if not self.claim.is_held_by(os.getpid(), os.getppid()) and not self.take():
            raise UserError(f"--runs: {self.claim.who()} works on {self.name}; wait until it ends")

    def release(self, failure: str = "") -> None:
        """Releases the claim of this or an ended process. `failure` is why the run is not done."""
        if failure:
            write_atomic(self._failure, failure + "\n")
        self.claim.release()


@dataclasses.dataclass(frozen=True)
class Study:
    """A sweep with the configs and facts of its arms, and its runs."""

    folder: Path
    sweep: Sweep
    configs: Mapping[str, Experiment]  # by arm, the baseline first
    facts: Mapping[str, Facts]
    file: str = ""  # the experiment file
    text: str = ""  # its contents
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of the command line

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, seed by seed, so that early results cover all arms."""
        planned = lambda arm, config: PlannedRun(self.folder, arm, config, self.sweep.metric)
        arms = list(itertools.product(self.sweep.seeds, self.configs.items()))
        return [planned(arm, dataclasses.replace(x, seed=seed)) for seed, (arm, x) in arms]

    def check(self) -> None:
        """Raises UserError if the directory holds something else. Arms and seeds may be added. As
        long as no run has started, everything may change."""
        if (self.folder / "sweep.json").exists():
            previous = load_study(self.folder)
            started = any(run.folder.exists() for run in previous.runs)
            for arm, config in previous.configs.items() if started else ():
                if arm not in self.configs:
                    raise self._conflict(f"contains arm {arm!r}, which is not in this sweep; ")
                if different := list(different_fields(config, self.configs[arm]).values()):
                    raise self._conflict(f"contains a different arm {arm!r}: {different[0]}; ")
            for run in previous.runs:
                if run.config.seed not in self.sweep.seeds and run.folder.exists():
                    problem = f"contains run {run.name}, whose seed is not in this sweep"
                    raise self._conflict(f"{problem}; keep the seed, or ")
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise self._conflict("is not empty and contains no sweep (no sweep.json); ")

    def _conflict(self, problem: str) -> UserError:
        return UserError(f"--workdir: {self.folder} {problem}choose another directory")

    def write(self) -> None:
        """Writes sweep.json, after `check`."""
        self.check()
        save_plugins(self.folder, [to_mapping(config) for config in self.configs.values()])
        self.folder.mkdir(parents=True, exist_ok=True)
        fields = to_mapping(self.sweep)
        del fields["grid"]  # its points are those of the arms
        arms = {}
        for arm, point in self.sweep.points.items():
            built = {"facts": self.facts[arm], "config": self.configs[arm]}
            arms[arm] = {"changes": point.changes, "called": point.called} | built
        source = {"file": self.file, "text": self.text, "overrides": dict(self.overrides)}
        write_json(self.folder / "sweep.json", source | fields | {"arms": to_mapping(arms)})


def load_study(folder: Path) -> Study:
    """Returns the study of a directory. Raises UserError if there is none."""
    file = Path(folder) / "sweep.json"
    if not file.exists():
        raise UserError(f"--workdir: no sweep in {folder} (no sweep.json)")
    tree = read_json(file)
    load_plugins(Path(folder))
    try:
        arms = tree.pop("arms")
        source = {key: tree.pop(key) for key in ("file", "text", "overrides") if key in tree}
        points = [Point(arm, x["changes"], x.get("called", {})) for arm, x in arms.items()]
        tree["tune"] = tuple(Tuned(**number) for number in tree.get("tune", ()))
        sweep = Sweep(Grid(points), **tree | {"seeds": tuple(tree["seeds"])})
        configs = {arm: from_mapping(Experiment, entry["config"]) for arm, entry in arms.items()}
        frozen = lambda x: {k: tuple(v) if isinstance(v, list) else v for k, v in x.items()}
        facts = {arm: Facts(**frozen(entry["facts"])) for arm, entry in arms.items()}
    except (TypeError, KeyError, AttributeError) as e:
        raise UserError(f"{file}: damaged ({type(e).__name__}: {e})") from None
    return Study(Path(folder), sweep, configs, facts, **source)
