"""Ladders: sweeps over model sizes and budgets, to which scaling laws are fitted.

- N: parameters without embeddings, unembedding and tables of positions, of the arm itself.
- D: input tokens, padding included; with packed text there is none.
- C: FLOPs of all matrix products in training (`planning/model_flops.py`), which include attention
  and the unembedding, but neither the lookup of embeddings nor recomputation."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from transformer.config import ModelConfig
from transformer.errors import UserError
from transformer.lab.guard import changed, facts
from transformer.lab.laws import unidentified
from transformer.model.layout import flatten
from transformer.model.network import build_model
from transformer.model.roles import role
from transformer.sweeps import Grid, Point, Sweep, product


def ladder(
    config, arms: Grid, sizes: Grid, budgets: Sequence[float], per: str = "parameter",
    rules: Mapping[str, Callable[[float], object]] | None = None, hold_out: bool = True, **options,
) -> Sweep:  # fmt: skip
    """Returns the sweep of all arms at all sizes. One run serves all budgets of its size (WSD-S).

    `config` is that of the file's `get_config()`. Budgets are input tokens per parameter, or FLOPs
    with per="flops". At each, the run is evaluated after a decay of the learning rate. Steps and
    `optimizer.decay_ends` follow from the first arm's model of each size, so all arms read the same
    tokens. Warm-up lasts for a token per parameter, at most a quarter of the first period. `rules`
    sets fields, such as the learning rate, as functions of N. Without a rule, fields keep their
    values: use a `model.parametrization` that transfers. Laws are fitted to all sizes but the
    largest, whose loss they predict, unless `hold_out` is False. `options` are those of `Sweep`.
    Raises UserError for a design that identifies no law."""
    if per not in ("parameter", "flops") or not budgets or min(budgets) <= 0:
        kinds = "positive numbers per='parameter' or per='flops'"
        raise UserError(f"ladder: budgets: {budgets!r} per {per!r}; use {kinds}")
    points, rungs, reached = [], {}, []  # reached: (N, D, size)
    for size in sizes:
        first = {**arms[0].changes, **size.changes}
        N = matrix_parameters(changed(config, first).model)
        ruled = {field: rule(N) for field, rule in (rules or {}).items()}
        reference = changed(config, {**first, **ruled})
        lengths = (reference.data.length, reference.data.decoder_length)
        tokens = reference.data.batch_size * sum(lengths[: len(reference.model.sides)])
        unit = N if per == "parameter" else 1 / facts(reference).flops
        *ends, steps = (max(1, round(budget * unit / tokens)) for budget in sorted(budgets))
        warmup = max(1, min(round(N / tokens), [*ends, steps][0] // 4))
        derived = {"train.steps": steps, "optimizer.decay_ends": tuple(ends)}
        derived |= {"optimizer.warmup_steps": warmup, **ruled}
        for point in product(arms, Grid([size])):
            own = matrix_parameters(changed(config, point.changes).model)
            arm = point.name.removesuffix(f"-{size.name}")
            rungs[point.name] = {"arm": arm, "size": size.name, "N": own}
            points.append(Point(point.name, {**point.changes, **derived}, point.called))
        reached += [(N, end * tokens, size.name) for end in (*ends, steps)]
    held = max(reached)[2] if hold_out else ""
    rungs = {name: rung | {"held_out": rung["size"] == held} for name, rung in rungs.items()}
    sweep = Sweep(Grid(points), ladder=rungs, **options)
    kept = [x for x in reached if x[2] != held]
    N_P, D_P = np.array([x[:2] for x in kept], np.float64).reshape(-1, 2).T
    runs = [(name, seed) for name in {x[2] for x in kept} for seed in np.atleast_1d(sweep.seeds)]
    if why := unidentified(N_P, D_P, runs):
        left = f" (the largest size, {held}, is held out)" if held else ""
        raise UserError(f"ladder: no law can be fitted to this design: {why}{left}")
    return sweep


@functools.lru_cache(maxsize=256)
def matrix_parameters(config: ModelConfig) -> int:
    """Returns N: the parameters outside embeddings, unembedding and tables of positions."""
    # With this backend, JAX need not start, which it must not before `plan` has set its devices.
    model, key = build_model(config.part(attention_backend="reference")), jax.random.key
    tokens = (jax.ShapeDtypeStruct((1, 1), "int32"),) * len(config.sides)
    shapes = flatten(jax.eval_shape(model.init_with_axes, jax.eval_shape(key, 0), *tokens))
    others = {path: x for path, x in shapes.items() if "embedding" not in path.split("/")[0]}
    matrices = [x for path, x in others.items() if role(path, x.names) != "embedding"]
    return sum(x.value.size for x in matrices)
