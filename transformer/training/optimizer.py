"""The update rule and its learning rate; both functions of the step alone, so a run resumes without a memory of its own."""

import jax
import jax.numpy as jnp
import optax

from transformer.checks import is_zero
from transformer.training.config import OptimizerConfig
from transformer.training.optimizers import OPTIMIZERS

Number = float | jax.Array
"""A hyperparameter; traced where the runs of one program differ in it (lab/together.py)."""


def schedule(
    config: OptimizerConfig, steps: int, learning_rate: Number | None = None
) -> optax.Schedule:
    """Update number (from 0) -> learning rate. All start with a linear warm-up to the peak over
    `warmup_steps`. The peak is `learning_rate`, by default the config's.

    inverse_sqrt   peak * min(n / w, sqrt(w / n)), n = update + 1, w = warm-up: Vaswani et al. 2017, eq. 3, whose peak
                   is (d_model * w)^(-1/2)
    cosine, linear from the peak down to final_fraction * peak at the last step
    wsd            at the peak, then linear over the last decay_fraction of all steps (warmup-stable-decay)
    constant       at the peak
    """
    peak = config.learning_rate if learning_rate is None else learning_rate
    final, warmup = peak * config.final_fraction, config.warmup_steps
    if config.schedule == "inverse_sqrt":

        def inverse_sqrt(update):
            n = jnp.asarray(update, jnp.float32) + 1
            return peak * jnp.minimum(n / warmup, jnp.sqrt(warmup / n))

        return inverse_sqrt
    rest = max(steps - warmup, 1)
    decay = max(round(steps * config.decay_fraction), 1)
    after = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction),
        "linear": optax.linear_schedule(peak, final, rest),
        "wsd": optax.linear_schedule(peak, final, decay, transition_begin=max(rest - decay, 0)),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    if not warmup:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), after], [warmup]
    )


def build_optimizer(
    config: OptimizerConfig,
    steps: int,
    *,
    learning_rate: Number | None = None,
    weight_decay: Number | None = None,
) -> optax.GradientTransformation:
    """Clipping by global norm, then the rule with decoupled weight decay on matrices (never on
    norms, biases, positions, gates). `learning_rate` and `weight_decay` are by default the config's."""
    rate = schedule(config, steps, learning_rate)
    weight_decay = config.weight_decay if weight_decay is None else weight_decay
    direction = OPTIMIZERS[config.name]().direction(config)
    decays = not is_zero(weight_decay)
    decay = optax.add_decayed_weights(weight_decay, decayed) if decays else optax.identity()
    rule = optax.chain(direction, decay, optax.scale_by_learning_rate(rate))
    return (
        optax.chain(optax.clip_by_global_norm(config.clip_norm), rule) if config.clip_norm else rule
    )


def decayed(params):
    """True for projections and embeddings."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: any(getattr(k, "key", None) in ("kernel", "embedding") for k in path[-2:]),
        params,
    )
