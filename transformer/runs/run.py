"""A run: its preparation before the first step, and its evaluations, checkpoints and logs."""

import contextlib
import dataclasses
import importlib.util
import io
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from flax import linen as nn
from jax.sharding import Mesh

from transformer import buckets
from transformer.checks import plain
from transformer.claims import Claim
from transformer.config import Experiment
from transformer.data.batching import Stream
from transformer.data.mixture import check_epochs
from transformer.data.pipeline import Data, open_data
from transformer.errors import UserError
from transformer.evaluation.evaluators.base import measure
from transformer.evaluation.losses import evaluate_loss
from transformer.evaluation.subject import Snapshot, Subject
from transformer.files import check_disk_space
from transformer.mapping import to_mapping
from transformer.model.network import FAMILIES, build_model
from transformer.model.parametrizations.base import ROLES
from transformer.model.roles import parameter_rules
from transformer.output import count, event, human_number, human_tokens
from transformer.parallel.mesh import check_memory
from transformer.parallel.processes import agree, barrier, is_first, process_zero_first
from transformer.parallel.sharding import Share, format_bytes, local_bytes, path_name
from transformer.runs import rundir
from transformer.runs.checkpoint import Checkpoints, size
from transformer.runs.checkpoint_record import json_sha256
from transformer.runs.fits import check_divisibility, check_training
from transformer.runs.initialize import check_source, check_tokenizer, start_from
from transformer.runs.metrics import Diverged, Goodput, MetricsLog, Progress, Recorder, read_metrics
from transformer.training.optimizer import build_optimizer, schedule
from transformer.training.state import TrainState, abstract_state, init_state, layout, relayout
from transformer.training.step import attention_backends, make_eval_step, make_train_step

_SHOWN = (
    ("perplexity", "perplexity", human_number),
    ("accuracy", "accuracy", "{:.1%}".format),
    ("translation/bleu", "BLEU", "{:.1f}".format),
)
"""Metric -> its label and format in the line of an evaluation."""


