"""Comparable arms: undeclared differences in facts are errors, and `match` equalizes sizes."""

import dataclasses

import numpy as np
import pytest
from studies import configs_and_facts

from transformer import Sweep, UserError, arms, vary
from transformer.lab import guard, prepare
from transformer.lab.study import Study


def test_undeclared_differences_raise():
    sweep = Sweep(vary("model.glu", False, True), declared={"flops": "gated"})
    configs, facts = configs_and_facts(sweep)
    assert facts["glu=True"].parameters > facts["glu=False"].parameters
    with pytest.raises(
        UserError,
        match=r"parameters: glu=False [\d,]+, glu=True [\d,]+; .*declared=\{'parameters'",
    ):
        guard.check(sweep, configs, facts)
    declared = {"flops": "gated", "parameters": "gated"}
    guard.check(dataclasses.replace(sweep, declared=declared), configs, facts)
    guard.check(
        Sweep(vary("model.position", "rotary", "alibi")),
        *configs_and_facts(Sweep(vary("model.position", "rotary", "alibi"))),
    )
    with pytest.raises(UserError, match="'params' is not a compared property; choose from: p"):
        guard.check(dataclasses.replace(sweep, declared={"params": "?"}), configs, facts)


@pytest.mark.parametrize(
    ("field", "values", "own"),
    [
        # Two layers of d_model 16: four norms of 32 parameters, and a final norm.
        ("norm_placement", ("pre", "post", "peri", "rezero"), (160, 128, 288, 4)),
        ("position", ("rotary", "t5", "learned"), (0, 32 * 4, 32 * 16)),
    ],
)
def test_parameters_of_a_varied_placement_or_scheme_need_no_declaration(field, values, own):
    """But others do: a wider feed-forward is refused."""
    sweep = Sweep(vary(f"model.{field}", *values))
    configs, facts = configs_and_facts(sweep)
    assert len({fact.parameters for fact in facts.values()}) == len(values)
    assert tuple(fact.own_parameters[f"model.{field}"] for fact in facts.values()) == own
    guard.check(sweep, configs, facts)
    wider = arms(a={f"model.{field}": values[0]}, b={f"model.{field}": values[1], "model.d_ff": 40})
    sweep = Sweep(wider, declared={"flops": "wider"})
    with pytest.raises(UserError, match="arms differ in undeclared properties: parameters: a"):
        guard.check(sweep, *configs_and_facts(sweep))
    # Neither counts what a field has if the sweep does not vary the field.
    fixed = Sweep(vary("model.d_ff", 32, 40), declared={"flops": "wider"})
    equal = dataclasses.replace(facts[values[0]], own_parameters={f"model.{field}": 0})
    more = dataclasses.replace(
        equal, parameters=equal.parameters + 9, own_parameters={f"model.{field}": 9}
    )
    assert guard.undeclared(fixed, {"d_ff=32": equal, "d_ff=40": more})


def test_same_experiment_under_two_names_raises():
    sweep = Sweep(
        arms(plain={}, alibi={"model.position": "alibi"}, said={"model.position": "alibi"})
    )
    configs, facts = configs_and_facts(sweep)
    with pytest.raises(UserError, match="'alibi' and 'said' are the same experiment"):
        guard.check(
            dataclasses.replace(sweep, declared=dict.fromkeys(guard.SET_BY, "any reason")),
            configs,
            facts,
        )


@pytest.mark.parametrize(
    ("grid", "name"),
    [
        (vary("model.d_ff", 32, 64), "flops"),
        (vary("model.max_length", 32, 2048), None),
        (
            arms(
                reads={},
                fills={
                    "model.family": "encoder",
                    "model.num_encoder_layers": 2,
                    "model.num_decoder_layers": 0,
                    "data.objective": "masked_lm",
                },
            ),
            "tokenizer",
        ),
        (vary("data.batch_size", 8, 16), None),  # the varied field sets this fact
        (vary("optimizer.warmup_steps", 1, 4), None),
        (vary("model.attention_backend", "reference", "blockwise"), None),
    ],
)
def test_each_differing_fact_is_detected(grid, name):
    sweep = Sweep(grid, declared={"parameters": "on purpose"})
    _, facts = configs_and_facts(sweep)
    lines = guard.undeclared(sweep, facts)
    assert any(line.startswith(name) for line in lines) if name else not lines


