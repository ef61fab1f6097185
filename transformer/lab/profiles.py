"""Profiles: metrics that evaluators measure at several lengths, layers or positions, by arm."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from transformer.evaluation.evaluators import EVALUATORS
from transformer.evaluation.evaluators.base import measures
from transformer.lab.results import Arm, Results, RunResult
from transformer.lab.statistics import Mean, mean
from transformer.units import kind

NATS, TOKENS = "loss (nats per token)", "tokens per sequence"
WHEN = {"first": "before the first step", "last": "at the end"}

PROFILES = {
    "loss_by_position": ("Test loss by position in the sequence",
        r"test/loss_by_position/(\d+)", "preceding tokens", NATS, "last", ""),
    "extrapolation": ("Test loss in longer, non-overlapping sequences",
        r"test/extrapolation/(\d+)", TOKENS, NATS, "last", "x"),
    "extrapolation_sliding": ("Test loss of the last tokens of longer sequences",
        r"test/extrapolation_sliding/(\d+)", TOKENS, NATS, "last", "x"),
    "context": ("Mean number of preceding tokens in longer sequences",
        r"test/context/(\d+)", TOKENS, "preceding tokens", "last", "xy"),
    "probe": ("Exact-match accuracy by task length",
        r"test/probe/exact/(\d+)", "task length", "exact-match accuracy", "last", "x"),
    "logit_lens": ("Logit-lens loss by layer", r"test/lens/loss/(\d+)", "layer", NATS, "last", ""),
    "bleu_by_length": ("BLEU by source length",
        r"test/bleu_by_length/(\d+)", "minimum number of source words", "BLEU", "last", ""),
} | {
    f"{metric}_of_heads_{side}_{when}": (
        f"{label}, mean over heads, by layer, {side} self-attention, {time}",
        rf"eval/attention/{metric}/{side}/(\d+)/self_attention/\d+",
        "layer", label.lower(), when, "",
    )
    for metric, label in {
        "entropy": "Entropy of attention weights (nats)",
        "sink": "Attention weight on the first token",
        "distance": "Mean attention distance (tokens)",
        "previous": "Attention weight on the previous token",
        "induction": "Induction score",
        "logit": "Largest attention logit",
    }.items()
    for side in ("encoder", "decoder")
    for when, time in WHEN.items()
} | {
    f"{metric}_by_depth_{side}_{when}": (
        f"{label} by layer, {side}, {time}", rf"eval/depth/{metric}/{side}/(\d+)/feed_forward",
        "layer", f"{label.lower()}, feed-forward", when, "y",
    )
    for metric, label in {
        "gradient": "Norm of the gradient",
        "stream": "Root mean square of the residual stream",
        "branch": "Ratio of branch to residual stream",
        "update": "Ratio of update to weights",
    }.items()
    for side in ("encoder", "decoder")
    for when, time in WHEN.items()
}  # fmt: skip
"""Name -> (caption, pattern of the metrics, x label, y label, which log line to use ("first" or
"last"), axes with a logarithmic scale). The evaluators of train.evaluators log the metrics."""


class Profile(NamedTuple):
    """A metric as a function of a length, layer or position: means over seeds for each arm."""

    name: str
    caption: str
    x_label: str
    y_label: str
    log: str  # the axes with a logarithmic scale: "x", "y", "xy", ""
    lines: Mapping[str, Mapping[int, Mean]]  # arm -> place -> mean over seeds
    evaluator: str  # its registered name

    @property
    def places(self) -> list[int]:
        return sorted({place for line in self.lines.values() for place in line})


def profiles(results: Results) -> list[Profile]:
    """Returns the profiles with two places or more and, on a logarithmic scale, a value above 0."""
    result, declared = [], [item for cls in EVALUATORS.values() for item in cls.profiles.items()]
    for name, (caption, pattern, x_label, y_label, when, log) in [*PROFILES.items(), *declared]:
        arms, regex = results.arms.items(), re.compile(pattern)
        lines = {name: line for name, arm in arms if (line := _line(arm, regex, when))}
        coverage = measured_text(results, pattern)
        caption += f" ({coverage})" if coverage else ""
        found = (measures(run.config.train.evaluators, pattern) for run in results.runs)
        evaluator = next((x.name for x in found if x), pattern.split("/")[1])
        profile = Profile(name, caption, x_label, y_label, log, lines, evaluator)
        values = [value for line in lines.values() for value in line.values()]
        # Updates are all zero if the learning-rate schedule ends at zero.
        if len(profile.places) > 1 and any(x.mean > 0 or "y" not in log for x in values):
            result.append(profile)
    return result


def measured_text(results: Results, metric: str) -> str:
    """Returns the part of the text that a metric is measured on in these runs; "" means all."""
    found = ((measures(run.config.train.evaluators, metric), run.config) for run in results.runs)
    return next((evaluator.measured_text(config) for evaluator, config in found if evaluator), "")


def _line(arm: Arm, pattern: re.Pattern, when: str) -> dict[int, Mean]:
    """Returns place -> mean over seeds, and over metrics with the same place, such as heads."""
    runs = [run for run in arm.runs.values() if run.diverged is None or when == "first"]
    first = lambda run, key: next(iter(run.values(key)), np.nan)
    value_of = first if when == "first" else RunResult.outcome
    places: dict[int, list[str]] = {}
    for key in sorted({key for run in runs for key in run.names}):
        if match := pattern.fullmatch(key):
            places.setdefault(int(match.group(1)), []).append(key)
    line = {}
    for place, keys in sorted(places.items()):
        values = [float(np.mean([value_of(run, key) for key in keys])) for run in runs]
        if finite := [x for x in values if np.isfinite(x)]:
            line[place] = mean(finite, kind(keys[0]).bounds)
    return line
