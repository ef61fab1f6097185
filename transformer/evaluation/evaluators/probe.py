"""Synthetic tasks at lengths that may be beyond those trained."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from transformer.checks import at_least
from transformer.data import probes
from transformer.data.store import Texts
from transformer.errors import UserError
from transformer.evaluation.evaluators.base import EVALUATORS, At, Evaluator, Found, Subject
from transformer.evaluation.losses import reading


@EVALUATORS.register("probe")
@dataclasses.dataclass(frozen=True)
class Probe(Evaluator):
    """Synthetic tasks (data/probes.py) at lengths that may be beyond those trained: of examples drawn for this, of each length, how many answers
    are right from end to end, and how many of their tokens. (Of short questions there are few, and training has seen them.)"""

    during: ClassVar[bool] = True

    task: str = ""  # "": the one that data.train names
    lengths: tuple[
        int, ...
    ] = ()  # (): the longest that data.train names, twice and four times that
    examples: int = 256  # of each length

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "examples")
        if self.task:
            probes.look_up_task("train.evaluators: probe: task", self.task)
        if not all(isinstance(length, int) and length > 0 for length in self.lengths):
            raise UserError(f"train.evaluators: probe: lengths: {self.lengths}; positive numbers")

    def why_not(self, task):
        if task.objective.columns != ("source", "target"):
            return "asks a question and expects an answer; data.objective = 'seq2seq' learns that"
        if task.data.format != "probe" and not (self.task and self.lengths):
            return "needs task and lengths, for data.format is not 'probe'"

    def reads(self, task):
        return f"{self.examples} examples of each length"

    def measure(self, subject: Subject, at: At) -> Found:
        """probe/exact/LENGTH, the share of answers of which every token is the most likely one given those before it, which is what greedy
        decoding would write; probe/tokens/LENGTH, the share of tokens. LENGTH is that of the task (data/probes.py)."""
        config = subject.config
        trained = probes.parse(config.data.train) if config.data.format == "probe" else None
        for length in self.lengths or tuple(times * trained.longest for times in (1, 2, 4)):
            store = _Answers(
                subject.data.store.tokenizer,
                probes.Wanted(self.task or trained.task, length, length, self.examples),
            )
            longest = store.longest(config.model.two_sides)
            if (model := reading(config.model, longest)) is None:
                break  # a table of positions ends
            data = dataclasses.replace(
                config.data, length=longest, target_length=0, packing=False, buckets=()
            )
            there = subject.changed(dataclasses.replace(config, data=data, model=model))
            yield from zip(
                (f"probe/exact/{length:05d}", f"probe/tokens/{length:05d}"),
                _right(there, store, at),
                strict=True,
            )


def _right(subject: Subject, store: "_Answers", at: At) -> tuple[float, float]:
    """(share of answers right from end to end, share of tokens)."""

    def right(params, batch):
        (h_BxTxE, head), _, batch = subject.watch(params, batch)
        asked_BxT = batch["weights"] > 0
        wrong_BxT = asked_BxT & (jnp.argmax(head(h_BxTxE), axis=-1) != batch["targets"])
        answers_B = jnp.any(asked_BxT, axis=1)
        exact = jnp.sum(answers_B & ~jnp.any(wrong_BxT, axis=1))
        return jnp.stack(
            [exact, jnp.sum(answers_B), jnp.sum(asked_BxT & ~wrong_BxT), jnp.sum(asked_BxT)]
        )

    run, batches = (
        subject.program("right", right),
        dataclasses.replace(subject.data, store=store).batches("test", subject.share.rows),
    )
    exact, answers, tokens, of = sum(
        np.asarray(run(at.params, subject.share.place(batch))) for batch in batches.stream()
    )
    return float(exact / answers), float(tokens / of)


@dataclasses.dataclass(frozen=True)
class _Answers:
    """Questions and answers as a Store has them: ids, each ended by eos."""

    tokenizer: object
    wanted: probes.Wanted

    def texts(self, part: str, side: int) -> Texts:
        ids = [
            [*one, self.tokenizer.eos]
            for one in self.tokenizer.encode(
                [example[side] for example in self.wanted.draw("probe ")]
            )
        ]
        return Texts(np.concatenate(ids).astype(np.int32), np.cumsum([len(one) for one in ids]))

    def longest(self, two_sides: bool) -> int:
        """The room that a row needs."""
        source, target = (self.texts("test", side).lengths for side in (0, 1))
        return int(
            max(source.max() + len(self.tokenizer.before_source), target.max())
            if two_sides
            else (source + target).max()
        )
