"""The extrapolation evaluator: losses in sequences longer than those of training."""

import dataclasses

import numpy as np
import pytest
from test_evaluators import experiment, measure_at_start

from transformer import UserError


def test_extrapolation_measures_longer_sequences():
    metrics, loss, *_ = measure_at_start(
        experiment({"name": "extrapolation", "times": 4, "tokens": 0}), max_batches=0
    )
    context = [metrics.pop(f"context/{length:06d}") for length in (16, 32, 64)]
    assert list(metrics) == [
        "extrapolation/000016",
        "extrapolation/000032",
        "extrapolation_sliding/000032",
        "extrapolation/000064",
        "extrapolation_sliding/000064",
    ]
    assert (
        6 < context[0] <= 7.5
        and context[0] < context[1] <= 15.5
        and context[1] < context[2] <= 31.5
    ), "the mean context is half a sequence, or less if texts end within sequences"
    assert metrics["extrapolation/000016"] == pytest.approx(loss, rel=1e-5)
    assert len({round(x, 6) for x in metrics.values()}) == 5 and all(
        np.isfinite(x) for x in metrics.values()
    )


def test_sliding_loss_of_windowed_model_does_not_depend_on_length():
    """Tests two layers with a window of 4 and no positions: an output depends on 7 tokens.

    The loss of the last tokens, which alone count with `sliding`, is the same at every length.
    """
    metrics, *_ = measure_at_start(
        experiment({"name": "extrapolation", "times": 4, "tokens": 0}, position="none", window=4),
        max_batches=0,
    )
    sliding = [metrics[f"extrapolation_sliding/{length:06d}"] for length in (32, 64)]
    assert sliding[0] == pytest.approx(sliding[1], rel=2e-3) and sliding[0] != pytest.approx(
        metrics["extrapolation/000016"], rel=1e-5
    )


def test_learned_positions_limit_the_length():
    longer = lambda times: experiment(
        {"name": "extrapolation", "times": times, "sliding": False}, position="learned"
    )
    with pytest.raises(
        UserError, match=r"reads sequences of .* = 256 tokens, but the table of .* ends"
    ):
        longer(16)
    metrics, *_ = measure_at_start(longer(2))
    assert [name for name in metrics if not name.startswith("context")] == [
        "extrapolation/000016",
        "extrapolation/000032",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"accumulate": 4}},
        {"data": {"packing": False, "buckets": (8, 16)}},
        {"model": {"random_positions": 40}},
    ],
)
def test_longer_sequences_ignore_settings_of_training_sequences(change):
    """Longer sequences ignore the settings of training sequences.

    These are micro-batches that divide the batch, buckets that end in data.length, and the range of
    random positions.
    """
    plain = experiment(
        {"name": "extrapolation", "times": 8, "sliding": False, "tokens": 2000}, max_length=16
    )
    changed = dataclasses.replace(
        plain,
        **{
            part: dataclasses.replace(getattr(plain, part), **fields)
            for part, fields in change.items()
        },
    )
    expected, metrics = measure_at_start(plain)[0], measure_at_start(changed, like=plain)[0]
    assert list(expected) == list(metrics) and "extrapolation/000128" in expected
    if "data" not in change:
        assert all(metrics[name] == pytest.approx(expected[name], rel=1e-5) for name in expected)


def test_extrapolation_requires_a_decoder():
    with pytest.raises(UserError, match="extrapolation requires a decoder"):
        measure_at_start(experiment("extrapolation", family="encoder_decoder"))
