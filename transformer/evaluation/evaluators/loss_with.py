"""Loss with one field of the model changed."""

import dataclasses
import re

from transformer.errors import nearest
from transformer.evaluation import losses
from transformer.evaluation.evaluators.base import EVALUATORS, NEEDS_TOKENS, Evaluator
from transformer.evaluation.subject import Metrics, Snapshot, Subject
from transformer.mapping import apply_overrides


@EVALUATORS.register("loss_with")
class LossWith(Evaluator):
    """Loss of the same parameters with one field of the model changed.

    Example: `dict(name="loss_with", change="model.causal=True")`.
    """

    in_training = True

    change: str = ""

    def __post_init__(self):
        if not re.fullmatch(r"model\.[\w.]+=.+", self.change):
            way_out = "must be a field of the model and its value: 'model.window=16'"
            raise self.error(f"change: {self.change!r} {way_out}")

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
            way_out = "choose a field that keeps them"
            raise self.error(f"{self.change} changes the shapes of parameters; {way_out}")
        yield f"loss_with/{self.change}", losses.mean(subject.with_config(changed), snapshot)[0]
