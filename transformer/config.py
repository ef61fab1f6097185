"""The experiment: one frozen dataclass that contains the configs of all packages.

Configs are validated when they are built. config_io.py reads experiments from files."""

import dataclasses
from typing import Literal

from transformer.checks import Choice, Effect, strict
from transformer.data.config import DataConfig, TokenizerConfig
from transformer.data.objectives.base import Objective
from transformer.decoding.config import DecodingConfig
from transformer.errors import UserError
from transformer.evaluation.evaluators import EVALUATORS
from transformer.limits import Count
from transformer.model.config import ModelConfig
from transformer.model.parametrizations.base import PARAMETRIZATIONS
from transformer.parallel.config import MeshConfig
from transformer.training.config import OptimizerConfig, TrainConfig
from transformer.training.optimizers import OPTIMIZERS

__all__ = [
    "Choice", "DataConfig", "DecodingConfig", "Experiment", "MeshConfig", "ModelConfig",
    "OptimizerConfig", "TokenizerConfig", "TrainConfig",
]  # fmt: skip

_EFFECTS = (
    Effect(("model.pipeline_microbatches",), "stages: mesh.stage > 1", lambda c: c.mesh.stage != 1),
    Effect(("train.z_loss",), "an objective that predicts tokens",
           lambda c: c.objective.predicts_tokens),
    Effect(("train.init_positions",), "a position table: model.position='learned'",
           lambda c: bool(c.model.position_table)),
    Effect(tuple(f"decoding.{field.name}" for field in dataclasses.fields(DecodingConfig)),
           "a model that generates text (data.objective: causal_lm, prefix_lm or seq2seq)",
           lambda c: c.objective.generates_text),
)  # fmt: skip


@strict("", _EFFECTS)
class Experiment:
    """All settings of a run."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    decoding: DecodingConfig = DecodingConfig()
    mesh: MeshConfig = MeshConfig()
    seed: Count = 0  # random seed of the parameters, dropout and the data order
    # the platform to train on; any other raises an error
    platform: Literal["auto", "cpu", "gpu", "tpu", "accelerator"] = "auto"

    def __post_init__(self):
        data, model, train, optimizer = self.data, self.model, self.train, self.optimizer
        for field in ("length", "target_length"):
            if (length := getattr(data, field)) > model.max_length:
                problem = f"{length} is longer than model.max_length = {model.max_length}"
                raise UserError(f"data.{field}: {problem}; reduce it, or increase model.max_length")
        if data.batch_size % train.accumulate:
            problem = f"{train.accumulate} does not divide data.batch_size = {data.batch_size}"
            raise UserError(f"train.accumulate: {problem}; change one of them")
        if optimizer.decay_ends and optimizer.decay_ends[-1] >= train.steps:
            problem = f"{optimizer.decay_ends[-1]} must be less than train.steps = {train.steps}"
            raise UserError(f"optimizer.decay_ends: {problem}, where the last decay ends")
        self._check_parametrization()
        objective, name = self.objective, self.objective.name
        if model.family not in objective.families:
            needed = f"a model of family {' or '.join(map(repr, objective.families))}"
            problem = f"{name!r} trains {needed}, but model.family = {model.family!r}"
            raise UserError(f"data.objective: {problem}; change one of them")
        if objective.predicts_tokens and not model.lm_head:
            raise UserError(f"data.objective: {name!r} predicts tokens; set model.lm_head=True")
        if model.prefix_lm and not objective.has_prefix:
            problem = f"True, but data.objective {name!r} defines no prefix"
            raise UserError(f"model.prefix_lm: {problem}; set it to False")
        if data.target_length and not model.is_encoder_decoder:
            problem = f"{data.target_length}, but model.family = {model.family!r} has one stack"
            raise UserError(f"data.target_length: {problem}; leave it at 0")
        for field, limit in (("beam_size", vocab := model.vocab_size), ("top_k", vocab - 1)):
            if (number := getattr(self.decoding, field)) > limit:
                problem = f"{number:,} is too large for model.vocab_size = {vocab:,}"
                raise UserError(f"decoding.{field}: {problem}; at most {limit:,}")
        for evaluator in map(EVALUATORS.build, train.evaluators):
            if problem := evaluator.why_not(self):
                raise UserError(f"train.evaluators: {evaluator.name} {problem}")
        if problem := objective.check(self):
            raise UserError(f"data.objective: {name!r} {problem}")
        # Checks the objective of each source. Evaluators and decoding need only that of the run.
        alone = {"train": dataclasses.replace(train, evaluators=()), "decoding": DecodingConfig()}
        for source in data.sources.values() if data.mixture else ():
            dataclasses.replace(self, data=source, **alone)

    def _check_parametrization(self) -> None:
        chosen, rule = PARAMETRIZATIONS.build(self.model.parametrization), self.optimizer.rule
        if self.model.base != self.model and not rule.scales_with_size:
            names = [repr(n) for n in OPTIMIZERS if OptimizerConfig(name=n).rule.scales_with_size]
            problem = f"{chosen.name!r} has no rule for optimizer.name = {rule.name!r}"
            raise UserError(f"model.parametrization: {problem}; use {' or '.join(names)}")
        if "epsilon" in chosen.sets and "epsilon" not in rule.fields:
            problem = f"a multiplier of epsilon has no effect on optimizer.name = {rule.name!r}"
            raise UserError(f"model.parametrization: {problem}; leave it out")

    @property
    def objective(self) -> Objective:
        """The objective that `data.objective` chooses, with its options."""
        return self.data.chosen

    def on(self, mesh: MeshConfig) -> "Experiment":
        """Returns the same experiment on another mesh. Without pipeline stages,
        `model.pipeline_microbatches` is reset to 0."""
        model = self.model if mesh.stage != 1 else self.model.part(pipeline_microbatches=0)
        return dataclasses.replace(self, mesh=mesh, model=model)
