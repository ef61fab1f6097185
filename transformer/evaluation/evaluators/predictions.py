"""Evaluators of predictions: by length, by position, with a changed model, in another order."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np

from transformer.errors import nearest
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
