"""Everything a trained run is judged by, from its directory."""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding

from transformer.config import Experiment
from transformer.data.pipeline import open_data
from transformer.data.tokenizer import Tokenizer, load_tokenizer
from transformer.decoding.generate import Generator
from transformer.errors import UserError
from transformer.evaluation.loss import evaluate_loss
from transformer.evaluation.translation import translate_and_score
from transformer.model.network import build_model
from transformer.parallel.sharding import BATCH
from transformer.training.checkpoint import Checkpoints
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state
from transformer.training.step import make_eval_step


@dataclasses.dataclass
class Trained:
    """A run's model as it is to be used: averaged, where the config says so."""

    workdir: Path
    config: Experiment
    params: Any
    placed: Any  # their shardings
    tokenizer: Tokenizer
    step: int


def load_trained(workdir: str | Path, config: Experiment, mesh: Mesh) -> Trained:
    """The parameters of a run's last checkpoint: their moving average, or the mean over the last few, where the run keeps one."""
    workdir, train = Path(workdir), config.train
    optimizer = build_optimizer(config.optimizer, train.steps)
    abstract, placed = abstract_state(config, build_model(config.model), optimizer, mesh)
    checkpoints = Checkpoints(workdir, train.keep_checkpoints)
    if not checkpoints.steps:
        raise UserError(f"--workdir: {workdir} has no checkpoint yet; go on training it, or set train.checkpoint_every")
    item, mean_of = ("ema", 1) if train.ema_decay else ("params", train.average_checkpoints)
    params = checkpoints.restore_params(abstract.params, item=item, mean_of=mean_of)
    return Trained(
        workdir, config, params, placed.params, load_tokenizer(workdir / "tokenizer.model"), checkpoints.steps[-1]
    )


def evaluate(trained: Trained, mesh: Mesh, part: str = "test") -> dict[str, float]:
    """Loss on a held-out side, and for translators BLEU and chrF; written to `PART.json` and, with translations, `samples.txt`."""
    config = trained.config
    data = open_data(config)
    language_model = data.objective.sides == 1
    eval_step = make_eval_step(config, build_model(config.model), mesh, trained.placed)
    text = data.store.meta[part] if language_model else None
    found = evaluate_loss(eval_step, trained.params, data.batches(part), NamedSharding(mesh, BATCH), text=text)
    signatures: dict[str, str] = {}
    if not language_model:
        began = time.perf_counter()
        generate = Generator(config, trained.params, trained.tokenizer)
        show = lambda done, total: (
            print(f"\rtranslating {done:,}/{total:,}", end="", file=sys.stderr) if sys.stderr.isatty() else None
        )
        sources, hypotheses, references, scores, signatures = translate_and_score(
            generate, data.store.examples(part), show
        )
        print("\r\x1b[K" if sys.stderr.isatty() else "", end="", file=sys.stderr)
        found |= scores | {
            "sentences": len(sources),
            "sentences_per_second": len(sources) / (time.perf_counter() - began),
        }
        _write_samples(trained.workdir / "samples.txt", sources, hypotheses, references)
    report = {"step": trained.step, "part": part} | found | {"signatures": signatures}
    (trained.workdir / f"{part}.json").write_text(json.dumps(report, indent=2) + "\n")
    return found | {f"{name}_signature": signature for name, signature in signatures.items()}


def _write_samples(file: Path, sources, hypotheses, references) -> None:
    with file.open("w", encoding="utf-8") as out:
        for source, hypothesis, refs in zip(sources, hypotheses, references, strict=True):
            out.write(
                f"source     {source}\nmodel      {hypothesis}\n" + "".join(f"reference  {r}\n" for r in refs) + "\n"
            )
