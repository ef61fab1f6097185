"""Goodput: the share of the paid time in which a run trained."""

import os
import time

import pytest

from transformer.errors import UserError
from transformer.runs.loop import train
from transformer.runs.metrics import PAID, SAVING, TRAINED, Goodput, read_metrics
from transformer.runs.rundir import read_manifest

EARLIER = [
    {"step": 10, TRAINED: 50.0, PAID: 100.0},
    {"step": 15, "eval/loss": 2.0},
    {"step": 20, TRAINED: 90.0, PAID: 150.0},
]


@pytest.fixture
def log(tmp_path):
    """The log of an earlier process, whose last line was written 30 s ago."""
    (tmp_path / "metrics.jsonl").touch()
    os.utime(tmp_path / "metrics.jsonl", (time.time() - 30,) * 2)
    return tmp_path / "metrics.jsonl"


def test_lost_steps_are_paid_but_not_trained(log):
    """The run resumes at step 10. Steps 11 to 20 are trained again."""
    goodput = Goodput(log, EARLIER, {}, 10, began=time.time() - 8)
    values = goodput.add(4.0)
    assert values[TRAINED] == 54.0 and values[PAID] == pytest.approx(158, abs=1)
    assert goodput.add(1.0)[TRAINED] == 55.0
    assert Goodput.share({TRAINED: 30.0, PAID: 40.0}) == 0.75


@pytest.mark.parametrize(
    ("booted", "lines", "paid"),
    [
        (20, [], 20),  # a new machine: from its start
        (20, EARLIER, 170),
        (500, EARLIER, 180),  # the same machine: since the last line of the earlier process
        (-100, EARLIER, 155),  # a clock that is ahead: since the start of the process
    ],
)
def test_machine_is_paid_since_it_started(log, monkeypatch, booted, lines, paid):
    monkeypatch.setenv("TRANSFORMER_PAID_SINCE", str(int(time.time()) - booted))
    goodput = Goodput(log, lines, {}, 20, began=time.time() - 5)
    assert goodput.add(0.0)[PAID] == pytest.approx(paid, abs=2)


def test_bad_time_raises(log, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_PAID_SINCE", "yesterday")
    with pytest.raises(UserError, match="TRANSFORMER_PAID_SINCE: 'yesterday' must be a time in Un"):
        Goodput(log, [], {}, 0, began=0.0)


def test_process_that_dies_before_its_first_line_is_paid(log):
    """It removes the lines after step 10 from the log. Its manifest has the time until it began."""
    began = time.time()
    second = Goodput(log, EARLIER, {"paid_seconds": 140.0}, 10, began - 20)
    record = second.record()
    assert record["paid_seconds"] == pytest.approx(170, abs=1)
    third = Goodput(log, EARLIER[:1], record, 10, began)
    third.saving += 3.0
    values = third.add(2.0)
    assert values == {TRAINED: 52.0, PAID: pytest.approx(170, abs=1), SAVING: 3.0}
    fourth = Goodput(log, [*EARLIER[:1], {"step": 10} | values], {}, 10, began)
    assert fourth.add(0.0)[SAVING] == 3.0


def test_run_records_its_goodput(run_config, tmp_path, capsys):
    train(run_config, tmp_path)
    lines = [line for line in read_metrics(tmp_path) if TRAINED in line]
    assert [line["step"] for line in lines] == [4, 8, 12]
    assert all(0 < line[TRAINED] < line[PAID] for line in lines)
    speeds = [line["train/tokens"] / line["time/tokens_per_second"] for line in lines[1:]]
    assert lines[-1][TRAINED] - lines[0][TRAINED] == pytest.approx(sum(speeds), rel=0.2, abs=0.02)
    recorded = read_manifest(tmp_path)["goodput"]
    assert recorded["trained_seconds"] == lines[-1][TRAINED]
    assert recorded["paid_seconds"] >= lines[-1][PAID]
    assert recorded["share"] == pytest.approx(
        recorded["trained_seconds"] / recorded["paid_seconds"], abs=0.001
    )
    assert " left  goodput " in capsys.readouterr().err