def test_description_shows_differing_training_tokens(tmp_path):
    for grid, reads in (
        (vary("data.batch_size", 8, 16), ("2.0k", "4.1k")),
        (vary("model.position", "rotary", "alibi"), ()),
    ):
        sweep = Sweep(grid)
        description = prepare.describe(Study(tmp_path, sweep, *configs_and_facts(sweep)))
        assert [
            line.split()[-1] for line in description.splitlines() if line.endswith(reads)
        ] == list(reads) and ("training tokens" in description) == bool(reads)


def test_different_attention_backend_is_detected():
    """A scheme that `blockwise` does not support falls back to `reference`, which is reported."""
    sweep = Sweep(
        vary("model.position", "rotary", "cope"),
        declared=dict.fromkeys(("parameters", "flops"), "on purpose"),
    )
    _, facts = configs_and_facts(sweep, model__attention_backend="blockwise")
    (line,) = guard.undeclared(sweep, facts)
    assert line == "attention: rotary blockwise, cope reference"


@pytest.mark.parametrize("what", ["parameters", "flops"])
def test_match_equalizes_sizes_of_arms(what):
    sweep = Sweep(vary("model.num_decoder_layers", 2, 4), match=what)
    configs, before = configs_and_facts(sweep, model__d_ff=512)
    after = {
        arm: guard.facts(config)
        for arm, config in guard.matched(sweep, configs, {}, lambda line: None).items()
    }
    sizes = lambda facts_by_arm: [getattr(facts, what) for facts in facts_by_arm.values()]
    assert abs(np.subtract(*sizes(before))) > 0.2 * sizes(before)[0]
    np.testing.assert_allclose(*sizes(after), rtol=guard.CLOSE)
    assert not any(line.startswith(what) for line in guard.undeclared(sweep, after))


def test_impossible_match_raises():
    sweep = Sweep(vary("model.num_decoder_layers", 1, 9), match="parameters")
    configs, _ = configs_and_facts(sweep)
    with pytest.raises(
        UserError, match="'num_decoder_layers=9' cannot be sized to the baseline's parameters"
    ):
        guard.matched(sweep, configs, {}, lambda line: None)
    with pytest.raises(UserError, match="sizes arms by model.d_ff, which varies"):
        guard.matched(
            Sweep(vary("model.d_ff", 8, 16), match="flops"),
            configs_and_facts(Sweep(vary("model.d_ff", 8, 16)))[0],
            {},
            print,
        )


def test_matching_parameters_tolerates_small_flops_differences():
    """With parameters matched to 1%, FLOPs may differ by 1%, but not by more.

    d_ff is a multiple of 8, so neither can be matched exactly.
    """
    sweep = Sweep(vary("model.position", "rotary", "alibi"), match="parameters")
    configs, facts = configs_and_facts(sweep)
    near, far = (
        {
            "rotary": facts["rotary"],
            "alibi": dataclasses.replace(facts["alibi"], flops=facts["rotary"].flops * ratio),
        }
        for ratio in (1.005, 1.02)
    )
    guard.check(sweep, configs, near)
    with pytest.raises(UserError, match="flops: rotary") as error:
        guard.check(sweep, configs, far)
    assert "match the sizes" not in str(error.value), "the sweep already matches a size"
    with pytest.raises(UserError, match="flops: rotary .*(.|\n)*match the sizes: match='flops'"):
        guard.check(dataclasses.replace(sweep, match=""), configs, near)


def test_match_time_equalizes_training_time():
    """A sweep that resumes keeps the numbers of steps that were measured first."""
    sweep = Sweep(vary("model.num_decoder_layers", 1, 8), match="time")
    configs, _ = configs_and_facts(sweep)
    measured = guard.matched(sweep, configs, {}, lambda line: None)
    base, deep = (config.train.steps for config in measured.values())
    assert base == 8 > deep >= 1
    recorded = {
        arm: dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
        for steps, (arm, config) in zip((8, 77), measured.items(), strict=True)
    }
    assert guard.matched(sweep, configs, recorded, pytest.fail) == recorded
    longer, _ = configs_and_facts(sweep, train__steps=80)
    assert (
        8
        < list(guard.matched(sweep, longer, recorded, lambda line: None).values())[1].train.steps
        < 80
    )
