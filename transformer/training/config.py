"""The configs of training: the optimizer, and the loop."""

import dataclasses
from typing import Protocol

from transformer.checks import Choice, Effect, at_least, in_unit_interval, one_of, positive, strict
from transformer.data.config import Task
from transformer.data.objectives.base import Objective
from transformer.errors import UserError
from transformer.parallel.config import MeshConfig
from transformer.training.optimizers import OPTIMIZERS


def _of_optimizers(field: str) -> Effect:
    """The field has an effect on the optimizers that read it."""
    names = [repr(name) for name, cls in OPTIMIZERS.items() if field in cls.fields]
    reads = lambda c: field in OPTIMIZERS[c.name].fields
    return Effect((field,), f"optimizer.name={' or '.join(names)}", reads)


_OPTIMIZER_EFFECTS = (
    *map(_of_optimizers, ("b1", "b2", "epsilon", "momentum")),
    Effect(("decay_fraction",), "optimizer.schedule='wsd'", lambda c: c.schedule == "wsd"),
    Effect(
        ("final_fraction",),
        "a schedule that decays to a last rate: optimizer.schedule='cosine', 'linear' or 'wsd'",
        lambda c: c.schedule in ("cosine", "linear", "wsd"),
    ),
)


@strict("optimizer", _OPTIMIZER_EFFECTS)
@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The update rule and its learning rate, a function of the step alone."""

    name: str = "adamw"  # adamw | adafactor | lion | sgd
    learning_rate: float = 1e-3  # the peak
    schedule: str = "cosine"  # inverse_sqrt | cosine | linear | wsd | constant
    warmup_steps: int = 1000  # linear, from 0
    decay_fraction: float = 0.2  # wsd: the share of the steps in which it decays, at the end
    final_fraction: float = 0.0  # cosine, linear, wsd: the last rate, as a share of the peak
    b1: float = 0.9
    b2: float = 0.98
    epsilon: float = 1e-9
    momentum: float = 0.9  # sgd
    weight_decay: float = 0.0  # decoupled; not on norms, biases, positions' tables and gates
    clip_norm: float = 0.0  # of the global gradient; 0: off

    def __post_init__(self):
        one_of("optimizer.name", self.name, OPTIMIZERS)
        one_of(
            "optimizer.schedule",
            self.schedule,
            ("inverse_sqrt", "cosine", "linear", "wsd", "constant"),
        )
        at_least(
            "optimizer",
            self,
            0,
            "learning_rate",
            "warmup_steps",
            "weight_decay",
            "clip_norm",
        )
        if not 0 <= self.final_fraction <= 1:
            raise UserError(f"optimizer.final_fraction: {self.final_fraction} must lie in [0, 1]")
        positive("optimizer", self, "epsilon")
        in_unit_interval("optimizer", self, "b1", "b2", "momentum")
        if not 0 < self.decay_fraction <= 1:
            raise UserError(f"optimizer.decay_fraction: {self.decay_fraction} must lie in (0, 1]")
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            raise UserError(
                "optimizer.warmup_steps: 0, but schedule 'inverse_sqrt' is measured in warm-ups; set it to 1 or more"
            )


_TRAIN_EFFECTS = (
    Effect(
        ("average_checkpoints",),
        "as many checkpoints in train.steps: a smaller train.checkpoint_every (0 saves at the end only)",
        lambda c: c.checkpoint_every and -(-c.steps // c.checkpoint_every) >= c.average_checkpoints,
    ),
    Effect(
        ("init_new", "init_drop", "init_positions"),
        "parameters to start from: train.init_from",
        lambda c: c.init_from,
    ),
    Effect(
        ("profile",),
        "a step to trace: train.steps > 10, for tracing begins there",
        lambda c: c.steps > 10,
    ),
)


@strict("train", _TRAIN_EFFECTS)
@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop: how long, which loss, how often what."""

    steps: int = 1000
    label_smoothing: float = 0.0
    z_loss: float = 0.0  # weight of log(Z)^2, which keeps logits from drifting
    accumulate: int = (
        1  # micro-batches a step: less memory, the same loss (dropout draws other masks)
    )
    ema_decay: float = (
        0.0  # exponential moving average of the parameters, used for evaluation; 0: off
    )
    average_checkpoints: int = 0  # evaluate the mean of the last n checkpoints; 0: the last alone
    init_from: str = (
        ""  # start from the parameters of a run, or of a Hugging Face directory (extra [hf])
    )
    init_new: tuple[
        str, ...
    ] = ()  # of this model, what starts anew nevertheless: ("classifier/*",)
    init_drop: tuple[str, ...] = ()  # of that model, what is left out: ("unembedding/*",)
    init_positions: str = (
        "same"  # same | extend | interpolate: a learned table of positions of another length
    )
    log_every: int = 50
    eval_every: int = 0  # 0: at the end only
    eval_batches: int = 0  # of the validation side, during training; 0: all
    evaluators: tuple[
        Choice, ...
    ] = ()  # what else is measured (evaluation/evaluators/): loss_by_position | depth_profile | attention | ..., or dict(name=...)
    checkpoint_every: int = 0  # 0: at the end only
    keep_checkpoints: int = 2
    strict_checkpoints: bool = (
        False  # refuse to resume from an older checkpoint where the newest is damaged
    )
    tensorboard: bool = True
    wandb: str = ""  # a Weights & Biases project; "": off
    profile: int = 0  # trace so many steps, from the 10th, into the run directory; 0: off

    def __post_init__(self):
        at_least("train", self, 1, "steps", "accumulate", "log_every", "keep_checkpoints")
        at_least(
            "train",
            self,
            0,
            "eval_every",
            "eval_batches",
            "checkpoint_every",
            "average_checkpoints",
            "z_loss",
        )
        at_least("train", self, 0, "profile")
        in_unit_interval("train", self, "label_smoothing", "ema_decay")
        one_of("train.init_positions", self.init_positions, ("same", "extend", "interpolate"))
        if self.average_checkpoints == 1:
            raise UserError(
                "train.average_checkpoints: the mean of 1 checkpoint is the last alone, as with 0; "
                "set it to 0, or to 2 or more"
            )
        if self.average_checkpoints > self.keep_checkpoints:
            raise UserError(
                f"train.average_checkpoints: {self.average_checkpoints}, but train.keep_checkpoints = {self.keep_checkpoints} are kept; raise it"
            )
        if self.average_checkpoints > 1 and self.ema_decay:
            raise UserError(
                "train.average_checkpoints and train.ema_decay: two ways to average; set one of them to 0"
            )


class TrainTask(Task, Protocol):
    """What of an experiment decides how its parameters are trained."""

    objective: Objective
    optimizer: OptimizerConfig
    train: TrainConfig
    mesh: MeshConfig
