"""Accuracy on synthetic tasks, at the lengths of training and beyond."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from transformer.data import probes
from transformer.data.store import Texts
from transformer.errors import look_up
from transformer.evaluation.evaluators.base import EVALUATORS, Evaluator, Metrics, Snapshot, Subject
from transformer.evaluation.losses import reading
from transformer.limits import Size
from transformer.output import count


@EVALUATORS.register("probe")
class Probe(Evaluator):
    """Accuracy on synthetic tasks (data/probes.py), at the training lengths and longer ones.

    Draws separate examples of each length. Short questions are few; they occur in training, too."""

    task: str = ""  # "": the task of data.train
    lengths: tuple[Size, ...] = ()  # (): the longest length of data.train, times 1, 2 and 4
    examples: Size = 256  # per length

    def __post_init__(self):
        if self.task:
            look_up(probes.TASKS, self.task, "train.evaluators: probe: task")

    def why_not(self, task):
        if not task.objective.has_pairs:
            return "requires questions and answers; set data.objective = 'seq2seq'"
        if not _has_task(task.data) and not (self.task and self.lengths):
            return "needs task and lengths, because data.format is not 'probe'"

    def measured_text(self, task):
        return f"{count(self.examples, 'example')} per length"

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields probe/exact/LENGTH and probe/tokens/LENGTH (of the task: data/probes.py). A token
        is correct if it is the most likely one given those before. `exact` is the share of answers
        whose tokens are all correct, as in greedy decoding; `tokens` is that of correct tokens."""
        config = subject.config
        trained = probes.parse(config.data.train) if _has_task(config.data) else None
        for length in self.lengths or tuple(times * trained.longest for times in (1, 2, 4)):
            task = probes.TaskSpec(self.task or trained.task, length, length, self.examples)
            store = _Answers(subject.data.tokenizer, task)
            longest = store.longest(config.model.is_encoder_decoder)
            if (model := reading(config.model, longest)) is None:
                break  # the position table is too short
            layout = {"length": longest, "target_length": 0, "packing": False, "buckets": ()}
            data = dataclasses.replace(config.data, **layout, mixture=(), mixture_temperature=0.0)
            at_length = subject.with_config(dataclasses.replace(config, data=data, model=model))
            exact, tokens = _right(at_length, store, snapshot)
            yield f"probe/exact/{length:05d}", exact
            yield f"probe/tokens/{length:05d}", tokens


def _has_task(data) -> bool:
    return data.format == "probe" and bool(data.train)


def _right(subject: Subject, store: "_Answers", snapshot: Snapshot) -> tuple[float, float]:
    """Returns (share of answers that are entirely correct, share of correct tokens)."""

    def right(params, batch):
        hidden, _, batch = subject.watch(params, batch)
        is_target_BxT = batch["weights"] > 0
        _, predicted_BxT = subject.predict(*hidden, batch["targets"])
        wrong_BxT = is_target_BxT & (predicted_BxT != batch["targets"])
        answers_B = jnp.any(is_target_BxT, axis=1)
        exact_B, right_BxT = answers_B & ~jnp.any(wrong_BxT, axis=1), is_target_BxT & ~wrong_BxT
        return jnp.stack([*map(jnp.sum, (exact_B, answers_B, right_BxT, is_target_BxT))])

    run = subject.program("right", right)
    data = dataclasses.replace(subject.data, stores={"": store})
    batches = data.batches("test", subject.share.sequences)
    counts = lambda batch: np.asarray(run(snapshot.params, subject.share.place(batch)))
    exact, answers, right_tokens, targets = sum(map(counts, batches.stream()))
    return float(exact / answers), float(right_tokens / targets)


@dataclasses.dataclass(frozen=True)
class _Answers:
    """Questions and answers in the form of a Store: token IDs, with eos at the end of each text."""

    tokenizer: object
    target_task: probes.TaskSpec

    def texts(self, part: str, side: int) -> Texts:
        texts = [example[side] for example in self.target_task.draw("probe ")]
        ids = [[*tokens, self.tokenizer.eos] for tokens in self.tokenizer.encode(texts)]
        return Texts(np.concatenate(ids).astype(np.int32), np.cumsum(list(map(len, ids))))

    def longest(self, is_encoder_decoder: bool) -> int:
        """Returns the length that holds every example."""
        source, target = (self.texts("test", side).lengths for side in (0, 1))
        if not is_encoder_decoder:
            return int((source + target).max())
        return int(max(source.max() + len(self.tokenizer.source_prefix_ids), target.max()))
