"""What runs measure at several places - lengths, layers, places in a row (train.evaluators) - of each arm: mean over seeds at each place."""

import dataclasses
import math
import re
from collections.abc import Mapping

import numpy as np

from transformer.evaluation.measure import measures
from transformer.lab.results import Arm, Results, Run
from transformer.lab.statistics import Mean, mean


@dataclasses.dataclass(frozen=True)
class Profile:
    """One such measurement, of all arms that have it."""

    name: str
    said: str  # what it shows
    x_label: str
    y_label: str
    log: str  # the axes that are logarithms: "x", "y", "xy", ""
    lines: Mapping[str, Mapping[int, Mean]]  # arm -> place -> over seeds

    @property
    def places(self) -> list[int]:
        return sorted({place for line in self.lines.values() for place in line})


PROFILES = {
    "loss_by_position": ("Test loss by the place in the row", r"test/loss_by_position/(\d+)", "tokens before", "loss (nats per token)", "last", ""),
    "extrapolation": ("Test loss in longer rows that do not overlap", r"test/extrapolation/(\d+)", "tokens in a row", "loss (nats per token)", "last", "x"),
    "extrapolation_sliding": ("Test loss of the last tokens of longer rows", r"test/extrapolation_sliding/(\d+)", "tokens in a row", "loss (nats per token)", "last", "x"),
    "context": ("Tokens before one, on average, in longer rows", r"test/context/(\d+)", "tokens in a row", "tokens before", "last", "xy"),
    "probe": ("Answers right from end to end, by the length of the task", r"test/probe/exact/(\d+)", "length of the task", "share right", "last", "x"),
    "logit_lens": ("Loss of what each layer would have said", r"test/lens/loss/(\d+)", "layer", "loss (nats per token)", "last", ""),
    "bleu_by_length": ("BLEU by the length of the source", r"test/bleu_by_length/(\d+)", "words in the source, or more", "BLEU", "last", ""),
} | {
    f"{what}_of_heads_{side}_{when}": (
        f"{said}, mean over heads, by layer, {side} self-attention, {'before the first step' if when == 'first' else 'at the end'}",
        rf"eval/attention/{what}/{side}/(\d+)/self_attention/\d+", "layer", said.lower(), when, "",
    )
    for what, said in {"entropy": "Entropy (nats)", "sink": "Weight on the first token", "distance": "Mean distance (tokens)", "previous": "Weight on the token before",
                       "induction": "Induction score", "logit": "Largest logit"}.items()
    for side in ("encoder", "decoder")
    for when in ("first", "last")
} | {
    f"{what}_by_depth_{side}_{when}": (
        f"{said} by layer, {side}, {'before the first step' if when == 'first' else 'at the end'}", rf"eval/depth/{what}/{side}/(\d+)/feed_forward",
        "layer", f"{said.lower()}, feed-forward", when, "y",
    )
    for what, said in {"gradient": "Norm of the gradient", "stream": "Root mean square of the stream", "branch": "Branch to stream", "update": "Update to weight"}.items()
    for side in ("encoder", "decoder")
    for when in ("first", "last")
}  # fmt: skip
"""What runs measure at several places (train.evaluators): name -> what it shows, the metrics' pattern, the axes, which line, which axis is a
logarithm."""


def profiles(results: Results) -> list[Profile]:
    """Those for which there are numbers at two places or more, of which something can be drawn (updates are zero where a schedule ends at zero)."""
    found = []
    for name, (said, pattern, x_label, y_label, when, log) in PROFILES.items():
        lines = {
            arm.name: line
            for arm in results.arms.values()
            if (line := _line(arm, re.compile(pattern), when))
        }
        part = reads(results, pattern)
        profile = Profile(name, said + (f" ({part})" if part else ""), x_label, y_label, log, lines)
        if len(profile.places) > 1 and any(
            one.mean > 0 or "y" not in log for line in lines.values() for one in line.values()
        ):
            found.append(profile)
    return found


def reads(results: Results, metric: str) -> str:
    """How much of the text it is that a metric is measured on in these runs; "": all."""
    for config in [run.config for arm in results.arms.values() for run in arm.runs.values()]:
        if kind := measures(config.train.evaluators, metric):
            return kind.reads(config)
    return ""


def _line(arm: Arm, pattern: re.Pattern, when: str) -> dict[int, Mean]:
    """Place -> mean over seeds. A place is the number in a metric's name; of several metrics with the same
    number (heads of a layer) it is their mean."""
    runs = [run for run in arm.runs.values() if run.diverged is None or when == "first"]
    of = Run.first if when == "first" else Run.outcome
    places: dict[int, set[str]] = {}
    for key, at in [
        (key, at) for run in runs for key in run.names if (at := pattern.fullmatch(key))
    ]:
        places.setdefault(int(at.group(1)), set()).add(key)
    of_run = lambda run, keys: float(np.mean([of(run, key) for key in keys]))
    found = {
        at: mean([x for run in runs if math.isfinite(x := of_run(run, places[at]))])
        for at in sorted(places)
    }
    return {at: one for at, one in found.items() if one.count}
