"""What arms really differ in, found in the models and programs that are built of them; and arms made equal in size.

A comparison says something of what varies only if nothing else does. What a field changes beside itself (parameters, floating-point
operations, the kernel that computes attention, the text) is found here before anything runs, and must be declared by the sweep.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from transformer.config import Experiment, MeshConfig
from transformer.errors import UserError
from transformer.lab.built import twins
from transformer.mapping import to_mapping
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.planning.model_flops import model_flops
from transformer.planning.sample import batch_shapes
from transformer.runs.rundir import flat
from transformer.sweeps import Sweep
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state, init_state
from transformer.training.step import attention_backends, make_train_step
from transformer.units import of_tokens


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an arm is, beside its name."""

    parameters: int
    flops: float  # of a token that is read, in training
    attention: str  # the backends that compute it
    data: tuple[str, ...]  # text, objective, rows and batches
    tokenizer: tuple[str, ...]
    warmup: str
    tokens: int = 0  # that a step reads, on both sides

    @property
    def flops_a_step(self) -> float:
        """Of training."""
        return self.flops * self.tokens


GIVEN_BY = {
    "parameters": (),
    "flops": (),
    "attention": ("model.attention_backend",),
    "data": ("data", "train.accumulate"),
    "tokenizer": ("data.tokenizer", "data.corpus", "data.train", "model.vocab_size"),
    "warmup": ("optimizer.warmup_steps", "optimizer.schedule"),
}
"""Fact -> the fields that say it themselves: where one of them varies, the fact is what is asked, and needs no declaration."""

SIZES = ("parameters", "flops")
"""What d_ff makes equal."""

CLOSE = 0.01
"""Arms that are matched differ by no more than this share in what is matched; and in the other of SIZES no more than that needs no word."""


@functools.lru_cache(maxsize=64)
def facts(config: Experiment) -> Facts:
    """Of the model and program that are built of a config, on shapes alone."""
    config = config.on(MeshConfig(data=1))
    model, optimizer = (
        build_model(config.model),
        build_optimizer(config.optimizer, config.train.steps),
    )
    mesh = make_mesh(config.mesh, jax.local_devices()[:1])
    with use(mesh):
        state, _ = abstract_state(config, model, optimizer, mesh)
        batch = batch_shapes(config, mesh)
        backends = attention_backends(config, model, state.params, batch, mesh)
    tokens = math.prod(batch["inputs"].shape) + (
        math.prod(batch["source"].shape) if "source" in batch else 0
    )
    data = to_mapping(config.data)
    its = data.pop("tokenizer")
    return Facts(
        sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
        model_flops(config, batch, state.params) / tokens,
        " + ".join(backends) or "none",
        _say(data),
        _say(its | {"vocab_size": config.model.vocab_size, "reserved": config.objective.reserved}),
        f"{config.optimizer.warmup_steps:,} steps, then {config.optimizer.schedule}",
        tokens,
    )


def asked(sweep: Sweep) -> set[str]:
    """The facts in which arms may differ: those that a varied field says itself, and those declared."""
    of = lambda given_by: any(
        field == given or field.startswith(given + ".")
        for field in sweep.fields
        for given in given_by
    )
    return {name for name, given_by in GIVEN_BY.items() if of(given_by)} | set(sweep.declared)


def undeclared(sweep: Sweep, found: Mapping[str, Facts]) -> list[str]:
    """A line for each thing in which arms differ, and no word of the sweep says that they do."""
    lines, base = [], found[sweep.baseline]
    for name in [name for name in GIVEN_BY if name not in asked(sweep)]:
        others = {arm: one for arm, one in found.items() if not _same(name, one, base, sweep.match)}
        if others:
            arm, one = next(iter(others.items()))
            more = f", and {len(others) - 1} more" if len(others) > 1 else ""
            lines.append(
                f"{name}: {sweep.baseline} {_spelled(name, base, one)}, {arm} {_spelled(name, one, base)}{more}"
            )
    return lines


