"""Checks that arms are comparable, and sizes arms to match the baseline.

A field may have side effects: other parameter counts, floating-point operations, attention kernels
or text. They are computed from the built models and programs, and a sweep must declare them."""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import time
from collections.abc import Mapping

import jax
import numpy as np

from transformer.config import Experiment, MeshConfig
from transformer.errors import UserError
from transformer.evaluation.evaluators import EVALUATORS
from transformer.mapping import build, to_mapping
from transformer.model.network import abstract_params
from transformer.parallel.mesh import use
from transformer.planning.model_flops import model_flops
from transformer.planning.programs import Programs
from transformer.runs.rundir import OUTPUT_FIELDS, different_fields, flatten_fields
from transformer.sweeps import Sweep
from transformer.training.state import init_state, state_maker
from transformer.training.step import attention_backends, make_train_step, training_step
from transformer.units import kind

Configs = Mapping[str, Experiment]  # arm -> its experiment

SET_BY = {
    "parameters": (), "flops": (), "attention": ("model.attention_backend",),
    "data": ("data", "train.accumulate"),
    "tokenizer": ("data.tokenizer", "data.corpus", "data.train", "model.vocab_size"),
    "warmup": ("optimizer.warmup_steps", "optimizer.schedule"),
}  # fmt: skip
"""Fact -> the fields that set it. If a sweep varies one of them, it need not declare the fact."""

SETS_PARAMETERS = ("norm_placement", "position")
"""The fields of the model with parameters of their own: norms and gates, tables and biases. If a
sweep varies one, these need no declaration. They are those that the model lacks with "none"."""

SIZES = ("parameters", "flops")  # the facts that are matched by adjusting d_ff
CLOSE = 0.01
"""Relative tolerance of matched arms, within which the other fact of SIZES needs no declaration."""

IN_PROGRAMS = "model train.label_smoothing train.z_loss train.accumulate train.ema_decay".split()
"""Config sections and fields whose effect appears in the lowered programs."""

NOT_IN_PROGRAMS = ("max_length", "pipeline_microbatches", "pipeline_rounds", "_id")
"""Suffixes of model fields outside programs: of decoding, evaluation or runs on other meshes."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of an arm that must be equal across arms, or varied or declared by the sweep."""

    parameters: int
    flops: float  # training FLOPs per input token
    attention: str  # the attention backends
    data: tuple[str, ...]  # text, objective, sequences and batches
    tokenizer: tuple[str, ...]
    warmup: str
    tokens: int = 0  # input tokens per step, of encoder and decoder
    # Field of SETS_PARAMETERS -> the number of parameters that the model has because of it.
    own_parameters: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def flops_per_step(self) -> float:
        return self.flops * self.tokens


@functools.lru_cache(maxsize=64)
def facts(config: Experiment) -> Facts:
    """Returns the facts of the model and training program of a config, computed on shapes."""
    config = config.on(MeshConfig(data=1))
    built = Programs(config, jax.local_devices()[:1])
    params, batch, tokens = built.state.params, built.batch, built.tokens
    with use(built.mesh):
        backends = attention_backends(config, built.model, params, batch, built.mesh)
    data = to_mapping(config.data)
    tokenizer = data.pop("tokenizer")
    vocabulary = {"vocab_size": config.model.vocab_size, "reserved": config.objective.reserved}
    size = lambda params: sum(x.size for x in jax.tree.leaves(params))
    parameters, own = size(params), {}
    for field in SETS_PARAMETERS:
        with contextlib.suppress(UserError):  # a model that needs the field has none of its own
            without = dataclasses.replace(config.model, **{field: "none"})
            own[f"model.{field}"] = parameters - size(abstract_params(without))
    flops = model_flops(config, batch, params) / tokens
    attention, text = " + ".join(backends) or "none", _settings(data)
    pieces = _settings(tokenizer | vocabulary)
    return Facts(parameters, flops, attention, text, pieces, warmup(config), tokens, own)


def changed(config, changes: Mapping[str, object], prefix: str = "sweep: ") -> Experiment:
    """Returns an experiment with other values of some fields. Raises UserError for invalid ones."""
    return build(Experiment, to_mapping(config), changes, prefix)


