"""What a run may be measured by beside its loss: the names and options that `train.evaluators` chooses from.

How each is measured stands in `evaluators.py`.
"""

import dataclasses
import re
from typing import ClassVar

from transformer.checks import at_least, build_choice, plain
from transformer.data import probes
from transformer.errors import UserError, nearest

_NO_TOKENS = "is of models that are asked for tokens, and data.objective asks for classes"


class Kind:
    """What may be measured."""

    name: ClassVar[str]
    during: ClassVar[bool]  # at every evaluation in training, not in `evaluate` alone
    others: ClassVar[
        tuple[str, ...]
    ] = ()  # what its metrics are called beside `name`: eval/depth/..., test/context/...

    def why_not(self, experiment) -> str | None:
        """Why it says nothing of such an experiment, to be read behind its name; None if it does."""
        return None

    def reads(self, experiment) -> str:
        """How much of the text it is measured on; "": all."""
        return ""


class _OneBatch(Kind):
    """What is measured on one batch."""

    def reads(self, experiment):
        return f"one batch of {experiment.data.batch_size} rows"


@dataclasses.dataclass(frozen=True)
class LossByPosition(Kind):
    """Loss by the place in the row, in so many parts of equal length: what context is worth."""

    name: ClassVar[str] = "loss_by_position"
    during: ClassVar[bool] = True

    parts: int = 8

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "parts")

    def why_not(self, experiment):
        return None if experiment.objective.asks_for_tokens else _NO_TOKENS


@dataclasses.dataclass(frozen=True)
class Extrapolation(Kind):
    """Loss of a language model in rows of the training length, twice, four times, ... `times` as long (Press et al. 2022): in rows that
    do not overlap, and, `sliding`, of the last tokens of each row alone, which have the row before them as context."""

    name: ClassVar[str] = "extrapolation"
    during: ClassVar[bool] = False
    others: ClassVar[tuple[str, ...]] = ("extrapolation_sliding", "context")

    times: int = 16  # a power of two
    tokens: int = 65536  # of each length, from the beginning of the text; 0: all
    sliding: bool = True

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "times")
        at_least("train.evaluators", self, 0, "tokens")
        if self.times & (self.times - 1):
            raise UserError(f"train.evaluators: extrapolation: times: {self.times}; a power of two")
        if self.times == 1 and not self.sliding:
            raise UserError(
                "train.evaluators: extrapolation: sliding: False has no effect with times=1; leave it out"
            )

    @property
    def multiples(self) -> tuple[int, ...]:
        """1, 2, 4, ..., times."""
        return tuple(2**n for n in range(self.times.bit_length()))

    def why_not(self, experiment):
        if experiment.model.family != "decoder" or not experiment.objective.every_token:
            return "is of decoders that are asked for every token (causal_lm)"
        model, longest = experiment.model, experiment.data.length * self.times
        if longest > model.max_length and model.has_position_table:
            return (
                f"reads rows of data.length * times = {longest} tokens, but the table of model.position = {plain(model.position)!r} "
                f"ends at model.max_length = {model.max_length}; lower times, or raise model.max_length"
            )

    def reads(self, experiment):
        return f"the first {self.tokens:,} tokens" if self.tokens else ""


@dataclasses.dataclass(frozen=True)
class DepthProfile(_OneBatch):
    """By layer and sublayer, on one batch: how large the residual stream and the branch beside it are, the gradient, and what one update
    changes (Xiong et al. 2020; Liu et al. 2020)."""

    name: ClassVar[str] = "depth_profile"
    during: ClassVar[bool] = True
    others: ClassVar[tuple[str, ...]] = ("depth",)

    def why_not(self, experiment):
        return (
            "is of a residual stream, which model.family = 'recurrent_encoder_decoder' has not"
            if "recurrent" in experiment.model.family
            else None
        )


@dataclasses.dataclass(frozen=True)
class Attention(_OneBatch):
    """Where each head of each layer looks, on one batch: entropy, weight on the first token, mean distance, weight on the token before,
    largest logit; and, of a decoder on random tokens said twice, the induction score (Olsson et al. 2022). The model's own attention may be
    any backend: it is computed once more, from queries and keys."""

    name: ClassVar[str] = "attention"
    during: ClassVar[bool] = True

    def why_not(self, experiment):
        if "recurrent" in experiment.model.family:
            return "is of heads, which model.family = 'recurrent_encoder_decoder' has not"
        if not experiment.model.observes("heads"):
            return f"is of heads that attend, which model.mixer = {plain(experiment.model.mixer)!r} has not"