def check(sweep: Sweep, configs: Mapping[str, Experiment], found: Mapping[str, Facts]) -> None:
    """Raises UserError if two arms are one experiment, or the same is built of them, and neither is a control; if arms differ in anything
    that is not declared; or a declaration is of nothing."""
    _check_twins(sweep, configs, found)
    others = [arm for arm, one in found.items() if one.tokenizer != found[sweep.baseline].tokenizer]
    if (
        others
        and "tokenizer" not in sweep.declared
        and of_tokens(sweep.metric, configs[sweep.baseline].objective.asks_for_tokens)
    ):
        raise UserError(
            f"sweep: metric {sweep.metric!r} is of tokens, and {others[0]!r} has others than {sweep.baseline!r}; "
            "decide by what is not, like Sweep(..., metric='test/bits_per_byte'), or declare why that is no matter, declared={'tokenizer': \"...\"}"
        )
    for name in sweep.declared:
        if name not in GIVEN_BY:
            raise UserError(
                f"sweep: declared: {name!r} is nothing that is compared; there is: {', '.join(GIVEN_BY)}"
            )
    if lines := undeclared(sweep, found):
        name = lines[0].partition(":")[0]
        way = f"; or size them equal: match={name!r}" if name in SIZES and not sweep.match else ""
        raise UserError(
            "sweep: arms differ in what nothing declares:\n  " + "\n  ".join(lines)
            + f"\nif that belongs to what is asked, say why: Sweep(..., declared={{{name!r}: \"...\"}}){way}"
        )  # fmt: skip


def _check_twins(
    sweep: Sweep, configs: Mapping[str, Experiment], found: Mapping[str, Facts]
) -> None:
    """Refuses arms that build the same programs, and controls that match no other arm."""
    same = twins(configs, {arm: (one.parameters, one.flops) for arm, one in found.items()})
    for arm, first in same.items():
        if sweep.controls.keys() & {arm, first}:
            continue
        equal = configs[arm] == configs[first]
        what = (
            "are the same experiment"
            if equal
            else f"differ in {_differs(configs, arm, first)}, but the same programs are built of them"
        )
        raise UserError(
            f"sweep: arms {first!r} and {arm!r} {what}, so their runs would be bit for bit equal; leave one of them out, "
            f'or declare it a control: Sweep(..., controls={{{arm!r}: "why"}})'
        )
    for arm in sweep.controls:
        if arm not in (*same.keys(), *same.values()):
            raise UserError(
                f"sweep: controls: {arm!r} matches no other arm, so it controls for nothing; remove it from controls"
            )


def _differs(configs: Mapping[str, Experiment], arm: str, first: str) -> str:
    """The fields in which two configs differ."""
    one, other = (flat(to_mapping(configs[name])) for name in (arm, first))
    return ", ".join(key for key in one | other if one.get(key) != other.get(key))


def _same(name: str, one: Facts, base: Facts, match: str) -> bool:
    a, b = getattr(one, name), getattr(base, name)
    return abs(a - b) <= CLOSE * b if name in SIZES and match in SIZES else a == b


def _spelled(name: str, one: Facts, other: Facts) -> str:
    """What `one` says that `other` does not."""
    value = getattr(one, name)
    if isinstance(value, tuple):
        return (
            ", ".join(part for part in value if part not in getattr(other, name))
            or "nothing of that"
        )
    return (
        f"{value:,}"
        if name == "parameters"
        else f"{value:,.0f} a token"
        if name == "flops"
        else value
    )


def _say(tree: dict) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in tree.items() if value not in ("", [], {}, None))