def warmup(config: Experiment) -> str:
    """Returns the warm-up and the schedule of a config, as `Facts` has them."""
    return f"{config.optimizer.warmup_steps:,} steps, then {config.optimizer.schedule}"


def allowed_facts(sweep: Sweep) -> set[str]:
    """Returns the facts in which arms may differ: declared ones, and those set by varied fields."""
    varied = {name for name, by in SET_BY.items() if any(_varies(sweep, x) for x in by)}
    return varied | set(sweep.declared)


def _varies(sweep: Sweep, prefix: str) -> bool:
    return any(field == prefix or field.startswith(prefix + ".") for field in sweep.fields)


def undeclared(sweep: Sweep, facts: Mapping[str, Facts]) -> list[str]:
    """Returns a line for each fact in which arms differ although the sweep does not allow it."""
    lines, base = [], {arm: facts[sweep.reference(arm)] for arm in facts}
    for name in [name for name in SET_BY if name not in allowed_facts(sweep)]:
        if different := [x for x in facts if not _same(name, facts[x], base[x], sweep)]:
            arm, fact = different[0], facts[different[0]]
            more = f", and {len(different) - 1} more" if len(different) > 1 else ""
            usual, here = _spell(name, base[arm], fact), _spell(name, fact, base[arm])
            lines.append(f"{name}: {sweep.reference(arm)} {usual}, {arm} {here}{more}")
    return lines


def check(sweep: Sweep, configs: Configs, facts: Mapping[str, Facts]) -> None:
    """Raises UserError if arms are not comparable: two have equal configs or programs and neither
    is a control; the primary metric depends on the tokenizer, which differs; arms differ in an
    undeclared fact; or a declaration or control is invalid."""
    twin_of = twins(configs, {arm: (fact.parameters, fact.flops) for arm, fact in facts.items()})
    if alike := [pair for pair in twin_of.items() if not sweep.controls.keys() & {*pair}]:
        (arm, first), relation = alike[0], "are the same experiment"
        if configs[arm] != configs[first]:
            fields = ", ".join(different_fields(configs[arm], configs[first]))
            relation = f"differ in {fields}, but build the same programs"
        problem = f"{relation}, so their runs would be bitwise identical"
        way_out = f'remove one, or declare it a control: Sweep(..., controls={{{arm!r}: "why"}})'
        raise UserError(f"sweep: arms {first!r} and {arm!r} {problem}; {way_out}")
    if alone := [x for x in sweep.controls if x not in (*twin_of.keys(), *twin_of.values())]:
        raise UserError(f"sweep: controls: {alone[0]!r} matches no other arm; remove it")
    usual = facts[sweep.baseline].tokenizer
    retokenized = [arm for arm, fact in facts.items() if fact.tokenizer != usual]
    in_tokens = kind(sweep.metric, configs[sweep.baseline].objective.predicts_tokens).of_tokens
    if retokenized and in_tokens and "tokenizer" not in sweep.declared:
        problem = f"arm {retokenized[0]!r} has a different tokenizer from {sweep.baseline!r}"
        metric = "use a metric that does not, such as Sweep(..., metric='test/bits_per_byte')"
        way_out = f"{metric}, or declare the reason, declared={{'tokenizer': \"...\"}}"
        depends = f"metric {sweep.metric!r} depends on the tokenizer"
        raise UserError(f"sweep: {depends}, and {problem}; {way_out}")
    if unknown := [name for name in sweep.declared if name not in SET_BY]:
        problem = f"sweep: declared: {unknown[0]!r} is not a compared property"
        raise UserError(f"{problem}; choose from: {', '.join(SET_BY)}")
    if lines := undeclared(sweep, facts):
        name = lines[0].partition(":")[0]
        hint = f"; or match the sizes: match={name!r}" if name in SIZES and not sweep.match else ""
        problem = f"arms differ in undeclared properties: {'; '.join(lines)}"
        way_out = f'give the reason: Sweep(..., declared={{{name!r}: "..."}}){hint}'
        raise UserError(f"sweep: {problem}; if the difference is intended, {way_out}")


