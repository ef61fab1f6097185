"""Evaluation of a trained run, from its directory."""

import dataclasses
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optax
from flax import linen as nn
from jax.sharding import Mesh

from transformer.config import Experiment
from transformer.data.pipeline import Data, open_data
from transformer.data.tokenizer import Tokenizer, load_tokenizer
from transformer.decoding.generate import Generator
from transformer.errors import UserError
from transformer.evaluation.evaluators.base import measure
from transformer.evaluation.evaluators.translation import exact, group, score
from transformer.evaluation.losses import evaluate_loss
from transformer.evaluation.subject import Snapshot, Subject
from transformer.files import write_atomic, write_json
from transformer.mapping import to_mapping
from transformer.model.network import build_model
from transformer.output import counting
from transformer.parallel.mesh import check_memory
from transformer.parallel.processes import is_first, process_zero_first
from transformer.runs.checkpoint import Checkpoints
from transformer.runs.checkpoint_record import Damaged
from transformer.runs.fits import check_divisibility
from transformer.runs.metrics import append_metrics
from transformer.runs.rundir import is_converted, read_manifest, tokenizer_file
from transformer.training.state import abstract_state
from transformer.training.step import make_eval_step


@dataclasses.dataclass
class LoadedRun:
    """A trained run, ready for use.

        run = transformer.load_run("runs/quickstart")
        source = jnp.array(run.tokenizer.encode(["Where is the library?"]))
        logits = run.model.apply(run.params, source, target)
        print(transformer.generate(run, ["Where is the library?"]))

    `params` are the last parameters, their moving average (`train.ema_decay`) or the mean of the
    last checkpoints (`train.average_checkpoints`). `tokenizer.encode` maps texts to lists of ids,
    without eos; `tokenizer.decode` maps the ids of one text to the text."""

    workdir: Path
    config: Experiment
    params: Any
    shardings: Any  # of `params`
    tokenizer: Tokenizer | None  # None if a converted model has no readable one
    step: int
    mesh: Mesh

    def __repr__(self) -> str:
        return f"LoadedRun({str(self.workdir)!r}, step={self.step})"

    @property
    def model(self) -> nn.Module:
        """The model, whose `apply` takes `params`."""
        return build_model(self.config.model)


def load_trained(
    workdir: str | os.PathLike, config: Experiment, mesh: Mesh, option: str = "workdir"
) -> LoadedRun:
    """Loads the parameters of a run's last checkpoint or, if the config says so, an average.
    `option` precedes errors: the setting that names the run."""
    workdir, train = Path(workdir), config.train
    checkpoints = Checkpoints(workdir, train) if (workdir / "checkpoints").exists() else None
    if not checkpoints or not checkpoints.steps:
        raise UserError(f"{option}: {workdir} has no checkpoint yet; continue training")
    try:
        config = dataclasses.replace(config, model=checkpoints.layout(config.model))
        # The parameters are the same for every optimizer.
        model, optimizer = build_model(config.model), optax.identity()
        abstract, shardings = abstract_state(config, model, optimizer, mesh)
        check_memory(abstract.params, mesh, "parameters")
        params = checkpoints.evaluation_params(abstract.params)
    except Damaged as e:
        raise Damaged(e.what, "restore it from a copy, or move that folder away") from e
    file = tokenizer_file(workdir)
    tokenizer = load_tokenizer(file, config.data.tokenizer) if file else None
    step = checkpoints.steps[-1]
    return LoadedRun(workdir, config, params, shardings.params, tokenizer, step, mesh)


