"""The functions behind the command line: train, load_run, evaluate, generate, score and embed."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from transformer import buckets
from transformer.config import Experiment, MeshConfig
from transformer.config_io import NOTHING, load_experiment
from transformer.decoding.generate import Generator, check_texts, check_tokenizer
from transformer.errors import UserError
from transformer.evaluation.scorer import Scorer, Scores, embed_texts, score_texts
from transformer.files import data_home
from transformer.mapping import apply_overrides, build, to_mapping
from transformer.parallel.mesh import start, use
from transformer.parallel.processes import start_processes
from transformer.runs.evaluate import LoadedRun, evaluate as evaluate_trained, load_trained
from transformer.runs.loop import train as train_in
from transformer.runs.rundir import is_converted, load_config

AnyRun = LoadedRun | str | os.PathLike  # a loaded run, or its directory


def train(
    experiment: str | Mapping | Experiment, workdir: str | os.PathLike,
    overrides: Mapping[str, Any] = NOTHING,
) -> LoadedRun:  # fmt: skip
    """Trains an experiment in `workdir`, or resumes its run, and loads the result.

    Args:
      experiment: an experiment file (`"experiments/quickstart.py"`, `"FILE.py:ARM"`), a ConfigDict
        or nested dict, or an `Experiment`.
      workdir: the run directory.
      overrides: fields to change, such as `{"model.d_model": 256}`.

    The run's `step` is less than `config.train.steps` if SIGTERM or Ctrl-C stopped it. Raises
    UserError (a ValueError) if the experiment is invalid, or not that of the run in `workdir`."""
    if isinstance(experiment, str | os.PathLike):
        config = load_experiment(os.fspath(experiment), overrides)
    else:
        config = build(Experiment, to_mapping(experiment), overrides)
    cache_compiled_programs()
    with buckets.closing():
        train_in(config, workdir)
    return load_run(workdir, {f"mesh.{name}": x for name, x in to_mapping(config.mesh).items()})


def load_run(workdir: str | os.PathLike, overrides: Mapping[str, Any] = NOTHING) -> LoadedRun:
    """Loads the last checkpoint of a run, from its run directory.

    `overrides` changes fields of `decoding`, `mesh`, `platform` and `seed`, such as
    `{"decoding.beam_size": 4, "mesh.data": 8}`. By default, the mesh is one device or, with several
    processes, the run's. Raises UserError (a ValueError) if there is no run, it has no undamaged
    checkpoint, or another field is changed."""
    workdir = buckets.open_folder(workdir)
    allowed = {"decoding", "mesh", "platform", "seed", "data.eval_overlap"}
    if is_converted(workdir):
        allowed.add("data")
    if keys := [key for key in overrides if not {key, key.split(".")[0]} & allowed]:
        way_out = "set only decoding, mesh, platform, seed and data.eval_overlap"
        raise UserError(f"{keys[0]}: a trained run keeps its config; {way_out}")
    config = apply_overrides(load_config(workdir), overrides)
    cache_compiled_programs()
    is_set = start_processes() or any(key.startswith("mesh") for key in overrides)
    mesh_config = config.mesh if is_set else MeshConfig(data=1)
    platform = config.platform if "platform" in overrides else "auto"
    with use(start(platform, mesh_config)) as mesh:
        return load_trained(workdir, config.on(mesh_config), mesh)


def evaluate(run: AnyRun, part: str = "test") -> dict[str, Any]:
    """Evaluates a run on its held-out text and returns the metrics by name.

    `run` is a run from `load_run`, or a run directory; `part` is "test" or "valid". The metrics are
    also written to the run directory, as by `python -m transformer evaluate`."""
    if part not in ("test", "valid"):
        raise UserError(f"part: {part!r} is neither 'test' nor 'valid'")
    run = run if isinstance(run, LoadedRun) else load_run(run)
    with use(run.mesh):
        metrics = evaluate_trained(run, run.mesh, part)
    buckets.sync(run.workdir)
    return metrics


def generate(run: AnyRun, texts: Sequence[str], **decoding: Any) -> list[str]:
    """Translates texts (encoder-decoder) or continues them (decoder). Returns one output per text.

    Args:
      run: a run from `load_run`, or a run directory.
      texts: the inputs. Those that exceed `model.max_length` are truncated.
      **decoding: fields of `config.decoding` to change, such as `temperature=0.8`."""
    check_texts(texts)
    run = run if isinstance(run, LoadedRun) else load_run(run)
    changes = {f"decoding.{name}": value for name, value in decoding.items()}
    config = apply_overrides(run.config, changes) if changes else run.config
    with use(run.mesh):
        return Generator(config, run.params, run.tokenizer)(texts)


def score(run: AnyRun, texts: Sequence[str], contexts: Sequence[str] = ()) -> list[Scores]:
    """Computes the log-probability of each token of texts.

    Args:
      run: a run from `load_run`, or a run directory.
      texts: the texts. Their end-of-text token is not scored.
      contexts: the text before each (decoder), or its source (encoder-decoder); default: none.

    Returns for each text: `logp`, float32[tokens] in nats; `is_greedy`, whether each token is the
    most likely one; and `pieces`, the tokens for display."""
    check_texts(texts)
    check_texts(contexts, "contexts")
    contexts = contexts if len(contexts) else [""] * len(texts)
    if len(contexts) != len(texts):
        raise UserError(f"contexts: {len(contexts)} for {len(texts)} texts; pass one for each")
    run = run if isinstance(run, LoadedRun) else load_run(run)
    tokenizer = check_tokenizer(run.tokenizer)
    with use(run.mesh):
        scorer = Scorer(run.config, run.params, tokenizer, run.mesh, run.config.decoding.batch_size)
        return score_texts(scorer, texts, contexts)


def embed(run: AnyRun, texts: Sequence[str], pooling: str = "mean") -> np.ndarray:
    """Computes a vector for each text: the pooled last hidden states, float32[texts, d_model].

    Args:
      run: a run from `load_run`, or a run directory. In an encoder-decoder, the encoder is used.
      texts: the texts. Those that exceed `model.max_length` are cut.
      pooling: "mean" over all tokens, "cls" (the first token) or "last"."""
    check_texts(texts)
    if pooling in ("none", "span"):
        raise UserError(f"pooling: {pooling!r} yields no vector for a text; use mean, cls or last")
    run = run if isinstance(run, LoadedRun) else load_run(run)
    tokenizer, size = check_tokenizer(run.tokenizer), run.config.decoding.batch_size
    with use(run.mesh):
        return embed_texts(run.config, run.params, tokenizer, run.mesh, texts, pooling, size)


def cache_compiled_programs() -> None:
    """Enables JAX's persistent compilation cache, unless it is already configured."""
    if not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(data_home() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