def matched(
    sweep: Sweep,
    configs: Mapping[str, Experiment],
    before: Mapping[str, Experiment],
    tell: Callable[[str], None],
) -> dict[str, Experiment]:
    """The arms, sized equal to the baseline in what the sweep matches: parameters or floating-point operations by d_ff, in multiples of 8;
    time by training fewer or more steps, as was measured `before` if it was. Raises UserError for an arm that cannot be."""
    if not sweep.match:
        return dict(configs)
    if sweep.match == "time":
        return _in_time(sweep, configs, before, tell)
    if "model.d_ff" in sweep.fields:
        raise UserError(
            f"sweep: match={sweep.match!r} sizes arms by model.d_ff, which varies; leave one of them out"
        )
    wanted = getattr(facts(configs[sweep.baseline]), sweep.match)
    return {arm: _sized(arm, config, sweep.match, wanted, tell) for arm, config in configs.items()}


def _sized(arm: str, config: Experiment, what: str, wanted: float, tell) -> Experiment:
    width = lambda eights: dataclasses.replace(
        config, model=dataclasses.replace(config.model, d_ff=8 * eights)
    )
    of = lambda eights: getattr(facts(width(eights)), what)
    if abs(getattr(facts(config), what) - wanted) <= 1e-6 * wanted:
        return config
    low, high = 1, max(1, config.model.d_ff // 8)
    while of(high) < wanted and high < 2**20:
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if of(middle) < wanted else (low, middle)
    best = min((low, high), key=lambda eights: abs(of(eights) - wanted))
    if abs(of(best) - wanted) > CLOSE * wanted:
        raise UserError(
            f"sweep: arm {arm!r} cannot be sized to the baseline's {what} ({wanted:,.0f}) by model.d_ff: {of(best):,.0f} at {8 * best}, "
            f"which is not within {CLOSE:.0%}; d_ff goes in eights: take a larger model, or set the arm's fields by hand and declare the difference"
        )
    if 8 * best != config.model.d_ff:
        tell(
            f"{arm}: model.d_ff {config.model.d_ff} -> {8 * best}, {what} {of(best):,.0f} for the baseline's {wanted:,.0f}"
        )
    return width(best)


def _in_time(
    sweep: Sweep, configs: Mapping[str, Experiment], before: Mapping[str, Experiment], tell
) -> dict[str, Experiment]:
    """An arm that was measured before and is otherwise the same keeps its steps: another measurement would give others."""
    base = configs[sweep.baseline]
    with_steps = lambda config, steps: dataclasses.replace(
        config, train=dataclasses.replace(config.train, steps=steps)
    )
    sized = {sweep.baseline: base}
    if before.get(sweep.baseline) == base:
        sized |= {
            arm: one
            for arm, one in before.items()
            if arm in configs and one == with_steps(configs[arm], one.train.steps)
        }
    left = [arm for arm in configs if arm not in sized]
    seconds = seconds_a_step(base) if left else math.nan
    for arm in left:
        steps = max(1, round(seconds / seconds_a_step(configs[arm]) * base.train.steps))
        tell(f"{arm}: train.steps {base.train.steps:,} -> {steps:,}, as long as the baseline")
        sized[arm] = with_steps(configs[arm], steps)
    return {arm: sized[arm] for arm in configs}


def seconds_a_step(config: Experiment, steps: int = 10) -> float:
    """How long a training step takes on this machine, on made-up text: the median of a few."""
    model, optimizer = (
        build_model(config.model),
        build_optimizer(config.optimizer, config.train.steps),
    )
    with use(make_mesh(config.mesh)) as mesh:
        _, placed = abstract_state(config, model, optimizer, mesh)
        state = init_state(config, model, optimizer, placed)
        batch = {name: np.ones(x.shape, x.dtype) for name, x in batch_shapes(config, mesh).items()}
        batch = {
            name: jax.device_put(x, batch_shapes(config, mesh)[name].sharding)
            for name, x in batch.items()
        }
        step, taken = make_train_step(config, model, optimizer, mesh, placed), []
        for _ in range(steps + 2):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            taken.append(time.perf_counter() - began)
    return float(np.median(taken[2:]))
