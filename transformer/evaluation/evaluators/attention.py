"""Where each head looks."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import jax
import numpy as np

from transformer.checks import plain
from transformer.evaluation.evaluators.base import EVALUATORS, At, Found, OneBatch, Subject
from transformer.evaluation.inside import OF_ONE_SIDE
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten, in_layer, part, where


@EVALUATORS.register("attention")
@dataclasses.dataclass(frozen=True)
class Attention(OneBatch):
    """Where each head of each layer looks, on one batch: entropy, weight on the first token, mean distance, weight on the token before,
    largest logit; and, of a decoder on random tokens said twice, the induction score (Olsson et al. 2022). The model's own attention may be
    any backend: it is computed once more, from queries and keys."""

    during: ClassVar[bool] = True

    def why_not(self, task):
        if not task.model.observes("heads"):
            return (
                f"is of heads that attend, which model.mixer = {plain(task.model.mixer)!r} has not"
            )

    def measure(self, subject: Subject, at: At) -> Found:
        """attention/WHAT/SIDE/LAYER/SUBLAYER/HEAD, on one batch; WHAT as in model/attention_statistics.py, `induction` being `repeated` on random
        tokens said twice."""
        look = subject.program(
            "attention",
            lambda params, batch: flatten(subject.watch(params, batch, "heads")[1]["heads"]),
        )
        of_text = dict(_by_head(subject.config.model, look(at.params, subject.batch)))
        for (what, here), values in of_text.items():
            if what != "repeated" and not (
                what in OF_ONE_SIDE and here.endswith("cross_attention")
            ):
                yield from (
                    (f"attention/{what}/{here}/{head:02d}", float(value))
                    for head, value in enumerate(values)
                )
        if subject.config.model.family == "decoder":
            for (what, here), values in _by_head(
                subject.config.model, look(at.params, _said_twice(subject))
            ):
                if what == "repeated":
                    yield from (
                        (f"attention/induction/{here}/{head:02d}", float(value))
                        for head, value in enumerate(values)
                    )


def _by_head(config: ModelConfig, told: dict) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """((WHAT, SIDE/LAYER/SUBLAYER), a number a head)."""
    for name, (path, place) in where(config, told).items():
        side, layer, rest = in_layer(name)
        for what, values in told[path][0].items():
            yield (
                (what, f"{side}/{layer:02d}/{rest.removesuffix('/heads')}"),
                np.asarray(part(values, place)),
            )


def _said_twice(subject: Subject) -> dict[str, jax.Array]:
    """The batch with random pieces of text, the second half of each row being the first once more."""
    whole = {name: np.array(x) for name, x in subject.data.batches(subject.part)[0].items()}
    rows, length = whole["inputs"].shape
    half = np.random.default_rng(0).choice(subject.data.tokenizer.text_ids, (rows, length // 2))
    whole["inputs"][:, : 2 * (length // 2)] = np.tile(half, 2)
    whole["segments"][:] = 1
    whole["positions"][:] = np.arange(length)
    here = subject.share.rows(rows)
    return subject.share.place({name: x[here] for name, x in whole.items() if name != "prefix"})
