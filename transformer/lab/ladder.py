"""Ladders: sweeps over model sizes and budgets, to which scaling laws are fitted.

    def sweep():
        return ladder(
            get_config(),
            vary("model.norm_placement", "pre", "post"),
            arms(S={"model.d_model": 64}, M={"model.d_model": 128}, L=..., XL=...),
            budgets=(5, 10, 20),
            rules={"optimizer.learning_rate": lambda N: 0.002 * (N / 1e6) ** -0.33},
        )

What is counted:

- N: parameters without embeddings, unembedding and tables of positions, of the arm itself.
- D: input tokens, padding included; with packed text there is none.
- C: FLOPs of all matrix products in training (`planning/model_flops.py`), which include attention
  and the unembedding, but neither the lookup of embeddings nor recomputation.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from transformer.config import Experiment, ModelConfig
from transformer.config_io import change
from transformer.errors import UserError
from transformer.lab.guard import facts
from transformer.lab.laws import unidentified
from transformer.mapping import from_mapping, thaw
from transformer.model.layout import flatten
from transformer.model.network import build_model
from transformer.model.roles import role
from transformer.sweeps import Grid, Point, Sweep, product

WARMUP = 0.25
"""Largest share of the first period that warm-up takes, by default: one token per parameter."""


def ladder(
    config,
    arms: Grid,
    sizes: Grid,
    budgets: Sequence[float],
    per: str = "parameter",
    rules: Mapping[str, Callable[[float], object]] | None = None,
    hold_out: bool = True,
    **options,
) -> Sweep:
    """Returns the sweep of all arms at all sizes. One run serves all budgets of its size (WSD-S).

    `config` is the file's `get_config()`. Budgets are input tokens per parameter, or FLOPs with
    per="flops". At each, the run is evaluated after a decay of the learning rate. Training steps
    and `optimizer.decay_ends` follow from them and from the first arm's model of each size, so that
    all arms read the same tokens. `rules` sets fields as functions of its N, such as the learning
    rate. Without a rule, the fields keep their values: use a `model.parametrization` that
    transfers. Warm-up lasts for one token per parameter, and at most a quarter of the first period.

    Laws are fitted to all sizes but the largest, whose loss they predict, unless `hold_out` is
    False. `options` are those of `Sweep`. Raises UserError for a design that identifies no law.
    """
    if per not in ("parameter", "flops") or not budgets or min(budgets) <= 0:
        raise UserError(
            f"ladder: budgets {budgets!r} per {per!r}; use positive numbers per 'parameter' or "
            "per='flops'"
        )
    points, rungs, fitted = [], {}, []
    for size in sizes.points:
        reference = _experiment(config, arms.points[0].changes, size.changes)
        N = matrix_parameters(reference.model)
        ruled = {field: rule(N) for field, rule in (rules or {}).items()}
        reference = _experiment(config, arms.points[0].changes, size.changes, ruled)
        spent = facts(reference).flops if per == "flops" else N
        tokens = reference.data.batch_size * _length(reference)
        unit = spent if per == "parameter" else 1 / spent
        *ends, steps = (max(1, round(budget * unit / tokens)) for budget in sorted(budgets))
        warmup = max(1, min(round(N / tokens), int(WARMUP * min([*ends, steps]))))
        derived = {"train.steps": steps, "optimizer.decay_ends": tuple(ends)}
        derived |= {"optimizer.warmup_steps": warmup} | ruled
        for point in product(arms, Grid((size,))).points:
            own = matrix_parameters(_experiment(config, point.changes).model)
            arm = point.name.removesuffix(f"-{size.name}")
            rungs[point.name] = {"arm": arm, "size": size.name, "N": own, "held_out": False}
            points.append(Point(point.name, point.changes | derived, point.called))
        fitted += [(N, end * tokens, size.name) for end in (*ends, steps)]
    largest = max(fitted)[2]
    for rung in rungs.values():
        rung["held_out"] = hold_out and rung["size"] == largest
    sweep = Sweep(Grid(tuple(points)), ladder=rungs, **{"metric": "test/loss"} | options)
    kept = [x for x in fitted if not hold_out or x[2] != largest]
    N, D = np.array([x[:2] for x in kept], np.float64).reshape(-1, 2).T
    runs = [(name, seed) for name in {x[2] for x in kept} for seed in sweep.seeds]
    if why := unidentified(N, D, runs):
        left = " (the largest size is held out)" if hold_out else ""
        raise UserError(f"ladder: no law can be fitted to this design: {why}{left}")
    return sweep


@functools.lru_cache(maxsize=256)
def matrix_parameters(config: ModelConfig) -> int:
    """Returns N: the parameters outside embeddings, unembedding and tables of positions."""
    # No backend is chosen for this one, so JAX need not start.
    model, key = build_model(config.part(attention_backend="reference")), jax.random.key
    tokens = (jax.ShapeDtypeStruct((1, 1), "int32"),) * len(config.sides)
    shapes = flatten(jax.eval_shape(model.init_with_axes, jax.eval_shape(key, 0), *tokens))
    outside = lambda path, x: (
        "embedding" in path.split("/")[0] or role(path, x.names) == "embedding"
    )
    return sum(math.prod(x.value.shape) for path, x in shapes.items() if not outside(path, x))


def _experiment(config, *changes: Mapping[str, object]) -> Experiment:
    tree = thaw(config)
    for fields in changes:
        change(tree, fields)
    return from_mapping(Experiment, tree)


def _length(config: Experiment) -> int:
    """Returns the input tokens of an example: of the encoder and the decoder."""
    data = config.data
    target = (data.target_length or data.length) * (len(config.model.sides) > 1)
    return data.length + target