def twins(configs: Configs, alike: Mapping[str, object]) -> dict[str, str]:
    """Returns arm -> the first arm that it is a twin of, except for first arms. Two arms are twins
    if their lowered programs (initialization, training step) are equal, and so are the optimizer
    and the config fields that do not appear in the programs. The runs of twins are bitwise
    identical. Programs are lowered on shapes, and nothing is compiled; they are lowered only where
    `fields_outside_programs` and the cheap values `alike` are equal."""
    groups: dict[tuple, list[str]] = {}
    for arm, config in configs.items():
        groups.setdefault((fields_outside_programs(config), alike[arm]), []).append(arm)
    same_as = {}
    for arms in groups.values():
        first: dict[str, str] = {}
        for arm in arms if len(arms) > 1 else ():
            if (twin := first.setdefault(programs_hash(configs[arm]), arm)) != arm:
                same_as[arm] = twin
    return same_as


def fields_outside_programs(config: Experiment) -> tuple[tuple[str, str], ...]:
    """Returns the fields that do not appear in the programs, in a canonical form."""
    fields = flatten_fields(to_mapping(config))
    others = (*IN_PROGRAMS, *OUTPUT_FIELDS, "optimizer.name", "data.objective", "train.evaluators")
    is_other = lambda field: any(field == x or field.startswith(x + ".") for x in others)
    is_unseen = lambda field: field.startswith("model.") and field.endswith(NOT_IN_PROGRAMS)
    compared = {k: x for k, x in fields.items() if not is_other(k) or is_unseen(k)}
    compared["optimizer.name"] = config.optimizer.rule
    compared["data.objective"] = config.objective
    compared["data.target_length"] = config.data.decoder_length
    compared["train.evaluators"] = sorted(map(repr, map(EVALUATORS.build, config.train.evaluators)))
    if config.train.average_checkpoints:
        compared["train.checkpoint_every"] = config.train.checkpoint_every
    return tuple(sorted((field, repr(value)) for field, value in compared.items()))


def programs_hash(config: Experiment) -> str:
    """Returns a hash of the lowered programs: initialization and training step."""
    config = _without_wide_windows(config.on(MeshConfig(data=1)))
    built = Programs(config, jax.local_devices()[:1])
    with use(built.mesh):
        start = jax.jit(state_maker(config, built.model, built.optimizer))
        step = jax.jit(training_step(config, built.model, built.optimizer, built.mesh))
        key = jax.eval_shape(lambda: jax.random.key(0))
        programs = start.lower(key), step.lower(built.state, built.batch)
    return hashlib.sha256("\n".join(x.as_text() for x in programs).encode()).hexdigest()


def _without_wide_windows(config: Experiment) -> Experiment:
    """Sets windows that hide no token of the longest sequence to 0. Generated text has up to
    `max_length` tokens, `extrapolation` reads longer texts, and random positions are spread."""
    model, evaluators = config.model, map(EVALUATORS.build, config.train.evaluators)
    if model.random_positions:
        return config
    times = [getattr(evaluator, "times", 1) for evaluator in evaluators]
    longest = max(model.max_length, config.data.length * max(times, default=1))
    narrow = lambda window: window if window < longest else 0
    narrowed = lambda entry: {k: narrow(x) if k == "window" else x for k, x in entry.items()}
    pattern = tuple(map(narrowed, model.layer_pattern))
    model = dataclasses.replace(model, window=narrow(model.window), layer_pattern=pattern)
    return dataclasses.replace(config, model=model)


def _same(name: str, arm_facts: Facts, base: Facts, sweep: Sweep) -> bool:
    a, b = getattr(arm_facts, name), getattr(base, name)
    if name in SIZES and sweep.match in SIZES and abs(a - b) <= CLOSE * b:
        return True
    if name == "parameters":
        own = lambda x: sum(n for field, n in x.own_parameters.items() if _varies(sweep, field))
        a, b = a - own(arm_facts), b - own(base)
    return a == b


def _spell(name: str, arm_facts: Facts, other: Facts) -> str:
    """Returns a fact as text. Of a tuple, only the settings that `other` does not have."""
    value = getattr(arm_facts, name)
    if isinstance(value, tuple):
        return ", ".join(x for x in value if x not in getattr(other, name)) or "none of these"
    return {"parameters": "{:,}", "flops": "{:,.0f} per token"}.get(name, "{}").format(value)


