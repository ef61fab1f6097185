"""Outputs of a run: progress lines, metrics.jsonl, TensorBoard, Weights & Biases and loss.png."""

import contextlib
import hashlib
import importlib.util
import io
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from transformer.errors import UserError
from transformer.files import read_bytes, write_atomic
from transformer.output import elapsed, human_time, human_tokens


class MetricsLog:
    """The log `metrics.jsonl`, with one flat JSON object per line, `step` first.

    On resuming at step n, lines after step n are removed. If there are several processes, only one
    `writes`. The others read the existing lines and write nothing.
    """

    def __init__(
        self, workdir: Path, resume_step: int, *, writes=True, tensorboard: bool, wandb: str, config
    ):
        self._path, self._writes = workdir / "metrics.jsonl", writes
        lines = [line for line in read_metrics(workdir) if line["step"] <= resume_step]
        self._last = {name: line["step"] for line in lines for name in line}
        self._board = self._wandb = None
        if not writes:
            self._file = io.StringIO()
            return
        write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        self._file = self._path.open("a")
        if tensorboard:
            from transformer.runs.tensorboard import EventFile

            self._board = EventFile(workdir / "tensorboard", resume_step + 1)
        if wandb:
            import wandb as client

            digest = hashlib.sha256(str(workdir.resolve()).encode()).hexdigest()
            run = {"name": workdir.name, "id": digest[:16], "dir": str(workdir)}
            self._wandb = client.init(project=wandb, config=config, resume="allow", **run)

    def last(self, name: str) -> int | None:
        """Returns the last step that logged this value."""
        return self._last.get(name)

    def write(self, step: int, **values: float) -> None:
        self._last |= dict.fromkeys(values, step)
        self._file.write(json.dumps({"step": step} | values) + "\n")
        self._file.flush()
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
        self._file.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._wandb.finish()


def check_wandb(project: str) -> None:
    """Raises UserError if a Weights & Biases project is set but wandb is not installed."""
    if project and importlib.util.find_spec("wandb") is None:
        raise UserError("train.wandb needs the extra [wandb]: pip install -e '.[wandb]'")


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
        self._steps = steps
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._seconds_per_step = 0.0
        self._is_open = False  # whether the last line is one that `show` may update

    def show(
        self, step: int, loss: float, rate: float, tokens_per_second: float, seconds_per_step: float
    ) -> None:
        """Shows the progress line. Estimates the remaining time from a moving average.

        `seconds_per_step` is the average over the last logging interval.
        """
        done = f"step {step:>{len(f'{self._steps:,}')},}/{self._steps:,}  {step / self._steps:4.0%}"
        line = f"{done}  loss {loss:6.3f}  lr {rate:.1e}"
        if tokens_per_second:
            previous = self._seconds_per_step or seconds_per_step
            self._seconds_per_step = 0.7 * previous + 0.3 * seconds_per_step
            left = human_time(self._seconds_per_step * (self._steps - step))
            line += f"  {human_tokens(tokens_per_second):>6} tok/s  {left:>7} left"
        self._write(line)

    def note(self, text: str) -> None:
        """Prints a permanent line after the last progress line, which stays."""
        self.close()
        self._stream.write(text + "\n")
        self._stream.flush()

    def compiling(self) -> contextlib.AbstractContextManager:
        """Shows the elapsed time while the first step is compiled."""
        return elapsed("compiling the training step", self._stream)

    def close(self) -> None:
        """Ends the progress line, if there is one."""
        if self._is_open:
            self._stream.write("\n")
        self._is_open = False

    def _write(self, line: str) -> None:
        if self._live:
            line = "\r\x1b[K" + line[: shutil.get_terminal_size().columns - 1]
            self._is_open = True
        else:
            line += "\n"
        self._stream.write(line)
        self._stream.flush()


def plot_loss(workdir: Path) -> Path | None:
    """Plots training loss (the mean of each interval) and validation loss, if any, to loss.png."""
    from matplotlib.figure import Figure

    lines = read_metrics(workdir)
    points = lambda name: [(line["step"], line[name]) for line in lines if name in line]
    curve = lambda name: tuple(zip(*points(name), strict=True)) or ((), ())
    train, valid = curve("train/loss"), curve("eval/loss")
    if not train[0]:
        return None
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
    figure.savefig(file := workdir / "loss.png")
    return file
