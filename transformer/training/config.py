"""Configs of the optimizer and of the training loop."""

import itertools
from typing import Annotated, Literal

from transformer.checks import Choice, Effect, strict
from transformer.errors import UserError
from transformer.limits import POSITIVE, Count, NonNegative, Positive, Rate, Size, at_least, at_most
from transformer.training.optimizers.base import OPTIMIZERS, Optimizer


def _of_optimizers(field: str) -> Effect:
    names = [repr(name) for name, cls in OPTIMIZERS.items() if field in cls.fields]
    reads = lambda c: field in c.rule.fields
    return Effect((field,), f"optimizer.name={' or '.join(names)}", reads)


_OPTIMIZER_EFFECTS = (
    *map(_of_optimizers, ("b1", "b2", "epsilon", "momentum")),
    Effect(("decay_fraction", "decay_ends"),
           "optimizer.schedule='wsd'", lambda c: c.schedule == "wsd"),
    Effect(("final_fraction",),
           "a schedule with a final rate: optimizer.schedule='cosine', 'linear' or 'wsd'",
           lambda c: c.schedule in ("cosine", "linear", "wsd")),
)  # fmt: skip

_TRAIN_EFFECTS = (
    Effect(("average_checkpoints",),
           "as many checkpoints in train.steps: a smaller train.checkpoint_every (0 saves only at "
           "the end)",
           lambda c: (c.checkpoint_every
                      and -(-c.steps // c.checkpoint_every) >= c.average_checkpoints)),
    Effect(("init_new", "init_drop", "init_positions", "init_kv_heads", "init_encoder"),
           "parameters to start from: train.init_from", lambda c: c.init_from),
    Effect(("profile",), "a step to trace: train.steps > 10, because tracing begins after step 10",
           lambda c: c.steps > 10),
)  # fmt: skip


@strict("optimizer", _OPTIMIZER_EFFECTS)
class OptimizerConfig:
    """The update rule and its learning rate, which depends only on the step."""

    name: Choice = "adamw"  # adamw | muon | adafactor | lion | sgd, or dict(name=...)
    learning_rate: NonNegative = 1e-3  # peak learning rate
    schedule: Literal["inverse_sqrt", "cosine", "linear", "wsd", "constant"] = "cosine"
    warmup_steps: Count = 1000  # steps of linear warm-up from 0
    # wsd: fraction of all steps, at the end, in which the rate decays
    decay_fraction: Annotated[float, POSITIVE, at_most(1)] = 0.2
    # wsd: steps, before the last, at which earlier decays end. The run is evaluated there, and the
    # rate returns to its peak (WSD-S; Wen et al. 2024).
    decay_ends: tuple[int, ...] = ()
    # cosine, linear, wsd: final rate / peak rate
    final_fraction: Annotated[float, at_least(0), at_most(1)] = 0.0
    b1: Rate = 0.9  # decay of the first moment
    b2: Rate = 0.98  # decay of the second moment
    epsilon: Positive = 1e-9  # added to the denominator
    momentum: Rate = 0.9  # decay of the sum (sgd) or mean (muon) of gradients
    # decoupled; not for norms, biases, position tables and gates
    weight_decay: NonNegative = 0.0
    # maximum global norm of the gradient; 0: off
    clip_norm: Annotated[NonNegative, at_most(10**9, "above it, nothing is clipped")] = 0.0

    def __post_init__(self):
        OPTIMIZERS.build(self.name)
        if any(b <= a for a, b in itertools.pairwise((self.warmup_steps, *self.decay_ends))):
            first = f"after warmup_steps = {self.warmup_steps}"
            raise UserError(f"optimizer.decay_ends: {self.decay_ends} must increase, {first}")
        if self.schedule == "inverse_sqrt" and not self.warmup_steps:
            problem = "0, but schedule 'inverse_sqrt' divides by it"
            raise UserError(f"optimizer.warmup_steps: {problem}; set it to 1 or more")

    @property
    def rule(self) -> Optimizer:
        """The optimizer that `name` selects, with its options."""
        return OPTIMIZERS.build(self.name)


@strict("train", _TRAIN_EFFECTS)
class TrainConfig:
    """The training loop: duration, loss, evaluation, checkpoints and logs."""

    steps: Size = 1000  # updates of the parameters
    label_smoothing: Rate = 0.0  # probability mass of a target that is spread over the vocabulary
    z_loss: NonNegative = 0.0  # weight of (log Z)^2, which keeps the logits from drifting
    # Micro-batches per step. More of them need less memory; only dropout masks differ.
    accumulate: Size = 1
    ema_decay: Rate = 0.0  # moving average of the parameters, used for evaluation; 0: off
    average_checkpoints: Count = 0  # evaluate the mean of the last n checkpoints; 0: only the last
    init_from: str = ""  # initialize from a run or from a Hugging Face directory (extra [hf])
    init_new: tuple[str, ...] = ()  # parameters of this model to initialize anew: ("classifier/*",)
    init_drop: tuple[str, ...] = ()  # parameters of init_from to ignore: ("unembedding/*",)
    # position tables of another length
    init_positions: Literal["same", "extend", "interpolate"] = "same"
    # More key/value heads than in this model: same (refused) | mean of each group ("GQA", 2023)
    init_kv_heads: Literal["same", "mean"] = "same"
    # what a decoder lacks in an encoder-decoder: same (refused) | decoder: copied ("T5Gemma", 2025)
    init_encoder: Literal["same", "decoder"] = "same"
    log_every: Size = 50  # steps between log lines
    eval_every: Count = 0  # steps between evaluations; 0: only at the end
    eval_batches: Count = 0  # validation batches in each evaluation during training; 0: all
    # loss_by_position | depth_profile | attention | ... (evaluation/evaluators/), or dict(name=...)
    evaluators: tuple[Choice, ...] = ()
    checkpoint_every: Count = 0  # steps between checkpoints; 0: only at the end
    keep_checkpoints: Size = 2  # number of checkpoints to keep; older ones are deleted
    strict_checkpoints: bool = False  # if the newest checkpoint is damaged, raise an error
    tensorboard: bool = True  # also write metrics for TensorBoard
    wandb: str = ""  # a Weights & Biases project; "": off
    # Seconds after which a step counts as hung, and the process ends with all stacks; 0: ten median
    # steps, at least 300. Compilation, evaluations and checkpoints do not count.
    step_deadline: NonNegative = 0.0
    profile: Count = 0  # trace this many steps, after the 10th, into the run directory; 0: off

    def __post_init__(self):
        field = "train.average_checkpoints"
        if self.average_checkpoints == 1:
            raise UserError(f"{field}: 1 has no effect; set it to 0, or to 2 or more")
        if self.average_checkpoints > self.keep_checkpoints:
            kept = f"but train.keep_checkpoints = {self.keep_checkpoints}"
            way_out = "increase train.keep_checkpoints"
            raise UserError(f"{field}: {self.average_checkpoints}, {kept}; {way_out}")
        if self.average_checkpoints > 1 and self.ema_decay:
            problem = "both average the parameters; set one of them to 0"
            raise UserError(f"{field} and train.ema_decay: {problem}")
