"""Two arms must build different programs; the check compares programs, not configs."""

import pytest
from studies import configs_and_facts, experiment

from transformer import Sweep, UserError, arms, vary
from transformer.lab import guard
from transformer.lab.guard import twins

ROTARY = {"name": "rotary", "theta": 10_000.0}


def check_sweep(sweep, **base):
    configs, facts = configs_and_facts(sweep, **base)
    guard.check(sweep, configs, facts)


def test_rejects_arms_that_build_the_same_program():
    spelled = arms(plain={}, spelled={"model.position": ROTARY})
    configs, _ = configs_and_facts(Sweep(spelled))
    assert configs["plain"] != configs["spelled"]
    with pytest.raises(
        UserError,
        match=r"arms 'plain' and 'spelled' differ in model.position.*, but build the same programs"
        r".* or declare it a control: Sweep\(..., controls=\{'spelled': \"why\"\}\)",
    ):
        check_sweep(Sweep(spelled))
    check_sweep(Sweep(spelled, controls={"spelled": "spells out a default"}))


def test_spelled_out_defaults_of_an_optimizer_do_not_distinguish_arms():
    names = (
        "adafactor",
        {"name": "adafactor", "decay_rate": 0.8},
        {"name": "adafactor", "decay_rate": 0.7},
    )
    plain, spelled, other = (
        guard.fields_outside_programs(experiment(optimizer__name=name)) for name in names
    )
    assert plain == spelled != other


def test_windows_that_hide_no_token_do_not_distinguish_arms():
    base = experiment()
    longest = base.model.max_length
    windows = {
        "plain": {},
        "wide": {"model__window": longest},
        "in a layer": {"model__layer_pattern": ({"window": longest}, {"window": 0})},
        "narrow": {"model__window": longest - 1},
    }
    configs = {arm: experiment(**changes) for arm, changes in windows.items()}
    assert len(set(configs.values())) == len(configs)
    plain = ("plain", "wide", "in a layer")
    assert guard.facts(configs["plain"]).flops == guard.facts(configs["wide"]).flops
    alike = dict.fromkeys(configs)
    assert twins(configs, alike) == dict.fromkeys(plain[1:], "plain")
    # Longer sequences, or positions further apart, are hidden.
    longer = [{"name": "extrapolation", "times": 2}]
    for changes in ({"train__evaluators": longer}, {"model__random_positions": 2 * longest}):
        pair = {
            "plain": experiment(**changes),
            "wide": experiment(**changes, model__window=longest),
        }
        assert not twins(pair, alike)


def test_invalid_controls_raise():
    with pytest.raises(UserError, match="controls: 'wide' matches no other arm; remove it"):
        check_sweep(
            Sweep(
                arms(plain={}, wide={"train.label_smoothing": 0.1}),
                controls={"wide": "the same model"},
            )
        )
    with pytest.raises(UserError, match="controls: 'wid' is not an arm; did you mean 'wide'"):
        Sweep(arms(plain={}, wide={}), controls={"wid": "x"})
    check_sweep(Sweep(arms(plain={}, again={}), controls={"again": "measures machine noise"}))


CHANGES = {
    "model.norm_epsilon": 1e-3,
    "model.embedding_init_std": 0.5,
    "model.dropout": 0.1,
    "model.max_length": 64,
    "optimizer.learning_rate": 3e-3,
    "optimizer.weight_decay": 0.1,
    "optimizer.b2": 0.9,
    "optimizer.final_fraction": 0.5,
    "optimizer.warmup_steps": 5,
    "train.label_smoothing": 0.1,
    "train.z_loss": 0.01,
    "train.accumulate": 2,
    "train.ema_decay": 0.9,
    "train.steps": 9,
    "train.eval_batches": 1,
    "decoding.beam_size": 4,
    "data.eval_overlap": 8,
    "data.tokenizer.kind": "unigram",
}


def test_numeric_fields_distinguish_arms():
    """Numbers are constants of the lowered programs, or the check compares them separately."""
    base = experiment()
    configs = {"base": base} | {
        field: experiment(**{field.replace(".", "__"): value}) for field, value in CHANGES.items()
    }
    assert not twins(configs, dict.fromkeys(configs))


def test_optimizers_that_read_logical_axes_can_be_compared():
    sweep = Sweep(arms(adamw={}, muon={"optimizer.name": "muon"}, again={"optimizer.name": "muon"}))
    with pytest.raises(UserError, match="arms 'muon' and 'again' are the same experiment"):
        guard.check(sweep, *configs_and_facts(sweep))


def test_logging_fields_do_not_distinguish_arms():
    sweep = Sweep(vary("train.log_every", 1, 2))
    configs = {
        arm: experiment(**{"train__log_every": n})
        for arm, n in zip(sweep.arms, (1, 2), strict=True)
    }
    assert twins(configs, dict.fromkeys(configs)) == {"log_every=2": "log_every=1"}