def _settings(tree: dict) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in tree.items() if value not in ("", [], {}, None))


def matched(sweep: Sweep, configs: Configs, before: Configs, report) -> dict[str, Experiment]:
    """Returns the arms, sized to match the baseline as `sweep.match` requires: parameters and FLOPs
    by d_ff, in multiples of 8, and time by the number of steps, which is taken from `before` for
    arms that were measured there. Raises UserError if an arm cannot be matched."""
    if not sweep.match:
        return dict(configs)
    if sweep.match == "time":
        return _in_time(sweep, configs, before, report)
    if "model.d_ff" in sweep.fields:
        problem = f"match={sweep.match!r} sizes arms by model.d_ff, which varies"
        raise UserError(f"sweep: {problem}; remove one of the two")
    target = lambda arm: getattr(facts(configs[sweep.reference(arm)]), sweep.match)
    return {arm: _sized(arm, x, sweep.match, target(arm), report) for arm, x in configs.items()}


def _sized(arm: str, config: Experiment, fact: str, target: float, report) -> Experiment:
    width = lambda eights: changed(config, {"model.d_ff": 8 * eights})
    size_at = lambda eights: getattr(facts(width(eights)), fact)
    if abs(getattr(facts(config), fact) - target) <= 1e-6 * target:
        return config
    low, high = 1, max(2, config.model.ff_size // 8)
    while size_at(high) < target and high < 2**20:
        low, high = high, 2 * high
    high = bisect.bisect_left(range(high), target, low + 1, key=size_at)
    best = min((high - 1, high), key=lambda eights: abs(size_at(eights) - target))
    if abs(size_at(best) - target) > CLOSE * target:
        goal = f"sized to the baseline's {fact} ({target:,.0f}) by model.d_ff"
        found = f"the closest is {size_at(best):,.0f} at {8 * best}, not within {CLOSE:.0%}"
        by_hand = "set the arm's fields by hand and declare the difference"
        way_out = f"only multiples of 8 are tried: use a larger model, or {by_hand}"
        raise UserError(f"sweep: arm {arm!r} cannot be {goal}: {found}; {way_out}")
    if 8 * best != config.model.ff_size:
        sizes = f"{size_at(best):,.0f} (baseline: {target:,.0f})"
        report(f"{arm}: model.d_ff {config.model.ff_size} -> {8 * best}, {fact} {sizes}")
    return width(best)


def _in_time(sweep: Sweep, configs: Configs, before: Configs, report) -> dict[str, Experiment]:
    """Matches training time by the number of steps. Unchanged arms keep theirs from `before`."""
    base, replace = configs[sweep.baseline], dataclasses.replace
    with_steps = lambda config, n: replace(config, train=replace(config.train, steps=n))
    sized = {sweep.baseline: base}
    for arm, config in before.items() if before.get(sweep.baseline) == base else ():
        if arm in configs and config == with_steps(configs[arm], config.train.steps):
            sized[arm] = config
    unmeasured = [arm for arm in configs if arm not in sized]
    seconds = seconds_per_step(base) if unmeasured else 0.0
    for arm in unmeasured:
        steps = max(1, round(seconds / seconds_per_step(configs[arm]) * base.train.steps))
        report(f"{arm}: train.steps {base.train.steps:,} -> {steps:,}, for the baseline's time")
        sized[arm] = with_steps(configs[arm], steps)
    return {arm: sized[arm] for arm in configs}


def seconds_per_step(config: Experiment, steps: int = 10) -> float:
    """Returns the median time of a training step on this machine, on dummy data, in seconds."""
    built, step_seconds = Programs(config, jax.devices()), []
    with use(built.mesh):
        state = init_state(config, built.model, built.optimizer, built.shardings)
        ones = lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding)
        batch = jax.tree.map(ones, built.batch)
        step = make_train_step(config, built.model, built.optimizer, built.mesh, built.shardings)
        for _ in range(steps + 2):
            start_time = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            step_seconds.append(time.perf_counter() - start_time)
    return float(np.median(step_seconds[2:]))
