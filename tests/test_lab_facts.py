"""What arms are compared in: facts that differ and are not declared, and sizes that are matched."""

import dataclasses

import numpy as np
import pytest
from studies import facts_of

from transformer import Sweep, UserError, arms, vary
from transformer.lab import guard, prepare
from transformer.lab.study import Study


def test_what_is_not_declared_is_refused():
    sweep = Sweep(vary("model.position", "rotary", "t5", "alibi"))
    configs, found = facts_of(sweep)
    assert found["t5"].parameters - found["rotary"].parameters == 32 * 4
    with pytest.raises(
        UserError, match=r"parameters: rotary [\d,]+, t5 [\d,]+; .*declared=\{'parameters'"
    ):
        guard.check(sweep, configs, found)
    guard.check(dataclasses.replace(sweep, declared={"parameters": "T5's bias"}), configs, found)
    guard.check(
        Sweep(vary("model.position", "rotary", "alibi")),
        *({arm: of[arm] for arm in ("rotary", "alibi")} for of in (configs, found)),
    )
    with pytest.raises(UserError, match="'params' is not a compared fact; there is: parameters"):
        guard.check(dataclasses.replace(sweep, declared={"params": "?"}), configs, found)


def test_one_experiment_under_two_names_is_refused():
    sweep = Sweep(
        arms(plain={}, alibi={"model.position": "alibi"}, said={"model.position": "alibi"})
    )
    configs, found = facts_of(sweep)
    with pytest.raises(UserError, match="'alibi' and 'said' are the same experiment"):
        guard.check(
            dataclasses.replace(sweep, declared=dict.fromkeys(guard.SET_BY, "whatever")),
            configs,
            found,
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
        (vary("data.batch_size", 8, 16), None),  # said by the field itself
        (vary("optimizer.warmup_steps", 1, 4), None),
        (vary("model.attention_backend", "reference", "blockwise"), None),
    ],
)
def test_each_fact_is_found(grid, name):
    sweep = Sweep(grid, declared={"parameters": "of it"})
    _, found = facts_of(sweep)
    lines = guard.undeclared(sweep, found)
    assert any(line.startswith(name) for line in lines) if name else not lines


def test_arms_that_read_more_are_shown_to(tmp_path):
    for grid, reads in (
        (vary("data.batch_size", 8, 16), ("2.0k", "4.1k")),
        (vary("model.position", "rotary", "alibi"), ()),
    ):
        sweep = Sweep(grid)
        said = prepare.describe(Study(tmp_path, sweep, *facts_of(sweep)))
        assert [line.split()[-1] for line in said.splitlines() if line.endswith(reads)] == list(
            reads
        ) and ("training tokens" in said) == bool(reads)


def test_another_backend_is_found():
    """A scheme that blocks cannot serve falls back to the plain path, where nobody asked for it."""
    sweep = Sweep(
        vary("model.position", "rotary", "cope"),
        declared=dict.fromkeys(("parameters", "flops"), "of it"),
    )
    _, found = facts_of(sweep, model__attention_backend="blockwise")
    (line,) = guard.undeclared(sweep, found)
    assert line == "attention: rotary blockwise, cope reference"


@pytest.mark.parametrize("what", ["parameters", "flops"])
def test_arms_are_sized_equal(what):
    sweep = Sweep(vary("model.num_decoder_layers", 2, 4), match=what)
    configs, before = facts_of(sweep, model__d_ff=512)
    found = {
        arm: guard.facts(config)
        for arm, config in guard.matched(sweep, configs, {}, lambda line: None).items()
    }
    of = lambda facts: [getattr(one, what) for one in facts.values()]
    assert abs(np.subtract(*of(before))) > 0.2 * of(before)[0]
    np.testing.assert_allclose(*of(found), rtol=guard.CLOSE)
    assert not any(line.startswith(what) for line in guard.undeclared(sweep, found))


def test_what_cannot_be_sized_is_refused():
    sweep = Sweep(vary("model.num_decoder_layers", 1, 9), match="parameters")
    configs, _ = facts_of(sweep)
    with pytest.raises(
        UserError, match="'num_decoder_layers=9' cannot be sized to the baseline's parameters"
    ):
        guard.matched(sweep, configs, {}, lambda line: None)
    with pytest.raises(UserError, match="sizes arms by model.d_ff, which varies"):
        guard.matched(
            Sweep(vary("model.d_ff", 8, 16), match="flops"),
            facts_of(Sweep(vary("model.d_ff", 8, 16)))[0],
            {},
            print,
        )


def test_what_is_sized_in_one_may_differ_a_little_in_the_other():
    """d_ff goes in eights: parameters made equal to 1 % leave FLOPs that differ as little, and more is still refused."""
    sweep = Sweep(vary("model.position", "rotary", "alibi"), match="parameters")
    configs, found = facts_of(sweep)
    near, far = (
        {
            "rotary": found["rotary"],
            "alibi": dataclasses.replace(found["alibi"], flops=found["rotary"].flops * by),
        }
        for by in (1.005, 1.02)
    )
    guard.check(sweep, configs, near)
    with pytest.raises(UserError, match="flops: rotary") as refused:
        guard.check(sweep, configs, far)
    assert "match the sizes" not in str(refused.value), "that is what was asked for"
    with pytest.raises(UserError, match="flops: rotary .*(.|\n)*match the sizes: match='flops'"):
        guard.check(dataclasses.replace(sweep, match=""), configs, near)


def test_arms_train_as_long_as_the_baseline():
    """And a sweep that goes on does so with the steps that were measured first."""
    sweep = Sweep(vary("model.num_decoder_layers", 1, 8), match="time")
    configs, _ = facts_of(sweep)
    once = guard.matched(sweep, configs, {}, lambda line: None)
    base, deep = (one.train.steps for one in once.values())
    assert base == 8 > deep >= 1
    noted = {
        arm: dataclasses.replace(one, train=dataclasses.replace(one.train, steps=n))
        for n, (arm, one) in zip((8, 77), once.items(), strict=True)
    }
    assert guard.matched(sweep, configs, noted, pytest.fail) == noted
    others, _ = facts_of(sweep, train__steps=80)
    assert (
        8
        < list(guard.matched(sweep, others, noted, lambda line: None).values())[1].train.steps
        < 80
    )