def evaluate(trained: LoadedRun, mesh: Mesh, part: str = "test") -> dict:
    """Evaluates a run on a held-out split and returns the metrics: the loss; for translation also
    BLEU and chrF, for synthetic tasks the fraction of exact answers, and for language models bits
    per byte and word perplexity. Writes them to `PART.json` and to `metrics.jsonl` (as `PART/loss`
    and so on), and generated text to `samples.txt` (`samples.valid.txt` for the validation split).
    Raises UserError if the held-out text differs from the one that belongs to this run."""
    config, workdir = trained.config, trained.workdir
    check_divisibility(config, mesh)
    with process_zero_first("the text to evaluate on"):
        data = open_data(config, tokenizer_file(workdir))
    _check_text(workdir, data, part)
    objective, subject = config.objective, Subject(config, data, part, mesh)
    eval_step = make_eval_step(config, subject.model, mesh, trained.shardings)
    batches = data.batches(part, subject.share.sequences)
    scores_every_token = all(x.chosen.scores_every_token for x in config.data.sources.values())
    text = data.meta[part] if scores_every_token else None
    metrics = evaluate_loss(eval_step, trained.params, batches, subject.share, text=text)
    report = {"step": trained.step, "part": part}
    if scores_every_token:
        report["eval_overlap"] = config.data.eval_overlap
    generated, examples = Written(), data.examples(part) if objective.generates_text else []
    if examples:
        report["decoding"] = to_mapping(config.decoding)
        generate = Generator(config, trained.params, trained.tokenizer)
        generated = (_translate if objective.has_pairs else _continue)(generate, examples, config)
    metrics |= generated.scores
    model_state = Snapshot(trained.params, translations=generated.translations)
    metrics |= measure(subject, model_state, in_training=False)
    left_out = batches.report | generated.left_out
    report |= metrics | {"signatures": generated.signatures, "left_out": left_out}
    if is_first():
        if generated.samples:
            samples = "samples.txt" if part == "test" else f"samples.{part}.txt"
            write_atomic(workdir / samples, "\n".join(generated.samples))
        write_json(workdir / f"{part}.json", report)
        append_metrics(workdir, trained.step, {f"{part}/{k}": x for k, x in metrics.items()})
    signatures = {f"{name}_signature": text for name, text in generated.signatures.items()}
    return metrics | signatures | left_out


@dataclasses.dataclass
class Written:
    """The text that a model generated, and its scores."""

    samples: list[str] = dataclasses.field(default_factory=list)  # for humans
    scores: dict[str, float] = dataclasses.field(default_factory=dict)
    signatures: dict[str, str] = dataclasses.field(default_factory=dict)  # of the scores
    left_out: dict[str, int] = dataclasses.field(default_factory=dict)
    translations: tuple | None = None  # sources, hypotheses, references


def _continue(generate: Generator, examples: Sequence, config: Experiment) -> Written:
    prompts = [" ".join(document.split()[:24]) for (document,) in examples[:10]]
    pairs = zip(prompts, generate(prompts), strict=True)
    return Written([f"prompt  {prompt}\nmodel   {answer.strip()}\n" for prompt, answer in pairs])


def _translate(generate: Generator, examples: Sequence, config: Experiment) -> Written:
    start = time.perf_counter()
    sources, references = group(examples)
    count = len(sources)
    counter = counting("translating", count) if is_first() else lambda done: None
    hypotheses = generate(sources, counter)
    scores, signatures = (exact if config.data.format == "probe" else score)(hypotheses, references)
    texts, speed = (sources, hypotheses, references), count / (time.perf_counter() - start)
    samples = []
    for source, hypothesis, accepted in zip(*texts, strict=True):
        sample = f"source     {source}\nmodel      {hypothesis}\n"
        samples.append(sample + "".join(f"reference  {text}\n" for text in accepted))
    scores |= {"sentences": count, "sentences_per_second": speed}
    left_out = {"sources were cut to translate them": generate.cut} if generate.cut else {}
    return Written(samples, scores, signatures, left_out, texts)


def _check_text(workdir: Path, data: Data, part: str) -> None:
    if is_converted(workdir):
        return
    try:
        recorded = read_manifest(workdir)["data"][part]["sha256"]
    except (KeyError, TypeError):
        raise UserError(f"{workdir / 'manifest.json'}: damaged (no data.{part}.sha256)") from None
    if recorded != data.meta[part]["sha256"]:
        raise UserError(f"{workdir}: the {part} text has changed since training; restore it")
