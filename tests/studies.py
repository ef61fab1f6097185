"""Synthetic experiments, studies and runs for the tests of `transformer.lab`."""

import json

from conftest import model_fields

from transformer import Sweep, vary
from transformer.config import Experiment
from transformer.lab import guard
from transformer.lab.study import Study
from transformer.mapping import from_mapping, override, to_mapping


def experiment(**changes) -> Experiment:
    """Returns a small experiment; in the names of `changes`, `__` stands for a dot."""
    tree = {
        "model": model_fields("decoder", vocab_size=512, max_length=32, position="rotary"),
        "data": {
            "corpus": "pydoc", "length": 32, "batch_size": 8, "held_out": 4,
            "tokenizer": {"kind": "bpe"},
        },
        "optimizer": {"warmup_steps": 4, "learning_rate": 1e-3},
        "train": {
            "steps": 8, "log_every": 2, "eval_every": 4, "eval_batches": 2, "tensorboard": False,
        },
    }  # fmt: skip
    for field, value in changes.items():
        override(tree, field.replace("__", "."), value, Experiment)
    return from_mapping(Experiment, tree)


def configs_and_facts(sweep, **base):
    """Returns (arm -> config, arm -> facts) for the arms of a sweep."""
    configs = {
        arm: experiment(**base | {k.replace(".", "__"): v for k, v in changes.items()})
        for arm, changes in sweep.arms.items()
    }
    return configs, {arm: guard.facts(config) for arm, config in configs.items()}


def make_study(folder, seeds=2):
    sweep = Sweep(vary("model.position", "rotary", "alibi"), seeds=seeds)
    configs, facts = configs_and_facts(sweep)
    return Study(folder, sweep, configs, facts)


def write_run(
    folder,
    arm,
    seed,
    loss,
    *,
    more=(),
    test="t",
    tokenizer="k",
    diverged=0,
    eval_losses=(),
    test_bleu=None,
    test_beauty=None,
    **changes,
):
    """Writes a run directory with made-up results and returns its path."""
    run = folder / arm / f"seed-{seed}"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(to_mapping(experiment(seed=seed, **changes))))
    data = {
        "objective": "CausalLM",
        "tokenizer_sha256": tokenizer,
        "test": {"sha256": test, "examples": 4},
    }
    (run / "manifest.json").write_text(
        json.dumps(
            {
                "data": data,
                "devices": ["cpu"],
                "parameters": 100,
                "attention_backends": {"reference": ""},
            }
        )
    )
    lines = [{"step": 4 * (n + 1), "eval/loss": x} for n, x in enumerate(eval_losses)]
    lines += [{"step": 0, **dict(more)}] if more else []
    lines += [{"step": 8, "train/loss": 3.0, "train/tokens": 1000, "time/tokens_per_second": 100.0}]
    lines += (
        [{"step": diverged, "train/diverged": True}]
        if diverged
        else []
        if loss is None
        else [{"step": 8, "test/loss": loss}]
    )
    lines += [
        {"step": 8, f"test/{name}": x}
        for name, x in {"bleu": test_bleu, "beauty": test_beauty}.items()
        if x is not None
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run
