"""Evaluators of predictions: by length and position, with a changed model or order, on probes."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np

from transformer import output
from transformer.data import probes
from transformer.data.store import Texts
from transformer.errors import look_up, nearest
from transformer.evaluation import losses
from transformer.evaluation.evaluators.base import EVALUATORS, NEEDS_TOKENS, Evaluator, OneBatch
from transformer.evaluation.subject import Metrics, Snapshot, Subject, as_documents
from transformer.limits import Count, Size
from transformer.mapping import apply_overrides


@EVALUATORS.register("extrapolation")
class Extrapolation(Evaluator):
    """Loss of a language model in sequences of 1, 2, 4, ..., `times` training lengths.

    The sequences do not overlap. With `sliding`, it is also measured in overlapping ones, whose
    last tokens alone count; the tokens before them are context. See Press et al. (2022)."""

    in_training = False
    metric_prefixes = ("extrapolation_sliding", "context")

    times: Size = 16  # a power of two
    tokens: Count = 65536  # per length, from the start of the text; 0: all
    sliding: bool = True

    def __post_init__(self):
        if self.times & (self.times - 1):
            raise self.error(f"times: {self.times} must be a power of two")
        if self.times == 1 and not self.sliding:
            raise self.error("sliding: False has no effect with times=1; leave it out")

    def why_not(self, task):
        if task.model.family != "decoder" or not task.objective.scores_every_token:
            return "requires a decoder that predicts every token (causal_lm)"
        model, longest = task.model, task.data.length * self.times
        if longest > model.max_length and model.position_table:
            problem = f"reads sequences of data.length * times = {longest} tokens"
            end = f"ends at model.max_length = {model.max_length}"
            why = f"the table of model.position = {model.position_table!r} {end}"
            return f"{problem}, but {why}; lower times, or raise model.max_length"

    def measured_text(self, task):
        return f"the first {self.tokens:,} tokens" if self.tokens else ""

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields three metrics for each LENGTH:

        - extrapolation: nats per token in sequences of this length that do not overlap;
        - context: mean number of tokens before each token in them: half the length, or less if
          several texts share a sequence;
        - extrapolation_sliding: nats per token of the last training length of sequences that start
          one training length apart. The first tokens of the text have less context."""
        config, length = subject.config, subject.config.data.length
        for times in (2**n for n in range(self.times.bit_length())):
            longer = length * times
            if (model := losses.reading(config.model, longer)) is None:
                break  # the model has a parameter per position, up to max_length
            train = dataclasses.replace(config.train, accumulate=1, evaluators=())
            devices = subject.mesh.size
            count = max(config.data.batch_size // times // devices, 1) * devices
            overlaps = {"extrapolation": 0}
            if self.sliding and times > 1:
                overlaps["extrapolation_sliding"] = longer - length
            for name, overlap in overlaps.items():
                sizes = {"length": longer, "batch_size": count, "eval_overlap": overlap}
                data = dataclasses.replace(config.data, buckets=(), **sizes)
                max_batches = -(-self.tokens // (count * (longer - overlap))) if self.tokens else 0
                at_length = dataclasses.replace(config, data=data, model=model, train=train)
                mean, context = losses.mean(subject.with_config(at_length), snapshot, max_batches)
                yield f"{name}/{longer:06d}", mean
                if not overlap:
                    yield f"context/{longer:06d}", context


@EVALUATORS.register("loss_by_position")
class LossByPosition(Evaluator):
    """Loss by position in the sequence, in `parts` equal parts. It shows the value of context."""

    parts: Size = 8

    def why_not(self, task):
        return None if task.objective.predicts_tokens else NEEDS_TOKENS

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields loss_by_position/POSITION: nats per token from here to the next POSITION. Where
        several documents share a sequence, positions count within the document."""
        data = subject.config.data
        length = data.decoder_length if subject.config.model.is_encoder_decoder else data.length
        edges, sums = np.linspace(0, length, self.parts + 1).astype(int), np.zeros((2, length))
        for losses_BxT, positions_BxT, weights_BxT in losses.by_token(subject, snapshot):
            np.add.at(sums[0], positions_BxT, losses_BxT)
            np.add.at(sums[1], positions_BxT, weights_BxT)
        for first, last in itertools.pairwise(edges):
            if weight := sums[1, first:last].sum():
                yield f"loss_by_position/{first:05d}", float(sums[0, first:last].sum() / weight)


@EVALUATORS.register("loss_with")
class LossWith(Evaluator):
    """Loss of the same parameters with one field of the model changed.

    Example: `dict(name="loss_with", change="model.causal=True")`."""

    change: str = ""

    def __post_init__(self):
        if not re.fullmatch(r"model\.[\w.]+=.+", self.change):
            form = "must be a field of the model and its value: 'model.window=16'"
            raise self.error(f"change: {self.change!r} {form}")

    def why_not(self, task):
        field = self.change.removeprefix("model.").partition("=")[0].partition(".")[0]
        names = [f.name for f in dataclasses.fields(task.model)]
        if field not in names:
            return f"changes {self.change}: no such field; {nearest(field, names)}"
        return None if task.objective.predicts_tokens else NEEDS_TOKENS

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields loss_with/FIELD=VALUE: nats per token with this field changed."""
        field, _, value = self.change.partition("=")
        changed = apply_overrides(subject.config, {field: value})
        if losses.shapes(changed.model) != losses.shapes(subject.config.model):
            problem = f"{self.change} changes the names or shapes of parameters"
            raise self.error(f"{problem}; choose another")
        yield f"loss_with/{self.change}", losses.mean(subject.with_config(changed), snapshot)[0]


@EVALUATORS.register("order")
class Order(OneBatch):
    """Change of the last prediction of a sequence when the tokens before it are permuted.

    Measured on one batch. It is zero for a model that ignores the order of tokens."""

    def why_not(self, task):
        if task.model.is_encoder_decoder or not task.objective.predicts_tokens:
            return "requires a single-stack model with target tokens"

    def measure(self, subject: Subject, snapshot: Snapshot) -> Metrics:
        """Yields order/kl: sum of p log(p / q) at the last position, in nats, mean over sequences.
        p is the prediction for the original sequence, q that after a permutation of the tokens
        before the last. Each sequence is read as one document."""

        def last_log_probs(params, batch):
            (h_BxTxE, head), _, batch = subject.watch(params, batch)
            at_last = batch["positions"] == jnp.max(batch["positions"], axis=1, keepdims=True)
            h_Bx1xE = jnp.sum(jnp.where(at_last[..., None], h_BxTxE, 0), axis=1, keepdims=True)
            return jax.nn.log_softmax(head(h_Bx1xE)[:, 0])

        batch = subject.data.batches(subject.part)[0]
        count, length = batch["inputs"].shape
        full = np.flatnonzero((batch["segments"] > 0).all(axis=1))
        if not len(full):
            raise self.error("needs a sequence without padding; set data.packing=True")
        chosen = np.resize(full, count)  # repeated if few are full, to keep the batch's shape
        inputs = batch["inputs"][chosen]
        permutation = np.random.default_rng(0).permutation(length - 1)
        permuted = np.concatenate([inputs[:, permutation], inputs[:, -1:]], axis=1)
        batch = {name: x[chosen] for name, x in batch.items() if not name.startswith("label")}
        run = subject.program(self, last_log_probs)
        batches = [as_documents(subject, batch, tokens) for tokens in (inputs, permuted)]
        logp, logq = (np.asarray(run(snapshot.params, x)) for x in batches)
        yield "order/kl", float(np.mean(np.sum(np.exp(logp) * (logp - logq), axis=-1)[: len(full)]))


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
        return f"{output.count(self.examples, 'example')} per length"

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
            if (model := losses.reading(config.model, longest)) is None:
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
