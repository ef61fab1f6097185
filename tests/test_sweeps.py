"""Sweeps: the algebra of grids, the arms of an experiment file, and invalid sweeps."""

import pytest

from transformer import Sweep, UserError, arms, chain, product, vary, zipped
from transformer.config_io import load_arms, load_experiment

NORMS, PLACES = (
    vary("model.norm_placement", "pre", "post"),
    vary("model.position", "rotary", "alibi", "t5"),
)

FILE = """
from transformer import *
def get_config():
    return dict(model=dict(family="decoder", vocab_size=48, d_model=32, d_ff=64, num_heads=4,
                           num_decoder_layers=2, max_length=32),
                data=dict(train="nowhere", format="text", objective="causal_lm", length=32,
                          batch_size=16))
def sweep():
    return SWEEP
"""


def point_names(grid):
    return [point.name for point in grid]


def test_grid_algebra():
    assert point_names(product(NORMS, PLACES)) == [
        "pre-rotary",
        "pre-alibi",
        "pre-t5",
        "post-rotary",
        "post-alibi",
        "post-t5",
    ]
    assert Sweep(product(NORMS, PLACES)).arms["post-t5"] == {
        "model.norm_placement": "post",
        "model.position": "t5",
    }
    point = Sweep(
        product(
            vary("model.attention_scale", plain=None, none=1.0),
            vary("optimizer.learning_rate", 1e-3),
        )
    ).points["none-learning_rate=0.001"]
    assert [point.call(field) for field in point.changes] == ["none", "0.001"]
    assert point_names(chain(NORMS, PLACES)) == ["pre", "post", "rotary", "alibi", "t5"]
    assert point_names(zipped(NORMS, vary("optimizer.warmup_steps", 1, 100))) == [
        "pre-warmup_steps=1",
        "post-warmup_steps=100",
    ]
    assert point_names(vary("model.d_ff", narrow=64, wide=256)) == ["narrow", "wide"]
    assert point_names(vary("model.position", {"name": "rotary", "theta": 5e5}, "none")) == [
        "rotary+theta=500000.0",
        "none",
    ]
    assert point_names(arms(plain={}, deep={"model.num_decoder_layers": 24})) == ["plain", "deep"]
    assert product(NORMS, chain(PLACES)) == product(NORMS, PLACES) and len(product()) == 1


def test_baseline_comes_first_and_arms_share_seeds():
    sweep = Sweep(PLACES, baseline="alibi", seeds=2)
    assert (
        list(sweep.arms) == ["alibi", "rotary", "t5"]
        and sweep.seeds == (0, 1)
        and sweep.fields == ("model.position",)
    )
    assert Sweep(PLACES).baseline == "rotary" and Sweep(PLACES, seeds=(7, 3)).seeds == (7, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Sweep(chain(NORMS, vary("model.d_ff", pre=64))),
            "two arms are called 'pre'; name them",
        ),
        (lambda: Sweep(vary("data.train", "a/b.txt")), "'a/b.txt' is not a valid folder name"),
        (lambda: Sweep(arms(logs={})), "an arm is called 'logs', which is a reserved folder name"),
        (lambda: Sweep(PLACES, declared=["parameters"]), "declared: .'parameters'.; set a dict"),
        (
            lambda: Sweep(PLACES, metric="test/beauty"),
            "metric 'test/beauty': its direction is unknown",
        ),
        (
            lambda: Sweep(PLACES, baseline="alibe"),
            "baseline 'alibe' is not an arm; did you mean 'alibi'",
        ),
        (lambda: Sweep(PLACES, seeds=0), "seeds: 0; set a positive number"),
        (lambda: Sweep(PLACES, seeds=(1, 1)), "a list of distinct seeds"),
        (lambda: Sweep(product(PLACES, vary("seed", 1, 2))), "use Sweep"),
        (lambda: Sweep(PLACES, match="size"), "match: 'size'"),
        (lambda: Sweep(chain()), "no arms"),
        (lambda: zipped(NORMS, PLACES), "zipped.. of 2 and 3 points"),
        (lambda: product(NORMS, NORMS), "'model.norm_placement' is set twice in one arm"),
        (lambda: vary("model.d_ff"), "has no values"),
        (lambda: arms(deep=24), "expected a mapping of fields"),
        (lambda: Sweep(["a", "b"]), r"\['a', 'b'\]; a Grid is expected: vary"),
    ],
)
def test_invalid_sweeps_raise(make, message):
    with pytest.raises(UserError, match=message):
        make()


def write_experiment(tmp_path, sweep):
    file = tmp_path / "x.py"
    file.write_text(FILE.replace("SWEEP", sweep))
    return str(file)


def test_arms_load_as_experiments(tmp_path):
    file = write_experiment(
        tmp_path,
        "Sweep(vary('model.position', 'none', {'name': 'rotary', 'theta': 500.0}), "
        "baseline='none')",
    )
    sweep, configs = load_arms(file, {"model.d_ff": "128"})
    assert list(configs) == ["none", "rotary+theta=500.0"] == list(sweep.arms)
    assert [config.model.d_ff for config in configs.values()] == [128, 128]
    assert configs["rotary+theta=500.0"].model.position["theta"] == 500.0
    assert load_experiment(f"{file}:none").model.position == "none"
    assert (
        load_experiment(file).model.position == load_experiment(file, {}).model.position != "none"
    )
    # sweep() may return a Grid.
    assert list(load_arms(write_experiment(tmp_path, "vary('model.d_ff', 32, 64)"))[1]) == [
        "d_ff=32",
        "d_ff=64",
    ]


@pytest.mark.parametrize(
    ("sweep", "overrides", "message"),
    [
        (
            "vary('model.positon', 'none')",
            {},
            "sweep: model.positon: no such field; did you mean 'position'",
        ),
        ("vary('modle.position', 'none')", {}, "sweep: modle: no such field; did you mean 'model'"),
        (
            "vary('model', dict(d_ff=3), named=3)",
            {},
            "sweep: model: a mapping of fields; set one of them",
        ),
        ("vary('model.position', 'rotery')", {}, "sweep: arm 'rotery': .*unknown value 'rotery'"),
        ("vary('model.num_heads', 4, 5)", {}, "sweep: arm 'num_heads=5': "),
        ("vary('model.d_ff', 'wide')", {}, "arm 'wide': model.d_ff: expected int"),
        (
            "vary('model.position', 'none')",
            {"model.position.theta": "3"},
            "the sweep varies model.position",
        ),
        ("vary('model.position', 'none')", {"seed": "3"}, "the sweep has its own seeds"),
        ("3", {}, "returns 3; a Sweep or a Grid is expected"),
    ],
)
def test_invalid_sweep_files_raise(tmp_path, sweep, overrides, message):
    with pytest.raises(UserError, match=message):
        load_arms(write_experiment(tmp_path, sweep), overrides)
