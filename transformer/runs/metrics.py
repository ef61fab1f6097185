"""Metrics of a run: means over steps, goodput, metrics.jsonl, TensorBoard, progress, loss.png."""

import contextlib
import hashlib
import json
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from transformer import buckets
from transformer.errors import UserError
from transformer.files import read_bytes, write_atomic
from transformer.output import human_time, human_tokens
from transformer.runs.watchdog import Watchdog

TRAINED, PAID, SAVING = "time/trained_seconds", "time/paid_seconds", "time/saving_seconds"


class MetricsLog:
    """The log `metrics.jsonl`, with one flat JSON object per line, `step` first. Resuming at step n
    removes later lines. Of several processes, only one `writes`; the others read existing lines."""

    def __init__(self, workdir: Path, resume_step: int, *, writes=True, tensorboard, wandb, config):
        self._path, self._writes = workdir / "metrics.jsonl", writes
        lines = [line for line in read_metrics(workdir) if line["step"] <= resume_step]
        # Name of a value -> the last step that logged it
        self.last = {name: line["step"] for line in lines for name in line}
        self._board = self._wandb = None
        if not writes:
            return
        write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        if tensorboard:
            from transformer.runs.tensorboard import EventFile

            self._board = EventFile(workdir / "tensorboard", resume_step + 1)
        if wandb:
            import wandb as client

            digest = hashlib.sha256(buckets.shown(workdir.resolve()).encode()).hexdigest()
            run = {"name": workdir.name, "id": digest[:16], "dir": str(workdir)}
            self._wandb = client.init(project=wandb, config=config, resume="allow", **run)

    def write(self, step: int, **values: float) -> None:
        self.last |= dict.fromkeys(values, step)
        if not self._writes:
            return
        with self._path.open("a") as file:  # anew: the log of a bucket may have been replaced
            file.write(json.dumps({"step": step} | values) + "\n")
        numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
        if self._board:
            for name, value in numbers.items():
                self._board.scalar(name, value, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Writes texts for people to samples/STEP.txt and to TensorBoard."""
        if not texts or not self._writes:
            return
        folder = self._path.parent / "samples"
        folder.mkdir(exist_ok=True)
        write_atomic(folder / f"{step:08d}.txt", "\n".join(texts.values()))
        if self._board:
            for name, text in texts.items():
                self._board.text(name, f"```\n{text}```", step)

    def close(self) -> None:
        """Closes all outputs and plots the losses."""
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()
        if self._writes:
            plot_loss(self._path.parent)


def read_metrics(workdir: Path) -> list[dict]:
    """Reads the lines of a run's metrics.jsonl. Truncated or damaged lines are skipped."""
    return [line for line in parse_metrics(workdir) if line is not None]


def parse_metrics(workdir: Path) -> list[dict | None]:
    """Reads the lines of a run's metrics.jsonl, with None for truncated or damaged ones."""
    path, lines = Path(workdir) / "metrics.jsonl", []
    for text in read_bytes(path).splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
            line = None
        lines.append(line if _is_whole(line) else None)
    return lines


def _is_whole(line) -> bool:
    """Returns whether a line has a step and no integer beyond 64 bits, which no run writes."""
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return False
    return all(abs(x) < 2**63 for x in line.values() if isinstance(x, int))


def append_metrics(workdir: Path, step: int, values: dict[str, float]) -> None:
    """Appends a line to the log of a finished run unless its last line is equal."""
    line, logged = {"step": step} | values, read_metrics(workdir)
    if logged[-1:] != [json.loads(json.dumps(line))]:
        with (workdir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


class Progress:
    """The progress line: updated in place in a terminal, else one every `log_every` steps."""

    def __init__(self, steps: int, stream=None):
        self.steps, self.stream = steps, stream or sys.stderr
        self._live = self.stream.isatty()
        self._seconds_per_step = 0.0
        self._is_open = False  # whether the last line is one that `show` may update

    def show(
        self, step: int, loss: float, rate: float, tokens_per_second: float,
        seconds_per_step: float, goodput: float,
    ) -> None:  # fmt: skip
        """Shows the progress line. `seconds_per_step` is the average over the last interval."""
        done = f"step {step:>{len(f'{self.steps:,}')},}/{self.steps:,}  {step / self.steps:4.0%}"
        line = f"{done}  loss {loss:6.3f}  lr {rate:.1e}"
        if tokens_per_second:
            previous = self._seconds_per_step or seconds_per_step
            self._seconds_per_step = 0.7 * previous + 0.3 * seconds_per_step
            left = human_time(self._seconds_per_step * (self.steps - step))
            line += f"  {human_tokens(tokens_per_second):>6} tok/s  {left:>7} left"
            line += f"  goodput {goodput:.0%}"
        if self._live:
            line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
        self._is_open = self._live
        print(line, end="" if self._live else "\n", file=self.stream, flush=True)

    def note(self, text: str) -> None:
        """Prints a permanent line after the last progress line, which stays."""
        self.close()
        print(text, file=self.stream, flush=True)

    def close(self) -> None:
        """Ends the progress line, if there is one."""
        if self._is_open:
            self.stream.write("\n")
        self._is_open = False


class Goodput:
    """The seconds in which a run trained and those that were paid, over all of its processes.
    Compilation, evaluations, checkpoints and steps after the last log line that a run keeps are not
    training. Time is paid from when a process begins the run or from `TRANSFORMER_PAID_SINCE` (Unix
    seconds), when the machine started. A process that died ended at its last log line."""

    def __init__(self, log: Path, lines: list, earlier: Mapping, resume_step: int, began: float):
        """`lines`: of `log`, of earlier processes; `earlier`: their `record`; `began`: this one."""
        total = lambda name, lines: max((line.get(name, 0.0) for line in lines), default=0.0)
        self._trained = total(TRAINED, [line for line in lines if line["step"] <= resume_step])
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
        return seconds | {"share": round(self.share(values), 4)}

    @staticmethod
    def share(values: Mapping[str, float]) -> float:
        """Returns the goodput, the share of the paid time in which the run trained."""
        return values[TRAINED] / max(values[PAID], 0.01)


class Diverged(UserError):
    """The loss is NaN or infinite. This is a result, which the log records."""


class Recorder:
    """Logs token-weighted means and the speed every `every` steps.

    `push(step, metrics)` reads the metrics of the previous step, which the device has finished by
    then, so the host never waits for the step it has just started. `rates` has the learning rate of
    every step. `window` holds the sums since the last log line. It is saved with a checkpoint, so a
    resumed run has the same curve as an uninterrupted one. `together` runs share the measured time.
    A line also has the mean number of CPU cores of other processes, which may slow the run down."""

    def __init__(
        self, log: MetricsLog, progress: Progress, rates, every, window, goodput: Goodput, together
    ):
        self._log, self._progress, self._rates, self._every = log, progress, rates, every
        self.goodput = goodput
        self._together = {"time/together": together} if together > 1 else {}
        self.window = dict(window)
        self._late: tuple[int, dict] | None = None
        self._mark: float | None = None  # start of the open interval; None while compiling
        self._timed_tokens, self._timed_steps = 0.0, 0
        self._aside, self._began = False, (time.perf_counter(), _cpu_of_others())
        self.watchdog, self._step = Watchdog(), 0

    def push(self, step: int, metrics: dict) -> None:
        """Takes the metrics of a step that has just started. Raises Diverged for the one before."""
        self.flush()
        self._late = step, metrics

    def flush(self) -> None:
        """Waits for the last step that was pushed and records its metrics."""
        if self._late is None:
            return
        (step, metrics), self._late = self._late, None
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self._step = step
        self.watchdog.step_done(step)
        if not math.isfinite(values["objective"]):
            self._log.write(step, **{"train/diverged": True})
            problem = f"the loss is {values['objective']} at step {step:,}"
            way_out = "lower optimizer.learning_rate, lengthen optimizer.warmup_steps"
            raise Diverged(f"training diverged: {problem}; {way_out} or set optimizer.clip_norm")
        for name, value in values.items():
            total = value if name in ("tokens", "inputs") else value * values["tokens"]
            self.window[name] = self.window.get(name, 0.0) + total
        if self._mark is None:
            self._mark = time.perf_counter()
        else:
            self._timed_tokens += values["inputs"]
            self._timed_steps += 1
        if step % self._every == 0 or step == self._progress.steps:
            self._line(step)

    def _line(self, step: int) -> None:
        now, sums, self.window = time.perf_counter(), self.window, {}
        inputs, tokens = sums.pop("inputs"), max(sums.pop("tokens"), 1.0)
        means = {f"train/{name}": value / tokens for name, value in sums.items()}
        spent, steps = max(now - self._mark, 1e-9), max(self._timed_steps, 1)
        speed, lr = self._timed_tokens / spent, float(self._rates[step - 1])
        self._mark, self._timed_tokens, self._timed_steps = now, 0.0, 0
        timing = {"time/tokens_per_second": round(speed, 1)} | self._together if speed else {}
        timing["memory/peak_bytes"] = peak_memory()
        others = _cpu_of_others() - self._began[1]
        if math.isfinite(others):
            cores = others / max(time.perf_counter() - self._began[0], 0.01)
            timing["time/other_cores"] = round(max(cores, 0.0), 2)
        timing |= (paid := self.goodput.add(spent))
        loss, goodput = means["train/loss"], self.goodput.share(paid)
        values = means | {"train/tokens": inputs, "train/learning_rate": lr} | timing
        self._log.write(step, **values)
        self._progress.show(step, loss, lr, speed, spent / steps, goodput)

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Excludes the time of its body from the measured training time. Nested uses count once.
        For evaluations and checkpoints of this run, or of one trained together with it."""
        self.flush()
        start, was_aside, self._aside = time.perf_counter(), self._aside, True
        self.watchdog.pause()
        yield
        self._aside = was_aside
        if self._mark is not None and not was_aside:
            self._mark += time.perf_counter() - start
            self.watchdog.step_done(self._step)


def _cpu_of_others() -> float:
    """Returns the CPU seconds that all other processes have used since boot; NaN if unknown."""
    try:
        ticks = list(map(int, Path("/proc/stat").read_text().split()[1:9]))
    except (OSError, ValueError):  # not Linux
        return math.nan
    busy = sum(ticks) - ticks[3] - ticks[4]  # without idle and iowait
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


def peak_memory() -> int:
    """Returns the peak memory in bytes of the fullest device or, on CPUs, of the process."""
    statistics = [device.memory_stats() for device in jax.local_devices()]
    peaks = [stats.get("peak_bytes_in_use", 0) for stats in statistics if stats]
    unit = 1 if sys.platform == "darwin" else 1024
    return max(peaks) if peaks else unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def plot_loss(workdir: Path) -> None:
    """Plots training loss (the mean of each interval) and validation loss, if any, to loss.png."""
    from matplotlib.figure import Figure

    lines = read_metrics(workdir)
    points = lambda name: [(line["step"], line[name]) for line in lines if name in line]
    curve = lambda name: tuple(zip(*points(name), strict=True)) or ((), ())
    train, valid = curve("train/loss"), curve("eval/loss")
    if not train[0]:
        return
    figure = Figure(figsize=(7, 4.2), dpi=150, layout="tight")
    axes = figure.subplots()
    axes.plot(*train, color="#0072b2", linewidth=1.2, label="training")
    if valid[0]:
        look = {"color": "#d55e00", "marker": "o", "markersize": 3.5, "linewidth": 1.2}
        axes.plot(*valid, label="validation", **look)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=workdir.resolve().name)
    low = min(*train[1], *valid[1]) if valid[0] else min(train[1])
    axes.set_ylim(max(0, low * 0.93), sorted(train[1])[int(len(train[1]) * 0.98)] * 1.03)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(workdir / "loss.png")
