"""The update rule and the learning rate, which depends on the step alone and so needs no state."""

import itertools

import jax
import jax.numpy as jnp
import optax

from transformer.checks import is_zero
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.feed_forwards.experts import BIAS
from transformer.model.network import FAMILIES
from transformer.model.roles import parameter_rules
from transformer.parallel.sharding import is_box, path_name
from transformer.training.config import OptimizerConfig


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Returns the schedule: update number (from 0) -> learning rate.
    All schedules start with a linear warm-up over `warmup_steps` to the peak, the config's rate.

        inverse_sqrt   peak * min(n / w, sqrt(w / n)) with n = update + 1 and w = warm-up steps:
                       Vaswani et al. 2017, eq. 3, where the peak is (d_model * w)^(-1/2)
        cosine, linear from the peak to final_fraction * peak at the last step
        wsd            at the peak, then linear decay over the last decay_fraction of all steps
                       (warmup-stable-decay). With `decay_ends`, the same up to each of these steps,
                       counted from the one before (WSD-S; Wen et al. 2024).
        constant       at the peak

    The learning rate and the warm-up may be traced (lab/together.py)."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "inverse_sqrt":
        factor = lambda n: jnp.minimum(n / warmup, jnp.sqrt(warmup / n))
        return lambda update: peak * factor(jnp.asarray(update, jnp.float32) + 1)
    final, remaining = peak * config.final_fraction, jnp.maximum(steps - warmup, 1)

    def linear(start, end, length):
        """Returns update -> a value that moves from `start` to `end` within `length` updates."""
        return lambda n: (start - end) * (1 - jnp.clip(n, 0, length) / length) + end

    def cosine(n):
        share = 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(n, remaining) / remaining))
        return peak * ((1 - config.final_fraction) * share + config.final_fraction)

    def stable_then_decay(start: int, end: int):
        decay = max(round((end - start) * config.decay_fraction), 1)
        stable = jnp.maximum(end - jnp.maximum(start, warmup) - decay, 0)
        return lambda n: linear(peak, final, decay)(n - stable)

    ends = [*config.decay_ends, steps]
    periods = [stable_then_decay(*period) for period in itertools.pairwise([0, *ends])]
    after_warmup = {
        "cosine": cosine, "linear": linear(peak, final, remaining),
        "wsd": optax.join_schedules(periods, [end - warmup for end in config.decay_ends]),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]  # fmt: skip
    if is_zero(warmup):
        return after_warmup
    rise = linear(peak / warmup, peak, jnp.maximum(warmup - 1, 1))
    return optax.join_schedules([rise, after_warmup], [warmup])


def build_optimizer(
    config: OptimizerConfig, steps: int, model: ModelConfig
) -> optax.GradientTransformation:
    """Builds the optimizer of a model: global-norm clipping, then the rule with weight decay.

        w <- w - rate_t (r direction(g) + d weight_decay w)        d = 0 unless w is `decayed`

    r and d are the multipliers of the model's `parametrization` (model/parametrizations/). Its
    multiplier of epsilon divides the gradient, which has the same effect on Adam. Biases of routers
    with `bias_rate` move by the sign of their gradient alone (model/feed_forwards/experts.py)."""
    rate, rules = schedule(config, steps), parameter_rules(FAMILIES[model.family], model)
    decay = optax.identity()
    if not is_zero(weight := config.weight_decay):
        decay = _decay(weight, rules) if rules else optax.add_decayed_weights(weight, decayed)
    parts = [config.rule.direction(config), decay, optax.scale_by_learning_rate(rate)]
    if rules:
        by_epsilon = {path: 1.0 / rule.epsilon for path, (_, rule) in rules.items()}
        rates = {path: config.rule.learning_rate(*of) for path, of in rules.items()}
        parts = [_scale(by_epsilon), parts[0], _scale(rates), *parts[1:]]
    rule = optax.chain(*parts)
    if bias_rates := _bias_rates(model):
        is_bias = lambda path, _: path_name(path).endswith(BIAS)
        labels = lambda params: jax.tree_util.tree_map_with_path(is_bias, params, is_leaf=is_box)
        rule = optax.partition({False: rule, True: optax.sign_sgd(*bias_rates)}, labels)
    clip = optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, rule) if config.clip_norm else rule


def _bias_rates(model: ModelConfig) -> set[float]:
    """Returns the step of the biases that balance the loads of experts; empty if there are none."""
    kinds = [layer.feed_forward_kind for side in model.sides for layer in model.layers(side)]
    rates = {getattr(kind, "bias_rate", 0.0) for kind in kinds} - {0.0}
    if len(rates) > 1:
        problem = f"feed-forwards have different values of bias_rate ({rates})"
        raise UserError(f"model.layer_pattern: {problem}; use one")
    return rates


def _scale(multipliers: dict[str, float]) -> optax.GradientTransformation:
    """Multiplies the update of each parameter by its own number."""
    scaled = lambda path, u: u * multipliers[path_name(path)]
    return optax.stateless(lambda us, _: jax.tree_util.tree_map_with_path(scaled, us))


def _decay(weight_decay: float, rules) -> optax.GradientTransformation:
    """Adds weight decay to the updates of `decayed` parameters, each with its multiplier."""

    def add(path, u, w, is_decayed):
        return u + weight_decay * rules[path_name(path)][1].weight_decay * w if is_decayed else u

    return optax.stateless(lambda us, ws: jax.tree.map_with_path(add, us, ws, decayed(ws)))


def decayed(params):
    """Returns a tree that is True for kernels and embeddings, which weight decay applies to."""
    names = ("kernel", "embedding")
    is_decayed = lambda path, _: any(getattr(key, "key", None) in names for key in path[-2:])
    return jax.tree_util.tree_map_with_path(is_decayed, params)