@dataclasses.dataclass(frozen=True)
class LogitLens(_OneBatch):
    """What the head would say if the stack ended behind each layer (nostalgebraist 2020), on one batch: its loss, and how often it says what
    the last layer says."""

    name: ClassVar[str] = "logit_lens"
    during: ClassVar[bool] = True
    others: ClassVar[tuple[str, ...]] = ("lens",)

    def why_not(self, experiment):
        if "recurrent" in experiment.model.family:
            return (
                "is of a residual stream, which model.family = 'recurrent_encoder_decoder' has not"
            )
        return None if experiment.objective.asks_for_tokens else _NO_TOKENS


@dataclasses.dataclass(frozen=True)
class Order(_OneBatch):
    """What the order of tokens is worth to the model: how far its prediction at the last place of a row moves when all tokens before it are put
    in another order, on one batch. Who is blind to order does not notice."""

    name: ClassVar[str] = "order"
    during: ClassVar[bool] = True

    def why_not(self, experiment):
        if experiment.model.two_sides or not experiment.objective.asks_for_tokens:
            return "is of models of one stack that are asked for tokens"


@dataclasses.dataclass(frozen=True)
class LossWith(Kind):
    """Loss of the same parameters with one field of the model changed: `dict(name="loss_with", change="model.causal=True")`."""

    name: ClassVar[str] = "loss_with"
    during: ClassVar[bool] = True

    change: str = ""

    def __post_init__(self):
        if not re.fullmatch(r"model\.[\w.]+=.+", self.change):
            raise UserError(
                f"train.evaluators: loss_with: change: {self.change!r}; a field of the model and its value: 'model.window=16'"
            )

    def why_not(self, experiment):
        field = self.change.removeprefix("model.").partition("=")[0].partition(".")[0]
        names = [one.name for one in dataclasses.fields(experiment.model)]
        if field not in names:
            return f"changes {self.change}: no such field; {nearest(field, names)}"
        return None if experiment.objective.asks_for_tokens else _NO_TOKENS


@dataclasses.dataclass(frozen=True)
class Probe(Kind):
    """Synthetic tasks (data/probes.py) at lengths that may be beyond those trained: of examples drawn for this, of each length, how many answers
    are right from end to end, and how many of their tokens. (Of short questions there are few, and training has seen them.)"""

    name: ClassVar[str] = "probe"
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

    def why_not(self, experiment):
        if experiment.objective.columns != ("source", "target"):
            return "asks a question and expects an answer; data.objective = 'seq2seq' learns that"
        if experiment.data.format != "probe" and not (self.task and self.lengths):
            return "needs task and lengths, for data.format is not 'probe'"

    def reads(self, experiment):
        return f"{self.examples} examples of each length"


@dataclasses.dataclass(frozen=True)
class BleuByLength(Kind):
    """BLEU of translations by the number of words in the source."""

    name: ClassVar[str] = "bleu_by_length"
    during: ClassVar[bool] = False

    words: int = 5  # in each group so many more than in the one before

    def __post_init__(self):
        at_least("train.evaluators", self, 1, "words")

    def why_not(self, experiment):
        return (
            None
            if experiment.objective.columns == ("source", "target")
            else "is of what translates a source; data.objective = 'seq2seq' learns that"
        )


KINDS = {
    kind.name: kind
    for kind in (
        LossByPosition,
        Extrapolation,
        LossWith,
        DepthProfile,
        Attention,
        LogitLens,
        Order,
        Probe,
        BleuByLength,
    )
}


def measures(specs, metric: str):
    """Which of these kinds it is that a metric comes from: test/context/000128; None: none of them."""
    part = f"{metric}/".split("/")[1]
    return next((kind for kind in map(build, specs) if part in (kind.name, *kind.others)), None)


def build(spec):
    """The kind that a config chooses: `"depth_profile"`, or `dict(name="extrapolation", times=8)`. Raises UserError."""
    return build_choice("train.evaluators", KINDS, spec)