@dataclasses.dataclass
class Run:
    """The state of a run in the training loop, with its evaluations, checkpoints and logs."""

    config: Experiment
    workdir: Path
    state: TrainState
    step: int
    train: Stream  # batches of the training text
    valid: Stream  # those of the validation text
    subject: Subject  # the model and its validation text
    train_step: Callable
    eval_step: Callable
    checkpoints: Checkpoints
    log: MetricsLog
    progress: Progress
    recorder: Recorder

    def __enter__(self) -> "Run":
        # Evaluators also measure the untrained model, before the first step.
        due = self.evaluation_due() if self.step else self.config.train.evaluators
        if due and self.log.last.get("eval/loss") != self.step:
            self.evaluate()
        return self

    def __exit__(self, error_type, error, trace) -> None:
        """Closes the logs in any case and waits for the last checkpoint."""
        try:
            with contextlib.closing(self.recorder.watchdog):
                if error_type is None:
                    self.recorder.flush()
            all_arrive = error_type is None or issubclass(error_type, Diverged)
            if all_arrive or jax.process_count() == 1:  # closing needs all processes
                with self._saving():
                    self.checkpoints.close(prune=error_type is None)
        finally:
            self.progress.close()
            self.log.close()
        if all_arrive:
            if is_first():
                rundir.amend(self.workdir, goodput=self.recorder.goodput.record())
                buckets.sync(self.workdir)
            barrier("end of the run")
            buckets.sync(self.workdir)  # on the other machines

    def saving_due(self) -> bool:
        return self._due(self.config.train.checkpoint_every)

    def evaluation_due(self) -> bool:
        ends_decay = self.step in self.config.optimizer.decay_ends
        return ends_decay or self._due(self.config.train.eval_every)

    def _due(self, every: int) -> bool:
        """Whether this is the last step or, with `every` > 0, a multiple of it."""
        return self.step == self.config.train.steps or (every > 0 and self.step % every == 0)

    def evaluate(self) -> None:
        """Logs the validation loss and the evaluators' metrics, and prints a line."""
        with self.recorder.untimed():
            params, limit = self.state.eval_params, self.config.train.eval_batches
            batches = (self.valid, self.subject.share)
            metrics = evaluate_loss(self.eval_step, params, *batches, max_batches=limit)
            snapshot = Snapshot(params, self.state.opt_state)
            metrics |= measure(self.subject, snapshot, in_training=True)
            texts = {name: x for name, x in metrics.items() if isinstance(x, str)}
            numbers = {f"eval/{name}": x for name, x in metrics.items() if name not in texts}
            self.log.write(self.step, **numbers)
            self.log.write_texts(self.step, texts)
            line = f"step {self.step:,}: validation loss {metrics['loss']:.3f}"
            for name, label, show in _SHOWN:
                if name in metrics:
                    line += f", {label} {show(metrics[name])}"
            self.progress.note(line)

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Adds the time of its body, in which training waits, to that of saving."""
        began = time.perf_counter()
        yield
        self.recorder.goodput.saving += time.perf_counter() - began

    def save(self) -> None:
        """Saves a checkpoint with the position in the data and the open logging interval."""
        with self.recorder.untimed(), self._saving():
            if is_first():
                Claim(self.workdir / rundir.LOCK).check()
            loop = {"data_step": self.step, "window": dict(self.recorder.window)}
            loop["text_sha256"] = self.subject.data.meta["train"]["sha256"]
            buckets.sync(self.workdir)  # a checkpoint in a bucket has the metrics before it
            self.checkpoints.save(self.state, self.step, loop, layout(self.config.model))


class Program(NamedTuple):
    """An experiment on a mesh: model, optimizer, and shapes and shardings of the train state."""

    config: Experiment
    mesh: Mesh
    model: nn.Module
    optimizer: optax.GradientTransformation
    abstract: TrainState  # shapes
    shardings: TrainState  # of the state


def begin(
    config: Experiment, workdir: Path, mesh: Mesh, *, together=1, prints=True, verbose=False
) -> Run:
    """Prepares all that a run needs before its first step. `together` runs are trained as one
    program, of which one `prints` progress; with `verbose`, also details before the first step."""
    began, program = time.time(), check(config, workdir, mesh)
    data, train, valid = read_text(config, workdir, Share(mesh))
    progress = Progress(config.train.steps, None if is_first() and prints else io.StringIO())
    state, loop, checkpoints = find_state(workdir, program, data, progress.note)
    step = loop["data_step"]
    resumed = f"at step {step:,} from {checkpoints.folder}" if step else ""
    for line in record_run(workdir, program, data, train, together, resumed, verbose):
        progress.note(line)
    checkpoints = checkpoints or Checkpoints(workdir, config.train, progress.note)
    targets = {"tensorboard": config.train.tensorboard, "wandb": config.train.wandb}
    earlier = read_metrics(workdir), rundir.read_manifest(workdir).get("goodput", {})
    goodput = Goodput(workdir / "metrics.jsonl", *earlier, step, began)
    log = MetricsLog(workdir, step, writes=is_first(), **targets, config=to_mapping(config))
    barrier("reading of earlier metrics")
    if is_first():
        rundir.amend(workdir, goodput=goodput.record())
    updates, every = jax.numpy.arange(config.train.steps), config.train.log_every
    rates = jax.device_get(jax.jit(jax.vmap(schedule(config.optimizer, len(updates))))(updates))
    recorder = Recorder(log, progress, rates, every, loop["window"], goodput, together)
    recorder.watchdog.seconds = config.train.step_deadline
    train_step = make_train_step(config, program.model, program.optimizer, mesh, program.shardings)
    eval_step = make_eval_step(config, program.model, mesh, program.shardings.params)
    subject = Subject(config, data, "valid", mesh, config.train.eval_batches, program.optimizer)
    steps, outputs = (train_step, eval_step), (checkpoints, log, progress, recorder)
    return Run(config, workdir, state, step, train, valid, subject, *steps, *outputs)


def check(config: Experiment, workdir: Path, mesh: Mesh) -> Program:
    """Step 1: checks all that can be checked before anything is computed, read or written."""
    agree("the config", json_sha256(to_mapping(config)))
    check_divisibility(config, mesh)
    check_training(config, Share(mesh))
    if config.train.wandb and importlib.util.find_spec("wandb") is None:
        raise UserError("train.wandb needs the extra [wandb]: pip install -e '.[wandb]'")
    rundir.check(workdir, config)
    if config.train.init_from and not rundir.has_checkpoint(workdir):
        check_source(config.train.init_from)
    model = build_model(config.model)
    optimizer = build_optimizer(config.optimizer, config.train.steps, config.model)
    abstract, shardings = abstract_state(config, model, optimizer, mesh)
    held = "parameters, optimizer statistics and gradients"
    check_memory((abstract, abstract.params), mesh, held)
    buckets.check_bucket(workdir)
    if buckets.url_of(workdir) is None:
        check_disk_space(workdir.absolute(), size(abstract), "a checkpoint")
    return Program(config, mesh, model, optimizer, abstract, shardings)


def read_text(config: Experiment, workdir: Path, share: Share) -> tuple[Data, Stream, Stream]:
    """Step 2: reads and tokenizes the data, with the run's own tokenizer if it resumes. Returns it
    with the batches for training and validation."""
    with process_zero_first("data"):
        tokenizer = rundir.tokenizer_file(workdir) if rundir.has_checkpoint(workdir) else None
        data = open_data(config, tokenizer)
    train, valid = (data.batches(part, share.sequences) for part in ("train", "valid"))
    check_epochs(config.data.mixture, train.epochs(config.train.steps))
    digests = data.meta["train"]["sha256"][:32] + data.tokenizer.sha256[:32]
    agree("the training text, or its tokenizer", digests)
    return data, train, valid


def find_state(
    workdir: Path, program: Program, data: Data, report: Callable[[str], None]
) -> tuple[TrainState, dict, Checkpoints | None]:
    """Step 3: gets the state from the newest intact checkpoint, from another model, or from the
    seed, the state of the training loop, and the checkpoints (None for a new run)."""
    config, checkpoints = program.config, None
    if (workdir / "checkpoints").exists():
        checkpoints = Checkpoints(workdir, config.train, report)
        agree("workdir: the last checkpoint in it", str(checkpoints.steps[-1:]))
    if not checkpoints or not checkpoints.steps:
        state = init_state(config, program.model, program.optimizer, program.shardings)
        if config.train.init_from:
            check_tokenizer(config.train.init_from, data.tokenizer.sha256)
            state = start_from(config, state, program.shardings, program.mesh)
        return state, {"data_step": 0, "window": {}}, None
    model_in = lambda layout: dataclasses.replace(config.model, **layout)

    def abstract_in(layout: dict) -> TrainState:
        if (model := model_in(layout)) == config.model:
            return program.abstract
        saved_config = dataclasses.replace(config, model=model)
        return abstract_state(saved_config, build_model(model), program.optimizer, program.mesh)[0]

    state, record = checkpoints.newest_intact(lambda step: checkpoints.restore(step, abstract_in))
    if (saved := model_in(record.layout)) != config.model:
        state = relayout(state, saved, config.model, program.abstract)
    if record.loop["text_sha256"] != data.meta["train"]["sha256"]:
        problem = f"the training text has changed since {workdir} was trained on it"
        raise UserError(f"workdir: {problem}; choose another directory or restore the text")
    return state, record.loop, checkpoints


def record_run(
    workdir: Path, program: Program, data: Data, train: Stream, together: int, resumed: str,
    verbose: bool,
) -> list[str]:  # fmt: skip
    """Step 4: records the run in its directory. Returns a summary: at most five lines, and one per
    role of parameters that has multipliers; with `verbose`, also the largest parameters and other
    details. `resumed` is where the run resumes, if it does."""
    config, mesh, params = program.config, program.mesh, program.abstract.params
    backends = attention_backends(config, program.model, params, train[0], mesh)
    origin = {"parameters": sum(x.size for x in jax.tree.leaves(params))}
    origin["data"] = {"objective": type(config.data.chosen).__name__, **data.meta}
    origin |= {"attention_backends": backends, "trained_together": together}
    if is_first():
        rundir.record_start(workdir, config, mesh, data.tokenizer, origin)
        buckets.sync(workdir)
    barrier("writing of the run directory")
    buckets.sync(workdir)  # on the other machines
    if not (workdir / "config.json").exists():
        problem = f"cannot see the files that process 0 wrote to {workdir}; use a shared folder"
        raise UserError(f"workdir: process {jax.process_index()} {problem}")
    used = "; ".join(name + (f" ({why})" if why else "") for name, why in backends.items())
    attention = [f"attention {used}"] if backends and (any(backends.values()) or verbose) else []
    notes = "; ".join([*attention, *([] if resumed else _advice(config, data))])
    return [
        _model(config, mesh, params), *(_table(params) if verbose else ()), *_multipliers(config),
        _text(config, data, verbose), _batches(config, train),
        *([f"resumed     {resumed}"] if resumed else ()),
        *([f"note        {notes}"] if notes else ()),
    ]  # fmt: skip


def _model(config: Experiment, mesh: Mesh, params: Any) -> str:
    number = sum(x.size for x in jax.tree.leaves(params))
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    devices = count(mesh.size, f"{mesh.devices.flat[0].device_kind} device")
    machine = f"mesh {axes}, {devices}" if axes else devices
    size = f"{count(number, 'parameter')} ({format_bytes(local_bytes(params))} per device)"
    return f"model       {config.model.family}, {size}, {machine}"


def _table(params: Any, shown: int = 6) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rows = [(path_name(path), x.shape, x.sharding.spec, local_bytes(x)) for path, x in leaves]
    rows.sort(key=lambda row: -math.prod(row[1]))
    lines = []
    for name, shape, spec, local in rows[:shown]:
        partition = ", ".join("·" if axis is None else str(axis) for axis in spec) or "replicated"
        cells = f"{name:<58} {'x'.join(map(str, shape)):>16}  {partition:<18}"
        lines.append(f"            {cells} {format_bytes(local):>9}")
    if len(rows) > shown:
        lines.append(f"            and {len(rows) - shown} more")
    return lines


def _multipliers(config: Experiment) -> list[str]:
    groups: dict[tuple, int] = {}
    for place, rule in parameter_rules(FAMILIES[config.model.family], config.model).values():
        key = (place.role, config.optimizer.rule.learning_rate(place, rule), *rule[1:])
        groups[key] = groups.get(key, 0) + 1
    names = ("learning rate", "weight decay", "epsilon", "init")
    lines = []
    for role, *values in sorted(groups, key=lambda group: ROLES.index(group[0])):
        parts = [f"{name} x {x:.3g}" for name, x in zip(names, values, strict=True) if x != 1.0]
        number = count(groups[role, *values], "array")
        lines.append(f"{'groups' * (not lines):<12}{role}, {number}: {', '.join(parts) or 'x 1'}")
    return lines


def _text(config: Experiment, data: Data, verbose: bool) -> str:
    meta, names = data.meta, {"train": "training", "valid": "validation", "test": "test"}
    counts = ", ".join(f"{meta[part]['examples']:,} {name}" for part, name in names.items())
    tokenizer = config.data.tokenizer.path or f"{config.data.tokenizer.kind} tokenizer"
    sha256 = f", sha256 {data.tokenizer.sha256[:12]}" if verbose else ""
    names = [source.corpus or source.train for source in config.data.sources.values()]
    tokens = f"{human_tokens(meta['train']['tokens'])} training tokens"
    pieces = f"{tokenizer}, {data.tokenizer.vocab_size:,} pieces{sha256}"
    return f"text        {' + '.join(names)}: {counts} examples; {tokens}; {pieces}"


def _batches(config: Experiment, batches: Stream) -> str:
    left_out = "".join(f"; {event(number, text)}" for text, number in batches.report.items())
    epochs = batches.epochs(config.train.steps).items()
    epochs = ", ".join(f"{number:.1f} epochs" + f" of {x}" * bool(x) for x, number in epochs)
    return f"batches     {config.data.batch_size * config.data.length:,} tokens, {epochs}{left_out}"


def _advice(config: Experiment, data: Data) -> list[str]:
    notes = [
        f"{count(number, 'example')} of the {part} split "
        f"share{'s' * (number == 1)} a sentence with the training data, so its scores are inflated"
        for part, number in data.meta["overlap"].items()
        if number
    ]
    hint = max(placement.warmup_hint for placement in config.model.placements)
    if config.optimizer.warmup_steps < hint:
        name = plain(config.model.norm_placement)
        notes.append(f"norm_placement {name!r} is known to need about {hint:,} warm-up steps")
    if not config.train.checkpoint_every:
        problem = "a checkpoint is saved only when the run ends or is stopped"
        notes.append(f"{problem}; to save more often, set train.checkpoint_every")
    return notes
