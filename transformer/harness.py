"""Runs as models of EleutherAI's lm-evaluation-harness (extra [eval]).

Example:

    from transformer.harness import HarnessLM
    results = lm_eval.simple_evaluate(HarnessLM("runs/lm_small"), tasks=["lambada_openai"])"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator, handle_stop_sequences, normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from transformer.api import AnyRun, load_run
from transformer.decoding.config import DecodingConfig
from transformer.decoding.generate import Generator, check_tokenizer
from transformer.errors import UserError, nearest
from transformer.evaluation.scorer import Scorer, windows
from transformer.files import write_atomic
from transformer.parallel.mesh import use
from transformer.parallel.processes import is_first
from transformer.runs.evaluate import LoadedRun
from transformer.runs.metrics import append_metrics
from transformer.runs.rundir import is_converted


class HarnessLM(TemplateLM):
    """A run as a model of the harness. Every process of a run, each of rank 0 to the harness, gets
    all requests, and the batches are distributed over the mesh.

    Args:
      run: a run from `load_run`, or a run directory.
      batch_size: sequences in a batch; by default, `decoding.batch_size`.
      add_bos_token: whether a text begins with bos. By default, it does unless the run was
        converted and its tokenizer.json adds none, such as GPT-2's.
      max_gen_toks: tokens to generate where a task does not say."""

    def __init__(
        self, run: AnyRun, batch_size: int | None = None,
        add_bos_token: bool | None = None, max_gen_toks: int = 256,
    ):  # fmt: skip
        super().__init__()
        self.run = run = run if isinstance(run, LoadedRun) else load_run(run)
        check_tokenizer(run.tokenizer)
        self.backend = "seq2seq" if run.config.model.is_encoder_decoder else "causal"
        if add_bos_token is None:
            add_bos_token = run.tokenizer.adds_bos or not is_converted(run.workdir)
        self.add_bos_token, self.max_gen_toks = add_bos_token, max_gen_toks
        self._batch_size = batch_size or run.config.decoding.batch_size
        self.max_length = run.config.model.max_length
        self._scorer = Scorer(run.config, run.params, run.tokenizer, run.mesh, self._batch_size)

    @property
    def eot_token_id(self) -> int:
        return self.run.tokenizer.eos

    @property
    def prefix_token_id(self) -> int:
        return self.run.tokenizer.bos

    def tok_encode(self, string, add_special_tokens=None, **_):
        ids, bos = self.run.tokenizer.encode([string])[0], self.run.tokenizer.bos
        wanted = self.add_bos_token if add_special_tokens is None else add_special_tokens
        return [bos, *ids] if wanted and self.backend == "causal" and ids[:1] != [bos] else ids

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
        with use(self.run.mesh):
            scored = self._scorer([pair for _, *pair in requests])
        results = [(float(scores.logp.sum()), bool(scores.is_greedy.all())) for scores in scored]
        for (request, *_), result in zip(requests, results, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, result)
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        ids = [self.tok_encode(*request.args) for request in requests]
        parts = [windows(self.prefix_token_id, text, self.max_length) for text in ids]
        pairs = [(None, *pair) for of_text in parts for pair in of_text]
        scores = iter(self._loglikelihood_tokens(pairs))
        return [sum(next(scores)[0] for _ in of_text) for of_text in parts]

    def generate_until(self, requests, disable_tqdm=False):
        arguments, results = [request.args for request in requests], []
        groups = Collator(arguments, sort_fn=lambda _: 0, group_by="gen_kwargs")
        for members in groups.get_batched(n=0):  # all requests with the same options at once
            contexts, (options, *_) = zip(*members, strict=True)
            results += self._generate(contexts, options)
            for request, text in zip(members, results[-len(members) :], strict=True):
                self.cache_hook.add_partial("generate_until", request, text)
        return groups.get_original(results)

    def _generate(self, contexts: Sequence[str], options: dict) -> list[str]:
        """Generates until `options["until"]`, with the harness's names of options."""
        options = normalize_gen_kwargs(dict(options), self.max_gen_toks)
        fields = {"max_extra": options["max_gen_toks"], "batch_size": self._batch_size}
        if options["do_sample"] and (temperature := options.get("temperature", 1.0)):
            fields |= {name: options[name] for name in ("top_k", "top_p") if name in options}
            fields["temperature"] = temperature
        run = self.run
        config = dataclasses.replace(run.config, decoding=DecodingConfig(**fields))
        with use(run.mesh):
            generator = Generator(config, run.params, run.tokenizer, add_bos=self.add_bos_token)
            texts = generator(contexts)
        for stop in filter(None, handle_stop_sequences(options.get("until"), eos=None)):
            texts = [text.split(stop)[0] for text in texts]
        return texts


def evaluate_tasks(
    run: LoadedRun, tasks: Sequence[str], include_path: Path | None = None, **options
) -> str:
    """Evaluates a run with `options` of `lm_eval.simple_evaluate` and returns a table. Writes
    `tasks.json` (results, samples), and the metrics to `metrics.jsonl` as `tasks/TASK/METRIC`."""
    if not tasks:
        raise UserError("--tasks: names no task")
    folder = str(include_path) if include_path else None
    manager = TaskManager(include_path=folder, include_defaults=False)
    if not set(tasks) <= set(manager.all_subtasks):
        manager = TaskManager(include_path=folder)  # takes seconds: it reads all built-in tasks
    if unknown := [name for name in tasks if not manager.match_tasks([name])]:
        suggested = nearest(unknown[0], manager.all_tasks)
        raise UserError(f"--tasks: no task {unknown[0]!r}; {suggested}")
    results = simple_evaluate(HarnessLM(run), tasks=list(tasks), task_manager=manager, **options)
    if not is_first():
        return ""
    results.pop("config", None)
    text = json.dumps(results, indent=1, default=handle_non_serializable, ensure_ascii=False)
    write_atomic(run.workdir / "tasks.json", text)
    metrics = {}
    for task, values in results["results"].items():
        for name, value in values.items():
            if isinstance(value, (int, float)):  # "METRIC,FILTER"
                metric = name.removesuffix(",none").replace(",", "_", 1)
                metrics[f"tasks/{task}/{metric}"] = float(value)
    append_metrics(run.workdir, run.step, metrics)
    return make_table(results)
