"""Everything a trained run is judged by, from its directory."""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from transformer.config import Experiment
from transformer.data.pipeline import Data, open_data
from transformer.data.tokenizer import Tokenizer, find_tokenizer, load_tokenizer
from transformer.decoding.generate import Generator
from transformer.errors import UserError
from transformer.evaluation.loss import evaluate_loss
from transformer.evaluation.measure import measure
from transformer.evaluation.subject import At, Subject
from transformer.evaluation.translation import exact, score, translate_and_score
from transformer.files import write_whole
from transformer.mapping import to_mapping
from transformer.model.network import build_model
from transformer.parallel.mesh import check_memory
from transformer.runs.fits import check_rows
from transformer.parallel.processes import first_before_the_others, is_first
from transformer.parallel.sharding import Share
from transformer.runs.checkpoint import Checkpoints
from transformer.runs.metrics import append_metrics
from transformer.training.optimizer import build_optimizer
from transformer.runs.rundir import converted, read_manifest
from transformer.training.state import abstract_state
from transformer.training.step import make_eval_step


@dataclasses.dataclass
class Trained:
    """A run's model as it is to be used: averaged, where the config says so."""

    workdir: Path
    config: Experiment
    params: Any
    placed: Any  # their shardings
    tokenizer: Tokenizer | None  # a converted model may have none that can be read
    step: int


def load_trained(workdir: str | Path, config: Experiment, mesh: Mesh) -> Trained:
    """The parameters of a run's last checkpoint: their moving average, or the mean over the last few, where the run keeps one."""
    workdir, train = Path(workdir), config.train
    has_any = (workdir / "checkpoints").exists() and (
        checkpoints := Checkpoints(workdir, train)
    ).steps
    if not has_any:
        raise UserError(
            f"--workdir: {workdir} has no checkpoint yet; go on training it, or set train.checkpoint_every"
        )
    config = dataclasses.replace(config, model=checkpoints.layout(config.model))
    optimizer = build_optimizer(config.optimizer, train.steps)
    abstract, placed = abstract_state(config, build_model(config.model), optimizer, mesh)
    check_memory(abstract.params, mesh, "parameters")
    item, mean_of = ("ema", 1) if train.ema_decay else ("params", train.average_checkpoints)
    params = checkpoints.restore_params(abstract.params, item=item, mean_of=mean_of)
    file = find_tokenizer(workdir)
    tokenizer = load_tokenizer(file, config.data.tokenizer) if file else None
    return Trained(workdir, config, params, placed.params, tokenizer, checkpoints.steps[-1])


def evaluate(trained: Trained, mesh: Mesh, part: str = "test") -> dict:
    """Loss on a held-out side; for translators BLEU and chrF, for synthetic tasks the share of answers that are right, for language models
    bits per byte and word perplexity.

    Written to `PART.json`, to `metrics.jsonl` (as `PART/loss` and so on) and, with what the model wrote, to `samples.txt`
    (`samples.valid.txt`). Raises UserError if the held-out text is not the one this run was trained beside.
    """
    config, workdir = trained.config, trained.workdir
    check_rows(config, mesh)
    with first_before_the_others("the text to evaluate on"):
        data = open_data(config, find_tokenizer(workdir))
    _check_text(workdir, data, part)
    objective = data.objective
    eval_step = make_eval_step(config, build_model(config.model), mesh, trained.placed)
    share = Share(mesh)
    batches, text = (
        data.batches(part, share.rows),
        data.store.meta[part] if objective.every_token else None,
    )
    found = evaluate_loss(eval_step, trained.params, batches, share, text=text)
    report = {"step": trained.step, "part": part}
    if objective.writes:
        report["decoding"] = to_mapping(config.decoding)
    if objective.every_token:
        report["eval_overlap"] = config.data.eval_overlap
    written = Written()
    if objective.writes:
        generate = Generator(config, trained.params, trained.tokenizer)
        write = _translate if objective.columns == ("source", "target") else _continue
        written = write(generate, data.store.examples(part), config)
    found |= written.scores
    at = At(trained.params, translations=written.translations)
    found |= measure(Subject(config, data, part, mesh), at, during=False)
    left_out = batches.report | written.left_out
    report |= found | {"signatures": written.signatures, "left_out": left_out}
    if is_first():
        if written.samples:
            samples = "samples.txt" if part == "test" else f"samples.{part}.txt"
            write_whole(workdir / samples, "\n".join(written.samples))
        write_whole(workdir / f"{part}.json", json.dumps(report, indent=2) + "\n")
        append_metrics(
            workdir, trained.step, {f"{part}/{name}": value for name, value in found.items()}
        )
    return found | {f"{name}_signature": s for name, s in written.signatures.items()} | left_out


@dataclasses.dataclass
class Written:
    """What a model wrote, and what it is worth."""

    samples: list[str] = dataclasses.field(default_factory=list)  # to be read by a person
    scores: dict[str, float] = dataclasses.field(default_factory=dict)
    signatures: dict[str, str] = dataclasses.field(default_factory=dict)  # of the scores
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    translations: tuple | None = None  # sources, hypotheses, references


def _continue(generate: Generator, examples: Sequence, config: Experiment) -> Written:
    """The beginnings of ten texts, continued."""
    prompts = [" ".join(document.split()[:24]) for (document,) in examples[:10]]
    both = zip(prompts, generate(prompts), strict=True)
    return Written([f"prompt  {p}\nmodel   {a.strip()}\n" for p, a in both])


def _translate(generate: Generator, examples: Sequence, config: Experiment) -> Written:
    """Every source, translated and scored against all its references."""
    began = time.perf_counter()
    by = exact if config.data.format == "probe" else score
    *texts, scores, signatures = translate_and_score(generate, examples, by, _show_progress)
    count = len(texts[0])
    speed = count / (time.perf_counter() - began)
    samples = [
        "\n".join(
            [f"source     {source}", f"model      {hypothesis}"]
            + [f"reference  {reference}" for reference in references]
        )
        + "\n"
        for source, hypothesis, references in zip(*texts, strict=True)
    ]
    return Written(
        samples,
        scores | {"sentences": count, "sentences_per_second": speed},
        signatures,
        {"cut for translation": generate.cut} if generate.cut else {},
        tuple(texts),
    )


def _check_text(workdir: Path, data: Data, part: str) -> None:
    if converted(workdir):
        return
    found = data.store.meta[part]["sha256"]
    try:
        was = read_manifest(workdir)["data"][part]["sha256"]
    except (KeyError, TypeError):
        raise UserError(f"{workdir / 'manifest.json'}: damaged (no data.{part}.sha256)") from None
    if was != found:
        raise UserError(
            f"--workdir: the {part} text has changed since {workdir} was trained; restore it to compare numbers"
        )


def _show_progress(done: int, total: int) -> None:
    """A line in a terminal, gone when all is done; nothing in a log."""
    if sys.stderr.isatty() and is_first():
        print(
            "\r\x1b[K" + (f"translating {done:,}/{total:,}" if done < total else ""),
            end="",
            file=sys.stderr,
            flush=True,
        )
