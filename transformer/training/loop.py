"""The loop: read it from top to bottom."""

import contextlib
import dataclasses
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding

from transformer.config import Experiment
from transformer.config_io import to_mapping
from transformer.data.batching import Batches
from transformer.data.pipeline import Data, open_data
from transformer.errors import UserError
from transformer.evaluation.loss import evaluate_loss
from transformer.model.network import build_model
from transformer.parallel.mesh import start, use
from transformer.parallel.sharding import BATCH, describe
from transformer.training import rundir
from transformer.training.checkpoint import Checkpoints
from transformer.training.metrics import MetricsLog, Progress, human_count, plot_loss
from transformer.training.optimizer import build_optimizer, schedule
from transformer.training.recorder import Recorder
from transformer.training.state import TrainState, abstract_state, init_state
from transformer.training.step import make_eval_step, make_train_step


def train(config: Experiment, workdir: str | Path) -> int:
    """Trains in `workdir`, or goes on where a run of the same experiment stopped. Returns the steps done, which are fewer
    than `train.steps` after SIGTERM or Ctrl-C; the same call goes on from there."""
    with use(start(config.platform, config.mesh)) as mesh:
        run = _start(config, Path(workdir), mesh)
        with _stop_signals() as stopped, _profile(run.workdir, config.train.profile, run.step) as profile:
            for batch in run.batches.stream(run.step, config.train.steps):
                run.state, metrics = run.train_step(run.state, jax.device_put(batch, run.rows))
                run.step += 1
                run.recorder.push(run.step, metrics)
                profile(run.step)
                last = stopped() or run.step == config.train.steps
                if _due(run.step, config.train.eval_every) or run.step == config.train.steps:
                    run.evaluate()
                if _due(run.step, config.train.checkpoint_every) or last:
                    run.save()
                if last:
                    break
        run.close()
    return run.step


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


@dataclasses.dataclass
class _Run:
    """What the loop holds while it runs."""

    config: Experiment
    workdir: Path
    state: TrainState
    step: int
    batches: Batches
    valid: Batches
    rows: NamedSharding
    train_step: Callable
    eval_step: Callable
    checkpoints: Checkpoints
    log: MetricsLog
    progress: Progress
    recorder: Recorder
    text_sha256: str

    def evaluate(self) -> None:
        """Loss on the validation side, into the log and onto a line of its own."""
        with self.recorder.aside():
            found = evaluate_loss(
                self.eval_step, self.state.eval_params, self.valid, self.rows, most=self.config.train.eval_batches
            )
            self.log.write(self.step, **{f"eval/{name}": value for name, value in found.items()})
            self.progress.note(
                f"step {self.step:,}: validation loss {found['loss']:.3f}, perplexity {found['perplexity']:.2f}, accuracy {found['accuracy']:.1%}"
            )

    def save(self) -> None:
        """A checkpoint of this step, with the position in the data and the open logging interval."""
        with self.recorder.aside():
            host = {"data_step": self.step, "window": self.recorder.window, "text_sha256": self.text_sha256}
            self.checkpoints.save(self.state, self.step, host)

    def close(self) -> None:
        self.recorder.flush()
        self.progress.close()
        self.checkpoints.close()
        self.log.close()
        plot_loss(self.workdir)


def _start(config: Experiment, workdir: Path, mesh: Mesh) -> _Run:
    """Everything before the first step: checks first, then data, then the state, new or as it was left."""
    _check_rows(config, mesh)
    model = build_model(config.model)
    optimizer = build_optimizer(config.optimizer, config.train.steps)
    abstract, placed = abstract_state(config, model, optimizer, mesh)
    data = open_data(config)
    batches, valid = data.batches("train"), data.batches("valid")
    rundir.claim(workdir, config)
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(abstract.params))
    rundir.write_manifest(workdir, config, mesh, data, parameters)
    progress = Progress(config.train.steps)
    progress.note(describe(abstract.params, placed.params, mesh) + "\n" + _describe_data(data, batches, config))

    checkpoints = Checkpoints(workdir, config.train.keep_checkpoints)
    if checkpoints.steps:
        state, host = checkpoints.restore(abstract)
        progress.note(f"resumed     at step {host['data_step']:,} from {checkpoints.folder}")
    else:
        state, host = init_state(config, model, optimizer, placed), {"data_step": 0, "window": {}}
    step, text_sha256 = host["data_step"], data.store.meta["train"]["sha256"]
    if host.get("text_sha256", text_sha256) != text_sha256:
        raise UserError(
            f"--workdir: the training text of {workdir} has changed since its checkpoint; choose another directory, or the old text"
        )
    log = MetricsLog(
        workdir, step, tensorboard=config.train.tensorboard, wandb=config.train.wandb, config=to_mapping(config)
    )
    rate = schedule(config.optimizer, config.train.steps)
    return _Run(
        config, workdir, state, step, batches, valid, NamedSharding(mesh, BATCH),
        make_train_step(config, model, optimizer, mesh, placed), make_eval_step(config, model, mesh, placed.params),
        checkpoints, log, progress, Recorder(log, progress, rate, config.train.log_every, config.train.steps, host["window"]), text_sha256,
    )  # fmt: skip


def _check_rows(config: Experiment, mesh: Mesh) -> None:
    """A batch must divide over devices and micro-batches, in every bucket."""
    for width in config.data.buckets or (config.data.length,):
        rows = config.data.batch_size * config.data.length // width
        if rows % (mesh.shape["data"] * mesh.shape["fsdp"] * config.train.accumulate):
            raise UserError(
                f"data.batch_size: {rows} rows of {width} tokens do not divide over mesh.data * mesh.fsdp * train.accumulate = "
                f"{mesh.shape['data']} * {mesh.shape['fsdp']} * {config.train.accumulate}"
            )


def _describe_data(data: Data, batches: Batches, config: Experiment) -> str:
    meta, epochs = data.store.meta, config.train.steps / batches.per_epoch
    counts = ", ".join(f"{part} {meta[part]['examples']:,}" for part in ("train", "valid", "test"))
    lines = [
        f"text        {config.data.corpus or config.data.train}: {counts} examples; {human_count(meta['train']['tokens'])} training tokens",
        f"tokenizer   {config.data.tokenizer.kind}, {data.tokenizer.vocab_size:,} pieces, sha256 {data.tokenizer.sha256[:12]}",
        f"batches     of {config.data.batch_size * config.data.length:,} tokens, {batches.per_epoch:,} an epoch, {epochs:.1f} epochs",
    ]
    return "\n".join(
        lines
        + [
            f"            {count:,} examples {what} (over {config.data.length} tokens)"
            for what, count in batches.report.items()
        ]
    )


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """After SIGTERM (preemption) or Ctrl-C, the function it yields returns True; a second Ctrl-C interrupts at once."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(number, frame):
        if seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        seen.append(number)
        print("\nstopping after this step, to save it", file=sys.stderr)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _profile(workdir: Path, steps: int, start: int) -> Iterator[Callable[[int], None]]:
    """Traces `steps` steps, from the 10th of this start, into `workdir/profile` (open it with TensorBoard or Perfetto)."""
    first = start + 10

    def at(step: int) -> None:
        if steps and step == first:
            jax.profiler.start_trace(str(workdir / "profile"))
        if steps and step == first + steps:
            jax.profiler.stop_trace()

    yield at
